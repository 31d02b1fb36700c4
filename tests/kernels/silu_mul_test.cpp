#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

namespace {

using Gated = void (*Kernels::*)(float*, const float*, const float*, std::size_t);

std::vector<float> gated(const Kernels& kernels, Gated operation, const std::vector<float>& gate,
                         const std::vector<float>& up) {
    std::vector<float> out(gate.size());
    (kernels.*operation)(out.data(), gate.data(), up.data(), gate.size());
    return out;
}

}  // namespace

TEST_CASE("silu_mul, gelu_mul and add return the same bytes on every instruction set") {
    for (const std::size_t count : {1, 3, 15, 16, 17, 31, 33, 576, 1535}) {
        const std::vector<float> gate = sample(count, 1, 120.0f);  // past both ends of exp
        const std::vector<float> up = sample(count, 2, 4.0f);
        for (const Kernels* kernels : wide_variants()) {
            CAPTURE(kernels->isa);
            CAPTURE(count);
            for (const Gated operation : {&Kernels::silu_mul, &Kernels::gelu_mul}) {
                CHECK(same_bytes(gated(*kernels, operation, gate, up),
                                 gated(*kernels_for(Isa::ref), operation, gate, up)));
            }
            std::vector<float> sum = gate, expected = gate;
            kernels->add(sum.data(), up.data(), count);
            kernels_for(Isa::ref)->add(expected.data(), up.data(), count);
            CHECK(same_bytes(sum, expected));
        }
    }
}

TEST_CASE("the gates may be overwritten with the result") {
    const std::vector<float> gate = sample(100, 1, 8.0f);
    const std::vector<float> up = sample(100, 2);
    for (const Kernels* kernels : all_variants()) {
        std::vector<float> in_place = gate;
        kernels->silu_mul(in_place.data(), in_place.data(), up.data(), gate.size());
        CHECK(same_bytes(in_place, gated(*kernels, &Kernels::silu_mul, gate, up)));
    }
}

TEST_CASE("silu and gelu are close to their definitions and quiet far out") {
    const std::vector<float> x = sample(20000, 5, 12.0f);
    const std::vector<float> ones(x.size(), 1.0f);
    const Kernels& ref = *kernels_for(Isa::ref);
    const std::vector<float> silu = gated(ref, &Kernels::silu_mul, x, ones);
    const std::vector<float> gelu = gated(ref, &Kernels::gelu_mul, x, ones);
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double v = x[i];
        const double inner = std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v);
        REQUIRE(silu[i] == doctest::Approx(v / (1 + std::exp(-v))).epsilon(1e-6));
        // gelu vanishes like exp(-x^2) on the left: there the error of the exponent counts.
        const double expected = v / (1 + std::exp(-2 * inner));
        REQUIRE(std::abs(gelu[i] - expected) <= 1e-6 * std::abs(v) + 4e-5 * std::abs(expected));
    }
    const std::vector<float> far = {-1000.0f, 1000.0f, -0.0f, 0.0f};
    const std::vector<float> four(4, 1.0f);
    for (const Gated operation : {&Kernels::silu_mul, &Kernels::gelu_mul}) {
        CHECK(same_bytes(gated(ref, operation, far, four), {-0.0f, 1000.0f, -0.0f, 0.0f}));
    }
}

TEST_CASE("what is not finite does not become finite") {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> nan(20, std::numeric_limits<float>::quiet_NaN());
    for (const Kernels* kernels : all_variants()) {
        for (const Gated operation : {&Kernels::silu_mul, &Kernels::gelu_mul}) {
            for (const float value :
                 gated(*kernels, operation, nan, std::vector<float>(20, 1.0f))) {
                CHECK(std::isnan(value));
            }
            CHECK(gated(*kernels, operation, {infinity}, {1.0f})[0] == infinity);
        }
    }
}
