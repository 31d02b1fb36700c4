// Where codes and scales lie inside a panel of packed weights: NUMERICS.md "Weights" gives the
// values, this header the bytes. Shared by the packer and the kernels; nobody else needs it.
//
// Block-quantised types. A panel is its chunks one after the other; a chunk is kChunkColumns
// columns, that is up to kChunkBlocks blocks of 32 (the last one may be shorter), and lies as
//
//     scales   [block][scale_vectors()][16 rows]   f16 or f32; padded to 64 bytes
//     codes    [block][lines][16 rows][4 columns]  64 bytes a line
//
// A block of bytes has 8 lines, line g holding columns 4g to 4g + 3. A block of nibbles has 4
// lines: line g holds the same columns in its low nibbles and columns 16 + 4g to 19 + 4g in its
// high ones. Float types: [column][16 rows].
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/weights.h"

namespace kvw {

inline constexpr std::size_t kPanelRows = 16;
inline constexpr std::size_t kBlockColumns = 32;
inline constexpr std::size_t kChunkColumns = 256;
inline constexpr std::size_t kChunkBlocks = kChunkColumns / kBlockColumns;

struct BlockLayout {
    bool nibbles;      // two codes per byte
    int code_max;      // codes are 0 .. code_max
    int offset;        // a weight is (code - offset) * scale, plus the minimum where there is one
    int scales;        // per row and block: 1, or 2 when each 16 columns have their own
    bool has_minimum;  // stored after the scale
    bool half_scales;  // scales and minima are f16, as in the source; else f32

    constexpr std::size_t code_bytes() const { return nibbles ? 256 : 512; }
    constexpr std::size_t scale_vectors() const {
        return static_cast<std::size_t>(scales) + (has_minimum ? 1 : 0);
    }
    constexpr std::size_t vector_bytes() const { return kPanelRows * (half_scales ? 2 : 4); }
    constexpr std::size_t scale_bytes() const { return scale_vectors() * vector_bytes(); }
    // Of a chunk of `blocks` blocks.
    constexpr std::size_t chunk_scale_bytes(std::size_t blocks) const {
        return (blocks * scale_bytes() + 63) / 64 * 64;
    }
    constexpr std::size_t chunk_bytes(std::size_t blocks) const {
        return chunk_scale_bytes(blocks) + blocks * code_bytes();
    }
    constexpr std::size_t panel_bytes(std::size_t blocks) const {
        const std::size_t rest = blocks % kChunkBlocks;
        return blocks / kChunkBlocks * chunk_bytes(kChunkBlocks) +
               (rest != 0 ? chunk_bytes(rest) : 0);
    }
};

// Meaningful for block-quantised types only.
constexpr BlockLayout block_layout(WeightType type) {
    switch (type) {
        case WeightType::q4_0:
            return {true, 15, 8, 1, false, true};
        case WeightType::q4_1:
            return {true, 15, 0, 1, true, true};
        case WeightType::q4_k:
            return {true, 15, 0, 1, true, false};
        case WeightType::q5_0:
            return {false, 31, 16, 1, false, true};
        case WeightType::q5_1:
            return {false, 31, 0, 1, true, true};
        case WeightType::q5_k:
            return {false, 31, 0, 1, true, false};
        case WeightType::q6_k:
            return {false, 63, 32, 2, false, false};
        default:
            return {false, 255,   128,
                    1,     false, true};  // q8_0: a signed byte with its top bit flipped
    }
}

}  // namespace kvw
