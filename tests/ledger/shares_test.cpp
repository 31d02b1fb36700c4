// Pages that more than one request holds: shares, adopts, evictions.
#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "src/ledger/ledger.h"
#include "tests/ledger/history.h"
#include "tests/ledger/told.h"

namespace kvw {
namespace {

// Request 1 writes and shares pages 0 and 1, request 2 of the same tenant adopts both and goes on
// in page 3; request 3 is of another tenant, in page 4 and on.
struct Prefix {
    History history{16};
    std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    std::uint64_t donor = 0, reader = 0, other = 0;

    explicit Prefix(History::Sharing sharing = {.text = 1}) {
        history.shares = true;
        donor = history.begin(a, 40, sharing);
        history.step({donor});
        history.shares = false;
    }
    void adopt() {
        reader = history.begin(a, 40, History::Sharing{.text = 1});
        other = history.begin(b, 40, History::Sharing{.text = 1});
    }
    std::string go_on() {
        history.step({reader, other});
        history.step({reader});
        return kinds(fold(history.events, false));
    }
    std::string end() {
        history.finish(donor);
        history.finish(reader);
        history.finish(other);
        history.end();
        return kinds(fold(history.events));
    }
    std::size_t at(EventKind kind, std::size_t n = 0) { return nth(history.events, kind, n); }
    Event& event(EventKind kind, std::size_t n = 0) { return history.events[at(kind, n)]; }
    void erase(EventKind kind, std::size_t n = 0) {
        history.events.erase(history.events.begin() + static_cast<std::ptrdiff_t>(at(kind, n)));
    }
};

TEST_CASE("a tenant's second request reads what its first one wrote, and nothing is wrong") {
    Prefix prefix;
    prefix.adopt();
    CHECK(prefix.history.length(prefix.reader) == 32);
    CHECK(prefix.history.length(prefix.other) == 0);
    CHECK(prefix.go_on() == "");
    CHECK(prefix.end() == "");
    const Ledger ledger = fold(prefix.history.events);
    CHECK(ledger.counts().shares == 2);
    CHECK(ledger.counts().evictions == 2);
    CHECK(ledger.counts().rows_covered ==
          prefix.history.events.back().as<events::RunEnd>().rows_read);
}

TEST_CASE("whichever of those that hold a page ends first, it drains when the last one is gone") {
    for (int order = 0; order < 6; ++order) {
        CAPTURE(order);
        Prefix prefix;
        prefix.adopt();
        CHECK(prefix.go_on() == "");
        prefix.history.finish(prefix.other);
        for (int i = 0; i < 3; ++i) {
            constexpr int kOrders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                           {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
            switch (kOrders[order][i]) {
                case 0:
                    prefix.history.finish(prefix.donor);
                    break;
                case 1:
                    prefix.history.finish(prefix.reader);
                    break;
                default:
                    prefix.history.evict_page(0);
                    prefix.history.evict_page(1);
            }
            prefix.history.clean_pages();
        }
        prefix.history.end();
        CHECK(kinds(fold(prefix.history.events)) == "");
    }
}

TEST_CASE("the witness of who adopted is formed from the header of who wrote") {
    Prefix prefix;
    prefix.adopt();
    REQUIRE(prefix.go_on() == "");
    // As if the kernel had found the reader's own header in page 0.
    Event& witness = prefix.event(EventKind::witness, 1);
    REQUIRE(witness.fields[0] == prefix.reader);
    std::uint64_t difference = 0;
    for (std::uint32_t layer = 0; layer < History::kLayers; ++layer) {
        for (std::uint32_t head = 0; head < History::kHeads; ++head) {
            difference += (page_mix(1, 2, 1, 0) - page_mix(1, 1, 1, 0)) * 16 * 8 *
                          access_factor(layer, head, AccessKind::read);
        }
    }
    witness.fields[1] = (witness.fields[1] + difference) & 0xffffffff;
    const Ledger ledger = fold(prefix.history.events, false);
    CHECK(kinds(ledger) == "witness_mismatch@kernel");
    CHECK(ledger.violations()[0].reader == owner(1, 2));
}

TEST_CASE("rows of another tenant are foreign when they are adopted, and when they are read") {
    Prefix prefix;
    prefix.other = prefix.history.begin(prefix.b, 40);
    prefix.history.adopt(prefix.other, 0);
    prefix.history.step({prefix.other});
    prefix.history.step({prefix.other});
    const Ledger ledger = fold(prefix.history.events, false);
    CHECK(kinds(ledger) == "foreign_row@ledger foreign_row@ledger");
    for (const Violation& violation : ledger.violations()) {
        CHECK(violation.reader == owner(2, 2));
        CHECK(violation.writer == owner(1, 1));
        CHECK(violation.page == 0);
        CHECK(violation.generation == 1);
        CHECK(violation.row_begin == 0);
        CHECK(violation.row_end == 16);
    }
    CHECK(ledger.violations()[1].emitted_after == 2);
}

TEST_CASE("what nobody shares is adopted by nobody") {
    // Never shared, no longer shared, another generation of it: always the same tenant's.
    const struct {
        const char* what;
        std::function<void(Prefix&)> change;
    } cases[] = {
        {"never", [](Prefix& p) { p.erase(EventKind::share, 0); }},
        {"evicted", [](Prefix& p) { p.history.evict_page(0); }},
    };
    for (const auto& one : cases) {
        CAPTURE(one.what);
        Prefix prefix;
        one.change(prefix);
        prefix.reader = prefix.history.begin(prefix.a, 40);
        prefix.history.adopt(prefix.reader, 0);
        prefix.history.step({prefix.reader});
        const Ledger ledger = fold(prefix.history.events, false);
        CHECK(kinds(ledger) == "undeclared_share@ledger undeclared_share@ledger");
        for (const Violation& violation : ledger.violations()) {
            CHECK(violation.reader == owner(1, 2));
            CHECK(violation.writer == owner(1, 1));
            CHECK(violation.page == 0);
            CHECK(violation.row_end == 16);
        }
    }
    Prefix prefix;
    prefix.adopt();
    ++prefix.event(EventKind::adopt, 1).fields[3];
    const Ledger ledger = fold(prefix.history.events, false);
    CHECK(kinds(ledger) == "undeclared_share@ledger");
    CHECK(ledger.violations()[0].page == 1);
}

TEST_CASE("a page that is free is not adopted, and a page of the next owner is its own") {
    Prefix prefix;
    prefix.history.finish(prefix.donor);
    prefix.history.evict();
    prefix.history.clean_pages();
    prefix.reader = prefix.history.begin(prefix.a, 40);
    const std::size_t before = prefix.history.events.size();
    prefix.history.adopt(prefix.reader, 0);
    CHECK(kinds(fold(prefix.history.events, false)) == "freed_page@ledger");

    prefix.history.events.resize(before);
    prefix.other = prefix.history.begin(prefix.b, 16);
    prefix.history.pages_next = {0};
    prefix.history.step({prefix.other});
    prefix.history.add(events::Adopt{prefix.reader, 0, 0, 1, 7, 7});
    const Ledger ledger = fold(prefix.history.events, false);
    CHECK(kinds(ledger) == "foreign_row@ledger");
    CHECK(ledger.violations()[0].reader == owner(1, 2));
    CHECK(ledger.violations()[0].writer == owner(2, 3));
    CHECK(ledger.violations()[0].generation == 2);
}

TEST_CASE("a share reaches as far as both of its ends were submitted for, and no further") {
    const auto said = [](History::Sharing offer, History::Sharing taker) {
        Prefix prefix(offer);
        prefix.reader = prefix.history.submit(prefix.a, 40, 8, taker);
        prefix.history.add(events::Admit{prefix.reader, 48, 1, 1});
        Event adopt;
        for (const Event& event : prefix.history.events) {
            if (event.kind == EventKind::share) {
                adopt = event;
                break;
            }
        }
        REQUIRE(adopt.kind == EventKind::share);
        const auto share = adopt.as<events::Share>();
        prefix.history.add(events::Adopt{prefix.reader, 0, share.page, share.generation,
                                         share.digest0, share.digest1});
        return kinds(fold(prefix.history.events, false));
    };
    using Scope = CacheScope;
    const History::Sharing tenant{.text = 1}, nobody{.text = 1, .scope = Scope::request},
        first{.text = 1, .session = 7, .scope = Scope::session},
        second{.text = 1, .session = 8, .scope = Scope::session},
        tenant_first{.text = 1, .session = 7};
    CHECK(said(tenant, tenant) == "");
    CHECK(said(tenant, tenant_first) == "");
    CHECK(said(first, first) == "");
    CHECK(said(first, tenant_first) == "");
    CHECK(said(tenant, nobody) == "undeclared_share@ledger");
    CHECK(said(tenant, first) == "undeclared_share@ledger");
    CHECK(said(first, second) == "undeclared_share@ledger");
    CHECK(said(first, tenant) == "undeclared_share@ledger");
    CHECK(said(first, nobody) == "undeclared_share@ledger");
}

TEST_CASE("rows of other tokens are no prefix, whatever the tree says") {
    for (const std::size_t field : {4, 5}) {
        Prefix prefix;
        prefix.adopt();
        prefix.event(EventKind::adopt, 0).fields[field] ^= 1;
        const Ledger ledger = fold(prefix.history.events, false);
        CHECK(kinds(ledger) == "consumed_mismatch@ends");
        CHECK(ledger.violations()[0].reader == owner(1, 2));
        CHECK(ledger.violations()[0].writer == owner(1, 1));
        CHECK(ledger.violations()[0].page == 0);
    }
}

TEST_CASE("what is adopted stands before everything else, at its own place, short of the prompt") {
    const auto changed = [](std::size_t n, std::size_t field, std::uint64_t value) {
        Prefix prefix;
        prefix.adopt();
        prefix.event(EventKind::adopt, n).fields[field] = value;
        return kinds(fold(prefix.history.events, false));
    };
    CHECK(changed(0, 1, 1) == "event_gap@ledger event_gap@ledger");  // and the one behind it
    CHECK(changed(0, 2, 1) == "undeclared_share@ledger");            // page 1 is shared as entry 1
    CHECK(changed(0, 0, 1) == "event_gap@ledger event_gap@ledger");  // by one who has rows
    CHECK(changed(1, 0, 9) == "event_gap@ledger");
    CHECK(has(changed(1, 2, 99), "event_gap@ledger"));

    Prefix with_alloc;
    with_alloc.reader = with_alloc.history.begin(with_alloc.a, 40);
    with_alloc.history.alloc(with_alloc.reader, 5);
    with_alloc.history.adopt(with_alloc.reader, 1);
    CHECK(kinds(fold(with_alloc.history.events, false)) == "event_gap@ledger");

    // 33 tokens leave one to compute behind two pages, 32 do not.
    for (const std::uint64_t prompt : {33, 32}) {
        CAPTURE(prompt);
        Prefix prefix;
        prefix.reader = prefix.history.submit(prefix.a, prompt, 8, {.text = 1});
        prefix.history.add(events::Admit{prefix.reader, prompt + 8, 1, 1});
        prefix.history.adopt(prefix.reader, 0);
        prefix.history.adopt(prefix.reader, 1);
        CHECK(kinds(fold(prefix.history.events, false)) ==
              (prompt == 33 ? "" : "event_gap@ledger"));
    }

    Prefix refused;
    refused.reader = refused.history.submit(refused.a, 40, 8, {.text = 1});
    refused.history.adopt(refused.reader, 0);
    CHECK(kinds(fold(refused.history.events, false)) == "event_gap@ledger");
}

TEST_CASE(
    "only a page that is full, and one's own, is shared, once, with those one may share with") {
    const auto changed = [](std::size_t n, std::size_t field, std::uint64_t value) {
        Prefix prefix;
        prefix.event(EventKind::share, n).fields[field] = value;
        return kinds(fold(prefix.history.events, false));
    };
    CHECK(changed(0, 1, 1) == "event_gap@ledger");
    CHECK(changed(0, 2, 1) == "event_gap@ledger");
    CHECK(changed(0, 2, 9) == "event_gap@ledger");   // never handed out
    CHECK(changed(0, 2, 99) == "event_gap@ledger");  // in no pool
    CHECK(changed(0, 3, 2) == "event_gap@ledger");
    CHECK(changed(0, 4, 0) == "event_gap@ledger");
    CHECK(changed(0, 4, 3) == "event_gap@ledger");
    CHECK(changed(0, 0, 7) == "event_gap@ledger");
    CHECK(changed(0, 4, 1) == "undeclared_share@ledger");  // with a session that it has not

    Prefix twice;
    twice.history.share(twice.donor, 0);
    CHECK(kinds(fold(twice.history.events, false)) == "event_gap@ledger");

    // Row 40 of page 2 is the last that was written.
    Prefix early;
    early.history.share(early.donor, 2);
    const Ledger ledger = fold(early.history.events, false);
    CHECK(kinds(ledger) == "unwritten_row@ledger");
    CHECK(ledger.violations()[0].reader == owner(1, 1));
    CHECK(ledger.violations()[0].page == 2);
    CHECK(ledger.violations()[0].row_begin == 8);
    CHECK(ledger.violations()[0].row_end == 16);

    Prefix wide(History::Sharing{.text = 1, .session = 3, .scope = CacheScope::session});
    wide.event(EventKind::share, 0).fields[4] = 2;
    CHECK(kinds(fold(wide.history.events, false)) == "undeclared_share@ledger");

    // Somebody else's page, of either tenant, and one that was adopted.
    for (const bool same : {true, false}) {
        Prefix prefix;
        prefix.adopt();
        prefix.history.step({prefix.reader, prefix.other});
        const std::uint64_t who = same ? prefix.reader : prefix.other;
        prefix.history.add(events::Share{who, 0, 0, 1, 2, 1, 1});
        const Ledger said = fold(prefix.history.events, false);
        CHECK(kinds(said) == "undeclared_share@ledger");
        CHECK(said.violations()[0].reader == owner(same ? 1 : 2, who));
        CHECK(said.violations()[0].writer == owner(1, 1));
    }
}

TEST_CASE("a page is shared when the pass that wrote it is over") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 40);
    history.add(events::Step{1, 1});
    history.rows(id, 40, 40);
    history.share(id, 0);
    history.witness(id);
    CHECK(kinds(fold(history.events, false)) == "event_gap@kernel");
}

TEST_CASE("nothing is ever written into a shared page") {
    // By who adopted it.
    Prefix prefix;
    prefix.adopt();
    const std::uint64_t second = prefix.history.begin(prefix.a, 40, History::Sharing{.text = 1});
    prefix.history.step({prefix.reader, second});
    prefix.history.add(events::Step{3, 1});
    prefix.history.add(events::Rows{prefix.reader, 12, 41, 0, 3});
    prefix.history.add(events::Step{4, 1});
    prefix.history.add(events::Rows{second, 1, 41, 0, 3});
    prefix.history.add(events::Step{5, 1});
    prefix.history.add(events::Rows{prefix.donor, 1, 41, 0, 3});
    const Ledger ledger = fold(prefix.history.events, false);
    const Violation* late = find(ledger, ViolationKind::late_write);
    REQUIRE(late != nullptr);
    CHECK(late->reader == owner(1, 2));
    CHECK(late->writer == owner(1, 1));
    CHECK(late->page == 1);
    CHECK(late->row_begin == 13);
    CHECK(late->row_end == 16);
    // Everybody who reads it afterwards reads rows that its writer did not write.
    std::string readers;
    for (const Violation& violation : ledger.violations()) {
        if (violation.kind == ViolationKind::foreign_row) {
            CHECK(violation.writer == owner(1, 2));
            CHECK(violation.row_begin == 13);
            readers += std::to_string(number(violation.reader.request)) + " ";
        }
    }
    CHECK(readers == "2 4 1 ");

    // By who shared it.
    Prefix own;
    own.history.add(events::Step{2, 1});
    own.history.add(events::Rows{own.donor, 12, 41, 0, 3});
    const Ledger said = fold(own.history.events, false);
    CHECK(kinds(said) == "event_gap@ledger late_write@ledger");
    CHECK(said.violations()[1].page == 1);
}

TEST_CASE(
    "a page that is taken from those who hold it is a violation for each who still reads it") {
    const struct {
        const char* what;
        std::function<void(History&)> change;
        ViolationKind reads;
    } cases[] = {
        {"drain", [](History& h) { h.add(events::Drain{0}); }, ViolationKind::freed_page},
        {"quarantine", [](History& h) { h.add(events::Quarantine{0}); }, ViolationKind::freed_page},
        {"scrub", [](History& h) { h.scrub(0); }, ViolationKind::unwritten_row},
        {"alloc",
         [](History& h) {
             const std::uint64_t thief = h.begin(2, 10);
             h.pages_next = {0};
             h.step({thief});
         },
         ViolationKind::foreign_row},
    };
    for (const auto& one : cases) {
        CAPTURE(one.what);
        Prefix prefix;
        prefix.adopt();
        const std::uint64_t second =
            prefix.history.begin(prefix.a, 40, History::Sharing{.text = 1});
        REQUIRE(prefix.go_on() == "");
        one.change(prefix.history);
        prefix.history.step({prefix.reader, second, prefix.donor});
        prefix.history.step({prefix.reader, second, prefix.donor});
        const Ledger ledger = fold(prefix.history.events, false);
        std::string readers;
        for (const Violation& violation : ledger.violations()) {
            if (violation.layer == ProofLayer::ledger && violation.kind == one.reads) {
                CHECK(violation.page == 0);
                CHECK(violation.row_end == 16);
                if (one.reads != ViolationKind::unwritten_row) {
                    CHECK(violation.writer ==
                          (std::string(one.what) == "alloc" ? owner(2, 5) : owner(1, 1)));
                }
                readers += std::to_string(number(violation.reader.request)) + " ";
            }
        }
        CHECK(readers == "2 4 1 ");  // each said once
    }
}

TEST_CASE("a page of the prefix tree belongs to who wrote it, long after that one's end") {
    Prefix prefix;
    prefix.history.finish(prefix.donor);
    prefix.history.clean_pages();
    const std::uint64_t thief = prefix.history.begin(prefix.b, 10);
    prefix.history.pages_next = {1};
    prefix.history.step({thief});
    const Ledger ledger = fold(prefix.history.events, false);
    const Violation* owned = find(ledger, ViolationKind::double_owner);
    REQUIRE(owned != nullptr);
    CHECK(owned->reader == owner(2, 2));
    CHECK(owned->writer == owner(1, 1));
    CHECK(owned->row_end == 16);
    CHECK(kinds(ledger) == "double_owner@ledger");
}

TEST_CASE("who let go of a shared page reads it no more, though others do") {
    Prefix prefix;
    prefix.adopt();
    REQUIRE(prefix.go_on() == "");
    prefix.history.add(events::Free{prefix.reader, 0, 1});
    prefix.history.step({prefix.reader});
    const Ledger ledger = fold(prefix.history.events, false);
    CHECK(kinds(ledger) == "event_gap@ledger freed_page@ledger");
    CHECK(ledger.violations()[1].reader == owner(1, 2));
    CHECK(ledger.violations()[1].writer == owner(1, 1));

    prefix.history.add(events::Free{prefix.donor, 0, 1});
    prefix.history.step({prefix.donor});
    const Violation last = fold(prefix.history.events, false).violations().back();
    CHECK(last.kind == ViolationKind::freed_page);
    CHECK(last.reader == owner(1, 1));
}

TEST_CASE("only who has a page lets go of it, and only once") {
    const auto after_free = [](std::uint64_t request, std::uint64_t page) {
        Prefix prefix;
        prefix.adopt();
        prefix.history.step({prefix.reader, prefix.other});
        prefix.history.finish(prefix.reader);
        prefix.history.add(events::Free{request, page, 1});
        return kinds(fold(prefix.history.events, false));
    };
    CHECK(after_free(2, 0) == "event_gap@ledger");  // again
    CHECK(after_free(2, 4) == "event_gap@ledger");  // another's
    CHECK(after_free(3, 0) == "event_gap@ledger");  // never adopted
    CHECK(after_free(9, 0) == "event_gap@ledger");

    const auto evicted = [](std::uint64_t page, std::uint64_t generation) {
        Prefix prefix;
        prefix.history.add(events::Evict{page, generation});
        return kinds(fold(prefix.history.events, false));
    };
    CHECK(evicted(0, 1) == "");
    CHECK(evicted(0, 2) == "event_gap@ledger");
    CHECK(evicted(2, 1) == "event_gap@ledger");
    CHECK(evicted(9, 1) == "event_gap@ledger");
    Prefix twice;
    twice.history.add(events::Evict{0, 1});
    twice.history.add(events::Evict{0, 1});
    CHECK(kinds(fold(twice.history.events, false)) == "event_gap@ledger");
    // What left the tree and is still in its owner's table can be shared again.
    twice.history.events.pop_back();
    twice.history.add(events::Share{1, 0, 0, 1, 2, 1, 1});
    CHECK(kinds(fold(twice.history.events, false)) == "");
}

TEST_CASE("the reason of a free is what happened to its request") {
    for (std::uint64_t reason = 0; reason < 9; ++reason) {
        CAPTURE(reason);
        Prefix prefix;
        prefix.adopt();
        prefix.history.step({prefix.reader, prefix.other});
        prefix.history.finish(prefix.reader, FinishReason::cancelled);
        prefix.event(EventKind::free, 1).fields[2] = reason;
        CHECK(kinds(fold(prefix.history.events, false)) == (reason == 2 ? "" : "event_gap@ledger"));
    }
}

TEST_CASE("pages that only the prefix tree has at the end are lost") {
    Prefix prefix;
    prefix.history.finish(prefix.donor);
    prefix.history.clean_pages();
    const Ledger ledger = fold(prefix.history.events);
    CHECK(kinds(ledger) == "lost_page@ledger");
    CHECK(ledger.violations()[0].reader == owner(1, 1));
    CHECK(ledger.violations()[0].page == 0);
    CHECK(kinds(fold(prefix.history.events, false)) == "");
}

TEST_CASE("the cached tokens of an answer are the rows that it adopted") {
    for (const std::uint64_t difference : {0, 1, -16}) {
        Prefix prefix;
        prefix.adopt();
        prefix.go_on();
        prefix.history.finish(prefix.reader);
        Event& finish = prefix.event(EventKind::finish, 0);
        CHECK(finish.fields[8] == 32);
        finish.fields[8] += difference;
        CHECK(kinds(fold(prefix.history.events, false)) ==
              (difference == 0 ? "" : "event_gap@ends"));
    }
}

TEST_CASE("strict: a declared share is a violation like another") {
    Prefix prefix;
    prefix.adopt();
    prefix.go_on();
    CHECK(kinds(fold(prefix.history.events, false, {.strict = true})) ==
          "undeclared_share@ledger undeclared_share@ledger");
    Prefix unused;  // an offer is no use
    CHECK(kinds(fold(unused.history.events, false, {.strict = true})) == "");
}

TEST_CASE("a quarantined page goes to nobody, and is in nobody's hands") {
    History history(4);
    const std::uint64_t id = history.begin(history.tenant("acme"), 10);
    history.step({id});
    history.finish(id, FinishReason::violation);
    history.add(events::Quarantine{0});
    CHECK(kinds(fold(history.events)) == "");
    const std::size_t clean = history.events.size();
    for (const auto& late : {Event::of(events::Quarantine{0}), Event::of(events::Quarantine{1}),
                             Event::of(events::Drain{0})}) {
        history.events.resize(clean);
        history.events.push_back(late);
        CHECK(kinds(fold(history.events, false)) == "event_gap@ledger");
    }
    history.events.resize(clean);
    history.scrub(0);
    CHECK(kinds(fold(history.events, false)) == "event_gap@ledger event_gap@ledger");
    history.pages_next = {0};
    history.step({history.begin(1, 4)});
    CHECK(has(kinds(fold(history.events, false)),
              "event_gap@ledger event_gap@ledger event_gap@ledger"));
}

TEST_CASE("a session is numbered in the order of first use, and belongs to one tenant") {
    const auto with = [](std::uint64_t first, std::uint64_t second, std::uint64_t tenant,
                         std::uint64_t scope = 2) {
        History history(4);
        history.tenant("acme");
        history.tenant("blue");
        history.reject(history.submit(1, 4, 4));
        history.reject(history.submit(tenant, 4, 4));
        history.events[nth(history.events, EventKind::submit, 0)].fields[6] = first;
        Event& submit = history.events[nth(history.events, EventKind::submit, 1)];
        submit.fields[6] = second;
        submit.fields[7] = scope;
        history.end();
        return kinds(fold(history.events));
    };
    CHECK(with(0, 0, 1) == "");
    CHECK(with(0, 1, 1) == "");
    CHECK(with(1, 1, 1) == "");
    CHECK(with(1, 2, 1) == "");
    CHECK(with(1, 2, 2) == "");
    CHECK(with(1, 0, 1, 0) == "");
    CHECK(with(1, 1, 1, 1) == "");
    CHECK(with(1, 1, 2) == "event_gap@ledger");
    CHECK(with(1, 3, 1) == "event_gap@ledger");
    CHECK(with(0, 2, 1) == "event_gap@ledger");
    CHECK(with(0, 0, 1, 3) == "event_gap@ledger");
    CHECK(with(0, 0, 1, 1) == "event_gap@ledger");  // its session, and it has none
}

}  // namespace
}  // namespace kvw
