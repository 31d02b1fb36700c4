// The tensor types a GGUF file may name, and how many bytes they take; the ones we can run are
// kernels/weights.h's business. Source: ggml.h (numbers) and ggml-common.h (block layouts).
#pragma once

#include <cstdint>
#include <string_view>

namespace kvw {

struct TensorType {
    std::uint32_t number;        // as in the file
    std::string_view name;       // "Q4_1"
    std::uint32_t block_values;  // consecutive values of a row that are stored together
    std::uint32_t block_bytes;
};

// Null for a number that no version of ggml gives a size to.
const TensorType* tensor_type(std::uint32_t number);

}  // namespace kvw
