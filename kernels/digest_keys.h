// The key words of digests (NUMERICS.md "Digests"): two per index, made once when first needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvw {

inline constexpr std::size_t kDigestIndexesMax = std::size_t{1} << 20;
inline constexpr std::size_t kDigestChunk = 4096;

// Keys of indexes [chunk * kDigestChunk, + kDigestChunk). Never freed, never changed; any thread.
struct DigestKeys {
    alignas(64) std::uint32_t a[kDigestChunk];
    alignas(64) std::uint32_t b[kDigestChunk];
};
const DigestKeys& digest_keys(std::size_t chunk);

}  // namespace kvw
