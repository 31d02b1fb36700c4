// replay: verify, then execution, then solo.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/threads.h"
#include "replay/certificate.h"
#include "replay/verify.h"
#include "src/gguf/gguf.h"
#include "src/model/model.h"
#include "src/text/tokenizer.h"

namespace kvw {

// A loaded model to replay with.
struct ReplayModel {
    const Model& model;
    const Tokenizer& tokenizer;
    const Kernels& kernels;
    ThreadPool& threads;
    Digest256 sha256{};
};

struct SoloChoice {
    bool on = true;
    std::optional<std::uint64_t> request;  // only this one
    double percent = 100.0;                // a deterministic sample of requests
    bool controls = true;                  // off: who runs it often has seen them caught before
};
// Whether `request` is one of that sample; by its number alone.
bool chosen(const SoloChoice& choice, std::uint64_t request);

struct ReplayOptions {
    bool strict = false;
    SoloChoice solo;
    bool other_model = false;            // go on when the model's digest is not the recorded one
    std::optional<std::uint64_t> until;  // stop execution after this event
    std::function<void(const char* phase, double fraction)> progress;
};

// The first place where re-execution gave something else than the record.
struct Divergence {
    std::uint64_t event = 0;
    std::uint64_t request = 0;           // 0: not of a request
    std::optional<std::uint64_t> token;  // position
    std::optional<std::uint64_t> layer;  // the first layer whose digest differs
    std::string detail;                  // both events as text, ids and numbers only
};

struct ReplayResult {
    Certificate certificate;
    std::optional<Divergence> divergence;  // execution
    double record_s = 0, execution_s = 0, solo_s = 0;
};

// Layer execution: the recorded arrivals drive an engine whose sink compares every numbered event
// and whose kernels go through the writer-checking accessor. Layer solo: each request alone,
// teacher-forced, in a new pool with poisoned scratch: same logits digests, re-sampled ids,
// rendered bytes. Each layer plants controls. Fails: bad_model when the model is not the recorded
// one (both digests named); usage when the one request to run alone is not there to be run.
Result<ReplayResult> replay(const Path& trace, const ReplayModel& model,
                            const ReplayOptions& options);

}  // namespace kvw
