#include "kernels/wide/exp.h"

#include "kernels/avx512/lanes.h"
#include "kernels/avx512/operations.h"

namespace kvw::avx512 {

void exp_shifted(float* out, const float* x, std::size_t count, float shift) {
    wide::exp_shifted<Lanes>(out, x, count, shift);
}

}  // namespace kvw::avx512
