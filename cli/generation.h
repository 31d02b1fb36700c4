// What `run` is told, and what one request came to.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cli/answer_stream.h"
#include "cli/engine_flags.h"
#include "cli/options.h"
#include "cli/recording.h"
#include "cli/session.h"
#include "src/engine/engine.h"

namespace kvw::cli {

struct RunFlags : GenerationFlags, EngineFlags, TraceFlags {
    std::optional<std::string> prompt_argument, prompt, prompt_file;
    std::uint32_t top_logits = 0;
    bool no_history = false;
};

// One request, from submit to its end.
struct Generated {
    std::string request = "0";  // decimal
    std::vector<TokenId> prompt_ids, ids;
    std::string text;
    std::optional<FinishReason> finish;  // none: refused, or the engine stopped
    std::optional<Error> error;   // refusal, nonfinite, violation, or what stopped the engine
    bool refused = false;         // never became work
    bool engine_stopped = false;  // only closing the trace may follow
    RequestFacts facts;
    std::vector<TopLogit> first_logits;
    double ttft_ms = 0, prefill_tps = 0, decode_tps = 0;
};

// Runs the engine until this request has ended. A signal, or a stdout that takes no more, cancels
// it.
Generated generate(Engine& engine, GenerateRequest request, Session& session, Progress& progress);

}  // namespace kvw::cli
