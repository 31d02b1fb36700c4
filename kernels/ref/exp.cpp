#include "kernels/detmath.h"
#include "kernels/ref/operations.h"

namespace kvw::ref {

void exp_shifted(float* out, const float* x, std::size_t count, float shift) {
    for (std::size_t i = 0; i < count; ++i) {
        out[i] = detmath::exp(x[i] - shift);
    }
}

}  // namespace kvw::ref
