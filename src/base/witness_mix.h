// The witness: a sum that kernels form over the tile headers they really loaded, and that the
// ledger forms over what was recorded. Both sides use exactly these functions, so they can only
// differ when what the hardware read is not what the engine believed.
//
// One access adds   page_mix(header) * access_factor(layer, head, kind) * rows   modulo 2^64, where
// rows = rows visible to a query row (read, once per query row and KV head), rows stored (write),
// or kPageTokens (scrub). Sums commute: tiling, threads and batch order do not show. Always
// inlined, so that no copy compiled for one instruction set is linked into code for another.
#pragma once

#include <cstdint>

namespace kvw {

enum class AccessKind : std::uint8_t { read = 1, write = 2, move = 3, scrub = 4 };

// A bijective 64-bit mixer (the finaliser of SplitMix64, Steele et al. 2014).
[[gnu::always_inline]] constexpr std::uint64_t mix64(std::uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    x ^= x >> 31;
    return x;
}

[[gnu::always_inline]] constexpr std::uint64_t page_mix(std::uint32_t tenant, std::uint64_t request,
                                                        std::uint32_t generation,
                                                        std::uint32_t page) {
    std::uint64_t x = mix64(request + 0x9e3779b97f4a7c15ull);
    x = mix64(x ^ ((std::uint64_t{tenant} << 32) | generation));
    return mix64(x + page * 0xd1342543de82ef95ull);
}

// Odd, so that no number of rows below 2^64 multiplies it to zero.
[[gnu::always_inline]] constexpr std::uint64_t access_factor(std::uint32_t layer,
                                                             std::uint32_t head, AccessKind kind) {
    return mix64((std::uint64_t{layer} << 32) ^ (std::uint64_t{head} << 8) ^
                 static_cast<std::uint64_t>(kind)) |
           1;
}

}  // namespace kvw
