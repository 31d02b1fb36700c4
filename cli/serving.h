// What run and batch serve with: a loaded model, an engine over it, and the recording of both.
#pragma once

#include <memory>
#include <optional>

#include "cli/engine_flags.h"
#include "cli/models.h"
#include "cli/recording.h"
#include "cli/session.h"
#include "cli/spot_check.h"
#include "src/engine/engine.h"
#include "src/text/chat.h"

namespace kvw::cli {

struct Serving {
    LoadedModel loaded;
    std::optional<ChatTemplate> chat;  // none: raw
    std::unique_ptr<Recording> recording;
    std::unique_ptr<SpotCheck> spot_check;  // none without --spot-check
    std::unique_ptr<TeeSink> sink;          // into both
    bool go_on_after_violation = false;
    std::unique_ptr<Engine> engine;  // goes first: it notes into the recording and reads the model

    // The spot checks that are due. With --on-violation continue a difference is only said.
    Status check_spots(const Session& session);
    bool violated() const {
        return recording->violated() || (spot_check && spot_check->violated());
    }
};

// The flags of both that need no file to be wrong.
Status check_serving_flags(const GenerationFlags& generation, const EngineFlags& engine,
                           const TraceFlags& trace);
// The folders and files that were named are there, or not there, as they must be; before any work.
Status check_trace_places(const TraceFlags& trace);

Result<Serving> start_serving(const GenerationFlags& generation, const EngineFlags& engine,
                              const TraceFlags& trace, Session& session, Progress& progress);
// The end of the run: settles, makes the last spot checks, closes the trace. `stopped`: the engine
// can do no more itself.
Result<TraceTotals> stop_serving(Serving& serving, bool stopped, const Session& session);

std::string where_the_trace_is(const Serving& serving);

}  // namespace kvw::cli
