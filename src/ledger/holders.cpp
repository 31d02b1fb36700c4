// Who has a page: its owner's table, the prefix tree, and those who adopted it.
#include <algorithm>

#include "src/ledger/ledger.h"

namespace kvw {

namespace {

std::string str(std::uint64_t number) { return std::to_string(number); }

}  // namespace

void Ledger::on_share(const Event& event) {
    const auto share = event.as<events::Share>();
    Page* page = page_at(share.page, "share");
    Request* request = running(share.request, "share");
    if (page == nullptr || request == nullptr) {
        return;
    }
    const std::string says =
        "request " + str(share.request) + " shares page " + str(share.page) + ", ";
    if (page->state == PageState::owned && page->request != share.request) {
        return report({.kind = ViolationKind::undeclared_share,
                       .layer = ProofLayer::ledger,
                       .reader = request->owner,
                       .writer = owner_of(*page),
                       .page = share.page,
                       .generation = page->generation,
                       .row_end = kPageTokens,
                       .detail = says + "which request " + str(page->request) + " wrote"});
    }
    if (page->slot != slot_of(*request) || page->index != share.index ||
        page->generation != share.generation || on_decode_side(share.page)) {
        return gap(request->owner, says + "generation " + str(share.generation) +
                                       ", which is not entry " + str(share.index) +
                                       " of its prefill table");
    }
    if (page->share != kNone && shares_[page->share].in_tree) {
        return gap(request->owner, says + "which is shared already");
    }
    if (share.scope != static_cast<std::uint64_t>(CacheScope::session) &&
        share.scope != static_cast<std::uint64_t>(CacheScope::tenant)) {
        return gap(request->owner, says + "with scope number " + str(share.scope));
    }
    if (request->witness_due) {
        gap(request->owner, says + "before the witness of its rows", ProofLayer::kernel);
    }
    const std::uint32_t rows = rows_in(*page);
    if (rows < kPageTokens) {
        return report_rows(ViolationKind::unwritten_row, *request, std::nullopt, *page, rows,
                           kPageTokens, "never written, for others");
    }
    const auto scope = static_cast<CacheScope>(share.scope);
    if (scope > request->scope || (scope == CacheScope::session && request->session == 0)) {
        report({.kind = ViolationKind::undeclared_share,
                .layer = ProofLayer::ledger,
                .reader = request->owner,
                .writer = request->owner,
                .page = share.page,
                .generation = page->generation,
                .row_end = kPageTokens,
                .detail = says + "with its " + name_of(scope) +
                          ", and was submitted to share with its " + name_of(request->scope)});
    }
    if (page->irregular) {
        look_at(*request, false, page->index, kPageTokens);
    }
    if (page->share == kNone) {
        if (shares_free_.empty()) {
            shares_free_.push_back(static_cast<std::uint32_t>(shares_.size()));
            shares_.emplace_back();
        }
        page->share = shares_free_.back();
        shares_free_.pop_back();
    }
    Share& offer = shares_[page->share];
    offer.session = scope == CacheScope::session ? request->session : 0;
    offer.digest0 = share.digest0;
    offer.digest1 = share.digest1;
    offer.index = page->index;
    offer.scope = scope;
    offer.in_tree = true;
}

void Ledger::on_adopt(const Event& event) {
    const auto adopt = event.as<events::Adopt>();
    ++counts_.shares;
    Page* page = page_at(adopt.page, "adopt");
    Request* request = running(adopt.request, "adopt");
    if (page == nullptr || request == nullptr) {
        return;
    }
    ++request->adopts;
    ++request->version;
    Table& table = table_of(*request, false);
    const std::uint64_t index = table.entries.size();
    if (request->was_preempted || index != request->seats.size() ||
        table.length != index * kPageTokens || adopt.index != index || request->on_decode) {
        return gap(request->owner,
                   "request " + str(adopt.request) + " adopts page " + str(adopt.page) +
                       " as entry " + str(adopt.index) +
                       (request->was_preempted ? ", after it was preempted"
                                               : ", the next one is " + str(index) + ", of which " +
                                                     str(request->seats.size()) + " are adopted"));
    }
    // The last token is computed in any case: its logits are wanted.
    if ((index + 1) * kPageTokens >= request->prompt_tokens) {
        gap(request->owner, "request " + str(adopt.request) + " adopts " +
                                str((index + 1) * kPageTokens) + " rows for a prompt of " +
                                str(request->prompt_tokens));
    }
    if (entries_ == kLedgerPagesMax) {
        return gap(request->owner, "tables with more than " + str(kLedgerPagesMax) + " entries");
    }
    const bool granted = is_granted(*request, *page, adopt);
    push_entry(table, *page);
    table.length += kPageTokens;
    if (granted) {
        std::vector<std::uint32_t>& readers = shares_[page->share].readers;
        request->seats.push_back(static_cast<std::uint32_t>(readers.size()));
        readers.push_back(slot_of(*request));
        ++request->pages_held;
    } else {
        request->seats.push_back(kNoGrant);
    }
    if (!granted || page->irregular || page->spoilt) {
        mark(slot_of(*request), false, static_cast<std::uint32_t>(index));
    }
}

bool Ledger::is_granted(const Request& request, const Page& page, const events::Adopt& adopt) {
    const auto refuse = [&](ViolationKind kind, const std::string& why,
                            ProofLayer layer = ProofLayer::ledger) {
        report({.kind = kind,
                .layer = layer,
                .reader = request.owner,
                .writer = page.request == 0 ? std::nullopt : std::optional(owner_of(page)),
                .page = adopt.page,
                .generation = page.generation,
                .row_end = kPageTokens,
                .detail = "request " + str(adopt.request) + " adopts page " + str(adopt.page) +
                          ", " + why});
        return false;
    };
    if (page.state != PageState::owned) {
        return refuse(ViolationKind::freed_page, "which is free");
    }
    if (page.tenant != number(request.owner.tenant)) {
        return refuse(ViolationKind::foreign_row, "which a request of another tenant wrote");
    }
    const Share* share = page.share == kNone ? nullptr : &shares_[page.share];
    if (share == nullptr || !share->in_tree) {
        return refuse(ViolationKind::undeclared_share, "which nobody shares");
    }
    if (page.generation != adopt.generation) {
        return refuse(ViolationKind::undeclared_share,
                      "of which generation " + str(adopt.generation) + " is not shared");
    }
    if (share->scope > request.scope) {
        return refuse(ViolationKind::undeclared_share,
                      std::string("which is shared with the ") + name_of(share->scope) +
                          ", and its own scope is the " + name_of(request.scope));
    }
    if (share->scope == CacheScope::session && share->session != request.session) {
        return refuse(ViolationKind::undeclared_share,
                      "which is shared with session " + str(share->session));
    }
    if (share->index != adopt.index) {
        return refuse(ViolationKind::undeclared_share,
                      "which is shared as entry " + str(share->index));
    }
    if (options_.strict) {
        refuse(ViolationKind::undeclared_share, "and no share is allowed");
    }
    if (share->digest0 != adopt.digest0 || share->digest1 != adopt.digest1) {
        refuse(ViolationKind::consumed_mismatch, "whose rows are those of other tokens",
               ProofLayer::ends);
    }
    return true;
}

void Ledger::on_evict(const Event& event) {
    const auto evict = event.as<events::Evict>();
    ++counts_.evictions;
    Page* page = page_at(evict.page, "evict");
    if (page == nullptr) {
        return;
    }
    if (page->share == kNone || !shares_[page->share].in_tree ||
        page->generation != evict.generation) {
        return gap(owner_of(*page), "page " + str(evict.page) + " of generation " +
                                        str(evict.generation) +
                                        " leaves the prefix tree, which does not hold it");
    }
    shares_[page->share].in_tree = false;
    if (shares_[page->share].readers.empty()) {
        end_share(*page);
    }
    if (page->share == kNone && page->slot == kNone) {
        page->state = PageState::freed;
    }
}

bool Ledger::is_reader(const Page& page, const Request& request) const {
    if (page.share == kNone) {
        return false;
    }
    const std::uint32_t index = shares_[page.share].index;
    return reads_by_grant(request, false, index) &&
           table_of(request, false).entries[index].page == number_of(page);
}

bool Ledger::owns(const Request& request, const Page& page, std::uint32_t index) const {
    return page.slot == slot_of(request) && page.index == index;
}

bool Ledger::reads_by_grant(const Request& request, bool decode, std::uint32_t index) const {
    return !decode && index < request.seats.size() && request.seats[index] != kLeft &&
           request.seats[index] != kNoGrant;
}

void Ledger::leave_share(Page& page, std::uint32_t reader) {
    Share& share = shares_[page.share];
    std::uint32_t& seat = slots_[reader].seats[share.index];
    const std::uint32_t last = share.readers.back();
    share.readers[seat] = last;
    slots_[last].seats[share.index] = seat;
    share.readers.pop_back();
    seat = kLeft;
    if (share.readers.empty() && !share.in_tree) {
        end_share(page);
    }
}

void Ledger::end_share(Page& page) {
    Share& share = shares_[page.share];
    share.readers.clear();
    share.in_tree = false;
    shares_free_.push_back(page.share);
    page.share = kNone;
}

void Ledger::mark_holders(Page& page) {
    if (page.slot != kNone) {
        mark(page.slot, on_decode_side(number_of(page)), page.index);
    }
    // Once: a page with many readers may be written to often.
    if (page.share != kNone && !page.spoilt) {
        for (const std::uint32_t reader : shares_[page.share].readers) {
            mark(reader, false, shares_[page.share].index);
        }
    }
    page.spoilt = true;
}

void Ledger::take_from_holders(Page& page) {
    writers_of(page);
    if (page.share != kNone) {
        const std::uint32_t index = shares_[page.share].index;
        const std::vector<std::uint32_t> readers = std::move(shares_[page.share].readers);
        end_share(page);
        for (const std::uint32_t reader : readers) {
            slots_[reader].seats[index] = kLeft;
            mark(reader, false, index);
            let_go(reader);
        }
    }
    if (page.slot != kNone) {
        const std::uint32_t owner = page.slot;
        page.slot = kNone;
        mark(owner, on_decode_side(number_of(page)), page.index);
        let_go(owner);
    }
}

void Ledger::take_away(Page& page, const char* how) {
    gap(owner_of(page), "page " + str(number_of(page)) + " " + how + " while " +
                            (page.slot != kNone ? "request " + str(page.request) + " has it"
                             : page.share != kNone && !shares_[page.share].readers.empty()
                                 ? "a request reads it"
                                 : std::string("the prefix tree has it")));
    mark_holders(page);
    page.taken_away = true;
}

}  // namespace kvw
