#include "kernels/wide/silu_mul.h"

#include "kernels/avx2/lanes.h"
#include "kernels/avx2/operations.h"

namespace kvw::avx2 {

void silu_mul(float* out, const float* gate, const float* up, std::size_t count) {
    wide::silu_mul<Lanes>(out, gate, up, count);
}

void gelu_mul(float* out, const float* gate, const float* up, std::size_t count) {
    wide::gelu_mul<Lanes>(out, gate, up, count);
}

void add(float* x, const float* y, std::size_t count) { wide::add<Lanes>(x, y, count); }

}  // namespace kvw::avx2
