// Sixteen floats as AVX-512 holds them, for the operations in kernels/wide. In an unnamed
// namespace, so that no code compiled for this processor is ever linked into a variant for another.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace kvw {
namespace {

struct Lanes {
    using Floats = __m512;
    using Mask = __mmask16;
    // What attention keeps in 32 registers for up to 6 query vectors: all four chains of a score,
    // and four groups of 16 columns of values.
    static constexpr int chains_at_once(int) { return 4; }
    static constexpr int columns_at_once(int) { return 4; }

    [[gnu::always_inline]] static Floats zero() { return _mm512_setzero_ps(); }
    [[gnu::always_inline]] static Floats set(float x) { return _mm512_set1_ps(x); }
    [[gnu::always_inline]] static Floats load(const float* p) { return _mm512_loadu_ps(p); }
    // The first n lanes; zeros behind them, and nothing behind them is touched.
    [[gnu::always_inline]] static Floats load_part(const float* p, std::size_t n) {
        return _mm512_maskz_loadu_ps(first(n), p);
    }
    [[gnu::always_inline]] static Floats load(const std::uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    [[gnu::always_inline]] static void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
    [[gnu::always_inline]] static void store_part(float* p, Floats x, std::size_t n) {
        _mm512_mask_storeu_ps(p, first(n), x);
    }
    [[gnu::always_inline]] static void store_halves(std::uint16_t* p, Floats x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    [[gnu::always_inline]] static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    [[gnu::always_inline]] static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    [[gnu::always_inline]] static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    [[gnu::always_inline]] static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    [[gnu::always_inline]] static Floats fma(Floats a, Floats b, Floats c) {
        return _mm512_fmadd_ps(a, b, c);
    }
    // a > b ? a : b, so b where either is NaN.
    [[gnu::always_inline]] static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    [[gnu::always_inline]] static Floats negate(Floats x) {
        return _mm512_castsi512_ps(
            _mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN)));
    }
    // a b - c in even lanes, a b + c in odd ones.
    [[gnu::always_inline]] static Floats fma_alternating(Floats a, Floats b, Floats c) {
        return _mm512_fmaddsub_ps(a, b, c);
    }
    [[gnu::always_inline]] static Floats swap_pairs(Floats x) {
        return _mm512_permute_ps(x, 0b10110001);
    }
    // Each of eight floats twice.
    [[gnu::always_inline]] static Floats load_doubled(const float* p) {
        const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
    }
    // 2^n from n + 1.5 * 2^23.
    [[gnu::always_inline]] static Floats power_of_two(Floats shifted) {
        return _mm512_castsi512_ps(_mm512_add_epi32(
            _mm512_slli_epi32(_mm512_castps_si512(shifted), 23), _mm512_set1_epi32(0x3f800000)));
    }

    [[gnu::always_inline]] static Mask first(std::size_t n) {
        return static_cast<Mask>(n >= 16 ? 0xffff : (1u << n) - 1);
    }
    [[gnu::always_inline]] static Mask less(Floats a, Floats b) {
        return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
    }
    [[gnu::always_inline]] static unsigned equal_bits(Floats a, Floats b) {
        return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
    }
    [[gnu::always_inline]] static Floats select(Mask mask, Floats yes, Floats no) {
        return _mm512_mask_blend_ps(mask, no, yes);
    }

    // Lanes j and j + 8, then j + 4, + 2, + 1.
    [[gnu::always_inline]] static float sum(Floats x) {
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
        return sum(_mm256_add_ps(_mm512_castps512_ps256(x), high));
    }
    [[gnu::always_inline]] static float sum(__m256 x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        y = _mm_add_ss(y, _mm_movehdup_ps(y));
        return _mm_cvtss_f32(y);
    }
    [[gnu::always_inline]] static float greatest(Floats x) {
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
        const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), high);
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        y = _mm_max_ss(y, _mm_movehdup_ps(y));
        return _mm_cvtss_f32(y);
    }
};

}  // namespace
}  // namespace kvw
