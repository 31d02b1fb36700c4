// Pages: who owns them, who wrote and read their rows, and what the kernels must have added up.
#include <algorithm>
#include <limits>

#include "kernels/tile.h"
#include "src/base/witness_mix.h"
#include "src/ledger/ledger.h"

namespace kvw {

namespace {

constexpr std::uint64_t kLow32 = 0xffffffff;

std::string str(std::uint64_t number) { return std::to_string(number); }

// Sum of p % 16 + 1 over the positions [begin, end) of one page: the rows of it that they see.
constexpr std::uint64_t rows_seen(std::uint64_t begin, std::uint64_t end) {
    return (end * (end + 1) - begin * (begin + 1)) / 2;
}

}  // namespace

void Ledger::on_alloc(const Event& event) {
    const auto alloc = event.as<events::Alloc>();
    Page* page = page_at(alloc.page, "alloc");
    Request* request = running(alloc.request, "alloc");
    if (page == nullptr) {
        return;
    }
    ++counts_.pages;
    const Owner owner = request != nullptr ? request->owner : Owner{{}, RequestId(alloc.request)};
    const std::uint32_t rows = rows_in(*page);
    if (page->state == PageState::owned) {
        report({.kind = ViolationKind::double_owner,
                .layer = ProofLayer::ledger,
                .reader = owner,
                .writer = owner_of(*page),
                .page = alloc.page,
                .generation = page->generation,
                .row_end = rows,
                .detail = "page " + str(alloc.page) + " goes to request " + str(alloc.request) +
                          " while request " + str(page->request) + " has it"});
        take_from_holders(*page);
    } else if (page->state != PageState::scrubbed) {
        const bool virgin = page->state == PageState::virgin;
        report({.kind = ViolationKind::missing_scrub,
                .layer = ProofLayer::ledger,
                .reader = owner,
                .writer = virgin ? std::nullopt : std::optional(owner_of(*page)),
                .page = alloc.page,
                .generation = page->generation,
                .row_end = rows,
                .detail = "page " + str(alloc.page) + " goes to request " + str(alloc.request) +
                          (virgin ? " and was never scrubbed"
                                  : " with what request " + str(page->request) + " left in it")});
        if (rows > 0) {
            writers_of(*page);
        }
    }
    if (page->quarantined) {
        gap(owner, "page " + str(alloc.page) + " is handed out, which was in quarantine");
    }
    if (!page->poison_checked) {
        gap(owner, "page " + str(alloc.page) + " is handed out without a look at its poison",
            ProofLayer::kernel);
    }
    if (alloc.generation != std::uint64_t{page->generation} + 1 || alloc.generation > kLow32) {
        gap(owner, "page " + str(alloc.page) + " goes from generation " + str(page->generation) +
                       " to " + str(alloc.generation));
    }
    page->request = alloc.request;
    page->tenant = number(owner.tenant);
    page->generation = static_cast<std::uint32_t>(alloc.generation);
    page->state = PageState::owned;
    page->rows = 0;
    page->poison_checked = false;
    page->taken_away = page->spoilt = false;
    page->slot = kNone;
    // take_from_holders() may have let go of the only request that had the page.
    request = request != nullptr ? find(alloc.request) : nullptr;
    if (request == nullptr) {
        return;
    }
    ++request->version;
    const bool decode = on_decode_side(alloc.page);
    Table& table = table_of(*request, decode);
    if (alloc.group != 0 || alloc.index != table.entries.size()) {
        gap(owner, "page " + str(alloc.page) + " becomes entry " + str(alloc.index) + " of group " +
                       str(alloc.group) + ", the next one is " + str(table.entries.size()) +
                       " of group 0");
    }
    if (entries_ == kLedgerPagesMax) {
        return gap(owner, "tables with more than " + str(kLedgerPagesMax) + " entries");
    }
    page->slot = slot_of(*request);
    page->index = static_cast<std::uint32_t>(table.entries.size());
    push_entry(table, *page);
    ++request->pages_held;
    if (page->irregular) {
        mark(page->slot, decode, page->index);
    }
}

void Ledger::push_entry(Table& table, const Page& page) {
    TableEntry entry{.mix = page_mix(page.tenant, page.request, page.generation, number_of(page)),
                     .page = number_of(page),
                     .generation = page.generation};
    if (!table.entries.empty()) {
        entry.before = table.entries.back().before + table.entries.back().mix;
    }
    table.entries.push_back(entry);
    ++entries_;
}

void Ledger::on_poison_check(const Event& event) {
    const auto check = event.as<events::PoisonCheck>();
    Page* page = page_at(check.page, "poison_check");
    if (page == nullptr) {
        return;
    }
    page->poison_checked = check.words > 0;
    if (check.wrong > 0) {
        report({.kind = ViolationKind::missing_scrub,
                .layer = ProofLayer::kernel,
                .writer = page->request == 0 ? std::nullopt : std::optional(owner_of(*page)),
                .page = check.page,
                .generation = page->generation,
                .row_end = kPageTokens,
                .detail = str(check.wrong) + " of " + str(check.words) + " words re-read in page " +
                          str(check.page) + " are not poison: its scrub was not done"});
    }
}

void Ledger::on_free(const Event& event) {
    const auto free = event.as<events::Free>();
    Page* page = page_at(free.page, "free");
    if (page == nullptr) {
        return;
    }
    Request* holder = find(free.request);
    const bool by_owner = page->state == PageState::owned && page->request == free.request &&
                          (page->slot != kNone || page->share == kNone);
    const bool by_reader = !by_owner && holder != nullptr && is_reader(*page, *holder);
    if (!by_owner && !by_reader) {
        return gap({{}, RequestId(free.request)},
                   "request " + str(free.request) + " frees page " + str(free.page) +
                       (page->state != PageState::owned ? ", which is free"
                        : page->request == free.request
                            ? ", which it let go of"
                            : ", which is request " + str(page->request) + "'s"));
    }
    if (holder != nullptr) {
        check_free(*holder, *page, free.reason);
    }
    std::uint32_t index = page->index;
    bool had_entry = true;
    if (by_owner) {
        page->rows = static_cast<std::uint8_t>(rows_in(*page));
        had_entry = page->slot != kNone;
        page->slot = kNone;
    } else {
        index = shares_[page->share].index;
        leave_share(*page, slot_of(*holder));
    }
    if (page->slot == kNone && page->share == kNone) {
        page->state = PageState::freed;
    }
    if (holder == nullptr || !had_entry) {
        return;
    }
    const bool decode = on_decode_side(free.page);
    if (holder->phase == Phase::admitted && decode == holder->on_decode) {
        mark(slot_of(*holder), decode, index);  // it may still be read
    }
    let_go(slot_of(*holder));
}

void Ledger::check_free(const Request& request, const Page& page, std::uint64_t reason) {
    const auto is = [&](FreeReason expected) {
        return reason == static_cast<std::uint64_t>(expected);
    };
    bool fits = false;
    switch (request.phase) {
        case Phase::submitted:
            break;
        case Phase::admitted:
            fits = is(FreeReason::transferred) && request.on_decode &&
                   !on_decode_side(number_of(page));
            break;
        case Phase::preempted:
            fits = is(FreeReason::preempted);
            break;
        case Phase::finished:
            switch (request.finish_reason) {
                case FinishReason::cancelled:
                case FinishReason::deadline:
                    fits = is(FreeReason::cancelled);
                    break;
                case FinishReason::error:
                    fits = is(FreeReason::error);
                    break;
                case FinishReason::violation:
                    fits = is(FreeReason::violation);
                    break;
                default:
                    fits = is(FreeReason::finished);
            }
    }
    if (!fits) {
        gap(request.owner, "request " + str(number(request.owner.request)) + " frees page " +
                               str(number_of(page)) + " for reason number " + str(reason) +
                               ", which is not where it stands");
    }
}

void Ledger::on_drain(const Event& event) {
    Page* page = page_at(event.as<events::Drain>().page, "drain");
    if (page == nullptr) {
        return;
    }
    if (page->state == PageState::owned) {
        return take_away(*page, "drains");
    }
    if (page->state != PageState::freed || page->quarantined) {
        return gap(owner_of(*page),
                   "page " + str(number_of(*page)) + " drains and was not just freed");
    }
    page->state = PageState::drained;
}

void Ledger::on_quarantine(const Event& event) {
    Page* page = page_at(event.as<events::Quarantine>().page, "quarantine");
    if (page == nullptr) {
        return;
    }
    if (page->state == PageState::owned) {
        take_away(*page, "goes into quarantine");
    } else if (page->quarantined || page->state == PageState::virgin) {
        gap(owner_of(*page),
            "page " + str(number_of(*page)) + " goes into quarantine and is in nobody's hands");
    }
    page->quarantined = true;
}

void Ledger::on_scrub(const Event& event) {
    const auto scrub = event.as<events::Scrub>();
    ++counts_.scrubs;
    Page* page = page_at(scrub.page, "scrub");
    if (page == nullptr) {
        return;
    }
    page->poison_checked = false;  // a look before says nothing about this one
    const std::uint64_t expected =
        page->state == PageState::virgin
            ? virgin_witness_
            : page_mix(page->tenant, page->request, page->generation, number_of(*page)) *
                  scrub_factor_;
    scrub_witness_ += expected;
    switch (page->state) {
        case PageState::virgin:
        case PageState::drained:
            break;
        case PageState::scrubbed:
            scrub_mismatch_ = true;  // what a FREED header adds is not predicted
            return gap({}, "page " + str(scrub.page) + " is scrubbed twice");
        case PageState::freed:
            gap(owner_of(*page), "page " + str(scrub.page) + " is scrubbed before it was drained");
            break;
        case PageState::owned:
            take_away(*page, "is scrubbed");
            break;
    }
    if (page->quarantined) {
        gap(owner_of(*page), "page " + str(scrub.page) + " is scrubbed in quarantine");
    }
    if (scrub.witness != (expected & kLow32)) {
        scrub_mismatch_ = true;
        report({.kind = ViolationKind::witness_mismatch,
                .layer = ProofLayer::kernel,
                .reader = owner_of(*page),
                .page = scrub.page,
                .generation = page->generation,
                .row_end = kPageTokens,
                .detail = "the headers scrubbed in page " + str(scrub.page) +
                          " are not those of its last owner"});
    }
    if (page->state == PageState::owned) {
        if (PageWriters* writers = writers_of(*page); writers != nullptr) {
            *writers = {};
        }
        return;
    }
    forget_writers(*page);
    page->rows = 0;
    page->state = PageState::scrubbed;
}

void Ledger::on_step(const Event& event) {
    const auto step = event.as<events::Step>();
    close_step();
    if (counts_.steps > 0 ? step.step != step_ + 1 : step.step > 1) {
        gap({}, "step " + str(step.step) + " follows " +
                    (counts_.steps > 0 ? "step " + str(step_) : std::string("the start")));
    }
    ++counts_.steps;
    step_ = step.step;
    step_sequences_ = step.sequences;
    step_rows_ = 0;
    step_open_ = true;
}

void Ledger::close_step() {
    if (step_open_ && step_rows_ != step_sequences_) {
        gap({}, "step " + str(step_) + " has " + str(step_sequences_) +
                    " sequences, rows were recorded for " + str(step_rows_));
    }
    step_open_ = false;
}

void Ledger::on_rows(const Event& event) {
    const auto rows = event.as<events::Rows>();
    ++counts_.reads;
    ++step_rows_;
    Request* found = running(rows.request, "rows");
    if (found == nullptr) {
        return;
    }
    Request& request = *found;
    if (const std::size_t tenant = number(request.owner.tenant);
        tenant != 0 && tenant <= tallies_.size()) {
        ++tallies_[tenant - 1].reads;
    }
    if (rows.count == 0 || rows.count > rows.end || rows.end > kLedgerPagesMax * kPageTokens ||
        rows.group != 0) {
        return gap(request.owner, "request " + str(rows.request) + " writes " + str(rows.count) +
                                      " rows up to row " + str(rows.end) + " of group " +
                                      str(rows.group));
    }
    if (!step_open_ || tiles_ == 0) {
        gap(request.owner, "rows of request " + str(rows.request) + " before " +
                               (step_open_ ? "the model" : "the first step"));
    }
    if (rows.version != request.version) {
        gap(request.owner, "request " + str(rows.request) + " reads through version " +
                               str(rows.version) + " of its table, which is at " +
                               str(request.version));
    }
    if (rows.end > request.rows_max) {
        gap(request.owner, "request " + str(rows.request) + " reads up to row " + str(rows.end) +
                               ", " + str(request.rows_max) + " were admitted");
    }
    if (request.witness_due) {
        gap(request.owner, "rows of request " + str(rows.request) + " have no witness",
            ProofLayer::kernel);
    }
    request.witness_due = true;
    request.rows_step = step_;
    request.slot_row = static_cast<std::uint32_t>(step_rows_ - 1);
    const std::uint64_t start = rows.end - rows.count;
    std::uint64_t capacity = request.table.capacity();
    if (request.table.irregular || start != request.table.length || rows.end > capacity)
        [[unlikely]] {
        if (!request.on_decode && request.other.length > 0) {
            go_to_decode(request);
            capacity = request.table.capacity();
        }
        if (rows.end > capacity) {
            gap(request.owner, "request " + str(rows.request) + " reads up to row " +
                                   str(rows.end) + " through a table of " + str(capacity) +
                                   " rows");
        }
        const std::uint64_t end = std::min(rows.end, capacity);
        write_closely(request, request.on_decode, std::min(start, capacity), end);
        read_closely(request, request.on_decode, 0, end);
    }
    count_rows(request, start, rows.end);
    request.table.length = std::min(std::max(request.table.length, rows.end), capacity);
}

void Ledger::count_rows(Request& request, std::uint64_t start, std::uint64_t end) {
    counts_.rows_covered += tiles_ * rows_seen(start, end);
    counts_.rows_written += tiles_ * (end - start);
    std::uint64_t read = 0, written = 0;  // page_mix times rows
    const Table& table = request.table;
    end = std::min(end, table.capacity());
    for (std::uint64_t at = start; at < end;) {
        const TableEntry& entry = table.entries[at / kPageTokens];
        const std::uint64_t page_begin = at / kPageTokens * kPageTokens;
        const std::uint64_t stop = std::min(end, page_begin + kPageTokens);
        read += entry.before * kPageTokens * (stop - at) +
                entry.mix * rows_seen(at - page_begin, stop - page_begin);
        written += entry.mix * (stop - at);
        at = stop;
    }
    request.witness += read * read_factor_ + written * write_factor_;
}

void Ledger::write_closely(Request& request, bool decode, std::uint64_t start, std::uint64_t end) {
    Table& table = table_of(request, decode);
    if (start < table.length) {
        gap(request.owner, "request " + str(number(request.owner.request)) + " writes row " +
                               str(start) + " again, it has " + str(table.length));
    }
    // Rows that were skipped: from here on the length does not say what is written.
    for (std::uint64_t i = table.length / kPageTokens; i * kPageTokens < start; ++i) {
        const auto index = static_cast<std::uint32_t>(i);
        Page& page = pages_[table.entries[i].page];
        if (owns(request, page, index) && writers_of(page) != nullptr) {
            mark(page.slot, decode, index);
        }
    }
    for (std::uint64_t at = start; at < end;) {
        const auto index = static_cast<std::uint32_t>(at / kPageTokens);
        const std::uint64_t page_begin = std::uint64_t{index} * kPageTokens;
        const std::uint64_t stop = std::min(end, page_begin + kPageTokens);
        const auto row_begin = static_cast<std::uint32_t>(at - page_begin);
        const auto row_end = static_cast<std::uint32_t>(stop - page_begin);
        Page& page = pages_[table.entries[index].page];
        const bool mine = owns(request, page, index);
        const bool shared = page.share != kNone;
        if ((!mine || shared) && table.written.insert(index).second) {
            report_rows(ViolationKind::late_write, request,
                        page.request == 0 ? std::nullopt : std::optional(owner_of(page)), page,
                        row_begin, row_end,
                        page.state != PageState::owned           ? "which it let go of"
                        : reads_by_grant(request, decode, index) ? "which it may only read"
                        : mine                                   ? "which it shares"
                                                                 : "which another owner has");
        }
        if (!mine || page.irregular) {
            if (PageWriters* writers = writers_of(page); writers != nullptr) {
                std::fill(writers->begin() + row_begin, writers->begin() + row_end,
                          RowWriter{request.owner, page.generation});
            }
            if (!mine) {
                mark_holders(page);
            }
        }
        at = stop;
    }
}

void Ledger::read_closely(Request& request, bool decode, std::uint64_t begin, std::uint64_t end) {
    std::set<std::uint32_t>& marked = table_of(request, decode).marked;
    auto it = marked.lower_bound(static_cast<std::uint32_t>(begin / kPageTokens));
    while (it != marked.end() && std::uint64_t{*it} * kPageTokens < end) {
        const std::uint64_t page_begin = std::uint64_t{*it} * kPageTokens;
        const auto rows_end =
            static_cast<std::uint32_t>(std::min<std::uint64_t>(kPageTokens, end - page_begin));
        it = look_at(request, decode, *it, rows_end) ? marked.erase(it) : std::next(it);
    }
}

bool Ledger::look_at(const Request& request, bool decode, std::uint32_t index,
                     std::uint32_t rows_end) {
    const TableEntry& entry = table_of(request, decode).entries[index];
    Page& page = pages_[entry.page];
    const auto found = writers_.find(entry.page);
    const PageWriters* writers = page.irregular ? &found->second : nullptr;
    const bool mine = owns(request, page, index) || reads_by_grant(request, decode, index);
    if (mine && writers == nullptr && !page.taken_away) {
        return true;
    }
    const bool adopted = !decode && index < request.seats.size();
    const bool granted_never = adopted && request.seats[index] == kNoGrant;
    // Still the page that its alloc or adopt gave it, as its headers say.
    const bool same_life = !granted_never && entry.mix == page_mix(page.tenant, page.request,
                                                                   page.generation, entry.page);
    if (page.state != PageState::owned || (!mine && same_life)) {
        std::optional<Owner> writer;
        if (writers != nullptr && (*writers)[0].owner.request != RequestId{}) {
            writer = (*writers)[0].owner;
        } else if (writers == nullptr && rows_in(page) > 0) {
            writer = owner_of(page);
        }
        report_rows(ViolationKind::freed_page, request, writer, page, 0, rows_end,
                    page.state == PageState::owned ? "which it let go of" : "which is free");
        return true;
    }
    if (!mine) {
        // Its owner is someone else, and whatever the reader may still find there of its own, or of
        // what it was once granted, is no excuse.
        const auto writer_of = [&](std::uint32_t row) {
            if (writers == nullptr) {
                return owner_of(page);
            }
            const RowWriter& left = (*writers)[row];
            const bool other = left.owner.request != RequestId{} && left.owner != request.owner &&
                               !(adopted && !granted_never && left.generation == entry.generation);
            return other ? left.owner : owner_of(page);
        };
        for (std::uint32_t row = 0; row < rows_end;) {
            std::uint32_t stop = row + 1;
            while (stop < rows_end && writer_of(stop) == writer_of(row)) {
                ++stop;
            }
            const Owner writer = writer_of(row);
            const ViolationKind kind = writer == request.owner ? ViolationKind::stale_row
                                       : granted_never && writer.tenant == request.owner.tenant
                                           ? ViolationKind::undeclared_share
                                           : ViolationKind::foreign_row;
            report_rows(kind, request, writer, page, row, stop, "which another owner has");
            row = stop;
        }
        return true;
    }
    const RowWriter own{owner_of(page), page.generation};
    bool reported = false;
    for (std::uint32_t row = 0; writers != nullptr && row < rows_end;) {
        const RowWriter& writer = (*writers)[row];
        std::uint32_t stop = row + 1;
        while (stop < rows_end && (*writers)[stop] == writer) {
            ++stop;
        }
        if (writer.owner.request == RequestId{}) {
            report_rows(ViolationKind::unwritten_row, request, std::nullopt, page, row, stop,
                        "never written");
            reported = true;
        } else if (!(writer == own)) {
            report_rows(writer.generation == page.generation ? ViolationKind::foreign_row
                                                             : ViolationKind::stale_row,
                        request, writer.owner, page, row, stop, "written by another owner");
            reported = true;
        }
        row = stop;
    }
    if (!reported && page.taken_away) {
        report_rows(ViolationKind::freed_page, request, owner_of(page), page, 0, rows_end,
                    "which was taken away from it");
        reported = true;
    }
    if (reported) {
        return true;
    }
    if (std::all_of(writers->begin(), writers->end(),
                    [&](const RowWriter& w) { return w == own; })) {
        forget_writers(page);
        return true;
    }
    return false;
}

void Ledger::report_rows(ViolationKind kind, const Request& request, std::optional<Owner> writer,
                         const Page& page, std::uint32_t begin, std::uint32_t end,
                         const char* why) {
    std::string detail = "request " + str(number(request.owner.request)) +
                         (kind == ViolationKind::late_write ? " writes" : " reads") + " rows " +
                         str(begin) + " to " + str(end - 1) + " of page " + str(number_of(page)) +
                         ", " + why;
    report({.kind = kind,
            .layer = ProofLayer::ledger,
            .reader = request.owner,
            .writer = writer,
            .page = number_of(page),
            .generation = page.generation,
            .row_begin = begin,
            .row_end = end,
            .detail = std::move(detail)});
}

void Ledger::on_witness(const Event& event) {
    const auto witness = event.as<events::Witness>();
    Request* request = running(witness.request, "witness");
    if (request == nullptr) {
        return;
    }
    ++counts_.witnesses;
    if (!request->witness_due) {
        gap(request->owner, "a witness of request " + str(witness.request) + " without rows",
            ProofLayer::kernel);
    }
    request->witness_due = false;
    compare_witness(*request, witness.sum, kLow32);
}

void Ledger::on_witness_sum(const Event& event) {
    const auto witness = event.as<events::WitnessSum>();
    Request* request = running(witness.request, "witness_sum");
    if (request == nullptr) {
        return;
    }
    if (witness.positions != request->table.length) {
        gap(request->owner,
            "a witness of request " + str(witness.request) + " over " + str(witness.positions) +
                " positions, it has " + str(request->table.length),
            ProofLayer::kernel);
    }
    compare_witness(*request, witness.sum, std::numeric_limits<std::uint64_t>::max());
}

void Ledger::compare_witness(Request& request, std::uint64_t recorded, std::uint64_t mask) {
    if (recorded == (request.witness & mask) || request.witness_told) {
        return;
    }
    request.witness_told = true;
    report({.kind = ViolationKind::witness_mismatch,
            .layer = ProofLayer::kernel,
            .reader = request.owner,
            .detail = "the headers that the kernels loaded for request " +
                      str(number(request.owner.request)) + " up to row " +
                      str(request.table.length) + " are not those of its table"});
}

void Ledger::on_loaded(const Event& event) {
    const auto loaded = event.as<events::Loaded>();
    ++counts_.loaded;
    const Request* request = find(loaded.request);
    const Owner reader = request != nullptr ? request->owner : Owner{{}, RequestId(loaded.request)};
    const Owner owner{TenantId(static_cast<std::uint32_t>(loaded.tenant_loaded)),
                      RequestId(loaded.request_loaded)};
    const bool owned = loaded.state_loaded == static_cast<std::uint64_t>(TileState::owned);
    ViolationKind kind = ViolationKind::unwritten_row;
    const char* why = "with too few rows written";
    const bool write = loaded.access == static_cast<std::uint64_t>(AccessKind::write);
    if (write) {  // `rows` is the row that was to be stored
        kind = ViolationKind::late_write;
        why = "not the one to be written";
    } else if (loaded.state_loaded == static_cast<std::uint64_t>(TileState::freed)) {
        kind = ViolationKind::freed_page;
        why = "of a page that was scrubbed";
    } else if (owned && owner != reader) {
        kind = ViolationKind::foreign_row;
        why = "of another owner";
    } else if (owned && loaded.rows_loaded >= loaded.rows) {
        kind = ViolationKind::stale_row;
        why = "of another generation, page, layer or head";
    }
    report({.kind = kind,
            .layer = ProofLayer::kernel,
            .reader = reader,
            .writer = owned ? std::optional(owner) : std::nullopt,
            .page = loaded.page,
            .generation = loaded.generation_loaded,
            .row_begin = write ? std::min<std::uint64_t>(loaded.rows, kPageTokens) : 0,
            .row_end = std::min<std::uint64_t>(loaded.rows, kPageTokens) + (write ? 1 : 0),
            .detail = "request " + str(loaded.request) + " met a header " + why + " in page " +
                      str(loaded.page) + ", layer " + str(loaded.layer) + ", head " +
                      str(loaded.head)});
}

Ledger::Page* Ledger::page_at(std::uint64_t page, const char* what) {
    const bool known = page - pools_[0].first_page < pools_[0].pages || on_decode_side(page);
    if (!known) [[unlikely]] {
        gap({}, std::string(what) + " of page " + str(page) + ", which no pool has");
        return nullptr;
    }
    if (page >= pages_.size()) {
        pages_.resize(page + 1);
    }
    return &pages_[page];
}

std::uint32_t Ledger::number_of(const Page& page) const {
    return static_cast<std::uint32_t>(&page - pages_.data());
}

bool Ledger::on_decode_side(std::uint64_t page) const {
    return page - pools_[1].first_page < pools_[1].pages;
}

Ledger::Table& Ledger::table_of(Request& request, bool decode) {
    return decode == request.on_decode ? request.table : request.other;
}
const Ledger::Table& Ledger::table_of(const Request& request, bool decode) const {
    return decode == request.on_decode ? request.table : request.other;
}

Owner Ledger::owner_of(const Page& page) {
    return {TenantId(page.tenant), RequestId(page.request)};
}

std::uint32_t Ledger::rows_in(const Page& page) const {
    if (page.slot == kNone) {
        return page.rows;
    }
    const std::uint64_t length =
        table_of(slots_[page.slot], on_decode_side(number_of(page))).length;
    const std::uint64_t begin = std::uint64_t{page.index} * kPageTokens;
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(length > begin ? length - begin : 0, kPageTokens));
}

Ledger::PageWriters* Ledger::writers_of(Page& page) {
    if (page.irregular) {
        return &writers_.at(number_of(page));
    }
    if (writers_.size() == kLedgerIrregularPagesMax) {
        return nullptr;
    }
    PageWriters& writers = writers_[number_of(page)];
    writers = {};
    std::fill_n(writers.begin(), rows_in(page), RowWriter{owner_of(page), page.generation});
    page.irregular = true;
    return &writers;
}

void Ledger::forget_writers(Page& page) {
    if (page.irregular) {
        writers_.erase(number_of(page));
        page.irregular = false;
    }
}

void Ledger::mark(std::uint32_t slot, bool decode, std::uint32_t index) {
    Table& table = table_of(slots_[slot], decode);
    table.irregular = true;
    table.marked.insert(index);
}

}  // namespace kvw
