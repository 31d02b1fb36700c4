// What may become work: every limit in one place, the same for every path a request can come by.
// Internal to src/engine.
#pragma once

#include <cstdint>
#include <optional>

#include "src/base/result.h"
#include "src/engine/engine.h"

namespace kvw {

// A refusal: what the record says of it, and what the caller is told.
struct Refusal {
    RejectReason reason;
    Error error;  // with its LimitFacts
};

struct Admission {
    std::uint32_t tokens_max = 0;  // to generate; asked for, or the smallest limit minus the prompt
    std::optional<Refusal> refusal;
};

// The first limit that fails of context, prefill pool, decode pool (unified: pool), the tenant's
// quota (0: none) and the queue. n_max is the longest prompt that all of them would have allowed
// beside that many tokens to generate (1 when none were asked for).
Admission admission_of(const EngineConfig& config, std::uint64_t prompt_tokens,
                       std::optional<std::uint32_t> tokens_asked, std::uint64_t quota_rows,
                       std::uint64_t waiting);

}  // namespace kvw
