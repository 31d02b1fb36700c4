#pragma once

#include <cstddef>

#include "kernels/wide/math.h"

namespace kvw::wide {

template <class Lanes>
void rms_norm(float* out, const float* x, const float* weight, std::size_t cols, float epsilon,
              std::size_t row_begin, std::size_t row_end) {
    for (std::size_t row = row_begin; row < row_end; ++row) {
        const float* in = x + row * cols;
        float* to = out + row * cols;
        typename Lanes::Floats quarter[4] = {Lanes::zero(), Lanes::zero(), Lanes::zero(),
                                             Lanes::zero()};
        std::size_t c = 0;
        for (; c + 64 <= cols; c += 64) {
            for (std::size_t i = 0; i < 4; ++i) {
                const auto part = Lanes::load(in + c + 16 * i);
                quarter[i] = Lanes::fma(part, part, quarter[i]);
            }
        }
        for (std::size_t i = 0; i < 4 && c + 16 * i < cols; ++i) {
            const auto part = Lanes::load_part(in + c + 16 * i, cols - c - 16 * i);
            quarter[i] =
                Lanes::fma(part, part, quarter[i]);  // adds 0 to lanes that have no element
        }
        const float mean = halving_tree<Lanes>(quarter) / static_cast<float>(cols);
        const auto scale = Lanes::set(1.0f / __builtin_sqrtf(mean + epsilon));
        for (c = 0; c + 16 <= cols; c += 16) {
            Lanes::store(to + c, Lanes::mul(Lanes::mul(Lanes::load(in + c), scale),
                                            Lanes::load(weight + c)));
        }
        if (c < cols) {
            const std::size_t rest = cols - c;
            Lanes::store_part(to + c,
                              Lanes::mul(Lanes::mul(Lanes::load_part(in + c, rest), scale),
                                         Lanes::load_part(weight + c, rest)),
                              rest);
        }
    }
}

}  // namespace kvw::wide
