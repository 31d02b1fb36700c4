#include <immintrin.h>

#include "kernels/avx512/matmul.h"
#include "kernels/packing.h"

namespace kvw::avx512 {

void quantise(const QuantisedRows& out, const float* x, std::size_t row_begin,
              std::size_t row_end) {
    const std::size_t blocks = out.cols / kBlockColumns;
    const __m512i magnitude_bits = _mm512_set1_epi32(0x7fffffff);
    for (std::size_t block = row_begin * blocks; block < row_end * blocks; ++block) {
        const __m512 low = _mm512_loadu_ps(x + block * kBlockColumns);
        const __m512 high = _mm512_loadu_ps(x + block * kBlockColumns + 16);
        // The magnitude of a float grows with its bits, infinities and NaN at the top.
        const int largest = static_cast<int>(_mm512_reduce_max_epu32(
            _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude_bits),
                             _mm512_and_si512(_mm512_castps_si512(high), magnitude_bits))));
        const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest)));
        const bool finite = largest < 0x7f800000;
        const bool usable = finite && amax >= 0x1p-100f;
        const __m512 inverse = _mm512_set1_ps(usable ? 127.0f / amax : 0.0f);
        const __mmask16 used = usable ? __mmask16{0xffff} : __mmask16{0};
        // Rounds to nearest even, as MXCSR says.
        const __m512i q_low = _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(low, inverse));
        const __m512i q_high = _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(high, inverse));
        __m128i* q = reinterpret_cast<__m128i*>(out.q + block * kBlockColumns);
        _mm_storeu_si128(q, _mm512_cvtepi32_epi8(q_low));
        _mm_storeu_si128(q + 1, _mm512_cvtepi32_epi8(q_high));
        out.half_sum[block * 2] = _mm512_reduce_add_epi32(q_low);
        out.half_sum[block * 2 + 1] = _mm512_reduce_add_epi32(q_high);
        out.scale[block] = usable ? amax / 127.0f : finite ? 0.0f : __builtin_nanf("");
    }
}

}  // namespace kvw::avx512
