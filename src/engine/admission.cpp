#include "src/engine/admission.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace kvw {

namespace {

struct RowLimit {
    RejectReason reason;
    ErrorCode code;
    std::uint64_t rows;
    bool of_answer_too;  // prompt and answer together stay within it; else the prompt alone
    const char* holder;
    const char* flag;
};

// In the order in which they are named when several fail.
std::vector<RowLimit> limits_of(const EngineConfig& config, std::uint64_t quota_rows) {
    std::vector<RowLimit> limits{{RejectReason::exceed_context_size, ErrorCode::exceed_context_size,
                                  config.context, true, "context", "-c"}};
    if (config.split) {
        limits.push_back({RejectReason::prefill_pool, ErrorCode::prefill_pool, config.prefill_rows,
                          false, "prefill pool", "--prefill-rows"});
        limits.push_back({RejectReason::decode_pool, ErrorCode::decode_pool, config.pool_rows, true,
                          "decode pool", "--pool-rows"});
    } else {
        limits.push_back({RejectReason::out_of_pages, ErrorCode::out_of_pages, config.pool_rows,
                          true, "pool", "--pool-rows"});
    }
    if (quota_rows > 0) {
        limits.push_back({RejectReason::tenant_quota, ErrorCode::tenant_quota, quota_rows, true,
                          "tenant's quota", "--quota"});
    }
    return limits;
}

std::string words(const RowLimit& limit, std::uint64_t prompt, std::uint64_t tokens,
                  std::uint64_t n_max) {
    const std::string needs = limit.of_answer_too
                                  ? " tokens and " + std::to_string(tokens) + " to generate need " +
                                        std::to_string(prompt + tokens)
                                  : " tokens needs " + std::to_string(prompt);
    std::string message = "prompt of " + std::to_string(prompt) + needs + " rows; the " +
                          limit.holder + " has " + std::to_string(limit.rows) + " (" + limit.flag +
                          "): ";
    if (n_max == 0) {
        return message + "no prompt fits beside them; generate fewer (-n) or raise the limit";
    }
    return message + "at most " + std::to_string(n_max) + " prompt tokens fit";
}

}  // namespace

Admission admission_of(const EngineConfig& config, std::uint64_t prompt_tokens,
                       std::optional<std::uint32_t> tokens_asked, std::uint64_t quota_rows,
                       std::uint64_t waiting) {
    const std::vector<RowLimit> limits = limits_of(config, quota_rows);
    const std::uint64_t tokens = tokens_asked.value_or(1);
    std::uint64_t n_max = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t least = n_max;  // of those that count the answer too
    const RowLimit* met = nullptr;
    for (const RowLimit& limit : limits) {
        const std::uint64_t beside = limit.of_answer_too ? tokens : 0;
        n_max = std::min(n_max, limit.rows > beside ? limit.rows - beside : 0);
        least = limit.of_answer_too ? std::min(least, limit.rows) : least;
        if (prompt_tokens + beside > limit.rows && met == nullptr) {
            met = &limit;
        }
    }
    Admission admission;
    admission.tokens_max =
        tokens_asked.value_or(static_cast<std::uint32_t>(least - std::min(least, prompt_tokens)));
    const auto refuse = [&](RejectReason reason, ErrorCode code, std::string message,
                            std::uint64_t limit) {
        admission.tokens_max = tokens_asked.value_or(0);
        admission.refusal = Refusal{reason, {code, std::move(message)}};
        admission.refusal->error.limit =
            LimitFacts{.n_prompt = prompt_tokens, .n_max = n_max, .limit = limit};
    };
    if (met != nullptr) {
        refuse(met->reason, met->code, words(*met, prompt_tokens, tokens, n_max), met->rows);
    } else if (waiting >= config.queue_max) {
        refuse(RejectReason::queue_full, ErrorCode::queue_full,
               std::to_string(waiting) + " requests wait; the queue takes " +
                   std::to_string(config.queue_max) + " (--queue): try again later",
               config.queue_max);
    }
    return admission;
}

}  // namespace kvw
