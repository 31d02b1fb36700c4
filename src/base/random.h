// Philox4x32-10 (Salmon et al., SC 2011): random numbers by address instead of by sequence, so that
// a draw depends on its seed and position only, whoever else is drawing.
#pragma once

#include <array>
#include <cstdint>

namespace kvw {

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key);

// The draw number `draw` at token `position` under `seed`, uniform in [0, 1) with 24 bits.
double uniform_draw(std::uint64_t seed, std::uint64_t position, std::uint64_t draw);

// 64 bits of entropy from the operating system. Ends the program if it has none.
std::uint64_t entropy64();

}  // namespace kvw
