#include <bit>

#include "kernels/digest_keys.h"
#include "kernels/ref/operations.h"
#include "src/base/check.h"

namespace kvw::ref {

namespace {

// Values `i` and `i + 1` of a row, as their bits; an odd row ends with a zero.
struct Pair {
    std::uint32_t first, second;
};
Pair pair_at(const float* x, std::size_t count, std::size_t i) {
    return {std::bit_cast<std::uint32_t>(x[i]),
            i + 1 < count ? std::bit_cast<std::uint32_t>(x[i + 1]) : 0};
}

// Sums with the keys wrap at 2^32, the product does not.
std::uint64_t product(Pair x, const std::uint32_t* key) {
    return std::uint64_t{x.first + key[0]} * std::uint32_t{x.second + key[1]};
}

}  // namespace

RowDigest digest_logits(const float* logits, std::size_t count, std::size_t first_index,
                        bool* nonfinite) {
    check(first_index % 2 == 0, "a piece of a row begins with a pair");
    RowDigest digest;
    for (std::size_t i = 0; i < count; i += 2) {
        const std::size_t index = first_index + i;
        const DigestKeys& keys = digest_keys(index / kDigestChunk);
        const Pair pair = pair_at(logits, count, i);
        digest.a += product(pair, keys.a + index % kDigestChunk);
        digest.b += product(pair, keys.b + index % kDigestChunk);
        constexpr std::uint32_t kExponent = 0x7f800000;
        if ((pair.first & kExponent) == kExponent || (pair.second & kExponent) == kExponent) {
            *nonfinite = true;
        }
    }
    return digest;
}

std::uint64_t digest_row(const float* x, std::size_t cols) {
    std::uint64_t digest = 0;
    for (std::size_t i = 0; i < cols; i += 2) {
        const DigestKeys& keys = digest_keys(i / kDigestChunk);
        digest += product(pair_at(x, cols, i), keys.a + i % kDigestChunk);
    }
    return digest;
}

}  // namespace kvw::ref
