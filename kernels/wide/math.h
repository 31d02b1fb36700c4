// kernels/detmath.h over sixteen lanes, and the sums of NUMERICS.md. Lanes is avx2/lanes.h or
// avx512/lanes.h.
#pragma once

#include <limits>

#include "kernels/detmath.h"

namespace kvw::wide {

template <class Lanes>
[[gnu::always_inline]] inline typename Lanes::Floats exp(typename Lanes::Floats x) {
    using namespace detmath;
    const auto shifted = Lanes::fma(x, Lanes::set(kLog2E), Lanes::set(kRounder));
    const auto n = Lanes::sub(shifted, Lanes::set(kRounder));
    auto r = Lanes::fma(n, Lanes::set(-kLn2High), x);
    r = Lanes::fma(n, Lanes::set(-kLn2Low), r);
    auto y = Lanes::set(kExpC6);
    y = Lanes::fma(y, r, Lanes::set(kExpC5));
    y = Lanes::fma(y, r, Lanes::set(kExpC4));
    y = Lanes::fma(y, r, Lanes::set(kExpC3));
    y = Lanes::fma(y, r, Lanes::set(kExpC2));
    y = Lanes::fma(y, r, Lanes::set(1.0f));
    y = Lanes::fma(y, r, Lanes::set(1.0f));
    y = Lanes::mul(y, Lanes::power_of_two(shifted));
    y = Lanes::select(Lanes::less(x, Lanes::set(kExpLowest)), Lanes::zero(), y);
    return Lanes::select(Lanes::less(Lanes::set(kExpHighest), x),
                         Lanes::set(std::numeric_limits<float>::infinity()), y);
}

template <class Lanes>
[[gnu::always_inline]] inline typename Lanes::Floats sigmoid_times(typename Lanes::Floats x,
                                                                   typename Lanes::Floats inner) {
    return Lanes::div(x, Lanes::add(Lanes::set(1.0f), exp<Lanes>(Lanes::negate(inner))));
}

template <class Lanes>
[[gnu::always_inline]] inline typename Lanes::Floats silu(typename Lanes::Floats x) {
    return sigmoid_times<Lanes>(x, x);
}

template <class Lanes>
[[gnu::always_inline]] inline typename Lanes::Floats gelu(typename Lanes::Floats x) {
    const auto slope = Lanes::fma(Lanes::mul(x, x), Lanes::set(detmath::kGeluCubic),
                                  Lanes::set(detmath::kGeluLinear));
    return sigmoid_times<Lanes>(x, Lanes::mul(x, slope));
}

// The 64 lanes of a sum as four registers: the halving tree from 32 down.
template <class Lanes>
[[gnu::always_inline]] inline float halving_tree(const typename Lanes::Floats (&quarter)[4]) {
    return Lanes::sum(
        Lanes::add(Lanes::add(quarter[0], quarter[2]), Lanes::add(quarter[1], quarter[3])));
}

}  // namespace kvw::wide
