// Layer execution of replay.
#pragma once

#include "replay/comparing_sink.h"
#include "replay/recorded_run.h"
#include "replay/replay.h"

namespace kvw {

struct ExecutionResult {
    std::optional<Divergence> divergence;
    std::vector<Violation> violations;  // what the shadow table saw, and the divergence itself
    ControlCount controls;
    std::uint64_t compared = 0;  // events that were equal
    bool complete = false;       // the whole record was compared
};

// Asks an engine in checked mode for exactly what was recorded, in the recorded order.
Result<ExecutionResult> execute(const Path& trace, const RecordedRun& recorded,
                                const ReplayModel& model, const ReplayOptions& options);

}  // namespace kvw
