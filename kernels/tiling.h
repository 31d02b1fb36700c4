// How a matmul is cut into tiles: the same for every instruction set, which brings only the kernel
// of one panel and one tile of tokens. Nothing here can change a bit of a result: a token's sums
// never meet another token's.
//
// Everything is a template over a type that its .cpp keeps to itself, or always inlined, so that no
// code made for one instruction set is linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"
#include "kernels/packing.h"

namespace kvw {

// What a panel meets of one block of a tile of `tokens` tokens, gathered once per tile:
//     at 0       int8 [tokens][32]        activation codes
//     at kScale  f32 [tokens]             their scales
//     at kStart  int32 [kStarts][tokens]  -offset * sum of the codes each weight scale covers:
//     where the
//                                         sum of unsigned weight codes must start to be that of
//                                         weights
//     at kSum    f32 [tokens]             sum of codes * scale, for weights with a minimum
template <BlockLayout layout, int tokens>
struct TokenTile {
    static constexpr int kScale = tokens * 32;
    static constexpr int kStart = kScale + tokens * 4;
    static constexpr int kStarts = layout.offset != 0 ? layout.scales : 0;
    static constexpr int kSum = kStart + kStarts * tokens * 4;
    static constexpr int kBytes = kSum + (layout.has_minimum ? tokens * 4 : 0);
    // Whole chunks, together less than an L1 cache; longer rows are taken in slabs.
    static constexpr std::size_t kSlabBlocks = 32768 / kBytes / kChunkBlocks * kChunkBlocks;

    alignas(64) std::uint8_t records[kSlabBlocks * kBytes];

