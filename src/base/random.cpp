#include "src/base/random.h"

#include <sys/random.h>

#include "src/base/check.h"

namespace kvw {

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xd2511f53u} * counter[0];
        const std::uint64_t b = std::uint64_t{0xcd9e8d57u} * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0],
                   static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1],
                   static_cast<std::uint32_t>(a)};
        key[0] += 0x9e3779b9u;
        key[1] += 0xbb67ae85u;
    }
    return counter;
}

double uniform_draw(std::uint64_t seed, std::uint64_t position, std::uint64_t draw) {
    const auto words = philox4x32(
        {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32),
         static_cast<std::uint32_t>(draw), static_cast<std::uint32_t>(draw >> 32)},
        {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    return (words[0] >> 8) * 0x1p-24;
}

std::uint64_t entropy64() {
    std::uint64_t bits = 0;
    check(getrandom(&bits, sizeof bits, 0) == sizeof bits, "the operating system gives entropy");
    return bits;
}

}  // namespace kvw
