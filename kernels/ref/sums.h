// NUMERICS.md "Sums": the order of additions that every variant keeps.
#pragma once

#include <array>
#include <cstddef>

namespace kvw::ref {

inline constexpr std::size_t kSumLanes = 64;  // lane j adds elements j, j + 64, ...

inline float halving_tree(std::array<float, kSumLanes> lanes) {
    for (std::size_t half = kSumLanes / 2; half >= 1; half /= 2) {
        for (std::size_t j = 0; j < half; ++j) {
            lanes[j] = lanes[j] + lanes[j + half];
        }
    }
    return lanes[0];
}

}  // namespace kvw::ref
