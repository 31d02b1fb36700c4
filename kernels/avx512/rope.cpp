#include "kernels/wide/rope.h"

#include "kernels/avx512/lanes.h"
#include "kernels/avx512/operations.h"

namespace kvw::avx512 {

void rope(float* x, std::size_t heads, std::size_t head_dim, const float* cos, const float* sin,
          bool interleaved) {
    wide::rope<Lanes>(x, heads, head_dim, cos, sin, interleaved);
}

}  // namespace kvw::avx512
