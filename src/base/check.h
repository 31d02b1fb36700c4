// An invariant of ours. A false one stops the program (exit 7) before another byte leaves it; it is
// on in release builds, because a broken invariant must never become an answer.
#pragma once

namespace kvw {

// Called with the message of the first check that fails, before anything is printed: a program that
// owes its caller an object prints it there. It may allocate nothing and take no lock. Null: none.
using CheckLastWords = void (*)(const char* message);
void set_check_last_words(CheckLastWords last_words);

// Prints `what` with file and line on stderr and ends the process with exit status 7.
[[noreturn]] void check_failed(const char* what, const char* file, int line);

inline void check(bool holds, const char* what, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
    if (!holds) [[unlikely]] {
        check_failed(what, file, line);
    }
}

}  // namespace kvw
