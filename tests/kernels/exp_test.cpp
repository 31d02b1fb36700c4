#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "kernels/detmath.h"
#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

namespace {

std::vector<float> exp_of(const Kernels& kernels, const std::vector<float>& x, float shift = 0.0f) {
    std::vector<float> out(x.size());
    kernels.exp_shifted(out.data(), x.data(), x.size(), shift);
    return out;
}

// Every 4001st float between 0 and the lowest argument that does not give 0.
std::vector<float> negative_floats() {
    std::vector<float> x;
    for (std::uint32_t bits = 0x80000000; bits <= std::bit_cast<std::uint32_t>(-87.0f);
         bits += 4001) {
        x.push_back(std::bit_cast<float>(bits));
    }
    return x;
}

}  // namespace

TEST_CASE("exp returns the same bytes on every instruction set, out of range too") {
    for (const std::size_t count : {1, 5, 15, 16, 17, 1000}) {
        const std::vector<float> x = sample(count, 1, 200.0f);
        for (const Kernels* kernels : wide_variants()) {
            CAPTURE(kernels->isa);
            CHECK(same_bytes(exp_of(*kernels, x, 3.5f), exp_of(*kernels_for(Isa::ref), x, 3.5f)));
        }
    }
    const std::vector<float> x = negative_floats();
    for (const Kernels* kernels : wide_variants()) {
        CHECK(same_bytes(exp_of(*kernels, x), exp_of(*kernels_for(Isa::ref), x)));
    }
}

TEST_CASE("exp is within one unit in the last place") {
    double worst = 0;
    std::vector<float> x = negative_floats();
    const std::vector<float> both = sample(100000, 2, 87.0f);
    x.insert(x.end(), both.begin(), both.end());
    const std::vector<float> y = exp_of(best_kernels(), x);
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double exact = std::exp(double{x[i]});
        const float nearest = static_cast<float>(exact);
        const double unit = std::nextafter(nearest, INFINITY) - double{nearest};
        worst = std::max(worst, std::abs(y[i] - exact) / unit);
    }
    CHECK(worst < 1.0);
}

TEST_CASE("exp has exact ends: 1 at 0, 0 below -87, infinity above 88, NaN for NaN") {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const Kernels* kernels : all_variants()) {
        const std::vector<float> y = exp_of(
            *kernels, {0.0f, -0.0f, -87.00001f, -infinity, 88.00001f, infinity, -87.0f, 88.0f});
        CHECK(same_bytes({y.begin(), y.begin() + 6},
                         std::vector<float>{1.0f, 1.0f, 0.0f, 0.0f, infinity, infinity}));
        CHECK(y[6] == doctest::Approx(std::exp(-87.0)).epsilon(1e-6));
        CHECK(y[7] == doctest::Approx(std::exp(88.0)).epsilon(1e-6));
        CHECK(std::isnan(exp_of(*kernels, {std::numeric_limits<float>::quiet_NaN()})[0]));
    }
}

TEST_CASE("log, exp and pow in double agree with the C library's to a few units") {
    for (double x = 1e-3; x < 1e7; x *= 1.0037) {
        REQUIRE(detmath::log(x) == doctest::Approx(std::log(x)).epsilon(1e-15));
        REQUIRE(std::abs(detmath::log(x) - std::log(x)) <=
                4e-16 * std::max(1.0, std::abs(std::log(x))));
    }
    CHECK(detmath::log(1.0) == 0.0);
    for (double x = -30; x < 30; x += 0.00371) {
        REQUIRE(std::abs(detmath::exp(x) / std::exp(x) - 1) <= 5e-16);
    }
    for (const double base : {10000.0, 100000.0, 500000.0, 1000000.0}) {
        CHECK(detmath::pow(base, 0.0) == 1.0);
        for (int i = 1; i < 128; ++i) {
            const double exponent = -2.0 * i / 256;
            REQUIRE(std::abs(detmath::pow(base, exponent) / std::pow(base, exponent) - 1) <= 1e-14);
        }
    }
}

TEST_CASE("sin and cos in double agree with the C library's up to a million") {
    for (double x = 0; x < 1048576; x += x < 100 ? 0.0113 : 17.93) {
        const detmath::SinCos y = detmath::sin_cos(x);
        REQUIRE(std::abs(y.sin - std::sin(x)) <= 4e-16);
        REQUIRE(std::abs(y.cos - std::cos(x)) <= 4e-16);
    }
}
