#include "kernels/detmath.h"
#include "kernels/ref/operations.h"

namespace kvw::ref {

void silu_mul(float* out, const float* gate, const float* up, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        out[i] = detmath::silu(gate[i]) * up[i];
    }
}

void gelu_mul(float* out, const float* gate, const float* up, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        out[i] = detmath::gelu(gate[i]) * up[i];
    }
}

void add(float* x, const float* y, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        x[i] = x[i] + y[i];
    }
}

}  // namespace kvw::ref
