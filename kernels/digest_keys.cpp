#include "kernels/digest_keys.h"

#include <array>
#include <atomic>
#include <memory>

#include "src/base/check.h"
#include "src/base/witness_mix.h"

namespace kvw {

namespace {

// A cache of constants: what is in it does not depend on who filled it.
constinit std::array<std::atomic<const DigestKeys*>, kDigestIndexesMax / kDigestChunk> made{};

}  // namespace

const DigestKeys& digest_keys(std::size_t chunk) {
    check(chunk < made.size(), "a digested row has at most kDigestIndexesMax values");
    const DigestKeys* keys = made[chunk].load(std::memory_order_acquire);
    if (keys == nullptr) {
        auto fresh = std::make_unique<DigestKeys>();
        for (std::size_t i = 0; i < kDigestChunk; ++i) {
            const std::uint64_t index = chunk * kDigestChunk + i;
            fresh->a[i] = static_cast<std::uint32_t>(mix64(index + 0x9e3779b97f4a7c15ull));
            fresh->b[i] = static_cast<std::uint32_t>(mix64(index + 0xc2b2ae3d27d4eb4full));
        }
        if (made[chunk].compare_exchange_strong(keys, fresh.get(), std::memory_order_acq_rel)) {
            keys = fresh.release();
        }  // else another thread was first, and `keys` is what it made
    }
    return *keys;
}

}  // namespace kvw
