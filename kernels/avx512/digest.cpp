#include "kernels/wide/digest.h"

#include <immintrin.h>

#include "kernels/avx512/operations.h"

namespace kvw::avx512 {

namespace {

struct Words {
    static constexpr std::size_t kCount = 16;
    [[gnu::always_inline]] static __m512i zero() { return _mm512_setzero_si512(); }
    [[gnu::always_inline]] static __m512i load(const std::uint32_t* p) {
        return _mm512_loadu_si512(p);
    }
    [[gnu::always_inline]] static __m512i load_part(const std::uint32_t* p, std::size_t n) {
        return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p);
    }
    [[gnu::always_inline]] static __m512i add_products(__m512i sum, __m512i x, __m512i key) {
        const __m512i keyed = _mm512_add_epi32(x, key);
        return _mm512_add_epi64(sum, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
    }
    [[gnu::always_inline]] static __m512i max_exponent(__m512i most, __m512i x) {
        return _mm512_max_epu32(most, _mm512_slli_epi32(x, 1));
    }
    [[gnu::always_inline]] static bool any_nonfinite(__m512i most) {
        return _mm512_cmpge_epu32_mask(most, _mm512_set1_epi32(static_cast<int>(0xff000000))) != 0;
    }
    [[gnu::always_inline]] static std::uint64_t total(__m512i sum) {
        alignas(64) std::uint64_t part[8];
        _mm512_store_si512(part, sum);
        std::uint64_t all = 0;
        for (const std::uint64_t one : part) {
            all += one;
        }
        return all;
    }
};

}  // namespace

RowDigest digest_logits(const float* logits, std::size_t count, std::size_t first_index,
                        bool* nonfinite) {
    return wide::digest_logits<Words>(logits, count, first_index, nonfinite);
}

std::uint64_t digest_row(const float* x, std::size_t cols) {
    return wide::digest_row<Words>(x, cols);
}

}  // namespace kvw::avx512
