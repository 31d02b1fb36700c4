#include "kernels/avx2/matmul.h"

#include <immintrin.h>

#include <cstring>

#include "kernels/packing.h"
#include "kernels/ref/matmul.h"
#include "kernels/tiling.h"
#include "kernels/unrolled.h"

// One ymm holds half a line: 8 rows x 4 columns. maddubs multiplies unsigned weight codes with
// signed activations and adds neighbours to int16; activations lie in [-127, 127], so with codes up
// to 15, 31 and 63 the sums of 8, 4 and 2 lines still fit. Codes of 8 bits do not (2 * 255 * 127):
// those become the weight's magnitude, and the activation takes the weight's sign, which gives at
// most 2 * 128 * 127 = 32512.
namespace kvw::avx2 {

namespace {

[[gnu::always_inline]] inline __m256i broadcast_i32(const std::uint8_t* p) {
    std::int32_t value;
    std::memcpy(&value, p, 4);
    return _mm256_set1_epi32(value);
}

[[gnu::always_inline]] inline __m256 broadcast_f32(const std::uint8_t* p) {
    float value;
    std::memcpy(&value, p, 4);
    return _mm256_set1_ps(value);
}

[[gnu::always_inline]] inline __m256i load_half_line(const std::uint8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}

template <WeightType weight_type>
struct Quantised {
    static constexpr WeightType type = weight_type;
    static constexpr int kTokensMax = 6;
    static constexpr BlockLayout layout = block_layout(type);
    static constexpr int kLines = static_cast<int>(layout.code_bytes() / 64);
    static constexpr bool kSigned = layout.code_max == 255;
    // Code lines whose products may be added up in int16.
    static constexpr int kLinesPerSum = kSigned ? 1 : 32767 / (2 * 127 * layout.code_max);

    // Vector v of the scales of a block, rows 8 * half to 8 * half + 7.
    [[gnu::always_inline]] static __m256 load_scales(const std::uint8_t* scales, std::size_t v,
                                                     std::size_t half) {
        const std::uint8_t* p = scales + v * layout.vector_bytes();
        if constexpr (layout.half_scales) {
            return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p) + half));
        } else {
            return _mm256_load_ps(reinterpret_cast<const float*>(p) + half * 8);
        }
    }

    // sum[t] = or += the products of one line of codes with 4 columns of each token, in pairs.
    template <int tokens, bool first>
    [[gnu::always_inline]] static void add_products(__m256i (&sum)[tokens], __m256i codes,
                                                    const std::uint8_t* record) {
        unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
            const __m256i products = _mm256_maddubs_epi16(codes, broadcast_i32(record + t * 32));
            sum[t] = first ? products : _mm256_add_epi16(sum[t], products);
        });
    }

    template <int tokens>
    [[gnu::always_inline]] static void add_widened(__m256i (&dot)[tokens],
                                                   const __m256i (&sum)[tokens]) {
        unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
            dot[t] = _mm256_add_epi32(dot[t], _mm256_madd_epi16(sum[t], _mm256_set1_epi16(1)));
        });
    }

    // Adds the dots of lines [line_begin, line_begin + lines) to dot[t]; codes: this half's.
    template <int tokens, int line_begin, int lines>
    [[gnu::always_inline]] static void add_lines(__m256i (&dot)[tokens], const std::uint8_t* codes,
                                                 const std::uint8_t* record) {
        if constexpr (layout.nibbles) {
            static_assert(2 * lines <= kLinesPerSum);
            __m256i sum[tokens];
            unrolled<lines>([&](auto i) __attribute__((always_inline)) {
                const __m256i low_bits = _mm256_set1_epi8(15);
                const __m256i packed = load_half_line(codes + i * 64);
                const __m256i low = _mm256_and_si256(packed, low_bits);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_bits);
                add_products<tokens, i == 0>(sum, low, record + i * 4);
                add_products<tokens, false>(sum, high, record + 16 + i * 4);
            });
            add_widened(dot, sum);
        } else if constexpr (kSigned) {
            unrolled<lines>([&](auto i) __attribute__((always_inline)) {
                constexpr int line = line_begin + i;
                const __m256i weights = _mm256_xor_si256(load_half_line(codes + line * 64),
                                                         _mm256_set1_epi8(static_cast<char>(0x80)));
                const __m256i magnitudes = _mm256_abs_epi8(weights);
                __m256i sum[tokens];
                unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                    const __m256i activations = broadcast_i32(record + t * 32 + line * 4);
                    sum[t] =
                        _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(activations, weights));
                });
                add_widened(dot, sum);
            });
        } else {
            static_assert(lines % kLinesPerSum == 0);
            unrolled<lines / kLinesPerSum>([&](auto part) __attribute__((always_inline)) {
                __m256i sum[tokens];
                unrolled<kLinesPerSum>([&](auto i) __attribute__((always_inline)) {
                    constexpr int line = line_begin + part * kLinesPerSum + i;
                    add_products<tokens, i == 0>(sum, load_half_line(codes + line * 64),
                                                 record + line * 4);
                });
                add_widened(dot, sum);
            });
        }
    }

    // Adds one block, rows 8 * half to 8 * half + 7.
    template <int tokens>
    [[gnu::always_inline]] static void add_half_block(__m256 (&acc)[tokens],
                                                      const std::uint8_t* codes,
                                                      const std::uint8_t* scales,
                                                      const std::uint8_t* record,
                                                      std::size_t half) {
        using Tile = TokenTile<layout, tokens>;
        unrolled<layout.scales>([&](auto s) __attribute__((always_inline)) {
            __m256i dot[tokens];
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                // Signed weights are multiplied as they are.
                dot[t] = Tile::kStarts != 0 && !kSigned
                             ? broadcast_i32(record + Tile::kStart + (s * tokens + t) * 4)
                             : _mm256_setzero_si256();
            });
            constexpr int lines = kLines / layout.scales;
            add_lines<tokens, s * lines, lines>(dot, codes + half * 32, record);
            const __m256 weight_scale = load_scales(scales, s, half);
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                const __m256 scale =
                    _mm256_mul_ps(weight_scale, broadcast_f32(record + Tile::kScale + t * 4));
                acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[t]), scale, acc[t]);
            });
        });
        if constexpr (layout.has_minimum) {
            const __m256 minimum = load_scales(scales, 1, half);
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                acc[t] =
                    _mm256_fmadd_ps(minimum, broadcast_f32(record + Tile::kSum + t * 4), acc[t]);
            });
        }
    }

    // One chunk of `count` blocks, rows 8 * half to 8 * half + 7.
    template <int tokens>
    [[gnu::always_inline]] static void add_half_chunk(float* total, const std::uint8_t* codes,
                                                      const std::uint8_t* scales,
                                                      const std::uint8_t* record, std::size_t count,
                                                      std::size_t half) {
        // Few tokens wait for memory, not for arithmetic: ask early for what the next panels hold.
        constexpr bool prefetch = tokens <= 2;
        constexpr std::size_t ahead = 4096;

        __m256 acc[tokens];
        unrolled<tokens>([&](auto t)
                             __attribute__((always_inline)) { acc[t] = _mm256_setzero_ps(); });
        for (std::size_t b = 0; b < count; ++b) {
            if constexpr (prefetch) {
                unrolled<kLines / 2>([&](auto i) __attribute__((always_inline)) {
                    _mm_prefetch(codes + ahead + (i * 2 + half) * 64, _MM_HINT_T0);
                });
                _mm_prefetch(scales + ahead, _MM_HINT_T0);
            }
            add_half_block<tokens>(acc, codes, scales, record, half);
            scales += layout.scale_bytes();
            codes += layout.code_bytes();
            record += TokenTile<layout, tokens>::kBytes;
        }
        unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
            float* sum = total + t * kPanelRows + half * 8;
            _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), acc[t]));
        });
    }

    template <int tokens>
    static void multiply_panel(float* total, const std::uint8_t* panel, const std::uint8_t* record,
                               std::size_t blocks) {
        while (blocks != 0) {
            const std::size_t count = blocks < kChunkBlocks ? blocks : kChunkBlocks;
            const std::uint8_t* codes = panel + layout.chunk_scale_bytes(count);
            for (std::size_t half = 0; half < 2; ++half) {
                add_half_chunk<tokens>(total, codes, panel, record, count, half);
            }
            panel = codes + count * layout.code_bytes();
            record += count * TokenTile<layout, tokens>::kBytes;
            blocks -= count;
        }
    }
};

