#include "src/base/check.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace kvw {

namespace {

std::atomic<CheckLastWords> check_last_words{nullptr};

}  // namespace

void set_check_last_words(CheckLastWords last_words) { check_last_words.store(last_words); }

void check_failed(const char* what, const char* file, int line) {
    if (const CheckLastWords last_words = check_last_words.exchange(nullptr)) {
        last_words(what);
    }
    std::fprintf(stderr, "kvwitness: invariant broken: %s (%s:%d)\n", what, file, line);
    std::_Exit(7);
}

}  // namespace kvw
