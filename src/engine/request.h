// A request that was not refused, from submit until its end is recorded. Internal to src/engine.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "src/base/ids.h"
#include "src/engine/answer.h"
#include "src/engine/content.h"
#include "src/engine/engine.h"
#include "src/engine/sampler.h"
#include "src/kv/prefix_tree.h"

namespace kvw {

constexpr std::uint32_t pages_for(std::uint64_t rows) {
    return static_cast<std::uint32_t>((rows + kPageTokens - 1) / kPageTokens);
}

struct Tenant {
    TenantId id{};
    std::string name;
    Digest256 key{};
    std::uint64_t quota_rows = 0;  // 0 = none
    std::map<std::string, std::uint64_t> sessions;
};

struct Request {
    Owner owner;
    const Tenant* tenant;
    std::vector<TokenId> tokens;  // prompt, then what was sampled
    std::uint32_t prompt_tokens;
    std::uint32_t tokens_max;
    std::uint32_t top_logits, logprobs;
    CacheScope scope;
    std::uint64_t session;                       // its number in the trace
    std::int64_t deadline_ns;                    // by the context's monotonic clock; 0 = none
    std::array<std::uint64_t, 2> source_digest;  // what the next `sourced` must come to
    Sampler sampler;
    Answer answer;
    std::vector<std::uint64_t> layers;  // running digest of each layer's computed outputs
    std::string emitted;                // as the caller's sink took it
    bool broken_off = false;            // and it takes no more
    RequestFacts facts;

    // What forward passes consumed, and how much of it there must be before the next sample.
    PositionDigest sourced;
    std::uint32_t source_target;
    bool source_due = true;  // a `sourced` event stands before the next sample

    // Digests of its own first pages, as far as they were needed, for shares and adoptions.
    PositionDigest prefix;
    std::vector<PrefixDigest> page_digests;
    std::uint32_t pages_offered = 0;  // to the prefix tree

    std::uint32_t prefill_pages = 0;  // that its prefill table may come to
    std::uint32_t decode_pages = 0;   // split: the same of the decode table
    bool admitted = false;            // at least once: the pool knows it
    bool moving = false;              // split: its rows are on their way to the decode side
    bool moved = false;               // split: its table is the decode side's
    bool stalled = false;             // no page for its next row in this step
    bool told_waiting = false;
    std::uint32_t passed_over = 0;  // how often others were admitted while it waited for pages
    std::optional<FinishReason> finish;

    std::uint64_t id() const { return number(owner.request); }
    std::uint32_t pending() const {
        return static_cast<std::uint32_t>(tokens.size() - facts.prefilled);
    }
    std::uint32_t rows_needed() const { return prompt_tokens + tokens_max; }
    // Rows of prompt that are computed before the next sample: all but the one token of a decode.
    bool decoding() const { return facts.prefilled > 0 && pending() == 1 && !source_due; }
    PrefixNamespace space() const {
        return {owner.tenant, scope == CacheScope::session ? session : 0};
    }
};

}  // namespace kvw
