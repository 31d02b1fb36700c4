// Digests over registers of integers. Words is the instruction set's own: load, load_part, keyed
// products of neighbours added to 64-bit sums, and the total of such sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/digest_keys.h"
#include "kernels/kernels.h"
#include "src/base/check.h"

namespace kvw::wide {

// Calls step(words, keys a, keys b) for each register of the row. Behind its end words are 0, and
// keys too, so that padding adds 0 times 0.
template <class Words, class Step>
[[gnu::always_inline]] inline void for_each_register(const float* x, std::size_t count,
                                                     std::size_t first_index, Step step) {
    constexpr std::size_t kWords = Words::kCount;
    const auto* bits = reinterpret_cast<const std::uint32_t*>(x);
    std::size_t i = 0;
    while (i < count) {
        const std::size_t index = first_index + i;
        const DigestKeys& keys = digest_keys(index / kDigestChunk);
        std::size_t offset = index % kDigestChunk;
        const std::size_t in_chunk =
            kDigestChunk - offset < count - i ? kDigestChunk - offset : count - i;
        const std::size_t end = i + in_chunk;
        for (; i + kWords <= end; i += kWords, offset += kWords) {
            step(Words::load(bits + i), Words::load(keys.a + offset), Words::load(keys.b + offset));
        }
        if (i < end) {
            // Keys of an odd tail's missing partner count, keys behind it do not.
            const std::size_t rest = end - i;
            const std::size_t keyed = rest + rest % 2;
            step(Words::load_part(bits + i, rest), Words::load_part(keys.a + offset, keyed),
                 Words::load_part(keys.b + offset, keyed));
            i = end;
        }
    }
}

template <class Words>
RowDigest digest_logits(const float* logits, std::size_t count, std::size_t first_index,
                        bool* nonfinite) {
    check(first_index % 2 == 0, "a piece of a row begins with a pair");
    auto a = Words::zero();
    auto b = Words::zero();
    auto largest = Words::zero();
    for_each_register<Words>(
        logits, count,
        first_index, [&](auto x, auto key_a, auto key_b) __attribute__((always_inline)) {
            a = Words::add_products(a, x, key_a);
            b = Words::add_products(b, x, key_b);
            largest = Words::max_exponent(largest, x);
        });
    if (Words::any_nonfinite(largest)) {
        *nonfinite = true;
    }
    return {Words::total(a), Words::total(b)};
}

template <class Words>
std::uint64_t digest_row(const float* x, std::size_t cols) {
    auto a = Words::zero();
    for_each_register<Words>(
        x, cols, 0, [&](auto words, auto key_a, auto) __attribute__((always_inline)) {
            a = Words::add_products(a, words, key_a);
        });
    return Words::total(a);
}

}  // namespace kvw::wide