    // Tokens [token, token + count), blocks [first, first + blocks). Places without a token repeat
    // the last one; nobody stores what comes of them.
    [[gnu::always_inline]] void gather(const QuantisedRows& x, std::size_t token, std::size_t count,
                                       std::size_t first, std::size_t blocks) {
        const std::size_t row_blocks = x.cols / kBlockColumns;
        for (std::size_t t = 0; t < tokens; ++t) {
            const std::size_t from = (token + (t < count ? t : count - 1)) * row_blocks + first;
            std::uint8_t* record = records;
            for (std::size_t b = from; b < from + blocks; ++b, record += kBytes) {
                std::memcpy(record + t * 32, x.q + b * kBlockColumns, 32);
                std::memcpy(record + kScale + t * 4, x.scale + b, 4);
                const std::int32_t halves[] = {x.half_sum[b * 2], x.half_sum[b * 2 + 1]};
                for (std::size_t s = 0; s < kStarts; ++s) {
                    const std::int32_t sum = kStarts == 1 ? halves[0] + halves[1] : halves[s];
                    const std::int32_t start = -layout.offset * sum;
                    std::memcpy(record + kStart + (s * tokens + t) * 4, &start, 4);
                }
                if constexpr (layout.has_minimum) {
                    const float sum = static_cast<float>(halves[0] + halves[1]) * x.scale[b];
                    std::memcpy(record + kSum + t * 4, &sum, 4);
                }
            }
        }
    }
};

// Calls f(integral_constant<int, T>) with the least tile of {1, 2, 4, 6, 8, 12} that holds `count`
// tokens, which is at most `largest`.
template <int largest, class F>
[[gnu::always_inline]] inline void with_tile(std::size_t count, const F& f) {
    if (count == 1) {
        f(std::integral_constant<int, 1>{});
    } else if (count == 2) {
        f(std::integral_constant<int, 2>{});
    } else if (count <= 4) {
        f(std::integral_constant<int, 4>{});
    } else if constexpr (largest > 4) {
        if (count <= 6) {
            f(std::integral_constant<int, 6>{});
        } else if constexpr (largest > 6) {
            if (count <= 8) {
                f(std::integral_constant<int, 8>{});
            } else {
                f(std::integral_constant<int, 12>{});
            }
        }
    }
}

// The rows of panel p that exist.
[[gnu::always_inline]] inline std::size_t panel_rows(const PackedMatrix& w, std::size_t p) {
    const std::size_t rows = w.rows - p * kPanelRows;
    return rows < kPanelRows ? rows : kPanelRows;
}

[[gnu::always_inline]] inline void copy_rows(float* to, const float* from, std::size_t rows) {
    if (rows == kPanelRows) {
        std::memcpy(to, from, kPanelRows * sizeof(float));
    } else {
        std::memcpy(to, from, rows * sizeof(float));
    }
}

// Where the result of a matmul goes: out[token * stride + row].
struct MatmulOut {
    float* base;
    std::size_t stride;
};

// Tokens [token, token + count) with panels [panel_begin, panel_end) of block-quantised weights.
// Kernel:
//     type, kTokensMax     the WeightType; the largest tile of tokens that the registers hold
//     multiply_panel<tokens>(total, panel, records, blocks)
//         total [tokens][16] += the chunk sums, in order, of `blocks` blocks from a chunk's start
//         on
template <class Kernel, int tokens>
void multiply_tile(const MatmulOut& out, const PackedMatrix& w, const QuantisedRows& x,
                   std::size_t token, std::size_t count, std::size_t panel_begin,
                   std::size_t panel_end) {
    constexpr BlockLayout layout = block_layout(Kernel::type);
    TokenTile<layout, tokens> tile;
    const std::size_t blocks = w.cols / kBlockColumns;
    for (std::size_t first = 0; first < blocks; first += tile.kSlabBlocks) {
        const std::size_t left = blocks - first;
        const std::size_t slab = left < tile.kSlabBlocks ? left : tile.kSlabBlocks;
        tile.gather(x, token, count, first, slab);
        for (std::size_t p = panel_begin; p < panel_end; ++p) {
            alignas(64) float total[tokens * kPanelRows] = {};
            float* place = out.base + token * out.stride + p * kPanelRows;
            const std::size_t rows = panel_rows(w, p);
            for (std::size_t t = 0; first != 0 && t < count; ++t) {
                copy_rows(total + t * kPanelRows, place + t * out.stride, rows);
            }
            const std::uint8_t* panel = w.data + p * w.panel_bytes +
                                        first / kChunkBlocks * layout.chunk_bytes(kChunkBlocks);
            Kernel::template multiply_panel<tokens>(total, panel, tile.records, slab);
            for (std::size_t t = 0; t < count; ++t) {
                copy_rows(place + t * out.stride, total + t * kPanelRows, rows);
            }
        }
    }
}

// Cuts `rows` tokens and a range of panels into tiles: f(tokens, token, count, begin, end) works on
// `count` tokens from `token` on, at most the constant `tokens`, and panels [begin, end).
template <int largest, class F>
[[gnu::always_inline]] inline void for_each_tile(std::size_t rows, std::size_t panel_begin,
                                                 std::size_t panel_end, std::size_t panel_bytes,
                                                 const F& f) {
    // Panels that stay in the L2 cache while all tiles of tokens pass over them.
    constexpr std::size_t group_bytes = 768 * 1024;
    const std::size_t fitting = group_bytes / panel_bytes;
    const std::size_t group = fitting < 8 ? 8 : fitting;
    for (std::size_t begin = panel_begin; begin < panel_end; begin += group) {
        const std::size_t end = panel_end - begin < group ? panel_end : begin + group;
        for (std::size_t token = 0; token < rows; token += largest) {
            const std::size_t left = rows - token;
            const std::size_t count = left < largest ? left : largest;
            with_tile<largest>(count, [&](auto tokens) { f(tokens, token, count, begin, end); });
        }
    }
}

template <class Kernel>
void multiply_quantised(const MatmulOut& out, const PackedMatrix& w, const QuantisedRows& x,
                        std::size_t rows, std::size_t panel_begin, std::size_t panel_end) {
    for_each_tile<Kernel::kTokensMax>(
        rows, panel_begin, panel_end, w.panel_bytes,
        [&](auto tokens, std::size_t token, std::size_t count, std::size_t begin, std::size_t end) {
            multiply_tile<Kernel, tokens>(out, w, x, token, count, begin, end);
        });
}

// The same for float weights; `panels` side by side give enough independent chains to hide the
// latency of an fma. Kernel:
//     kTokensMax, kSums    as above; how many sums of 16 rows the registers hold
//     multiply_columns<tokens, panels>(total, panel, panel_bytes, rows, begin, end)
//         total [tokens][panels][16] += the sum of columns [begin, end), one chunk
template <class Kernel, int tokens, int panels>
void multiply_float_panels(const MatmulOut& out, const PackedMatrix& w, const float* x,
                           std::size_t token, std::size_t count, std::size_t p) {
    const float* rows[tokens];
    for (std::size_t t = 0; t < tokens; ++t) {
        rows[t] = x + (token + (t < count ? t : count - 1)) * w.cols;
    }
    alignas(64) float total[tokens * panels * kPanelRows] = {};
    for (std::size_t begin = 0; begin < w.cols; begin += kChunkColumns) {
        const std::size_t end = w.cols - begin < kChunkColumns ? w.cols : begin + kChunkColumns;
        Kernel::template multiply_columns<tokens, panels>(total, w.data + p * w.panel_bytes,
                                                          w.panel_bytes, rows, begin, end);
    }
    for (std::size_t t = 0; t < count; ++t) {
        for (std::size_t j = 0; j < panels; ++j) {
            copy_rows(out.base + (token + t) * out.stride + (p + j) * kPanelRows,
                      total + (t * panels + j) * kPanelRows, panel_rows(w, p + j));
        }
    }
}

template <class Kernel>
void multiply_floats(const MatmulOut& out, const PackedMatrix& w, const float* x, std::size_t rows,
                     std::size_t panel_begin, std::size_t panel_end) {
    for_each_tile<Kernel::kTokensMax>(
        rows, panel_begin, panel_end, w.panel_bytes,
        [&](auto tokens, std::size_t token, std::size_t count, std::size_t begin, std::size_t end) {
            constexpr int fitting = Kernel::kSums / tokens;
            constexpr int panels = fitting < 4 ? fitting : 4;
            std::size_t p = begin;
            for (; p + panels <= end; p += panels) {
                multiply_float_panels<Kernel, tokens, panels>(out, w, x, token, count, p);
            }
            for (; p < end; ++p) {
                multiply_float_panels<Kernel, tokens, 1>(out, w, x, token, count, p);
            }
        });
}

// The matmul of kernels.h. Quantised<type> and Floats<type> are the kernels described above.
template <template <WeightType> class Quantised, template <WeightType> class Floats>
void matmul_with(const MatmulOut& out, const PackedMatrix& w, const ActivationRows& x,
                 std::size_t panel_begin, std::size_t panel_end) {
    const auto quantised = [&]<WeightType type>(std::integral_constant<WeightType, type>) {
        multiply_quantised<Quantised<type>>(out, w, x.quantised, x.rows, panel_begin, panel_end);
    };
    const auto floats = [&]<WeightType type>(std::integral_constant<WeightType, type>) {
        multiply_floats<Floats<type>>(out, w, x.floats, x.rows, panel_begin, panel_end);
    };
    using enum WeightType;
    switch (w.type) {
        case f32:
            return floats(std::integral_constant<WeightType, f32>{});
        case f16:
            return floats(std::integral_constant<WeightType, f16>{});
        case bf16:
            return floats(std::integral_constant<WeightType, bf16>{});
        case q4_0:
            return quantised(std::integral_constant<WeightType, q4_0>{});
        case q4_1:
            return quantised(std::integral_constant<WeightType, q4_1>{});
        case q5_0:
            return quantised(std::integral_constant<WeightType, q5_0>{});
        case q5_1:
            return quantised(std::integral_constant<WeightType, q5_1>{});
        case q8_0:
            return quantised(std::integral_constant<WeightType, q8_0>{});
        case q4_k:
            return quantised(std::integral_constant<WeightType, q4_k>{});
        case q5_k:
            return quantised(std::integral_constant<WeightType, q5_k>{});
        case q6_k:
            return quantised(std::integral_constant<WeightType, q6_k>{});
    }
}

}  // namespace kvw
