// What the record keeps of content: keyed digests, computed alike when serving and in replay.
// Without the tenant's key they say nothing, not even to someone who guesses (FORMAT.md, "Keyed
// digests").
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/kernels.h"
#include "src/base/sha256.h"
#include "src/text/tokenizer.h"

namespace kvw {

// The first 16 bytes of HMAC-SHA-256(key, domain || 0 || content), as two big-endian words.
std::array<std::uint64_t, 2> keyed_digest(const Digest256& key, std::string_view domain,
                                          std::string_view content);

// Of a request's logits so far. The running digest folds each sampled row at the row's own position
// (the position before the sampled token's).
std::array<std::uint64_t, 2> logits_digest(const Digest256& key, const RowDigest& running);
// The 32 bits of it that a sample event keeps.
std::uint64_t sample_digest(const Digest256& key, const RowDigest& running);
// Of one layer's outputs so far, folded by position.
std::uint64_t layer_digest(const Digest256& key, std::uint32_t layer, std::uint64_t running);

// Everything a request's forward passes consumed, position after position: what admission counted
// and what was really sourced must come to the same.
class PositionDigest {
  public:
    void add(std::uint64_t position, TokenId id);
    std::uint64_t positions() const { return positions_; }
    std::array<std::uint64_t, 2> digest(const Digest256& key) const;

  private:
    Sha256 running_;
    std::uint64_t positions_ = 0;
};

}  // namespace kvw
