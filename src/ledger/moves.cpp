// Split roles: rows go from a request's prefill table to its decode table.
#include <algorithm>

#include "src/ledger/ledger.h"

namespace kvw {

namespace {

std::string str(std::uint64_t number) { return std::to_string(number); }

}  // namespace

void Ledger::on_transfer(const Event& event) {
    const auto transfer = event.as<events::Transfer>();
    ++counts_.transfers;
    Request* request = running(transfer.request, "transfer");
    if (request == nullptr) {
        return;
    }
    const std::string says = "request " + str(transfer.request) + " moves " + str(transfer.count) +
                             " rows up to row " + str(transfer.end);
    if (pools_[1].pages == 0 || request->on_decode || transfer.count == 0 ||
        transfer.count > transfer.end || transfer.end > kLedgerPagesMax * kPageTokens) {
        return gap(request->owner, says + (pools_[1].pages == 0 ? " and there is no decode pool"
                                           : request->on_decode ? ", and all were moved before"
                                                                : std::string()));
    }
    if (transfer.version != request->version) {
        gap(request->owner, says + " at version " + str(transfer.version) +
                                " of its tables, which are at " + str(request->version));
    }
    if (request->witness_due) {
        gap(request->owner, "rows of request " + str(transfer.request) + " have no witness",
            ProofLayer::kernel);
    }
    request->witness_due = true;
    Table& source = request->table;
    Table& destination = request->other;
    const std::uint64_t start = transfer.end - transfer.count;
    if (start != destination.length) {
        gap(request->owner, says + ", it has received " + str(destination.length));
    }
    const std::uint64_t capacity = std::min(source.capacity(), destination.capacity());
    if (transfer.end > capacity) {
        gap(request->owner, says + " between tables of " + str(source.capacity()) + " and " +
                                str(destination.capacity()) + " rows");
    }
    const std::uint64_t end = std::min(transfer.end, capacity);
    if (const std::uint64_t first = std::max(start, source.length); end > first) {
        const Page& page = pages_[source.entries[first / kPageTokens].page];
        const auto row = static_cast<std::uint32_t>(first % kPageTokens);
        report_rows(ViolationKind::unwritten_row, *request, std::nullopt, page, row,
                    static_cast<std::uint32_t>(std::min<std::uint64_t>(
                        kPageTokens, end - first / kPageTokens * kPageTokens)),
                    "never written");
    }
    if (start < end) {
        if (source.irregular) {
            read_closely(*request, false, start, end);
        }
        if (destination.irregular || start != destination.length) {
            write_closely(*request, true, start, end);
        }
    }

    counts_.rows_covered += tiles_ * transfer.count;
    counts_.rows_written += tiles_ * transfer.count;
    for (std::uint64_t at = start; at < end;) {
        const std::uint64_t index = at / kPageTokens;
        const std::uint64_t stop = std::min(end, (index + 1) * kPageTokens);
        request->witness += (source.entries[index].mix * move_factor_ +
                             destination.entries[index].mix * write_factor_) *
                            (stop - at);
        at = stop;
    }
    destination.length = std::max(destination.length, end);
    source.irregular = true;  // until all are moved, rows events look whether they may be
    if (destination.length >= source.length) {
        go_to_decode(*request);
    }
}

// With less than all of its rows there, what it lacks was never written. Where there are pages for
// it, the read that follows names them.
void Ledger::go_to_decode(Request& request) {
    const std::uint64_t length = request.table.length, received = request.other.length;
    std::swap(request.table, request.other);
    request.on_decode = true;
    if (received < length && received == request.table.capacity()) {
        report({.kind = ViolationKind::unwritten_row,
                .layer = ProofLayer::ledger,
                .reader = request.owner,
                .detail = "request " + str(number(request.owner.request)) + " goes on with " +
                          str(received) + " of its " + str(length) +
                          " rows in the decode pool, and without pages for the others"});
    }
}

}  // namespace kvw
