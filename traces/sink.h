// The one seam through which page and request events leave the engine.
#pragma once

#include <string>
#include <vector>

#include "src/base/result.h"
#include "traces/event.h"

namespace kvw {

// Takes events in their order from one thread. Errors are kept and come out of commit(), which the
// engine calls before anything of the step is revealed: a sink that fails stops the engine.
class EventSink {
  public:
    virtual ~EventSink() = default;
    virtual void note(const Event& event) = 0;
    virtual void text(const TextRecord& record) = 0;
    // End of a step: everything noted so far is where it survives this process.
    virtual Status commit() = 0;
};

class NullSink final : public EventSink {
  public:
    void note(const Event&) override {}
    void text(const TextRecord&) override {}
    Status commit() override { return {}; }
};

// Passes everything on to several sinks, in order; the first error wins.
class TeeSink final : public EventSink {
  public:
    explicit TeeSink(std::vector<EventSink*> sinks) : sinks_(std::move(sinks)) {}
    void note(const Event& event) override;
    void text(const TextRecord& record) override;
    Status commit() override;

  private:
    std::vector<EventSink*> sinks_;
};

// Keeps events as lines of to_text(), for tests.
class TextSink final : public EventSink {
  public:
    void note(const Event& event) override;
    void text(const TextRecord& record) override;
    Status commit() override { return {}; }
    const std::string& lines() const { return lines_; }
    void clear() { lines_.clear(); }

  private:
    std::string lines_;
};

}  // namespace kvw
