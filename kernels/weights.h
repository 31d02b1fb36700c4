// Weights as kernels read them: repacked at load, one layout for every machine.
//
// Rows (outputs) are grouped in panels of 16. Within a panel, a block is 32 columns; the codes of a
// block lie as lines of 16 rows x 4 columns (64 bytes: one AVX-512 register, four columns of K for a
// dp4a), so that a row's 4 bytes meet 4 activations. Rows are padded with zeros to a multiple of 16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvw {

// GGUF tensor types that are accepted, by their GGUF number (ggml.h, enum ggml_type).
enum class WeightType : std::uint32_t {
    f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8,
    q4_k = 12, q5_k = 13, q6_k = 14, bf16 = 30,
};

// "Q4_1"; for numbers that are not accepted too ("type 17"), so that a refusal can name them.
const char* weight_type_name(std::uint32_t gguf_type);
bool weight_type_supported(std::uint32_t gguf_type);
// Columns per block (1, 32 or 256) and bytes per block, as stored in a GGUF file.
std::size_t block_columns(WeightType type);
std::size_t block_bytes(WeightType type);
inline bool is_quantised(WeightType type) { return block_columns(type) > 1; }

// How the codes of a packed matrix are stored. Which source type uses which form is the packer's choice; the
// value of every weight, and so every bit of every result, is that of NUMERICS.md "Weights".
enum class WeightForm : std::uint8_t { nibbles, bytes, halves, brains, floats };

// A packed matrix [rows, cols]: out = W x. Borrowed memory, 64-byte aligned.
struct PackedMatrix {
    WeightType type = WeightType::f32;
    WeightForm form = WeightForm::floats;
    std::uint32_t rows = 0;
    std::uint32_t cols = 0;             // multiple of block_columns(type)
    std::size_t panel_bytes = 0;        // codes and scales of one panel, contiguous
    const std::uint8_t* data = nullptr; // [panels][panel_bytes]

    std::uint32_t panels() const { return (rows + 15) / 16; }
    std::size_t bytes() const { return panel_bytes * panels(); }
};

// The shape of a packed matrix before it has memory (data == nullptr). cols must divide into blocks.
PackedMatrix packed_shape(WeightType type, std::uint32_t rows, std::uint32_t cols);

// Packs panels [panel_begin, panel_end) of `source` (GGUF bytes, [rows][cols] row-major blocks) into
// `data` (matrix.bytes() long). Ranges may run on different threads.
void pack_panels(const PackedMatrix& matrix, std::span<const std::uint8_t> source,
                 std::uint8_t* data, std::size_t panel_begin, std::size_t panel_end);

// Weights of one source row as floats, for embeddings and tests: NUMERICS.md "Weights".
void dequantise_row(WeightType type, const std::uint8_t* source_row, std::size_t cols, float* out);

}  // namespace kvw
