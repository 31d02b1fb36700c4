#include "kernels/weights.h"

#include <array>
#include <cstring>
#include <string>

#include "kernels/half.h"
#include "kernels/packing.h"
#include "src/base/check.h"

namespace kvw {

namespace {

struct TypeFacts {
    WeightType type;
    const char* name;
    std::size_t columns;
    std::size_t bytes;
};

constexpr TypeFacts kTypes[] = {
    {WeightType::f32, "F32", 1, 4},       {WeightType::f16, "F16", 1, 2},
    {WeightType::bf16, "BF16", 1, 2},     {WeightType::q4_0, "Q4_0", 32, 18},
    {WeightType::q4_1, "Q4_1", 32, 20},   {WeightType::q5_0, "Q5_0", 32, 22},
    {WeightType::q5_1, "Q5_1", 32, 24},   {WeightType::q8_0, "Q8_0", 32, 34},
    {WeightType::q4_k, "Q4_K", 256, 144}, {WeightType::q5_k, "Q5_K", 256, 176},
    {WeightType::q6_k, "Q6_K", 256, 210},
};

// Names of the GGUF types that are not accepted, so that a refusal can name them.
constexpr struct {
    std::uint32_t number;
    const char* name;
} kOtherTypes[] = {
    {9, "Q8_1"},     {10, "Q2_K"},  {11, "Q3_K"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"},
    {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"},
    {24, "I8"},      {25, "I16"},   {26, "I32"},    {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},
    {34, "TQ1_0"},   {35, "TQ2_0"}, {39, "MXFP4"},
};

const TypeFacts* find_type(std::uint32_t gguf_type) {
    for (const TypeFacts& facts : kTypes) {
        if (static_cast<std::uint32_t>(facts.type) == gguf_type) {
            return &facts;
        }
    }
    return nullptr;
}

const TypeFacts& facts_of(WeightType type) {
    const TypeFacts* facts = find_type(static_cast<std::uint32_t>(type));
    check(facts != nullptr, "a weight type in use is one of the accepted ones");
    return *facts;
}

std::uint16_t load_u16(const std::uint8_t* bytes) {
    return static_cast<std::uint16_t>(bytes[0] | (bytes[1] << 8));
}

float load_half(const std::uint8_t* bytes) { return float_from_half(load_u16(bytes)); }

float load_float(WeightType type, const std::uint8_t* bytes) {
    if (type == WeightType::f16) {
        return load_half(bytes);
    }
    if (type == WeightType::bf16) {
        return float_from_brain(load_u16(bytes));
    }
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

// 32 columns of one row, whatever the source: codes from 0 up (BlockLayout::offset says where zero
// lies), then the scale, and the second scale or the minimum where the type has one.
struct Block {
    std::array<std::uint8_t, kBlockColumns> codes;
    std::array<float, 2> scales;
};

// Scale and minimum `index` (0 .. 7) of a Q4_K or Q5_K block: 6 bits each, in 12 bytes.
struct SixBits {
    std::uint32_t scale, minimum;
};
SixBits six_bits(const std::uint8_t* packed, std::size_t index) {
    if (index < 4) {
        return {packed[index] & 63u, packed[index + 4] & 63u};
    }
    const std::uint32_t low = packed[index + 4];
    const std::uint32_t scale_top = packed[index - 4] >> 6, minimum_top = packed[index] >> 6;
    return {(low & 15u) | (scale_top << 4), (low >> 4) | (minimum_top << 4)};
}

// Q4_0, Q4_1, Q5_0, Q5_1: column c < 16 is the low nibble of byte c, column 16 + c its high one;
// the fifth bits, if any, are a 32-bit word, bit c for column c.
void read_nibble_codes(Block& block, const std::uint8_t* nibbles, std::uint32_t fifth_bits) {
    for (std::size_t c = 0; c < 16; ++c) {
        const std::uint32_t low_top = (fifth_bits >> c) & 1,
                            high_top = (fifth_bits >> (c + 16)) & 1;
        block.codes[c] = static_cast<std::uint8_t>((nibbles[c] & 15) | (low_top << 4));
        block.codes[c + 16] = static_cast<std::uint8_t>((nibbles[c] >> 4) | (high_top << 4));
    }
}

std::uint32_t load_u32(const std::uint8_t* bytes) {
    return std::uint32_t{load_u16(bytes)} | (std::uint32_t{load_u16(bytes + 2)} << 16);
}

// Block `index` of 32 columns of a source row.
Block read_block(WeightType type, const std::uint8_t* row, std::size_t index) {
    const TypeFacts& facts = facts_of(type);
    const std::size_t parts = facts.columns / kBlockColumns;
    const std::uint8_t* source = row + index / parts * facts.bytes;
    const std::size_t part = index % parts;
    Block block{};
    switch (type) {
        case WeightType::q4_0:
            block.scales[0] = load_half(source);
            read_nibble_codes(block, source + 2, 0);
            break;
        case WeightType::q4_1:
            block.scales = {load_half(source), load_half(source + 2)};
            read_nibble_codes(block, source + 4, 0);
            break;
        case WeightType::q5_0:
            block.scales[0] = load_half(source);
            read_nibble_codes(block, source + 6, load_u32(source + 2));
            break;
        case WeightType::q5_1:
            block.scales = {load_half(source), load_half(source + 2)};
            read_nibble_codes(block, source + 8, load_u32(source + 4));
            break;
        case WeightType::q8_0:
            block.scales[0] = load_half(source);
            for (std::size_t c = 0; c < kBlockColumns; ++c) {
                block.codes[c] = source[2 + c] ^ 0x80;
            }
            break;
        case WeightType::q4_k:
        case WeightType::q5_k: {
            const SixBits bits = six_bits(source + 4, part);
            block.scales = {load_half(source) * static_cast<float>(bits.scale),
                            -(load_half(source + 2) * static_cast<float>(bits.minimum))};
            const bool five = type == WeightType::q5_k;
            const std::uint8_t* fifth = source + 16;
            const std::uint8_t* nibbles = source + (five ? 48 : 16) + part / 2 * 32;
            for (std::size_t c = 0; c < kBlockColumns; ++c) {
                const int low = (nibbles[c] >> (part % 2 * 4)) & 15;
                const int top = five ? (fifth[c] >> part) & 1 : 0;
                block.codes[c] = static_cast<std::uint8_t>(low | (top << 4));
            }
            break;
        }
        case WeightType::q6_k: {
            const std::size_t half = part / 4, quarter = part % 4;
            const std::uint8_t* low = source + half * 64 + quarter % 2 * 32;
            const std::uint8_t* high = source + 128 + half * 32;
            const std::uint8_t* scales = source + 192 + part * 2;
            const float d = load_half(source + 208);
            for (std::size_t i = 0; i < 2; ++i) {
                block.scales[i] = d * static_cast<float>(static_cast<std::int8_t>(scales[i]));
            }
            for (std::size_t c = 0; c < kBlockColumns; ++c) {
                const int four = (low[c] >> (quarter / 2 * 4)) & 15;
                const int two = (high[c] >> (quarter * 2)) & 3;
                block.codes[c] = static_cast<std::uint8_t>(four | (two << 4));
            }
            break;
        }
        default:
            check(false, "only block-quantised types have blocks");
    }
    return block;
}

void store_float(std::uint8_t* bytes, float value) { std::memcpy(bytes, &value, sizeof value); }

// Row `lane` of a panel of block-quantised weights.
void pack_quantised_row(WeightType type, std::size_t cols, const std::uint8_t* row,
                        std::size_t lane, std::uint8_t* panel) {
    const BlockLayout layout = block_layout(type);
    const std::size_t blocks = cols / kBlockColumns;
    for (std::size_t index = 0; index < blocks; ++index) {
        const std::size_t chunk = index / kChunkBlocks, within = index % kChunkBlocks;
        const std::size_t rest = blocks - chunk * kChunkBlocks;
        const std::size_t in_chunk = rest < kChunkBlocks ? rest : kChunkBlocks;
        std::uint8_t* chunk_begin = panel + chunk * layout.chunk_bytes(kChunkBlocks);
        std::uint8_t* scales = chunk_begin + within * layout.scale_bytes();
        std::uint8_t* codes =
            chunk_begin + layout.chunk_scale_bytes(in_chunk) + within * layout.code_bytes();

        const Block block = read_block(type, row, index);
        for (std::size_t v = 0; v < layout.scale_vectors(); ++v) {
            std::uint8_t* place = scales + v * layout.vector_bytes();
            if (layout.half_scales) {
                // Types with f16 scales begin every block with them: copied, not converted.
                std::memcpy(place + lane * 2, row + index * block_bytes(type) + v * 2, 2);
            } else {
                store_float(place + lane * 4, block.scales[v]);
            }
        }
        const std::size_t lines = layout.code_bytes() / 64;
        for (std::size_t line = 0; line < lines; ++line) {
            for (std::size_t c = 0; c < 4; ++c) {
                const std::uint8_t low = block.codes[line * 4 + c];
                const std::uint8_t high = layout.nibbles ? block.codes[16 + line * 4 + c] : 0;
                codes[line * 64 + lane * 4 + c] = static_cast<std::uint8_t>(low | (high << 4));
            }
        }
    }
}

}  // namespace

const char* weight_type_name(std::uint32_t gguf_type) {
    if (const TypeFacts* facts = find_type(gguf_type)) {
        return facts->name;
    }
    for (const auto& other : kOtherTypes) {
        if (other.number == gguf_type) {
            return other.name;
        }
    }
    thread_local std::string unknown;
    unknown = "type " + std::to_string(gguf_type);
    return unknown.c_str();
}

bool weight_type_supported(std::uint32_t gguf_type) { return find_type(gguf_type) != nullptr; }

std::size_t block_columns(WeightType type) { return facts_of(type).columns; }
std::size_t block_bytes(WeightType type) { return facts_of(type).bytes; }

PackedMatrix packed_shape(WeightType type, std::uint32_t rows, std::uint32_t cols) {
    check(cols % block_columns(type) == 0, "the columns of a packed matrix divide into its blocks");
    PackedMatrix matrix;
    matrix.type = type;
    matrix.rows = rows;
    matrix.cols = cols;
    if (is_quantised(type)) {
        const BlockLayout layout = block_layout(type);
        matrix.form = layout.nibbles ? WeightForm::nibbles : WeightForm::bytes;
        matrix.panel_bytes = layout.panel_bytes(cols / kBlockColumns);
    } else {
        matrix.form = type == WeightType::f32   ? WeightForm::floats
                      : type == WeightType::f16 ? WeightForm::halves
                                                : WeightForm::brains;
        // A panel of 2-byte weights with an odd number of columns ends in half a line.
        matrix.panel_bytes = (kPanelRows * cols * block_bytes(type) + 63) / 64 * 64;
    }
    return matrix;
}

void pack_panels(const PackedMatrix& matrix, std::span<const std::uint8_t> source,
                 std::uint8_t* data, std::size_t panel_begin, std::size_t panel_end) {
    const std::size_t unit = block_bytes(matrix.type);
    const std::size_t row_bytes = matrix.cols / block_columns(matrix.type) * unit;
    check(source.size() == row_bytes * matrix.rows, "the source has exactly the matrix's rows");
    check(panel_end <= matrix.panels(), "only panels of the matrix are packed");
    for (std::size_t p = panel_begin; p < panel_end; ++p) {
        std::uint8_t* panel = data + p * matrix.panel_bytes;
        std::memset(panel, 0, matrix.panel_bytes);
        for (std::size_t lane = 0; lane < kPanelRows && p * kPanelRows + lane < matrix.rows;
             ++lane) {
            const std::uint8_t* row = source.data() + (p * kPanelRows + lane) * row_bytes;
            if (is_quantised(matrix.type)) {
                pack_quantised_row(matrix.type, matrix.cols, row, lane, panel);
                continue;
            }
            for (std::size_t c = 0; c < matrix.cols; ++c) {
                std::memcpy(panel + (c * kPanelRows + lane) * unit, row + c * unit, unit);
            }
        }
    }
}

void dequantise_row(WeightType type, const std::uint8_t* source_row, std::size_t cols, float* out) {
    check(cols % block_columns(type) == 0, "the columns of a row divide into its blocks");
    if (!is_quantised(type)) {
        for (std::size_t c = 0; c < cols; ++c) {
            out[c] = load_float(type, source_row + c * block_bytes(type));
        }
        return;
    }
    const BlockLayout layout = block_layout(type);
    for (std::size_t index = 0; index < cols / kBlockColumns; ++index) {
        const Block block = read_block(type, source_row, index);
        for (std::size_t c = 0; c < kBlockColumns; ++c) {
            const float scale = block.scales[layout.scales == 2 ? c / 16 : 0];
            // The product is exact for every type, so this rounds once, as a fused operation would.
            const float product = static_cast<float>(block.codes[c] - layout.offset) * scale;
            out[index * kBlockColumns + c] =
                layout.has_minimum ? product + block.scales[1] : product;
        }
    }
}

}  // namespace kvw
