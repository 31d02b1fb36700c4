// What every kernel that touches tiles does with a header it loaded: compare it, and add it to the
// witness. Always inlined: each instruction set compiles its own copy. What is constexpr here is
// shared with device code (kernels/cuda), so that one judgement serves every device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "src/base/check.h"

namespace kvw {

// The longest head the kernels have scratch space for.
inline constexpr std::size_t kHeadDimMax = 512;

// Does the header say what the page table and the admission record promise of this tile?
[[gnu::always_inline]] constexpr bool header_matches(const TileHeader& header, const Owner& reader,
                                                     const PageRef& entry, std::uint32_t layer,
                                                     std::uint32_t head) {
    return header.state == TileState::owned && header.tenant == number(reader.tenant) &&
           header.request == number(entry.writer(reader.request)) &&
           header.generation == entry.generation && header.page == entry.page &&
           header.layer == layer && header.head == head;
}

// One row's share of the witness: all of it from the loaded header, nothing from the table.
[[gnu::always_inline]] constexpr std::uint64_t witness_of_row(const TileHeader& header,
                                                              AccessKind kind) {
    return page_mix(header.tenant, header.request, header.generation, header.page) *
           access_factor(header.layer, header.head, kind);
}

// Rows of tile `table_index` that a query at `position` may see.
[[gnu::always_inline]] constexpr std::uint32_t visible_rows(std::uint32_t position,
                                                            std::uint32_t table_index) {
    const std::uint32_t begin = table_index * kPageTokens;
    if (position < begin) {
        return 0;
    }
    return position - begin + 1 < kPageTokens ? position - begin + 1 : kPageTokens;
}

// Which entries of the page table a tile walk covers: all up to `position`, or those of one split.
struct TileRange {
    std::uint32_t begin = 0, end = 0;
};
[[gnu::always_inline]] constexpr TileRange tiles_of(std::uint32_t position, std::uint32_t split) {
    constexpr std::uint32_t kSplitTiles = kSplitTokens / kPageTokens;
    const std::uint32_t visible_end = position / kPageTokens + 1;
    if (split == kAllSplits) {
        return {0, visible_end};
    }
    const std::uint32_t begin = split * kSplitTiles;
    const std::uint32_t end = begin + kSplitTiles;
    return {begin < visible_end ? begin : visible_end, end < visible_end ? end : visible_end};
}

// What plain execution knows of the rows it is about to use: the header, and nothing else.
struct PlainAccess {
    static constexpr bool kChecked = false;
    [[gnu::always_inline]] static std::uint64_t foreign_writer(const KvMemory&, const std::uint8_t*,
                                                               std::uint32_t, const SequenceView&,
                                                               const PageRef&, bool*) {
        return 0;
    }
    [[gnu::always_inline]] static void record(const KvMemory&, const std::uint8_t*, std::uint32_t,
                                              std::uint32_t, std::uint64_t) {}
};

// Checked execution asks the shadow table, at the place that follows from the address itself.
struct CheckedAccess {
    static constexpr bool kChecked = true;
    [[gnu::always_inline]] static std::uint64_t* writers(const KvMemory& memory,
                                                         const std::uint8_t* tile) {
        const std::size_t index =
            static_cast<std::size_t>(tile - memory.base) / memory.shape.tile_bytes();
        return memory.writers + index * kPageTokens;
    }
    // The first of `rows` rows that somebody else wrote (or nobody) sets *found; returns its
    // writer.
    [[gnu::always_inline]] static std::uint64_t foreign_writer(const KvMemory& memory,
                                                               const std::uint8_t* tile,
                                                               std::uint32_t rows,
                                                               const SequenceView& sequence,
                                                               const PageRef& entry, bool* found) {
        const std::uint64_t* writer = writers(memory, tile);
        for (std::uint32_t row = 0; row < rows; ++row) {
            const bool allowed = writer[row] == number(entry.writer(sequence.reader.request));
            if (!allowed) {
                *found = true;
                return writer[row];
            }
        }
        return 0;
    }
    [[gnu::always_inline]] static void record(const KvMemory& memory, const std::uint8_t* tile,
                                              std::uint32_t row_begin, std::uint32_t row_end,
                                              std::uint64_t request) {
        std::uint64_t* writer = writers(memory, tile);
        for (std::uint32_t row = row_begin; row < row_end; ++row) {
            writer[row] = request;
        }
    }
};

// What attention relies on: a broken one of these would read or write outside its buffers.
template <class Access>
[[gnu::always_inline]] inline void check_attention(const AttentionArgs& args,
                                                   const AttentionItem& item) {
    const TileShape& shape = args.memory.shape;
    const SequenceView& sequence = *item.sequence;
    check(shape.head_dim % 16 == 0 && shape.head_dim <= kHeadDimMax,
          "head_dim is a multiple of 16, at most kHeadDimMax");
    check(args.query_heads % shape.heads == 0,
          "each KV head serves the same number of query heads");
    check(item.row_begin < item.row_end && item.row_end <= sequence.count,
          "an item has rows, and they are among the new tokens");
    check(sequence.pages.size() * kPageTokens >= std::size_t{sequence.first} + item.row_end,
          "the page table covers every row that is attended to");
    check(item.split == kAllSplits || (args.partials != nullptr && item.split < args.splits_max),
          "an item of one split has a place for its partials");
    check(!Access::kChecked || args.memory.writers != nullptr,
          "checked execution has a shadow table");
}

}  // namespace kvw
