#include "kernels/detmath.h"
#include "kernels/ref/operations.h"

namespace kvw::ref {

void rope(float* x, std::size_t heads, std::size_t head_dim, const float* cos, const float* sin,
          bool interleaved) {
    const std::size_t half = head_dim / 2;
    for (std::size_t head = 0; head < heads; ++head) {
        for (std::size_t i = 0; i < half; ++i) {
            float& first = x[head * head_dim + (interleaved ? 2 * i : i)];
            float& second = x[head * head_dim + (interleaved ? 2 * i + 1 : i + half)];
            const float turned_first = detmath::fma(first, cos[i], -(second * sin[i]));
            const float turned_second = detmath::fma(second, cos[i], first * sin[i]);
            first = turned_first;
            second = turned_second;
        }
    }
}

}  // namespace kvw::ref
