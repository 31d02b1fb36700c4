#include "kernels/ref/matmul.h"

#include <cmath>
#include <cstring>

#include "kernels/half.h"
#include "kernels/packing.h"

namespace kvw::ref {

namespace {

std::uint16_t load_u16(const std::uint8_t* bytes) {
    std::uint16_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

float load_f32(const std::uint8_t* bytes) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// One block of one row in a panel (`lane` = row % 16).
struct BlockView {
    BlockLayout layout;
    const std::uint8_t* codes;
    const std::uint8_t* scales;
    std::size_t lane;

    // Scale `v`, or the minimum as the last of the block's scale vectors.
    float scale(std::size_t v) const {
        const std::uint8_t* vector = scales + v * layout.vector_bytes();
        return layout.half_scales ? float_from_half(load_u16(vector + lane * 2))
                                  : load_f32(vector + lane * 4);
    }
    float minimum() const { return scale(layout.scale_vectors() - 1); }

    // The integer weight of column c.
    std::int32_t weight(std::size_t c) const {
        const std::size_t column = layout.nibbles ? c % 16 : c;
        const std::uint8_t byte = codes[column / 4 * 64 + lane * 4 + column % 4];
        const std::int32_t code = layout.nibbles ? (c < 16 ? byte & 15 : byte >> 4) : byte;
        return code - layout.offset;
    }
};

BlockView block_view(const BlockLayout& layout, const std::uint8_t* panel, std::size_t lane,
                     std::size_t block, std::size_t blocks) {
    const std::size_t chunk = block / kChunkBlocks, within = block % kChunkBlocks;
    const std::size_t rest = blocks - chunk * kChunkBlocks;
    const std::uint8_t* begin = panel + chunk * layout.chunk_bytes(kChunkBlocks);
    return {layout,
            begin + layout.chunk_scale_bytes(rest < kChunkBlocks ? rest : kChunkBlocks) +
                within * layout.code_bytes(),
            begin + within * layout.scale_bytes(), lane};
}

// NUMERICS.md "Integer dots" and "Matmul order": one block of one row with one token.
float add_block(float acc, const BlockView& w, const std::int8_t* q, float scale,
                const std::int32_t* half_sum) {
    const std::size_t columns = kBlockColumns / static_cast<std::size_t>(w.layout.scales);
    for (std::size_t part = 0; part < kBlockColumns / columns; ++part) {
        std::int32_t dot = 0;
        for (std::size_t c = part * columns; c < (part + 1) * columns; ++c) {
            dot += w.weight(c) * q[c];
        }
        acc = std::fma(static_cast<float>(dot), w.scale(part) * scale, acc);
    }
    if (w.layout.has_minimum) {
        const float sum = static_cast<float>(half_sum[0] + half_sum[1]) * scale;
        acc = std::fma(w.minimum(), sum, acc);
    }
    return acc;
}

float quantised_dot(const PackedMatrix& w, std::size_t row, const QuantisedRows& x,
                    std::size_t token) {
    const BlockLayout layout = block_layout(w.type);
    const std::uint8_t* panel = w.data + row / kPanelRows * w.panel_bytes;
    const std::size_t blocks = w.cols / kBlockColumns;
    float total = 0;
    float acc = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t at = token * blocks + b;
        acc = add_block(acc, block_view(layout, panel, row % kPanelRows, b, blocks),
                        x.q + at * kBlockColumns, x.scale[at], x.half_sum + at * 2);
        if ((b + 1) % kChunkBlocks == 0 || b + 1 == blocks) {
            total = total + acc;
            acc = 0;
        }
    }
    return total;
}

float float_weight(const PackedMatrix& w, std::size_t row, std::size_t c) {
    const std::size_t size = w.type == WeightType::f32 ? 4 : 2;
    const std::uint8_t* place =
        w.data + row / kPanelRows * w.panel_bytes + (c * kPanelRows + row % kPanelRows) * size;
    if (w.type == WeightType::f32) {
        return load_f32(place);
    }
    return w.type == WeightType::f16 ? float_from_half(load_u16(place))
                                     : float_from_brain(load_u16(place));
}

float float_dot(const PackedMatrix& w, std::size_t row, const float* x) {
    float total = 0;
    float acc = 0;
    for (std::size_t c = 0; c < w.cols; ++c) {
        acc = std::fma(float_weight(w, row, c), x[c], acc);
        if ((c + 1) % kChunkColumns == 0 || c + 1 == w.cols) {
            total = total + acc;
            acc = 0;
        }
    }
    return total;
}

}  // namespace

void matmul(float* out, std::size_t out_stride, const PackedMatrix& w, const ActivationRows& x,
            std::size_t panel_begin, std::size_t panel_end) {
    const std::size_t last = panel_end * kPanelRows;
    const std::size_t row_end = last < w.rows ? last : w.rows;
    for (std::size_t token = 0; token < x.rows; ++token) {
        for (std::size_t row = panel_begin * kPanelRows; row < row_end; ++row) {
            out[token * out_stride + row] = is_quantised(w.type)
                                                ? quantised_dot(w, row, x.quantised, token)
                                                : float_dot(w, row, x.floats + token * x.cols);
        }
    }
}

void embed(float* out, const PackedMatrix& w, std::uint32_t row) {
    if (!is_quantised(w.type)) {
        for (std::size_t c = 0; c < w.cols; ++c) {
            out[c] = float_weight(w, row, c);
        }
        return;
    }
    const BlockLayout layout = block_layout(w.type);
    const std::uint8_t* panel = w.data + row / kPanelRows * w.panel_bytes;
    const std::size_t blocks = w.cols / kBlockColumns;
    for (std::size_t b = 0; b < blocks; ++b) {
        const BlockView block = block_view(layout, panel, row % kPanelRows, b, blocks);
        const float scales[] = {block.scale(0), block.scale(layout.scale_vectors() - 1)};
        for (std::size_t c = 0; c < kBlockColumns; ++c) {
            const float scale = scales[layout.scales == 2 ? c / 16 : 0];
            // Exact, so adding the minimum is the only rounding.
            const float product = static_cast<float>(block.weight(c)) * scale;
            out[b * kBlockColumns + c] = layout.has_minimum ? product + scales[1] : product;
        }
    }
}

}  // namespace kvw::ref
