#include "kernels/wide/digest.h"

#include <immintrin.h>

#include "kernels/avx2/operations.h"

namespace kvw::avx2 {

namespace {

struct Words {
    static constexpr std::size_t kCount = 8;
    [[gnu::always_inline]] static __m256i zero() { return _mm256_setzero_si256(); }
    [[gnu::always_inline]] static __m256i load(const std::uint32_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    [[gnu::always_inline]] static __m256i load_part(const std::uint32_t* p, std::size_t n) {
        const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                                                _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), mask);
    }
    [[gnu::always_inline]] static __m256i add_products(__m256i sum, __m256i x, __m256i key) {
        const __m256i keyed = _mm256_add_epi32(x, key);
        return _mm256_add_epi64(sum, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
    }
    [[gnu::always_inline]] static __m256i max_exponent(__m256i most, __m256i x) {
        return _mm256_max_epu32(most, _mm256_slli_epi32(x, 1));
    }
    [[gnu::always_inline]] static bool any_nonfinite(__m256i most) {
        const __m256i infinity = _mm256_set1_epi32(static_cast<int>(0xff000000));
        return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(most, infinity), most)) !=
               0;
    }
    [[gnu::always_inline]] static std::uint64_t total(__m256i sum) {
        alignas(32) std::uint64_t part[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(part), sum);
        return part[0] + part[1] + part[2] + part[3];
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

}  // namespace kvw::avx2
