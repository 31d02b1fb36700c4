#include <algorithm>
#include <cstring>

#include "kernels/sim/operations.h"
#include "kernels/tile_check.h"

namespace kvw::sim {

namespace {

// Query rows that see each row of tile `index`, added up: what a kernel that walks the tile for
// every query row would count.
std::uint64_t visible_to_all(const SequenceView& sequence, const AttentionItem& item,
                             std::uint32_t index) {
    std::uint64_t visible = 0;
    const std::uint32_t tile_end = (index + 1) * kPageTokens;
    std::uint32_t row = item.row_begin;
    for (; row < item.row_end && sequence.first + row < tile_end; ++row) {
        visible += visible_rows(sequence.first + row, index);
    }
    return visible + std::uint64_t{item.row_end - row} * kPageTokens;
}

void add_row(Attended& running, const std::uint16_t* keys, std::uint32_t row) {
    std::uint64_t word = 0;
    for (std::uint32_t d = 0; d < kHashHalves; ++d) {
        word |= std::uint64_t{keys[d * kPageTokens + row]} << 16 * d;
    }
    running.sum += word;
    running.poisoned |= (word & kStored) != kStored ? 1 : 0;
}

// The same for all rows of a tile, four halves at a time: the words' sum is that of their halves,
// each at its place.
void add_rows(Attended& running, const std::uint16_t* keys) {
    constexpr std::uint64_t kEven = 0x0000ffff0000ffff;
    std::uint64_t stored = kStored;
    for (std::uint32_t d = 0; d < kHashHalves; ++d) {
        std::uint64_t sums = 0;  // two of 32 bits
        for (std::uint32_t row = 0; row < kPageTokens; row += 4) {
            std::uint64_t halves = 0;
            std::memcpy(&halves, keys + d * kPageTokens + row, sizeof halves);
            sums += (halves & kEven) + (halves >> 16 & kEven);
            stored &= halves;
        }
        running.sum += ((sums & 0xffffffff) + (sums >> 32)) << 16 * d;
    }
    running.poisoned |= stored != kStored ? 1 : 0;
}

template <class Access>
class Walk {
  public:
    Walk(const AttentionArgs& args, const AttentionItem& item)
        : args_(args),
          item_(item),
          sequence_(*item.sequence),
          memory_(args.memory),
          group_(args.query_heads / memory_.shape.heads),
          first_(sequence_.first + item.row_begin),
          last_(sequence_.first + item.row_end - 1) {}

    void run() {
        for (std::uint32_t index = 0; index <= last_ / kPageTokens; ++index) {
            add_tile(index);
        }
        sequence_.report->witness.fetch_add(witness_, std::memory_order_relaxed);
        sequence_.report->rows_read.fetch_add(rows_read_, std::memory_order_relaxed);
    }

  private:
    std::uint8_t* tile_of(const PageRef& entry) const {
        return entry.page < memory_.pages ? memory_.tile(entry.page, args_.layer, item_.kv_head)
                                          : nullptr;
    }

    void add_tile(std::uint32_t index) {
        const std::uint32_t begin = index * kPageTokens;
        const std::uint32_t rows = visible_rows(last_, index);
        const std::uint32_t earlier = first_ > begin ? std::min(first_ - begin, rows) : 0;
        const std::uint16_t* const keys = usable(index, rows);
        if (keys != nullptr && earlier == kPageTokens) {
            add_rows(running_, keys);
            return;
        }
        for (std::uint32_t row = 0; row < rows; ++row) {
            if (keys != nullptr) {
                add_row(running_, keys, row);
            }
            if (row >= earlier) {
                write(begin + row);
            }
        }
    }

    // Accounts for the tile and judges it: its keys, or null when its rows count as masked.
    const std::uint16_t* usable(std::uint32_t index, std::uint32_t rows) {
        const PageRef& entry = sequence_.pages.data()[index];
        std::uint8_t* const tile = tile_of(entry);
        if (tile == nullptr) {
            report(index, rows, TileHeader{}, false, 0);
            return nullptr;
        }
        const TileHeader& loaded = *tile_header(tile);
        const std::uint64_t visible = visible_to_all(sequence_, item_, index);
        witness_ += witness_of_row(loaded, AccessKind::read) * visible;
        rows_read_ += visible;
        if (sequence_.check_headers &&
            !(header_matches(loaded, sequence_.reader, entry, args_.layer, item_.kv_head) &&
              loaded.rows_written >= rows)) {
            report(index, rows, loaded, false, 0);
            return nullptr;
        }
        bool foreign = false;
        const std::uint64_t writer =
            Access::foreign_writer(memory_, tile, rows, sequence_, entry, &foreign);
        if (foreign) {
            report(index, rows, loaded, true, writer);
            return nullptr;
        }
        return tile_keys(tile);
    }

    [[gnu::noinline]] void report(std::uint32_t index, std::uint32_t rows, const TileHeader& loaded,
                                  bool from_shadow, std::uint64_t writer) const {
        sequence_.report->report({.access = AccessKind::read,
                                  .layer = args_.layer,
                                  .head = item_.kv_head,
                                  .table_index = index,
                                  .page = sequence_.pages.data()[index].page,
                                  .rows = rows,
                                  .loaded = loaded,
                                  .shadow_writer = writer,
                                  .from_shadow = from_shadow});
    }

    void write(std::uint32_t position) const {
        const std::size_t row = std::size_t{sequence_.batch_row} + position - sequence_.first;
        for (std::uint32_t head = item_.kv_head * group_; head < (item_.kv_head + 1) * group_;
             ++head) {
            std::memcpy(args_.out + (row * args_.query_heads + head) * memory_.shape.head_dim,
                        &running_, sizeof running_);
        }
    }

    const AttentionArgs& args_;
    const AttentionItem& item_;
    const SequenceView& sequence_;
    const KvMemory& memory_;
    const std::uint32_t group_;
    const std::uint32_t first_, last_;  // positions of the queries
    Attended running_{};
    std::uint64_t witness_ = 0, rows_read_ = 0;
};

template <class Access>
void attend_item(const AttentionArgs& args, const AttentionItem& item) {
    check_attention<Access>(args, item);
    check(item.split == kAllSplits, "a running sum is not divided");
    Walk<Access>(args, item).run();
}

}  // namespace

void attend(const AttentionArgs& args, const AttentionItem& item) {
    attend_item<PlainAccess>(args, item);
}

void attend_checked(const AttentionArgs& args, const AttentionItem& item) {
    attend_item<CheckedAccess>(args, item);
}

}  // namespace kvw::sim
