// Time comes in through a Clock, so that tests and replay can bring their own. Times never decide
// an event, a sum or an output; they are notes for people.
#pragma once

#include <cstdint>
#include <string>

namespace kvw {

class Clock {
  public:
    virtual ~Clock() = default;
    virtual std::int64_t wall_ns() const = 0;       // since the epoch, UTC
    virtual std::int64_t monotonic_ns() const = 0;  // for durations only
};

class SystemClock final : public Clock {
  public:
    std::int64_t wall_ns() const override;
    std::int64_t monotonic_ns() const override;
};

// "2026-11-30T23:20:35Z" (RFC 3339, whole seconds).
std::string rfc3339(std::int64_t wall_ns);

}  // namespace kvw
