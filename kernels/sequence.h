// What a kernel is told about one request in one step, and what it reports back.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/tile.h"
#include "src/base/ids.h"
#include "src/base/witness_mix.h"

namespace kvw {

// One entry of a page table: the page and the generation it had when the entry was made. `grantor`:
// a declared share lets this reader use the rows that this request of the same tenant wrote, and
// nobody else's; nobody: the rows are the reader's own.
struct PageRef {
    std::uint32_t page = 0;
    std::uint32_t generation = 0;
    RequestId grantor{};
    // Whose rows must stand in the page when `reader` uses it.
    constexpr RequestId writer(RequestId reader) const {
        return grantor == RequestId{} ? reader : grantor;
    }
    friend bool operator==(const PageRef&, const PageRef&) = default;
};

// A header that was not the one expected, as it was loaded.
struct TileFault {
    AccessKind access = AccessKind::read;
    std::uint32_t layer = 0, head = 0;
    std::uint32_t table_index = 0;  // which entry of the page table
    std::uint32_t page = 0;         // the page that was meant
    std::uint32_t rows = 0;         // rows that were about to be read, or the row to be written
    TileHeader loaded;
    std::uint64_t shadow_writer = 0;  // checked execution: the foreign writer, else 0
    bool from_shadow = false;         // found by the shadow table, not by the header
};

// Evidence that kernels add up for one request over one step. Sums commute, so which thread adds is
// not visible. Counters are logical: tiles and rows as the ledger counts them, not loads or
// launches.
struct SequenceReport {
    std::atomic<std::uint64_t> witness{0};
    std::atomic<std::uint64_t> rows_read{
        0};  // sum over query rows, KV heads and layers of visible rows
    std::atomic<std::uint64_t> rows_written{0};  // sum over KV heads and layers of stored rows
    std::atomic<std::uint32_t> faults{0};
    std::mutex fault_lock;
    std::vector<TileFault> first_faults;  // at most one, the least by (layer, head, table_index)

    // Counts a fault and keeps it if it comes before the one held.
    void report(const TileFault& fault);
    void clear();
};

// One request in one step. Made from a lease (src/kv); kernels trust `reader`, which comes from the
// admission record, and check everything in `pages` against the headers they load.
struct SequenceView {
    Owner reader;
    std::span<const PageRef> pages;  // covers positions [0, first + count)
    std::uint32_t first = 0;         // position of the first new token
    std::uint32_t count = 0;         // new tokens in this step, >= 1
    std::uint32_t batch_row = 0;     // row of the first new token in the batch matrices
    std::uint32_t logits_from =
        0;  // new tokens with index >= this get logits (count - 1: the last one)
    SequenceReport* report = nullptr;
    bool check_headers = true;  // false only under a fault plan: then the witness stands alone
};

}  // namespace kvw
