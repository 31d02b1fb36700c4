// Controls: faults planted into a copy of the ledger, which must see each of them.
//
// A check that never fails proves nothing. So while verify reads a trace it changes single values
// of that trace's own events, in memory, and applies them to a copy of the ledger as it stood:
// early in the trace, and again each time it has become twice as long, so that there is one in its
// later half.
//
//     ledger   a page of a reader handed to a stranger before the read; a read of one row more; a
//              scrub left out before the page is handed out; where pages are shared, an adopt by a
//              stranger, and a share left out before its page is adopted; where rows are moved, one
//              row further on
//     kernel   a witness sum off by one; the rows that the kernels counted off by one
//     ends     a digest of consumed tokens, a digest of emitted bytes, the number of answered
//              tokens; the stamp of a slot; the digest of what is adopted
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>

#include "replay/certificate.h"
#include "src/ledger/ledger.h"
#include "traces/event.h"

namespace kvw {

class Controls {
  public:
    Controls();

    // To be called before `ledger` is given rest[0]; `rest` goes on to the end of what is in
    // memory.
    void before(const Ledger& ledger, std::span<const Event> rest) {
        if (ledger.next_event() >= due_[static_cast<std::size_t>(rest[0].kind)]) [[unlikely]] {
            plant(ledger, rest);
        }
    }
    // By layer; a layer on which nothing could be planted has a zero count.
    const std::map<ProofLayer, ControlCount>& counts() const { return counts_; }

  private:
    void plant(const Ledger& ledger, std::span<const Event> rest);
    void count(ProofLayer layer, bool caught);

    std::array<std::uint64_t, 256> due_;  // by event kind: the first event at which to plant again
    std::map<ProofLayer, ControlCount> counts_;
};

}  // namespace kvw