template <WeightType type>
struct Floats {
    static constexpr int kTokensMax = 4;
    static constexpr int kSums = 4;

    // Rows 8 * half to 8 * half + 7.
    [[gnu::always_inline]] static __m256 load_column(const std::uint8_t* panel, std::size_t c,
                                                     std::size_t half) {
        if constexpr (type == WeightType::f32) {
            return _mm256_load_ps(reinterpret_cast<const float*>(panel + c * 64) + half * 8);
        } else {
            const __m128i stored =
                _mm_load_si128(reinterpret_cast<const __m128i*>(panel + c * 32) + half);
            if constexpr (type == WeightType::f16) {
                return _mm256_cvtph_ps(stored);
            } else {
                return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
            }
        }
    }

    template <int tokens, int panels>
    static void multiply_columns(float* total, const std::uint8_t* panel, std::size_t panel_bytes,
                                 const float* const* rows, std::size_t begin, std::size_t end) {
        constexpr int halves = panels * 2;
        __m256 acc[tokens * halves];
        unrolled<tokens * halves>([&](auto i) __attribute__((always_inline)) {
            acc[i] = _mm256_setzero_ps();
        });
        for (std::size_t c = begin; c < end; ++c) {
            unrolled<halves>([&](auto j) __attribute__((always_inline)) {
                const __m256 weights = load_column(panel + j / 2 * panel_bytes, c, j % 2);
                unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                    constexpr int i = t * halves + j;
                    acc[i] = _mm256_fmadd_ps(weights, _mm256_set1_ps(rows[t][c]), acc[i]);
                });
            });
        }
        unrolled<tokens * halves>([&](auto i) __attribute__((always_inline)) {
            float* sum = total + i * 8;
            _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), acc[i]));
        });
    }
};

}  // namespace

void matmul(float* out, std::size_t out_stride, const PackedMatrix& w, const ActivationRows& x,
            std::size_t panel_begin, std::size_t panel_end) {
    matmul_with<Quantised, Floats>({out, out_stride}, w, x, panel_begin, panel_end);
}

void embed(float* out, const PackedMatrix& w, std::uint32_t row) { ref::embed(out, w, row); }

}  // namespace kvw::avx2
