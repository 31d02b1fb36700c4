#include <cmath>

#include "kernels/detmath.h"
#include "kernels/ref/operations.h"
#include "kernels/ref/sums.h"

namespace kvw::ref {

void rms_norm(float* out, const float* x, const float* weight, std::size_t cols, float epsilon,
              std::size_t row_begin, std::size_t row_end) {
    for (std::size_t row = row_begin; row < row_end; ++row) {
        const float* in = x + row * cols;
        std::array<float, kSumLanes> lanes{};
        for (std::size_t c = 0; c < cols; ++c) {
            lanes[c % kSumLanes] = detmath::fma(in[c], in[c], lanes[c % kSumLanes]);
        }
        const float mean = halving_tree(lanes) / static_cast<float>(cols);
        const float scale =
            1.0f / std::sqrt(mean + epsilon);  // two IEEE operations, never an estimate
        for (std::size_t c = 0; c < cols; ++c) {
            out[row * cols + c] = in[c] * scale * weight[c];
        }
    }
}

}  // namespace kvw::ref
