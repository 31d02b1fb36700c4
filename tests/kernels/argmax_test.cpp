#include <doctest/doctest.h>

#include <algorithm>

#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

TEST_CASE("argmax finds the largest value wherever it stands") {
    for (const Kernels* kernels : all_variants()) {
        CAPTURE(kernels->isa);
        for (const std::size_t count : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 64, 100}) {
            for (std::size_t place = 0; place < count; ++place) {
                std::vector<float> x = sample(count, 1);
                x[place] = 2.0f;
                CHECK(kernels->argmax(x.data(), count) == place);
            }
        }
        const std::vector<float> x = sample(49152, 7, 30.0f);
        CHECK(kernels->argmax(x.data(), x.size()) ==
              static_cast<std::size_t>(std::max_element(x.begin(), x.end()) - x.begin()));
    }
}

TEST_CASE("of equal largest values argmax names the first, and the two zeros are equal") {
    for (const Kernels* kernels : all_variants()) {
        for (std::size_t first = 0; first < 70; ++first) {
            for (std::size_t second = first + 1; second < 70; ++second) {
                std::vector<float> x(70, -3.0f);
                x[first] = x[second] = -1.0f;
                REQUIRE(kernels->argmax(x.data(), x.size()) == first);
                x[first] = -0.0f;
                x[second] = 0.0f;
                REQUIRE(kernels->argmax(x.data(), x.size()) == first);
            }
        }
    }
}
