#pragma once

#include <cstddef>

#include "kernels/wide/math.h"

namespace kvw::wide {

template <class Lanes>
void exp_shifted(float* out, const float* x, std::size_t count, float shift) {
    const auto by = Lanes::set(shift);
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        Lanes::store(out + i, exp<Lanes>(Lanes::sub(Lanes::load(x + i), by)));
    }
    if (i < count) {
        const std::size_t rest = count - i;
        Lanes::store_part(out + i, exp<Lanes>(Lanes::sub(Lanes::load_part(x + i, rest), by)), rest);
    }
}

}  // namespace kvw::wide
