#include "cli/engine_flags.h"

#include <fmt/format.h>

#include <limits>

namespace kvw::cli {

namespace {

constexpr std::uint64_t kRowsMax = 1ull << 36;
constexpr std::size_t kSessionBytesMax = 64;

// A reader of `read`'s value into `target`.
template <class T, class Read>
Flags::Take into(T& target, Read read) {
    return [&target, read](std::string_view text) -> Status {
        const auto value = read(text);
        if (!value) {
            return value.error();
        }
        target = *value;
        return {};
    };
}

Status take_session(std::string& session, std::string_view text) {
    if (text.empty() || text.size() > kSessionBytesMax) {
        return Error{ErrorCode::usage, fmt::format("a session has 1 to {} bytes, this one {}",
                                                   kSessionBytesMax, text.size())};
    }
    session = text;
    return {};
}

// -1 is llama.cpp's word for a seed that is drawn.
Status take_seed(std::optional<std::uint64_t>& seed, std::string_view text) {
    if (text == "-1") {
        seed.reset();
        return {};
    }
    const Result<std::uint64_t> number =
        whole_number(text, 0, std::numeric_limits<std::uint64_t>::max());
    if (!number) {
        return number.error();
    }
    seed = *number;
    return {};
}

void add_limit_flags(Flags& flags, EngineFlags& engine) {
    const auto quota = [](std::string_view text) { return whole_number(text, 0, kRowsMax); };
    flags.section("limits")
        .whole("-c,--context", engine.context, 0, 0xffffffff,
               "Most tokens of prompt and answer; 0: the model's")
        .whole("--quota", engine.quota_rows, 0, kRowsMax,
               "Most rows that one tenant holds at once; 0: no quota")
        .per_tenant([&engine, quota](const std::string& tenant, std::string_view text) {
            return into(engine.tenants[tenant].quota_rows, quota)(text);
        })
        .whole("--queue", engine.queue_max, 0, 0xffffffff,
               "Most requests that wait; one more is refused")
        .value("--deadline", "TIME", "0s",
               "Longest life of a request, such as 30s or 500ms; 0s: no deadline",
               into(engine.deadline_ms, duration_ms))
        .per_tenant([&engine](const std::string& tenant, std::string_view text) {
            return into(engine.tenants[tenant].deadline_ms, duration_ms)(text);
        });
}

}  // namespace

std::uint64_t EngineFlags::quota_rows_of(const std::string& tenant_name) const {
    const auto own = tenants.find(tenant_name);
    return own != tenants.end() ? own->second.quota_rows.value_or(quota_rows) : quota_rows;
}

std::int64_t EngineFlags::deadline_ms_of(const std::string& tenant_name) const {
    const auto own = tenants.find(tenant_name);
    return own != tenants.end() ? own->second.deadline_ms.value_or(deadline_ms) : deadline_ms;
}

void add_template_flags(Flags& flags, GenerationFlags& generation) {
    flags.section("")
        .text("--sys", "TEXT", generation.system, "System message", false)
        .section("generation")
        .flag("--raw", generation.raw, "No chat template: the text as it is, special tokens parsed")
        .alternative_to({"sys", "chat", "template"})
        .flag("--chat", generation.chat, "With the chat template, or not at all")
        .text("--template", "NAME", generation.template_name, "Use this chat template (chatml)");
}

void add_generation_flags(Flags& flags, GenerationFlags& generation) {
    SamplingOptions& sampling = generation.sampling;
    flags.group("Generation")
        .section("generation")
        .whole("-n,--tokens", generation.tokens_max, 1, 0xffffffff,
               "Most tokens to generate; default: what the limits leave")
        .value(
            "-s,--seed", "N", "", "Seed; drawn and recorded when not given (-1: the same)",
            [&generation](std::string_view text) { return take_seed(generation.seed, text); }, true,
            ValueType::whole_or_text)
        .real("--temp", sampling.temperature, 0, 1000, "Temperature; 0 takes the likeliest token")
        .whole("--top-k", sampling.top_k, 0, 0x7fffffff, "Draw from the K likeliest tokens; 0: all")
        .real("--top-p", sampling.top_p, 0, 1,
              "Draw from the likeliest tokens of this total probability")
        .real("--min-p", sampling.min_p, 0, 1, "Drop tokens below this share of the likeliest one")
        .real("--repeat-penalty", sampling.repeat_penalty, 0, 1000,
              "Make recent tokens less likely; 1: off")
        .real("--presence-penalty", sampling.presence_penalty, -1000, 1000,
              "Lower tokens that occurred; 0: off")
        .real("--frequency-penalty", sampling.frequency_penalty, -1000, 1000,
              "Lower tokens by how often they occurred")
        .texts("--stop", "TEXT", sampling.stops,
               "End the answer before this text; may be given several times")
        .flag("--ignore-eos", sampling.ignore_eos, "Never sample a token that ends the answer");
}

void add_engine_flags(Flags& flags, EngineFlags& engine) {
    flags.group("Engine");
    add_model_flags(flags, engine.model);
    flags.section("engine")
        .whole("--np,--parallel", engine.sequences_max, 1, 65536,
               "Most requests at once (also -np)")
        .whole("-b,--batch", engine.batch, 1, 65536,
               "Most tokens taken at once; the smaller of -b and -ub counts")
        .whole("--ub,--ubatch", engine.step_rows, 1, 65536, "Most tokens in one step (also -ub)")
        .choice("--roles", engine.roles, {"unified", "split"},
                "One page pool, or one for prompts and one for answers")
        .choice("--cotenancy", engine.cotenancy, {"any", "none"},
                "Which tenants may share a step: any, or none with another")
        .value("--tenant", "NAME", engine.tenant, "Whom the prompt belongs to",
               [&engine](std::string_view text) -> Status {
                   const Status named = check_tenant_name(text);
                   if (named) {
                       engine.tenant = text;
                   }
                   return named;
               })
        .value("--spot-check", "P%", "0%", "Share of requests that is run again alone, at once",
               into(engine.spot_check_percent, percentage))
        .choice("--on-violation", engine.on_violation, {"stop", "continue"},
                "When a foreign row was about to be read")
        .section("kv")
        .whole("--pool-rows", engine.pool_rows, 0, kRowsMax,
               "Rows in the page pool (split: for answers); 0: one context")
        .whole("--prefill-rows", engine.prefill_rows, 0, kRowsMax,
               "Rows in the pool for prompts (--roles split); 0: one context")
        .choice("--scope", engine.scope, {"request", "session", "tenant"},
                "Who may be given the pages of an equal prefix");
    add_limit_flags(flags, engine);
    flags.section("").value(
        "--session", "NAME", "", "The session the prompt belongs to (--scope session)",
        [&engine](std::string_view text) { return take_session(engine.session, text); });
}

void add_trace_flags(Flags& flags, TraceFlags& trace) {
    flags.group("Trace")
        .text("--trace", "FILE", trace.trace,
              "Record into this file; default: a new one in the store", false)
        .alternative_to({"no-trace"})
        .section("trace")
        .flag("--no-trace", trace.no_trace, "Record nothing")
        .text("--trace-dir", "DIR", trace.trace_dir, "The store; default: the XDG data folder")
        .choice("--text", trace.text_mode, {"plain"},
                "How prompts and answers are kept in the trace")
        .text("--key-dir", "DIR", trace.key_dir, "Folder of tenant keys")
        .flag("--sync", trace.sync, "Wait for the disk at every step: survives power loss")
        .choice("--on-trace-error", trace.on_trace_error, {"stop", "warn"}, "When recording fails")
        .section("")
        .flag("--force", trace.force, "Replace an existing --trace FILE", false);
}

}  // namespace kvw::cli
