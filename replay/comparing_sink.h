// The sink of a re-execution: every numbered event the engine notes must be the next one of the
// record.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "replay/replay.h"
#include "traces/sink.h"
#include "traces/trace.h"

namespace kvw {

// Walks the numbered events of a trace one by one, chunk by chunk.
class TraceCursor {
  public:
    static Result<TraceCursor> open(const Path& path);
    // The next numbered event, or null at the end of the record (or after an error, see status()).
    const Event* peek();
    void advance();
    std::uint64_t number() const { return number_; }  // of the event peek() shows
    const Status& status() const { return status_; }

  private:
    explicit TraceCursor(TraceReader reader) : reader_(std::move(reader)) {}
    TraceReader reader_;
    TraceChunk chunk_;
    std::size_t index_ = 0;
    std::uint64_t number_ = 1;
    bool ended_ = false;
    Status status_;
};

// What is different between a recorded event (null: the record has ended) and the one that
// re-execution notes in its place; nothing when they are the same fact: kind, every field, bytes.
std::optional<Divergence> compare(const Event* recorded, const Event& executed,
                                  std::uint64_t number);

class ComparingSink final : public EventSink {
  public:
    // `until`: events after this number are not compared. The cursor must outlive the sink.
    ComparingSink(TraceCursor& cursor, std::optional<std::uint64_t> until);

    void note(const Event& event) override;
    void text(const TextRecord&) override {}  // content is compared through its keyed digests
    Status commit() override { return {}; }

    std::uint64_t compared() const { return compared_; }
    const std::optional<Divergence>& divergence() const { return divergence_; }
    // The tile header that re-execution met where the record goes on otherwise: what its checks
    // found out.
    const std::optional<events::Loaded>& loaded() const { return loaded_; }
    // One of this trace's own sample digests, changed by one bit, gives a divergence that names its
    // event, request and token (a control).
    const ControlCount& controls() const { return controls_; }

  private:
    TraceCursor* cursor_;
    std::optional<std::uint64_t> until_;
    std::uint64_t compared_ = 0;
    std::optional<Divergence> divergence_;
    std::optional<events::Loaded> loaded_;
    ControlCount controls_;
};

}  // namespace kvw
