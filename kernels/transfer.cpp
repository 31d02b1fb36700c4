#include "kernels/transfer.h"

#include <cstring>

#include "kernels/tile_check.h"
#include "src/base/check.h"

namespace kvw {

namespace {

void copy_rows(std::uint8_t* to, std::uint8_t* from, const TileShape& shape, std::uint32_t begin,
               std::uint32_t end) {
    const std::size_t rows = end - begin;
    if (rows == kPageTokens) {
        std::memcpy(tile_keys(to), tile_keys(from), 2 * shape.key_bytes());
        return;
    }
    for (std::size_t d = 0; d < shape.head_dim; ++d) {
        const std::size_t place = d * kPageTokens + begin;
        std::memcpy(tile_keys(to) + place, tile_keys(from) + place, rows * sizeof(std::uint16_t));
    }
    const std::size_t place = std::size_t{begin} * shape.head_dim;
    std::memcpy(tile_values(to, shape) + place, tile_values(from, shape) + place,
                rows * shape.head_dim * sizeof(std::uint16_t));
}

template <class Access>
class Mover {
  public:
    Mover(const KvMemory& memory, const PageMove& move) : memory_(memory), move_(move) {}

    void tile(std::uint32_t layer, std::uint32_t head) {
        std::uint8_t* source = tile_of(move_.source, layer, head);
        std::uint8_t* destination = tile_of(move_.destination, layer, head);
        if (may_read(source, layer, head) && may_write(destination, layer, head)) {
            copy_rows(destination, source, memory_.shape, move_.row_begin, move_.row_end);
            tile_header(destination)->rows_written = static_cast<std::uint16_t>(move_.row_end);
            Access::record(memory_, destination, move_.row_begin, move_.row_end,
                           number(move_.reader.request));
            rows_written_ += rows();
        }
    }

    void publish() const {
        move_.report->witness.fetch_add(witness_, std::memory_order_relaxed);
        move_.report->rows_read.fetch_add(rows_read_, std::memory_order_relaxed);
        move_.report->rows_written.fetch_add(rows_written_, std::memory_order_relaxed);
    }

  private:
    std::uint32_t rows() const { return move_.row_end - move_.row_begin; }
    std::uint8_t* tile_of(const PageRef& entry, std::uint32_t layer, std::uint32_t head) const {
        return entry.page < memory_.pages ? memory_.tile(entry.page, layer, head) : nullptr;
    }

    bool may_read(std::uint8_t* tile, std::uint32_t layer, std::uint32_t head) {
        const PageRef& entry = move_.source;
        TileFault fault{.access = AccessKind::move,
                        .layer = layer,
                        .head = head,
                        .table_index = move_.table_index,
                        .page = entry.page,
                        .rows = move_.row_end};
        if (tile == nullptr) {
            move_.report->report(fault);
            return false;
        }
        fault.loaded = *tile_header(tile);
        witness_ += witness_of_row(fault.loaded, AccessKind::move) * rows();
        rows_read_ += rows();
        if (move_.check_headers &&
            !(header_matches(fault.loaded, move_.reader, entry, layer, head) &&
              fault.loaded.rows_written >= move_.row_end)) {
            move_.report->report(fault);
            return false;
        }
        const SequenceView reader{.reader = move_.reader};
        fault.shadow_writer =
            Access::foreign_writer(memory_, tile, move_.row_end, reader, entry, &fault.from_shadow);
        if (fault.from_shadow) {
            move_.report->report(fault);
            return false;
        }
        return true;
    }

    bool may_write(std::uint8_t* tile, std::uint32_t layer, std::uint32_t head) {
        PageRef entry = move_.destination;
        entry.grantor = {};  // a grant is for reading
        TileFault fault{.access = AccessKind::write,
                        .layer = layer,
                        .head = head,
                        .table_index = move_.table_index,
                        .page = entry.page,
                        .rows = move_.row_begin};
        if (tile != nullptr) {
            fault.loaded = *tile_header(tile);
        }
        if (tile == nullptr || !header_matches(fault.loaded, move_.reader, entry, layer, head) ||
            fault.loaded.rows_written != move_.row_begin) {
            move_.report->report(fault);
            return false;
        }
        witness_ += witness_of_row(fault.loaded, AccessKind::write) * rows();
        return true;
    }

    const KvMemory& memory_;
    const PageMove& move_;
    std::uint64_t witness_ = 0, rows_read_ = 0, rows_written_ = 0;
};

template <class Access>
void transfer_tiles(const KvMemory& memory, const PageMove& move) {
    check(move.row_begin < move.row_end && move.row_end <= kPageTokens,
          "a move has rows, and they are of one page");
    check(!Access::kChecked || memory.writers != nullptr, "checked execution has a shadow table");
    Mover<Access> mover(memory, move);
    for (std::uint32_t layer = 0; layer < memory.shape.layers; ++layer) {
        for (std::uint32_t head = 0; head < memory.shape.heads; ++head) {
            mover.tile(layer, head);
        }
    }
    mover.publish();
}

}  // namespace

void transfer_page(const KvMemory& memory, const PageMove& move) {
    transfer_tiles<PlainAccess>(memory, move);
}

void transfer_page_checked(const KvMemory& memory, const PageMove& move) {
    transfer_tiles<CheckedAccess>(memory, move);
}

}  // namespace kvw
