#include "kernels/wide/rms_norm.h"

#include "kernels/avx512/lanes.h"
#include "kernels/avx512/operations.h"

namespace kvw::avx512 {

void rms_norm(float* out, const float* x, const float* weight, std::size_t cols, float epsilon,
              std::size_t row_begin, std::size_t row_end) {
    wide::rms_norm<Lanes>(out, x, weight, cols, epsilon, row_begin, row_end);
}

}  // namespace kvw::avx512
