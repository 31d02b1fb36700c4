#include <immintrin.h>

#include "kernels/avx2/matmul.h"
#include "kernels/packing.h"

namespace kvw::avx2 {

namespace {

[[gnu::always_inline]] inline __m256i magnitude(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

[[gnu::always_inline]] inline int largest_of(__m256i x) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

[[gnu::always_inline]] inline int sum_of(__m256i x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

}  // namespace

void quantise(const QuantisedRows& out, const float* x, std::size_t row_begin,
              std::size_t row_end) {
    const std::size_t blocks = out.cols / kBlockColumns;
    for (std::size_t block = row_begin * blocks; block < row_end * blocks; ++block) {
        const float* from = x + block * kBlockColumns;
        const __m256 x0 = _mm256_loadu_ps(from), x1 = _mm256_loadu_ps(from + 8);
        const __m256 x2 = _mm256_loadu_ps(from + 16), x3 = _mm256_loadu_ps(from + 24);
        // The magnitude of a float grows with its bits, infinities and NaN at the top.
        const int largest =
            largest_of(_mm256_max_epu32(_mm256_max_epu32(magnitude(x0), magnitude(x1)),
                                        _mm256_max_epu32(magnitude(x2), magnitude(x3))));
        const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest)));
        const bool finite = largest < 0x7f800000;
        const bool usable = finite && amax >= 0x1p-100f;
        const __m256 inverse = _mm256_set1_ps(usable ? 127.0f / amax : 0.0f);
        const __m256i used = _mm256_set1_epi32(usable ? -1 : 0);
        // Rounds to nearest even, as MXCSR says.
        const auto codes = [&](__m256 v) __attribute__((always_inline)) {
            return _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(v, inverse)), used);
        };
        const __m256i q0 = codes(x0), q1 = codes(x1), q2 = codes(x2), q3 = codes(x3);
        // Packing works in 128-bit lanes: the permutation puts groups of 4 codes back in order.
        const __m256i packed =
            _mm256_packs_epi16(_mm256_packs_epi32(q0, q1), _mm256_packs_epi32(q2, q3));
        const __m256i ordered =
            _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.q + block * kBlockColumns), ordered);
        out.half_sum[block * 2] = sum_of(_mm256_add_epi32(q0, q1));
        out.half_sum[block * 2 + 1] = sum_of(_mm256_add_epi32(q2, q3));
        out.scale[block] = usable ? amax / 127.0f : finite ? 0.0f : __builtin_nanf("");
    }
}

}  // namespace kvw::avx2
