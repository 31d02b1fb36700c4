// Weights and activations for tests: seeded, of every type, with the values that go wrong mixed in.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/weights.h"

namespace kvw {

inline constexpr WeightType kAllWeightTypes[] = {
    WeightType::f32,  WeightType::f16,  WeightType::bf16, WeightType::q4_0,
    WeightType::q4_1, WeightType::q5_0, WeightType::q5_1, WeightType::q8_0,
    WeightType::q4_k, WeightType::q5_k, WeightType::q6_k,
};

inline const char* name_of(WeightType type) {
    return weight_type_name(static_cast<std::uint32_t>(type));
}

// The variants this processor can run, ref first.
inline std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
    for (Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        if (const Kernels* kernels = kernels_for(isa)) {
            found.push_back(kernels);
        }
    }
    return found;
}

// A half of modest size, now and then zero, subnormal or negative.
inline std::uint16_t random_half(std::mt19937& random) {
    const std::uint32_t draw = random();
    const auto sign = static_cast<std::uint16_t>((draw >> 16) & 0x8000);
    switch (draw % 16) {
        case 0:
            return sign;
        case 1:
            return static_cast<std::uint16_t>(sign | (draw >> 8 & 0x3ff));
        default:
            return static_cast<std::uint16_t>(sign | (0x1400 + (draw >> 4) % 0x1800));
    }
}

// [rows][cols] in the form a GGUF file has it.
inline std::vector<std::uint8_t> random_weights(WeightType type, std::size_t rows, std::size_t cols,
                                                std::uint32_t seed) {
    std::mt19937 random(seed);
    const std::size_t unit = block_bytes(type);
    std::vector<std::uint8_t> bytes(rows * (cols / block_columns(type)) * unit);
    for (std::uint8_t& byte : bytes) {
        byte = static_cast<std::uint8_t>(random() >> 13);
    }
    for (std::size_t at = 0; at < bytes.size(); at += unit) {
        const auto put_half = [&](std::size_t offset) {
            const std::uint16_t half = random_half(random);
            std::memcpy(&bytes[at + offset], &half, 2);
        };
        switch (type) {
            case WeightType::f32: {
                const float value =
                    static_cast<float>(static_cast<int>(random() % 20001) - 10000) / 8192;
                std::memcpy(&bytes[at], &value, 4);
                break;
            }
            case WeightType::bf16: {
                const auto brain = static_cast<std::uint16_t>((random() & 0x80ff) | 0x3e00);
                std::memcpy(&bytes[at], &brain, 2);
                break;
            }
            case WeightType::q6_k:
                put_half(208);
                break;
            case WeightType::q4_1:
            case WeightType::q5_1:
            case WeightType::q4_k:
            case WeightType::q5_k:
                put_half(2);
                [[fallthrough]];
            default:
                put_half(0);
        }
    }
    return bytes;
}

struct FreeAligned {
    void operator()(std::uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
};

// A packed matrix with the memory it borrows and the bytes it came from.
struct PackedSample {
    std::vector<std::uint8_t> source;
    std::unique_ptr<std::uint8_t[], FreeAligned> memory;
    PackedMatrix matrix;

    // Row r as floats.
    std::vector<float> row(std::size_t r) const {
        std::vector<float> floats(matrix.cols);
        dequantise_row(matrix.type, source.data() + r * (source.size() / matrix.rows), matrix.cols,
                       floats.data());
        return floats;
    }
};

inline PackedSample pack(WeightType type, std::uint32_t rows, std::uint32_t cols,
                         std::vector<std::uint8_t> source) {
    PackedSample sample{std::move(source), nullptr, packed_shape(type, rows, cols)};
    sample.memory.reset(new (std::align_val_t{64}) std::uint8_t[sample.matrix.bytes()]);
    pack_panels(sample.matrix, sample.source, sample.memory.get(), 0, sample.matrix.panels());
    sample.matrix.data = sample.memory.get();
    return sample;
}

inline PackedSample random_matrix(WeightType type, std::uint32_t rows, std::uint32_t cols,
                                  std::uint32_t seed) {
    return pack(type, rows, cols, random_weights(type, rows, cols, seed));
}

// Activations of `rows` tokens, quantised by the given kernels.
struct Activations {
    std::size_t rows, cols;
    std::vector<float> floats;
    std::vector<std::int8_t> q;
    std::vector<float> scale;
    std::vector<std::int32_t> half_sum;

    Activations(std::size_t rows_, std::size_t cols_)
        : rows(rows_),
          cols(cols_),
          floats(rows * cols),
          q(rows * cols),
          scale(rows * (cols / 32)),
          half_sum(rows * (cols / 16)) {}

    QuantisedRows quantised() { return {q.data(), scale.data(), half_sum.data(), cols}; }
    void quantise(const Kernels& kernels) { kernels.quantise(quantised(), floats.data(), 0, rows); }
    // Tokens [first, first + count).
    ActivationRows view(std::size_t first, std::size_t count) {
        return {floats.data() + first * cols,
                {q.data() + first * cols, scale.data() + first * (cols / 32),
                 half_sum.data() + first * (cols / 16), cols},
                count,
                cols};
    }
};

// Values over many magnitudes; now and then a block of zeros, of subnormals or of one large value.
inline Activations random_activations(std::size_t rows, std::size_t cols, std::uint32_t seed) {
    Activations x(rows, cols);
    std::mt19937 random(seed);
    for (std::size_t block = 0; block < x.floats.size(); block += 32) {
        const std::uint32_t kind = random() % 24;
        const float size = std::ldexp(1.0f, static_cast<int>(random() % 12) - 8);
        for (std::size_t c = block; c < block + 32 && c < x.floats.size(); ++c) {
            const float value =
                static_cast<float>(static_cast<int>(random() % 65537) - 32768) / 32768;
            x.floats[c] = kind == 0 ? 0.0f : kind == 1 ? value * 0x1p-130f : value * size;
        }
        if (kind == 2) {
            x.floats[block] = 1000.0f;
        }
    }
    return x;
}

}  // namespace kvw
