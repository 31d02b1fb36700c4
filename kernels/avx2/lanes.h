// Sixteen floats as AVX2 holds them, for the operations in kernels/wide. In an unnamed namespace,
// so that no code compiled for this processor is ever linked into a variant for another.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvw {
namespace {

struct Lanes {
    struct Floats {
        __m256 low, high;
    };
    using Mask = Floats;
    // What attention keeps in 16 registers for `width` query vectors: chains of a score, and groups
    // of 16 columns of values. Two of either for few vectors, so that enough sums are under way.
    static constexpr int chains_at_once(int width) { return width <= 3 ? 2 : 1; }
    static constexpr int columns_at_once(int width) { return width <= 3 ? 2 : 1; }

    [[gnu::always_inline]] static Floats zero() { return set(0.0f); }
    [[gnu::always_inline]] static Floats set(float x) {
        return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
    }
    [[gnu::always_inline]] static Floats load(const float* p) {
        return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    }
    // The first n lanes; zeros behind them, and nothing behind them is touched.
    [[gnu::always_inline]] static Floats load_part(const float* p, std::size_t n) {
        const Mask mask = first(n);
        return {_mm256_maskload_ps(p, _mm256_castps_si256(mask.low)),
                _mm256_maskload_ps(p + 8, _mm256_castps_si256(mask.high))};
    }
    [[gnu::always_inline]] static Floats load(const std::uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
    }
    [[gnu::always_inline]] static void store(float* p, Floats x) {
        _mm256_storeu_ps(p, x.low);
        _mm256_storeu_ps(p + 8, x.high);
    }
    [[gnu::always_inline]] static void store_part(float* p, Floats x, std::size_t n) {
        const Mask mask = first(n);
        _mm256_maskstore_ps(p, _mm256_castps_si256(mask.low), x.low);
        _mm256_maskstore_ps(p + 8, _mm256_castps_si256(mask.high), x.high);
    }
    [[gnu::always_inline]] static void store_halves(std::uint16_t* p, Floats x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                         _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
    }

    [[gnu::always_inline]] static Floats add(Floats a, Floats b) {
        return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
    }
    [[gnu::always_inline]] static Floats sub(Floats a, Floats b) {
        return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
    }
    [[gnu::always_inline]] static Floats mul(Floats a, Floats b) {
        return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
    }
    [[gnu::always_inline]] static Floats div(Floats a, Floats b) {
        return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
    }
    [[gnu::always_inline]] static Floats fma(Floats a, Floats b, Floats c) {
        return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
    }
    // a > b ? a : b, so b where either is NaN.
    [[gnu::always_inline]] static Floats max(Floats a, Floats b) {
        return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
    }
    [[gnu::always_inline]] static Floats negate(Floats x) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_xor_ps(x.low, sign), _mm256_xor_ps(x.high, sign)};
    }
    // a b - c in even lanes, a b + c in odd ones.
    [[gnu::always_inline]] static Floats fma_alternating(Floats a, Floats b, Floats c) {
        return {_mm256_fmaddsub_ps(a.low, b.low, c.low),
                _mm256_fmaddsub_ps(a.high, b.high, c.high)};
    }
    [[gnu::always_inline]] static Floats swap_pairs(Floats x) {
        return {_mm256_permute_ps(x.low, 0b10110001), _mm256_permute_ps(x.high, 0b10110001)};
    }
    // Each of eight floats twice.
    [[gnu::always_inline]] static Floats load_doubled(const float* p) {
        const __m256 eight = _mm256_loadu_ps(p);
        return {_mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
                _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
    }
    // 2^n from n + 1.5 * 2^23.
    [[gnu::always_inline]] static Floats power_of_two(Floats shifted) {
        return {power_of_two(shifted.low), power_of_two(shifted.high)};
    }
    [[gnu::always_inline]] static __m256 power_of_two(__m256 shifted) {
        return _mm256_castsi256_ps(_mm256_add_epi32(
            _mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32(0x3f800000)));
    }

    [[gnu::always_inline]] static Mask first(std::size_t n) {
        const __m256i count = _mm256_set1_epi32(static_cast<int>(n < 16 ? n : 16));
        const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
        return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low)),
                _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high))};
    }
    [[gnu::always_inline]] static Mask less(Floats a, Floats b) {
        return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
    }
    [[gnu::always_inline]] static unsigned equal_bits(Floats a, Floats b) {
        const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ));
        const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
        return static_cast<unsigned>(low) | static_cast<unsigned>(high) << 8;
    }
    [[gnu::always_inline]] static Floats select(Mask mask, Floats yes, Floats no) {
        return {_mm256_blendv_ps(no.low, yes.low, mask.low),
                _mm256_blendv_ps(no.high, yes.high, mask.high)};
    }

    // Lanes j and j + 8, then j + 4, + 2, + 1.
    [[gnu::always_inline]] static float sum(Floats x) {
        const __m256 eight = _mm256_add_ps(x.low, x.high);
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        y = _mm_add_ss(y, _mm_movehdup_ps(y));
        return _mm_cvtss_f32(y);
    }
    [[gnu::always_inline]] static float greatest(Floats x) {
        const __m256 eight = _mm256_max_ps(x.low, x.high);
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        y = _mm_max_ss(y, _mm_movehdup_ps(y));
        return _mm_cvtss_f32(y);
    }
};

}  // namespace
}  // namespace kvw
