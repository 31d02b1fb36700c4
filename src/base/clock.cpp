#include "src/base/clock.h"

#include <ctime>

namespace kvw {

namespace {

std::int64_t read_clock(clockid_t id) {
    timespec now{};
    clock_gettime(id, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace

std::int64_t SystemClock::wall_ns() const { return read_clock(CLOCK_REALTIME); }
std::int64_t SystemClock::monotonic_ns() const { return read_clock(CLOCK_MONOTONIC); }

std::string rfc3339(std::int64_t wall_ns) {
    const std::time_t seconds = static_cast<std::time_t>(wall_ns / 1'000'000'000);
    std::tm parts{};
    gmtime_r(&seconds, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

}  // namespace kvw
