#include "kernels/wide/exp.h"

#include "kernels/avx2/lanes.h"
#include "kernels/avx2/operations.h"

namespace kvw::avx2 {

void exp_shifted(float* out, const float* x, std::size_t count, float shift) {
    wide::exp_shifted<Lanes>(out, x, count, shift);
}

}  // namespace kvw::avx2
