#include "src/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace kvw {

void check_failed(const char* what, const char* file, int line) {
    std::fprintf(stderr, "kvwitness: invariant broken: %s (%s:%d)\n", what, file, line);
    std::_Exit(7);
}

}  // namespace kvw
