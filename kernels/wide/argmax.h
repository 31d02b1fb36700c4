#pragma once

#include <cstddef>

namespace kvw::wide {

// Two passes: the greatest value in any order, then the first place that holds it.
template <class Lanes>
std::size_t argmax(const float* x, std::size_t count) {
    const std::size_t whole = count / 16 * 16;
    float greatest = x[0];
    if (whole != 0) {
        auto most = Lanes::load(x);
        auto most_odd = most;
        std::size_t i = 16;
        for (; i + 32 <= whole; i += 32) {
            most = Lanes::max(most, Lanes::load(x + i));
            most_odd = Lanes::max(most_odd, Lanes::load(x + i + 16));
        }
        if (i < whole) {
            most = Lanes::max(most, Lanes::load(x + i));
        }
        greatest = Lanes::greatest(Lanes::max(most, most_odd));
    }
    for (std::size_t i = whole; i < count; ++i) {
        greatest = x[i] > greatest ? x[i] : greatest;
    }
    for (std::size_t i = 0; i < whole; i += 16) {
        const unsigned found = Lanes::equal_bits(Lanes::load(x + i), Lanes::set(greatest));
        if (found != 0) {
            return i + static_cast<std::size_t>(__builtin_ctz(found));
        }
    }
    for (std::size_t i = whole; i < count; ++i) {
        if (x[i] == greatest) {
            return i;
        }
    }
    return 0;
}

}  // namespace kvw::wide
