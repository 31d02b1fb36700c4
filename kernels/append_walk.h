// Which rows an append may store: the part of it that is the same for every instruction set.
#pragma once

#include <cstddef>

#include "kernels/tile_check.h"
#include "src/base/check.h"

namespace kvw {

// Calls store(tile, row, rows, source) for each run of rows that lie in one tile and may be stored:
// rows [row, row + rows) of the tile, from `source`, an offset into k and v of the first of them.
template <class Access, class Store>
[[gnu::always_inline]] inline void append_walk(const KvMemory& memory, const SequenceView& sequence,
                                               std::uint32_t layer, std::uint32_t kv_head,
                                               Store store) {
    const TileShape& shape = memory.shape;
    check(sequence.pages.size() * kPageTokens >= std::size_t{sequence.first} + sequence.count,
          "the page table covers every row that is appended");
    check(!Access::kChecked || memory.writers != nullptr, "checked execution has a shadow table");
    std::uint64_t witness = 0;
    std::uint64_t stored = 0;
    for (std::uint32_t i = 0; i < sequence.count;) {
        const std::uint32_t table_index = (sequence.first + i) / kPageTokens;
        const std::uint32_t row = (sequence.first + i) % kPageTokens;
        const std::uint32_t left = sequence.count - i;
        const std::uint32_t rows = kPageTokens - row < left ? kPageTokens - row : left;
        PageRef entry = sequence.pages.data()[table_index];
        entry.grantor = {};  // a grant is for reading
        TileHeader loaded;
        std::uint8_t* tile = nullptr;
        if (entry.page < memory.pages) {
            tile = memory.tile(entry.page, layer, kv_head);
            loaded = *tile_header(tile);
        }
        if (tile != nullptr && header_matches(loaded, sequence.reader, entry, layer, kv_head) &&
            loaded.rows_written == row) {
            store(tile, row, rows,
                  ((std::size_t{sequence.batch_row} + i) * shape.heads + kv_head) * shape.head_dim);
            tile_header(tile)->rows_written = static_cast<std::uint16_t>(row + rows);
            Access::record(memory, tile, row, row + rows, number(sequence.reader.request));
            witness += witness_of_row(loaded, AccessKind::write) * rows;
            stored += rows;
        } else {
            sequence.report->report({.access = AccessKind::write,
                                     .layer = layer,
                                     .head = kv_head,
                                     .table_index = table_index,
                                     .page = entry.page,
                                     .rows = row,
                                     .loaded = loaded});
        }
        i += rows;
    }
    sequence.report->witness.fetch_add(witness, std::memory_order_relaxed);
    sequence.report->rows_written.fetch_add(stored, std::memory_order_relaxed);
}

}  // namespace kvw
