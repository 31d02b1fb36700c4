// Layer solo of replay.
#pragma once

#include "replay/recorded_run.h"
#include "replay/replay.h"

namespace kvw {

struct SoloResult {
    std::vector<Violation> violations;
    ControlCount controls;
    std::uint64_t requests = 0;  // re-run alone
    std::uint64_t tokens = 0;
    bool sampled = false;  // not every request that sampled was re-run
};

// Fails: usage, when the one request that is asked for is not in the record or sampled nothing.
Status check_choice(const RecordedRun& recorded, const SoloChoice& choice);

// Each chosen request alone: a new pool, poisoned scratch, teacher-forced with the recorded ids.
// Logits digests, layer digests, re-sampled ids and rendered bytes must be the recorded ones.
Result<SoloResult> run_solo(const RecordedRun& recorded, const ReplayModel& model,
                            const ReplayOptions& options);

// The first layer whose digest differs when `request` runs alone, if any (to name a divergence).
Result<std::optional<std::uint64_t>> first_differing_layer(const RecordedRun& recorded,
                                                           const ReplayModel& model,
                                                           std::uint64_t request);

}  // namespace kvw
