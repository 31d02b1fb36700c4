// Functions of our own, so that no library's last bit reaches a result: NUMERICS.md "Functions" and
// "RoPE". Only IEEE add, multiply, divide and fma, each rounded once. Always inlined: each
// instruction set compiles its own copy.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace kvw::detmath {

// exp in f32: below kExpLowest exactly 0, above kExpHighest infinity, exp(0) exactly 1.
inline constexpr float kExpLowest = -87.0f;
inline constexpr float kExpHighest = 88.0f;
inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kRounder =
    12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
inline constexpr float kLn2High = 0x1.62e430p-1f;
inline constexpr float kLn2Low = -0x1.05c610p-29f;
// exp(r) = 1 + r + C2 r^2 + ... + C6 r^6, |r| <= ln(2)/2; relative error 3.2e-9.
inline constexpr float kExpC2 = 0x1.fffffcp-2f;
inline constexpr float kExpC3 = 0x1.555492p-3f;
inline constexpr float kExpC4 = 0x1.5558b2p-5f;
inline constexpr float kExpC5 = 0x1.12398ep-7f;
inline constexpr float kExpC6 = 0x1.6a4b36p-10f;
// gelu(x) = x / (1 + exp(-x (kGeluLinear + kGeluCubic x^2))), which is the tanh form.
inline constexpr float kGeluLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.07135481627159586f;  // the same times 0.044715

[[gnu::always_inline]] inline float fma(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
[[gnu::always_inline]] inline double fma(double a, double b, double c) {
    return __builtin_fma(a, b, c);
}

[[gnu::always_inline]] inline float exp(float x) {
    const float shifted = fma(x, kLog2E, kRounder);
    const float n = shifted - kRounder;
    float r = fma(n, -kLn2High, x);
    r = fma(n, -kLn2Low, r);
    float y = kExpC6;
    y = fma(y, r, kExpC5);
    y = fma(y, r, kExpC4);
    y = fma(y, r, kExpC3);
    y = fma(y, r, kExpC2);
    y = fma(y, r, 1.0f);
    y = fma(y, r, 1.0f);
    // The low bits of `shifted` are n: moved into the exponent they make 2^n.
    const std::uint32_t power = (std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000u;
    y = y * std::bit_cast<float>(power);
    y = x < kExpLowest ? 0.0f : y;
    return x > kExpHighest ? std::numeric_limits<float>::infinity() : y;
}

[[gnu::always_inline]] inline float silu(float x) { return x / (1.0f + exp(-x)); }

[[gnu::always_inline]] inline float gelu(float x) {
    const float slope = fma(x * x, kGeluCubic, kGeluLinear);
    return x / (1.0f + exp(-(x * slope)));
}

// The rest is double and used for RoPE tables only; arguments as they occur there.

inline constexpr double kRounderDouble = 0x1.8p52;
inline constexpr double kLn2HighDouble = 0x1.62e42fefa39efp-1;
inline constexpr double kLn2LowDouble = 0x1.abc9e3b39803fp-56;

// Natural logarithm of a normal x > 0: x = m 2^e with m in [sqrt(1/2), sqrt(2)), s = (m - 1) / (m +
// 1), log m = 2 artanh(s) = 2 (s + s^3 / 3 + ... + s^23 / 23).
[[gnu::always_inline]] inline double log(double x) {
    constexpr double kTerms[] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                 1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3};
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
    // Counted from sqrt(1/2), the exponent field changes where m has to start again.
    const std::int64_t e = static_cast<std::int64_t>(bits - 0x3fe6a09e667f3bcdull) >> 52;
    const double m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(e) << 52));
    const double s = (m - 1.0) / (m + 1.0);
    const double s2 = s * s;
    double sum = 0.0;
    for (const double term : kTerms) {
        sum = fma(sum, s2, term);
    }
    sum = 2.0 * fma(s * s2, sum, s);
    const double exponent = static_cast<double>(e);
    return fma(exponent, kLn2HighDouble, fma(exponent, kLn2LowDouble, sum));
}

// exp of |x| < 700: x = n ln 2 + r, Taylor to r^14 / 14!.
[[gnu::always_inline]] inline double exp(double x) {
    constexpr double kTerms[] = {1.0 / 87178291200,
                                 1.0 / 6227020800,
                                 1.0 / 479001600,
                                 1.0 / 39916800,
                                 1.0 / 3628800,
                                 1.0 / 362880,
                                 1.0 / 40320,
                                 1.0 / 5040,
                                 1.0 / 720,
                                 1.0 / 120,
                                 1.0 / 24,
                                 1.0 / 6,
                                 1.0 / 2,
                                 1.0,
                                 1.0};
    const double shifted = fma(x, 1.4426950408889634, kRounderDouble);
    const double n = shifted - kRounderDouble;
    double r = fma(n, -kLn2HighDouble, x);
    r = fma(n, -kLn2LowDouble, r);
    double y = 0.0;
    for (const double term : kTerms) {
        y = fma(y, r, term);
    }
    const std::uint64_t power =
        (std::bit_cast<std::uint64_t>(shifted) << 52) + 0x3ff0000000000000ull;
    return y * std::bit_cast<double>(power);
}

// base > 0.
[[gnu::always_inline]] inline double pow(double base, double exponent) {
    return exp(exponent * log(base));
}

struct SinCos {
    double sin, cos;
};

// |x| up to 2^20: x = n pi/2 + r by a pi/2 in three parts, then Taylor to r^17 / 17! and r^18 /
// 18!.
[[gnu::always_inline]] inline SinCos sin_cos(double x) {
    constexpr double kSin[] = {
        1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800,
        1.0 / 362880,          -1.0 / 5040,          1.0 / 120,        -1.0 / 6};
    constexpr double kCos[] = {-1.0 / 6402373705728000,
                               1.0 / 20922789888000,
                               -1.0 / 87178291200,
                               1.0 / 479001600,
                               -1.0 / 3628800,
                               1.0 / 40320,
                               -1.0 / 720,
                               1.0 / 24,
                               -1.0 / 2,
                               1.0};
    const double shifted = fma(x, 0.63661977236758138, kRounderDouble);
    const double n = shifted - kRounderDouble;
    double r = fma(n, -0x1.921fb54400000p+0, x);  // 33 bits of pi/2: exact for n below 2^20
    r = fma(n, -0x1.0b4611a600000p-34, r);
    r = fma(n, -0x1.3198a2e037073p-69, r);
    const double r2 = r * r;
    double sin = 0.0;
    for (const double term : kSin) {
        sin = fma(sin, r2, term);
    }
    sin = fma(r * r2, sin, r);
    double cos = 0.0;
    for (const double term : kCos) {
        cos = fma(cos, r2, term);
    }
    switch (std::bit_cast<std::uint64_t>(shifted) & 3) {  // n modulo 4
        case 0:
            return {sin, cos};
        case 1:
            return {cos, -sin};
        case 2:
            return {-sin, -cos};
        default:
            return {-cos, sin};
    }
}

}  // namespace kvw::detmath
