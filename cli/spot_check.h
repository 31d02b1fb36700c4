// --spot-check: some requests are run again, alone, as soon as they have ended.
//
// Which ones is decided by their numbers. The re-run shares the weights with the engine and nothing
// else; logits, sampled ids and bytes must be the same (replay/solo.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "replay/recorded_run.h"
#include "replay/replay.h"
#include "traces/sink.h"

namespace kvw::cli {

class SpotCheck final : public EventSink {
  public:
    SpotCheck(double percent, const ReplayModel& model) : model_(model) {
        choice_.percent = percent;
    }

    void note(const Event& event) override;
    void text(const TextRecord& record) override;
    Status commit() override { return status_; }

    // Runs what has ended since, between two steps. What differed is a violation, naming the first.
    // Also fails: what a forward pass fails with.
    Status check_ended();

    std::uint64_t checked() const { return checked_; }
    bool violated() const { return violated_; }

  private:
    ReplayModel model_;
    SoloChoice choice_;
    RecordedRun run_;  // of chosen requests that run
    std::vector<std::uint64_t> ended_;
    std::uint64_t events_ = 0, checked_ = 0;
    bool violated_ = false;
    Status status_;
};

}  // namespace kvw::cli
