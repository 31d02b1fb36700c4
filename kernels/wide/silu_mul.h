#pragma once

#include <cstddef>

#include "kernels/wide/math.h"

namespace kvw::wide {

// out[i] = f(a[i], b[i]); out may be a.
template <class Lanes, class Function>
[[gnu::always_inline]] inline void for_each_pair(float* out, const float* a, const float* b,
                                                 std::size_t count, Function f) {
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        Lanes::store(out + i, f(Lanes::load(a + i), Lanes::load(b + i)));
    }
    if (i < count) {
        const std::size_t rest = count - i;
        Lanes::store_part(out + i, f(Lanes::load_part(a + i, rest), Lanes::load_part(b + i, rest)),
                          rest);
    }
}

template <class Lanes>
void silu_mul(float* out, const float* gate, const float* up, std::size_t count) {
    using Floats = typename Lanes::Floats;
    for_each_pair<Lanes>(
        out, gate, up, count, [](Floats g, Floats u) __attribute__((always_inline)) {
            return Lanes::mul(silu<Lanes>(g), u);
        });
}

template <class Lanes>
void gelu_mul(float* out, const float* gate, const float* up, std::size_t count) {
    using Floats = typename Lanes::Floats;
    for_each_pair<Lanes>(
        out, gate, up, count, [](Floats g, Floats u) __attribute__((always_inline)) {
            return Lanes::mul(gelu<Lanes>(g), u);
        });
}

template <class Lanes>
void add(float* x, const float* y, std::size_t count) {
    using Floats = typename Lanes::Floats;
    for_each_pair<Lanes>(
        x, x, y, count,
        [](Floats a, Floats b) __attribute__((always_inline)) { return Lanes::add(a, b); });
}

}  // namespace kvw::wide
