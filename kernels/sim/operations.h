// The operations of the hash model: keys and values are hashes, attention is a sum over every row
// it reads. Pages, headers, checks, witness and counters are those of every other instruction set,
// so that pool, ledger and prover cannot tell the difference; what is left out is arithmetic.
//
// A row carries kHashBits of a hash, four halves of it, over and over in its K and its V. Attention
// reads them from the first four halves of K, which lie right behind the header and side by side
// for all rows of a tile. Its result over rows [0, p] is the sum, modulo 2^64, of the words they
// make: it commutes and can be carried on from row to row, so a chunk of queries costs one walk
// over the rows, linear in what is visible.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace kvw::sim {

// Halves of a word, half d at bit 16 d. The top bit of a half that was stored is set; that of the
// poison is not, so a row that nobody wrote is known by any of its halves.
inline constexpr std::uint32_t kHashHalves = 4;
inline constexpr std::uint32_t kHashBits = 15 * kHashHalves;
inline constexpr std::uint64_t kStored = 0x8000800080008000;

// What a row of k, v and out begins with, in bytes: not floats, and nothing computes with them as
// such. k (v is not looked at): 64 bits, of which kHashBits are kept. out: the sum over the visible
// rows, and whether one of them had a half that was never stored.
struct Attended {
    std::uint64_t sum, poisoned;
};

void append(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
            std::uint32_t kv_head, const float* k, const float* v);
void append_checked(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                    std::uint32_t kv_head, const float* k, const float* v);
// Items name kAllSplits; all query rows of a sequence belong in one item.
void attend(const AttentionArgs& args, const AttentionItem& item);
void attend_checked(const AttentionArgs& args, const AttentionItem& item);

}  // namespace kvw::sim
