#pragma once

#include "kernels/append_walk.h"

namespace kvw::wide {

template <class Lanes, class Access>
void append(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
            std::uint32_t kv_head, const float* k, const float* v) {
    const TileShape& shape = memory.shape;
    const std::size_t head_dim = shape.head_dim;
    const std::size_t stride = shape.heads * head_dim;  // from one row of the batch to the next
    append_walk<Access>(
        memory, sequence, layer, kv_head,
        [&](std::uint8_t* tile, std::uint32_t row, std::uint32_t rows, std::size_t source) {
            std::uint16_t* keys = tile_keys(tile) + row;
            std::uint16_t* values = tile_values(tile, shape) + row * head_dim;
            for (std::uint32_t r = 0; r < rows; ++r) {
                for (std::size_t d = 0; d < head_dim; d += 16) {
                    Lanes::store_halves(values + r * head_dim + d,
                                        Lanes::load(v + source + r * stride + d));
                    std::uint16_t column[16];
                    Lanes::store_halves(column, Lanes::load(k + source + r * stride + d));
                    for (std::size_t i = 0; i < 16; ++i) {
                        keys[(d + i) * kPageTokens + r] = column[i];
                    }
                }
            }
        });
}

}  // namespace kvw::wide
