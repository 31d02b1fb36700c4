#include "kernels/ref/operations.h"

namespace kvw::ref {

std::size_t argmax(const float* x, std::size_t count) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < count; ++i) {
        if (x[i] > x[best]) {
            best = i;
        }
    }
    return best;
}

}  // namespace kvw::ref
