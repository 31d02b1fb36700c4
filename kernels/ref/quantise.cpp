#include <bit>
#include <cmath>
#include <limits>

#include "kernels/packing.h"
#include "kernels/ref/matmul.h"

namespace kvw::ref {

namespace {

// NUMERICS.md "Activations": one block of 32 values.
void quantise_block(const float* x, std::int8_t* q, float* scale, std::int32_t* half_sum) {
    // The magnitude of a float grows with its bits, infinities and NaN at the top.
    std::uint32_t largest = 0;
    for (std::size_t c = 0; c < kBlockColumns; ++c) {
        const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x[c]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    half_sum[0] = half_sum[1] = 0;
    const float amax = std::bit_cast<float>(largest);
    if (!(amax >= 0x1p-100f) || largest >= 0x7f800000) {
        for (std::size_t c = 0; c < kBlockColumns; ++c) {
            q[c] = 0;
        }
        *scale = largest >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        return;
    }
    *scale = amax / 127.0f;
    const float inverse = 127.0f / amax;
    for (std::size_t c = 0; c < kBlockColumns; ++c) {
        q[c] = static_cast<std::int8_t>(std::nearbyint(x[c] * inverse));  // ties to even
        half_sum[c / 16] += q[c];
    }
}

}  // namespace

void quantise(const QuantisedRows& out, const float* x, std::size_t row_begin,
              std::size_t row_end) {
    const std::size_t blocks = out.cols / kBlockColumns;
    for (std::size_t block = row_begin * blocks; block < row_end * blocks; ++block) {
        quantise_block(x + block * kBlockColumns, out.q + block * kBlockColumns, out.scale + block,
                       out.half_sum + block * 2);
    }
}

}  // namespace kvw::ref
