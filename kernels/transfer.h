// Moves rows of a request from one page into another of its own (split roles: from the prefill side
// to the decode side).
//
// One implementation for every instruction set: it copies bytes and computes nothing. Per tile
//   - the source is read, so its header is checked as attention does: tenant always, request unless
//     granted, generation, page, layer, head, and at least row_end rows written;
//   - the destination is written, so its header is checked as append does: the reader's own,
//     generation, page, layer, head, and rows_written == row_begin. One that is not is reported as
//     a write and its tile stays untouched: a late writer changes nothing.
// A tile of either kind that does not match is skipped, the others are moved. rows_written of the
// destination is advanced here and nowhere else. Adds to the report, from the loaded headers: of
// each source, matching or not, the witness of a move and rows_read; of each destination written,
// the witness of a write and rows_written.
#pragma once

#include <cstdint>

#include "kernels/sequence.h"
#include "kernels/tile.h"

namespace kvw {

struct PageMove {
    Owner reader;  // from the admission record; owner of the destination
    PageRef source, destination;
    std::uint32_t table_index = 0;             // of both entries, in their tables
    std::uint32_t row_begin = 0, row_end = 0;  // rows within the page
    bool check_headers = true;                 // of the source, as in SequenceView
    SequenceReport* report = nullptr;
};

void transfer_page(const KvMemory& memory, const PageMove& move);
// The same; also checks the writer of each source row against memory.writers (a grant allows any,
// but not none), and records the reader as the writer of the destination's rows.
void transfer_page_checked(const KvMemory& memory, const PageMove& move);

}  // namespace kvw
