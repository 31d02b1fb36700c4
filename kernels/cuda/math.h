// NUMERICS.md "Functions" and "Sums" in CUDA's words: the constants of detmath.h, the .rn forms.
#pragma once

#include "kernels/detmath.h"
#include "kernels/simt/cuda.h"

namespace kvw::cuda {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// detmath::exp, to the bit.
__device__ inline float exp(float x) {
    const float shifted = __fmaf_rn(x, detmath::kLog2E, detmath::kRounder);
    const float n = __fsub_rn(shifted, detmath::kRounder);
    float r = __fmaf_rn(n, -detmath::kLn2High, x);
    r = __fmaf_rn(n, -detmath::kLn2Low, r);
    float y = detmath::kExpC6;
    y = __fmaf_rn(y, r, detmath::kExpC5);
    y = __fmaf_rn(y, r, detmath::kExpC4);
    y = __fmaf_rn(y, r, detmath::kExpC3);
    y = __fmaf_rn(y, r, detmath::kExpC2);
    y = __fmaf_rn(y, r, 1.0f);
    y = __fmaf_rn(y, r, 1.0f);
    y = __fmul_rn(y, __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u));
    y = x < detmath::kExpLowest ? 0.0f : y;
    return x > detmath::kExpHighest ? infinity() : y;
}

__device__ inline float from_half(std::uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
}

// Over the whole warp; every lane gets the result.
__device__ inline float warp_greatest(float value) {
    for (int distance = 16; distance >= 1; distance /= 2) {
        const float other = __shfl_xor_sync(kWholeWarp, value, distance);
        value = value > other ? value : other;
    }
    return value;
}
// Lane 0 gets lane[j] + lane[j + 16], then 8, 4, 2, 1: the halving tree from 32 lanes down.
__device__ inline float warp_sum(float value) {
    for (int distance = 16; distance >= 1; distance /= 2) {
        value = __fadd_rn(value, __shfl_xor_sync(kWholeWarp, value, distance));
    }
    return value;
}
__device__ inline unsigned long long warp_sum(unsigned long long value) {
    for (int distance = 16; distance >= 1; distance /= 2) {
        value += __shfl_xor_sync(kWholeWarp, value, distance);
    }
    return value;
}

}  // namespace kvw::cuda
