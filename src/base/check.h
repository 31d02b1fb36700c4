// An invariant of ours. A false one stops the program (exit 7) before another byte leaves it; it is
// on in release builds, because a broken invariant must never become an answer.
#pragma once

namespace kvw {

// Prints `what` with file and line on stderr and ends the process with exit status 7.
[[noreturn]] void check_failed(const char* what, const char* file, int line);

inline void check(bool holds, const char* what, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
    if (!holds) [[unlikely]] {
        check_failed(what, file, line);
    }
}

}  // namespace kvw
