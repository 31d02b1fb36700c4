#include <doctest/doctest.h>

#include <cmath>

#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

namespace {

const std::size_t kWidths[] = {1, 7, 15, 16, 17, 48, 63, 64, 65, 127, 129, 576, 896, 1000, 2048};

std::vector<float> norm(const Kernels& kernels, const std::vector<float>& x, std::size_t cols,
                        std::size_t row_begin, std::size_t row_end) {
    const std::vector<float> weight = sample(cols, 2, 3.0f);
    std::vector<float> out(x.size(), -1.0f);
    kernels.rms_norm(out.data(), x.data(), weight.data(), cols, 1e-5f, row_begin, row_end);
    return out;
}

}  // namespace

TEST_CASE("rms_norm returns the same bytes on every instruction set, at any width") {
    for (const std::size_t cols : kWidths) {
        const std::vector<float> x = sample(3 * cols, 1, 10.0f);
        const std::vector<float> expected = norm(*kernels_for(Isa::ref), x, cols, 0, 3);
        for (const Kernels* kernels : wide_variants()) {
            CAPTURE(kernels->isa);
            CAPTURE(cols);
            CHECK(same_bytes(norm(*kernels, x, cols, 0, 3), expected));
        }
    }
}

TEST_CASE("rms_norm may work in place, and touches only the rows it was given") {
    const std::size_t cols = 77;
    for (const Kernels* kernels : all_variants()) {
        const std::vector<float> x = sample(4 * cols, 3);
        const std::vector<float> whole = norm(*kernels, x, cols, 0, 4);
        const std::vector<float> weight = sample(cols, 2, 3.0f);
        std::vector<float> in_place = x;
        kernels->rms_norm(in_place.data(), in_place.data(), weight.data(), cols, 1e-5f, 1, 3);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const bool given = i / cols == 1 || i / cols == 2;
            REQUIRE(in_place[i] == (given ? whole[i] : x[i]));
        }
    }
}

TEST_CASE("rms_norm is the root mean square norm") {
    const std::size_t cols = 576;
    const std::vector<float> x = sample(cols, 4, 5.0f);
    const std::vector<float> weight = sample(cols, 2, 3.0f);
    const std::vector<float> out = norm(*kernels_for(Isa::ref), x, cols, 0, 1);
    double squares = 0;
    for (const float value : x) {
        squares += double{value} * value;
    }
    for (std::size_t c = 0; c < cols; ++c) {
        const double expected = x[c] / std::sqrt(squares / cols + 1e-5) * weight[c];
        REQUIRE(out[c] == doctest::Approx(expected).epsilon(1e-6));
    }
}
