#include "kernels/weights.h"

#include <doctest/doctest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "kernels/half.h"
#include "tests/kernels/weight_samples.h"

using namespace kvw;

namespace {

std::vector<std::uint8_t> from_hex(const std::string& hex) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
        bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

}  // namespace

TEST_CASE("every weight type is read as gguf-py reads it") {
    std::ifstream file(KVW_SOURCE_DIR "/tests/data/dequantised_blocks.txt");
    REQUIRE(file.good());
    std::size_t types_seen = 0;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with('#')) {
            continue;
        }
        std::istringstream fields(line);
        std::string name, block_hex, float_hex;
        std::size_t columns = 0;
        fields >> name >> columns >> block_hex >> float_hex;
        CAPTURE(name);
        for (WeightType type : kAllWeightTypes) {
            if (name != name_of(type)) {
                continue;
            }
            ++types_seen;
            const std::vector<std::uint8_t> source = from_hex(block_hex),
                                            expected = from_hex(float_hex);
            REQUIRE(source.size() == columns / block_columns(type) * block_bytes(type));
            REQUIRE(expected.size() == columns * sizeof(float));
            std::vector<float> floats(columns);
            dequantise_row(type, source.data(), columns, floats.data());
            CHECK(std::memcmp(floats.data(), expected.data(), expected.size()) == 0);
        }
    }
    CHECK(types_seen == std::size(kAllWeightTypes));
}

TEST_CASE("a weight type is named whether or not it is accepted") {
    CHECK(std::string(weight_type_name(3)) == "Q4_1");
    CHECK(std::string(weight_type_name(10)) == "Q2_K");
    CHECK(std::string(weight_type_name(200)) == "type 200");
    for (WeightType type : kAllWeightTypes) {
        CHECK(weight_type_supported(static_cast<std::uint32_t>(type)));
    }
    for (std::uint32_t other : {4u, 5u, 9u, 10u, 11u, 15u, 16u, 20u, 24u, 39u, 200u, 0xffffffffu}) {
        CAPTURE(other);
        CHECK_FALSE(weight_type_supported(other));
    }
}

TEST_CASE("a packed matrix is about as large as its source") {
    const PackedMatrix q4 = packed_shape(WeightType::q4_1, 576, 576);
    CHECK(q4.form == WeightForm::nibbles);
    CHECK(q4.panels() == 36);
    CHECK(q4.bytes() == 576 * 576 / 32 * 20);  // 4-bit codes, two f16 scales: the source's size

    const PackedMatrix q8 = packed_shape(WeightType::q8_0, 17, 576);
    CHECK(q8.form == WeightForm::bytes);
    CHECK(q8.panels() == 2);
    CHECK(q8.bytes() == 2 * 16 * 576 / 32 * 34);

    for (WeightType type : kAllWeightTypes) {
        CAPTURE(name_of(type));
        const PackedMatrix matrix = packed_shape(type, 33, 768);
        CHECK(matrix.panel_bytes % 64 == 0);
        CHECK(matrix.bytes() == matrix.panel_bytes * 3);
        CHECK(matrix.data == nullptr);
    }
}

TEST_CASE("panels packed one range at a time equal panels packed at once") {
    for (WeightType type : kAllWeightTypes) {
        CAPTURE(name_of(type));
        const PackedSample whole = random_matrix(type, 53, 512, 7);
        std::vector<std::uint8_t> pieces(whole.matrix.bytes(), 0xee);
        pack_panels(whole.matrix, whole.source, pieces.data(), 2, 4);
        pack_panels(whole.matrix, whole.source, pieces.data(), 0, 2);
        CHECK(std::memcmp(pieces.data(), whole.matrix.data, pieces.size()) == 0);
    }
}

TEST_CASE("an embedding is the row of the source, from any panel and on any instruction set") {
    for (const Kernels* kernels : available_kernels()) {
        for (WeightType type : kAllWeightTypes) {
            for (std::uint32_t cols : {32u, 96u, 256u, 576u, 768u}) {
                if (cols % block_columns(type) != 0) {
                    continue;
                }
                CAPTURE(kernels->isa);
                CAPTURE(name_of(type));
                CAPTURE(cols);
                const PackedSample sample = random_matrix(type, 37, cols, cols);
                std::vector<float> out(cols);
                for (std::uint32_t row = 0; row < 37; ++row) {
                    const std::vector<float> expected = sample.row(row);
                    kernels->embed(out.data(), sample.matrix, row);
                    REQUIRE(std::memcmp(out.data(), expected.data(), cols * sizeof(float)) == 0);
                }
            }
        }
    }
}

TEST_CASE("every half becomes the float it stands for") {
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const float got = float_from_half(static_cast<std::uint16_t>(bits));
        const int exponent = static_cast<int>(bits >> 10 & 31);
        const int fraction = static_cast<int>(bits & 1023);
        if (exponent == 31 && fraction != 0) {
            REQUIRE(std::isnan(got));
            continue;
        }
        const double magnitude = exponent == 31  ? HUGE_VAL
                                 : exponent == 0 ? std::ldexp(fraction, -24)
                                                 : std::ldexp(1024 + fraction, exponent - 25);
        REQUIRE(static_cast<double>(got) == (bits & 0x8000 ? -magnitude : magnitude));
        REQUIRE(std::signbit(got) == ((bits & 0x8000) != 0));
    }
}
