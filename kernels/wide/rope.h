#pragma once

#include <cstddef>

namespace kvw::wide {

template <class Lanes>
[[gnu::always_inline]] inline void rotate_halves(float* first, float* second, const float* cos,
                                                 const float* sin, std::size_t n) {
    const auto a = Lanes::load_part(first, n);
    const auto b = Lanes::load_part(second, n);
    const auto c = Lanes::load_part(cos, n);
    const auto s = Lanes::load_part(sin, n);
    Lanes::store_part(first, Lanes::fma(a, c, Lanes::negate(Lanes::mul(b, s))), n);
    Lanes::store_part(second, Lanes::fma(b, c, Lanes::mul(a, s)), n);
}

// head_dim is a multiple of 16: interleaved pairs fill whole registers.
template <class Lanes>
void rope(float* x, std::size_t heads, std::size_t head_dim, const float* cos, const float* sin,
          bool interleaved) {
    const std::size_t half = head_dim / 2;
    for (std::size_t head = 0; head < heads; ++head) {
        float* at = x + head * head_dim;
        if (interleaved) {
            for (std::size_t d = 0; d < head_dim; d += 16) {
                const auto pairs = Lanes::load(at + d);
                const auto turn =
                    Lanes::mul(Lanes::swap_pairs(pairs), Lanes::load_doubled(sin + d / 2));
                Lanes::store(at + d,
                             Lanes::fma_alternating(pairs, Lanes::load_doubled(cos + d / 2), turn));
            }
        } else {
            for (std::size_t i = 0; i < half; i += 16) {
                rotate_halves<Lanes>(at + i, at + half + i, cos + i, sin + i,
                                     half - i < 16 ? half - i : 16);
            }
        }
    }
}

}  // namespace kvw::wide
