#include "kernels/avx512/matmul.h"

#include <immintrin.h>

#include <cstring>

#include "kernels/packing.h"
#include "kernels/ref/matmul.h"
#include "kernels/tiling.h"
#include "kernels/unrolled.h"

// One zmm holds one line: 16 rows x 4 columns. vpdpbusd multiplies its unsigned codes with the four
// activations of one token, broadcast, so that lane r gathers row r. Codes are read and unpacked
// once for a tile of up to 12 tokens: 12 integer and 12 float sums leave 8 registers for the rest.
namespace kvw::avx512 {

namespace {

[[gnu::always_inline]] inline __m512i broadcast_i32(const std::uint8_t* p) {
    std::int32_t value;
    std::memcpy(&value, p, 4);
    return _mm512_set1_epi32(value);
}

[[gnu::always_inline]] inline __m512 broadcast_f32(const std::uint8_t* p) {
    float value;
    std::memcpy(&value, p, 4);
    return _mm512_set1_ps(value);
}

template <WeightType weight_type>
struct Quantised {
    static constexpr WeightType type = weight_type;
    static constexpr int kTokensMax = 12;
    static constexpr BlockLayout layout = block_layout(type);
    static constexpr int kLines = static_cast<int>(layout.code_bytes() / 64);

    // Vector v of the scales of a block.
    [[gnu::always_inline]] static __m512 load_scales(const std::uint8_t* scales, std::size_t v) {
        const std::uint8_t* p = scales + v * layout.vector_bytes();
        if constexpr (layout.half_scales) {
            return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
        } else {
            return _mm512_load_ps(p);
        }
    }

    // Adds the dots of lines [line_begin, line_begin + lines) to dot[t].
    template <int tokens, int line_begin, int lines>
    [[gnu::always_inline]] static void add_lines(__m512i (&dot)[tokens], const std::uint8_t* codes,
                                                 const std::uint8_t* record) {
        const auto multiply = [&](__m512i weights, int column) __attribute__((always_inline)) {
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                dot[t] =
                    _mm512_dpbusd_epi32(dot[t], weights, broadcast_i32(record + t * 32 + column));
            });
        };
        unrolled<lines>([&](auto i) __attribute__((always_inline)) {
            constexpr int line = line_begin + i;
            const __m512i packed = _mm512_load_si512(codes + line * 64);
            if constexpr (layout.nibbles) {
                const __m512i low_bits = _mm512_set1_epi8(15);
                multiply(_mm512_and_si512(packed, low_bits), line * 4);
                multiply(_mm512_and_si512(_mm512_srli_epi16(packed, 4), low_bits), 16 + line * 4);
            } else {
                multiply(packed, line * 4);
            }
        });
    }

    template <int tokens>
    [[gnu::always_inline]] static void add_block(__m512 (&acc)[tokens], const std::uint8_t* codes,
                                                 const std::uint8_t* scales,
                                                 const std::uint8_t* record) {
        using Tile = TokenTile<layout, tokens>;
        unrolled<layout.scales>([&](auto s) __attribute__((always_inline)) {
            __m512i dot[tokens];
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                dot[t] = Tile::kStarts != 0
                             ? broadcast_i32(record + Tile::kStart + (s * tokens + t) * 4)
                             : _mm512_setzero_si512();
            });
            constexpr int lines = kLines / layout.scales;
            add_lines<tokens, s * lines, lines>(dot, codes, record);
            const __m512 weight_scale = load_scales(scales, s);
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                const __m512 scale =
                    _mm512_mul_ps(weight_scale, broadcast_f32(record + Tile::kScale + t * 4));
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), scale, acc[t]);
            });
        });
        if constexpr (layout.has_minimum) {
            const __m512 minimum = load_scales(scales, 1);
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                acc[t] =
                    _mm512_fmadd_ps(minimum, broadcast_f32(record + Tile::kSum + t * 4), acc[t]);
            });
        }
    }

    template <int tokens>
    static void multiply_panel(float* total, const std::uint8_t* panel, const std::uint8_t* record,
                               std::size_t blocks) {
        // Few tokens wait for memory, not for arithmetic: ask early for what the next panels hold.
        constexpr bool prefetch = tokens <= 4;
        constexpr std::size_t ahead = 4096;

        while (blocks != 0) {
            const std::size_t count = blocks < kChunkBlocks ? blocks : kChunkBlocks;
            const std::uint8_t* scales = panel;
            const std::uint8_t* codes = panel + layout.chunk_scale_bytes(count);
            __m512 acc[tokens];
            unrolled<tokens>([&](auto t)
                                 __attribute__((always_inline)) { acc[t] = _mm512_setzero_ps(); });
            for (std::size_t b = 0; b < count; ++b) {
                if constexpr (prefetch) {
                    unrolled<kLines>([&](auto i) __attribute__((always_inline)) {
                        _mm_prefetch(codes + ahead + i * 64, _MM_HINT_T0);
                    });
                    _mm_prefetch(scales + ahead, _MM_HINT_T0);
                }
                add_block<tokens>(acc, codes, scales, record);
                scales += layout.scale_bytes();
                codes += layout.code_bytes();
                record += TokenTile<layout, tokens>::kBytes;
            }
            unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                float* sum = total + t * kPanelRows;
                _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), acc[t]));
            });
            panel = codes;
            blocks -= count;
        }
    }
};

template <WeightType type>
struct Floats {
    static constexpr int kTokensMax = 12;
    static constexpr int kSums = 24;

    [[gnu::always_inline]] static __m512 load_column(const std::uint8_t* panel, std::size_t c) {
        if constexpr (type == WeightType::f32) {
            return _mm512_load_ps(panel + c * 64);
        } else {
            const __m256i stored =
                _mm256_load_si256(reinterpret_cast<const __m256i*>(panel + c * 32));
            if constexpr (type == WeightType::f16) {
                return _mm512_cvtph_ps(stored);
            } else {
                return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
            }
        }
    }

    template <int tokens, int panels>
    static void multiply_columns(float* total, const std::uint8_t* panel, std::size_t panel_bytes,
                                 const float* const* rows, std::size_t begin, std::size_t end) {
        __m512 acc[tokens * panels];
        unrolled<tokens * panels>([&](auto i) __attribute__((always_inline)) {
            acc[i] = _mm512_setzero_ps();
        });
        for (std::size_t c = begin; c < end; ++c) {
            unrolled<panels>([&](auto j) __attribute__((always_inline)) {
                const __m512 weights = load_column(panel + j * panel_bytes, c);
                unrolled<tokens>([&](auto t) __attribute__((always_inline)) {
                    constexpr int i = t * panels + j;
                    acc[i] = _mm512_fmadd_ps(weights, _mm512_set1_ps(rows[t][c]), acc[i]);
                });
            });
        }
        unrolled<tokens * panels>([&](auto i) __attribute__((always_inline)) {
            float* sum = total + i * kPanelRows;
            _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), acc[i]));
        });
    }
};

}  // namespace

void matmul(float* out, std::size_t out_stride, const PackedMatrix& w, const ActivationRows& x,
            std::size_t panel_begin, std::size_t panel_end) {
    matmul_with<Quantised, Floats>({out, out_stride}, w, x, panel_begin, panel_end);
}

void embed(float* out, const PackedMatrix& w, std::uint32_t row) { ref::embed(out, w, row); }

}  // namespace kvw::avx512
