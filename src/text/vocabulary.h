// The spellings of a vocabulary and its merge rules, as hash tables over the mapped file: built in
// one pass at start, no copy of any spelling.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "src/text/tokenizer.h"

namespace kvw {

// Spelling -> id. A file made so that its spellings collide is refused, not searched slowly.
class SpellingTable {
  public:
    // Keeps views of `spellings`; empty ones are left out. Fails: the id of a spelling that was
    // there before, or that collides with too many others.
    tl::expected<void, TokenId> build(std::span<const std::string_view> spellings);
    TokenId find(std::string_view spelling) const;  // -1 when absent
    // The same for many at once; their places in memory are fetched side by side.
    void find_all(std::span<const std::string_view> spellings, std::span<TokenId> ids) const;

  private:
    struct Slot {
        std::uint32_t hash = 0;
        TokenId id = -1;
    };
    TokenId find(std::string_view spelling, std::uint32_t hash) const;

    std::span<const std::string_view> spellings_;
    std::vector<Slot> slots_;  // a power of two, at most half full
};

struct Merge {
    std::uint32_t rank = 0;  // lower goes first
    TokenId merged = -1;
};

// (left id, right id) -> rank and the id of both together.
class MergeTable {
  public:
    void reserve(std::size_t merges);
    // False when the pair is there already, or collides with too many others.
    bool add(TokenId left, TokenId right, Merge merge);
    void will_add(TokenId left, TokenId right) const;      // a hint: add() of this pair comes soon
    const Merge* find(TokenId left, TokenId right) const;  // null when absent

  private:
    struct Slot {
        std::uint64_t pair = kEmpty;
        Merge merge;
    };
    static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};  // two ids of -1, which do not merge
    std::vector<Slot> slots_;
};

// Merges the byte pairs of one word after the other; keeps its working memory between words.
class PairMerger {
  public:
    PairMerger(const MergeTable& merges, std::span<const TokenId, 256> byte_ids)
        : merges_(merges), byte_ids_(byte_ids) {}

    // Appends the ids of `word` to `ids`: lowest rank first, ties leftmost, O(n log n). Fails: the
    // position of a byte that the vocabulary has no token for.
    std::optional<std::size_t> append(std::string_view word, std::vector<TokenId>& ids);

  private:
    struct Symbol {
        TokenId id;  // kGone when it became part of its left neighbour
        std::uint32_t before;
        std::uint32_t after;
    };
    struct Candidate {
        std::uint32_t rank;
        std::uint32_t left;  // symbol
        TokenId left_id;     // as they were; a candidate whose symbols changed is stale
        TokenId right_id;
        TokenId merged;
    };
    void consider(std::uint32_t left);

    const MergeTable& merges_;
    std::span<const TokenId, 256> byte_ids_;
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
};

// Finds special tokens where they stand in a text: the longest that begins at a position.
class SpecialFinder {
  public:
    void add(std::string_view spelling, TokenId id);
    void finish();  // after the last add()

    struct Match {
        std::size_t at = 0;    // bytes
        std::size_t size = 0;  // bytes; 0: none
        TokenId id = -1;
    };
    // The first special token in `text` at or after `from`.
    Match find(std::string_view text, std::size_t from) const;

  private:
    struct Entry {
        std::string_view spelling;
        TokenId id;
    };
    const Entry* longest(std::string_view text) const;

    std::vector<Entry> entries_;  // sorted
    std::array<bool, 256> begins_{};
};

}  // namespace kvw
