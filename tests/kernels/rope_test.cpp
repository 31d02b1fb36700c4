#include <doctest/doctest.h>

#include <cmath>

#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

TEST_CASE("rope returns the same bytes on every instruction set, for both kinds of pairs") {
    for (const std::size_t head_dim : {16, 32, 48, 64, 80, 128, 256}) {
        std::vector<float> cos(head_dim / 2), sin(head_dim / 2);
        rope_table(1234, 1, static_cast<std::uint32_t>(head_dim), 10000.0, 1.0, cos.data(),
                   sin.data());
        for (const bool interleaved : {false, true}) {
            std::vector<float> expected = sample(3 * head_dim, 1, 4.0f);
            const std::vector<float> x = expected;
            kernels_for(Isa::ref)->rope(expected.data(), 3, head_dim, cos.data(), sin.data(),
                                        interleaved);
            for (const Kernels* kernels : wide_variants()) {
                CAPTURE(kernels->isa);
                CAPTURE(head_dim);
                CAPTURE(interleaved);
                std::vector<float> turned = x;
                kernels->rope(turned.data(), 3, head_dim, cos.data(), sin.data(), interleaved);
                CHECK(same_bytes(turned, expected));
            }
        }
    }
}

TEST_CASE("rope turns the pairs its layout names") {
    const std::size_t head_dim = 16;
    const std::vector<float> cos(8, 0.0f), sin(8, 1.0f);  // a quarter turn: (a, b) becomes (-b, a)
    for (const Kernels* kernels : all_variants()) {
        std::vector<float> x(head_dim);
        for (std::size_t i = 0; i < head_dim; ++i) {
            x[i] = static_cast<float>(i + 1);
        }
        std::vector<float> interleaved = x, halves = x;
        kernels->rope(interleaved.data(), 1, head_dim, cos.data(), sin.data(), true);
        kernels->rope(halves.data(), 1, head_dim, cos.data(), sin.data(), false);
        for (std::size_t i = 0; i < 8; ++i) {
            CHECK(interleaved[2 * i] == -x[2 * i + 1]);
            CHECK(interleaved[2 * i + 1] == x[2 * i]);
            CHECK(halves[i] == -x[i + 8]);
            CHECK(halves[i + 8] == x[i]);
        }
    }
}

TEST_CASE("the rope table is that of the C library to float precision, up to position 131,071") {
    struct Case {
        double base;
        double scale;
        std::uint32_t head_dim;
    };
    for (const Case& c :
         {Case{10000.0, 1.0, 64}, Case{100000.0, 1.0, 64}, Case{1000000.0, 8.0, 256}}) {
        const std::uint32_t half = c.head_dim / 2;
        for (const std::uint32_t first : {0u, 1u, 511u, 8191u, 65536u, 131056u}) {
            std::vector<float> cos(16 * half), sin(16 * half);
            rope_table(first, 16, c.head_dim, c.base, c.scale, cos.data(), sin.data());
            for (std::uint32_t p = 0; p < 16; ++p) {
                for (std::uint32_t i = 0; i < half; ++i) {
                    const double angle =
                        (first + p) / c.scale * std::pow(c.base, -2.0 * i / c.head_dim);
                    REQUIRE(std::abs(cos[p * half + i] - std::cos(angle)) < 3.1e-8);
                    REQUIRE(std::abs(sin[p * half + i] - std::sin(angle)) < 3.1e-8);
                }
            }
        }
    }
}

TEST_CASE("a rope table does not depend on where it was started") {
    std::vector<float> cos(300 * 32), sin(300 * 32), cos_one(32), sin_one(32);
    rope_table(0, 300, 64, 100000.0, 1.0, cos.data(), sin.data());
    for (std::uint32_t p = 0; p < 300; p += 7) {
        rope_table(p, 1, 64, 100000.0, 1.0, cos_one.data(), sin_one.data());
        REQUIRE(std::memcmp(cos_one.data(), cos.data() + p * 32, 128) == 0);
        REQUIRE(std::memcmp(sin_one.data(), sin.data() + p * 32, 128) == 0);
    }
}
