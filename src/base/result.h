// What can fail says so in its signature: Result<T> is a value or an Error.
//
// An Error is something the world did (a bad file, a full disk, a prompt that does not fit). What
// we did wrong ourselves is a check (src/base/check.h). Messages carry names, ids, lengths and
// limits, never prompt text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace kvw {

// One word per kind of failure; error_name() prints it as the "code" of JSON errors, exit_code()
// maps it to the process exit status.
enum class ErrorCode : std::uint8_t {
    usage,                // 2: flags, values, configuration
    file_exists,          // 2: an output that would be overwritten
    bad_model,            // 3: a GGUF file that is malformed, truncated or not supported
    bad_trace,            // 3: a trace with a digest mismatch, or not a trace
    bad_input,            // 3: a prompt or line file that is malformed
    bad_template,         // 3: an unknown chat template
    nonfinite,            // 3: the model computed NaN or infinity
    exceed_context_size,  // 4: refusals, with both numbers in `limit`
    prefill_pool,
    decode_pool,
    out_of_pages,
    tenant_quota,
    queue_full,
    deadline,
    io,  // 5: the environment; worth a retry
    disk_full,
    out_of_memory,
    no_device,
    key_folder,
    file_changed,
    not_closed,  // 6: evidence that is not complete
    torn,
    violation,  // 7: a page row was about to be read by someone who may not
    invariant,  // 7: we contradicted ourselves
    cancelled,  // 130
};

// What a refusal says in numbers, all in tokens (rows).
struct LimitFacts {
    std::uint64_t n_prompt = 0;  // tokens in the refused prompt
    std::uint64_t n_max = 0;     // the longest prompt this max_tokens would have allowed
    std::uint64_t limit = 0;     // the limit that was met
};

struct Error {
    ErrorCode code;
    std::string message;
    std::optional<LimitFacts> limit = std::nullopt;
};

// A value of T or an Error; ignoring one is a compiler warning. For T = void use Status.
template <class T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
  public:
    using Base = tl::expected<T, Error>;
    using Base::Base;
    Result(Error error) : Base(tl::unexpected<Error>(std::move(error))) {}
    Result(Base base) : Base(std::move(base)) {}
};

using Status = Result<void>;

// "exceed_context_size": the code that scripts match on.
const char* error_name(ErrorCode code);

// The exit status of a process that ends with this error (2..7, 130).
int exit_code(ErrorCode code);

}  // namespace kvw
