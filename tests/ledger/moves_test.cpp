// Requests that lose their pages and begin anew, whose rows move from pool to pool, and whose
// results wait in slots.
#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "src/ledger/ledger.h"
#include "tests/ledger/history.h"
#include "tests/ledger/told.h"

namespace kvw {
namespace {

using Change = std::function<void(std::vector<Event>&)>;

Event& event(std::vector<Event>& events, EventKind kind, std::size_t n = 0) {
    return events[nth(events, kind, n)];
}
void erase(std::vector<Event>& events, EventKind kind, std::size_t n = 0) {
    events.erase(events.begin() + static_cast<std::ptrdiff_t>(nth(events, kind, n)));
}
template <class T>
void put_before(std::vector<Event>& events, EventKind kind, std::size_t n, const T& typed) {
    events.insert(events.begin() + static_cast<std::ptrdiff_t>(nth(events, kind, n)),
                  Event::of(typed));
}

// ---- preemption

// Request 1 of 20 tokens samples two, loses its pages to request 2, and computes 22 anew.
std::string preempted(const Change& change = nullptr) {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t first = history.begin(a, 20);
    history.step({first});
    history.step({first});
    history.preempt(first);
    history.clean_pages();
    const std::uint64_t second = history.begin(b, 20);
    history.step({second});
    history.resume(first);
    history.step({first, second}, 16);
    history.step({first, second});
    history.step({first, second});
    history.finish(first);
    history.finish(second);
    history.end();
    if (change) {
        change(history.events);
    }
    return kinds(fold(history.events));
}

TEST_CASE("a preempted request loses its pages, keeps its witness and computes all of it anew") {
    CHECK(preempted() == "");
    // The sum goes on over the preemption: what it read before counts at the end.
    CHECK(preempted([](auto& events) { erase(events, EventKind::witness, 0); }) ==
          "event_gap@kernel");
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 20);
    history.step({id});
    history.preempt(id);
    history.clean_pages();
    history.resume(id);
    history.step({id});
    history.finish(id);
    history.end();
    CHECK(kinds(fold(history.events)) == "");
    CHECK(fold(history.events).counts().preemptions == 1);
    for (Event& one : history.events) {
        if (one.kind == EventKind::finish) {
            one.fields[7] = 0;
        }
    }
    CHECK(kinds(fold(history.events)) == "witness_mismatch@kernel");
}

TEST_CASE("what a preempted request consumes is what it had, all of it, and sourced again") {
    const auto with = [](EventKind kind, std::size_t n, std::size_t field) {
        return preempted([&](auto& events) { ++event(events, kind, n).fields[field]; });
    };
    CHECK(with(EventKind::preempt, 0, 1) == "consumed_mismatch@ends");
    CHECK(with(EventKind::preempt, 0, 2) == "consumed_mismatch@ends");
    CHECK(with(EventKind::preempt, 0, 3) == "consumed_mismatch@ends");
    for (const std::size_t field : {1, 2, 3}) {
        CHECK(with(EventKind::sourced, 2, field) == "consumed_mismatch@ends");
    }
    CHECK(preempted([](auto& events) { erase(events, EventKind::sourced, 2); }) ==
          "consumed_mismatch@ends");
    CHECK(preempted([](auto& events) {
              const Event again = event(events, EventKind::sourced, 2);
              events.insert(
                  events.begin() + static_cast<std::ptrdiff_t>(nth(events, EventKind::sample, 4)),
                  again);
          }) == "consumed_mismatch@ends");

    // Before its first token it is the prompt, as it was admitted.
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 20);
    history.step({id}, 16);
    history.preempt(id);
    history.clean_pages();
    history.resume(id);
    history.step({id});
    CHECK(kinds(fold(history.events, false)) == "");
    event(history.events, EventKind::preempt).fields[2] ^= 1;
    event(history.events, EventKind::sourced).fields[2] ^= 1;
    CHECK(kinds(fold(history.events, false)) == "consumed_mismatch@ends");
}

TEST_CASE("between preempt and resume a request has nothing and does nothing") {
    CHECK(has(preempted([](auto& events) { erase(events, EventKind::preempt); }),
              "event_gap@ledger"));
    CHECK(
        has(preempted([](auto& events) { erase(events, EventKind::resume); }), "event_gap@ledger"));
    CHECK(preempted([](auto& events) {
              put_before(events, EventKind::resume, 0, events::Resume{1});
          }) == "event_gap@ledger");
    CHECK(preempted([](auto& events) {
              put_before(events, EventKind::resume, 0, events::Preempt{1, 22, 0, 0});
          }) == "event_gap@ledger");
    CHECK(preempted([](auto& events) {
              put_before(events, EventKind::resume, 0, events::Reserve{1, 0, 1});
          }) == "event_gap@ledger");
    CHECK(preempted([](auto& events) {
              put_before(events, EventKind::resume, 0, events::Rows{1, 1, 23, 0, 2});
          }) == "event_gap@ledger event_gap@ledger");  // nor does its step count with it
    CHECK(preempted([](auto& events) { event(events, EventKind::preempt).fields[0] = 2; }) != "");
    CHECK(preempted([](auto& events) { event(events, EventKind::resume).fields[0] = 2; }) != "");
    for (const std::uint64_t reason : {1, 2, 6}) {
        CHECK(preempted([&](auto& events) {
                  event(events, EventKind::free, 0).fields[2] = reason;
              }) == "event_gap@ledger");
    }
    // A page that it keeps, it still has when it resumes.
    CHECK(has(preempted([](auto& events) { erase(events, EventKind::free, 0); }),
              "event_gap@ledger"));
}

TEST_CASE("a preempted request adopts nothing, whatever the tree has of it") {
    History history(8);
    history.shares = true;
    const std::uint64_t a = history.tenant("acme");
    const std::uint64_t donor = history.begin(a, 40, History::Sharing{.text = 1});
    history.step({donor});
    const std::uint64_t reader = history.begin(a, 40, History::Sharing{.text = 1});
    history.step({reader});
    history.preempt(reader);
    history.resume(reader);
    CHECK(kinds(fold(history.events, false)) == "");
    const std::size_t clean = history.events.size();
    history.adopt(reader, 0);
    CHECK(kinds(fold(history.events, false)) == "event_gap@ledger");

    // Its own pages stay in the tree for others, and it may be ended while it waits.
    history.events.resize(clean);
    History again(8);
    again.shares = true;
    again.tenant("acme");
    const std::uint64_t first = again.begin(1, 40, History::Sharing{.text = 1});
    again.step({first});
    again.preempt(first);
    const std::uint64_t second = again.begin(1, 40, History::Sharing{.text = 1});
    again.step({second});
    again.finish(first, FinishReason::cancelled);
    again.finish(second);
    again.end();
    CHECK(kinds(fold(again.events)) == "");
    CHECK(fold(again.events).counts().shares == 2);
}

// ---- transfer

// Request 1 of 40 tokens: pages 0 to 2 of the prefill pool, then 8 to 10 of the decode pool.
struct Split {
    History history{8, 8};
    std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    std::uint64_t id = history.begin(a, 40);

    explicit Split(std::uint64_t pages_at_once = 1000) {
        history.step({id});
        while (!history.transfer(id, pages_at_once)) {
        }
    }
    std::string end() {
        history.step({id});
        history.step({id});
        history.finish(id);
        history.end();
        return kinds(fold(history.events));
    }
    std::string changed(const Change& change) {
        history.step({id});
        history.finish(id);
        history.end();
        change(history.events);
        return kinds(fold(history.events));
    }
};

TEST_CASE("rows that were moved are read in the decode pool, at once or page by page") {
    for (const std::uint64_t pages : {1, 2, 1000}) {
        CAPTURE(pages);
        Split split(pages);
        CHECK(split.history.table(split.id, 0).empty());
        CHECK(split.end() == "");
        const Ledger ledger = fold(split.history.events);
        CHECK(ledger.counts().transfers == (pages == 1 ? 3 : pages == 2 ? 2 : 1));
        const auto end = split.history.events.back().as<events::RunEnd>();
        CHECK(ledger.counts().rows_covered == end.rows_read);
        CHECK(ledger.counts().rows_written == end.rows_written);
    }
}

TEST_CASE("a request may end, or lose its pages, at every point of a transfer") {
    for (int moved = 0; moved <= 3; ++moved) {
        for (const bool preempted : {false, true}) {
            CAPTURE(moved);
            CAPTURE(preempted);
            History history(8, 8);
            const std::uint64_t id = history.begin(history.tenant("acme"), 40);
            history.step({id});
            for (int i = 0; i < moved; ++i) {
                history.transfer(id, 1);
            }
            if (preempted) {
                history.preempt(id);
                history.clean_pages();
                history.resume(id);
                history.step({id});
                history.transfer(id, 2);
                history.transfer(id, 2);
                history.step({id});
            }
            history.finish(id, FinishReason::deadline);
            history.end();
            CHECK(kinds(fold(history.events)) == "");
        }
    }
}

TEST_CASE("decode never passes the rows that it received") {
    // The decode side goes on after one page of three: rows 16 to 39 were never written there.
    for (const bool reserved : {true, false}) {
        CAPTURE(reserved);
        History history(8, 8);
        const std::uint64_t id = history.begin(history.tenant("acme"), 40);
        history.step({id});
        history.transfer(id, 1);
        if (reserved) {  // pages for the whole prompt, as in the incident
            history.alloc(id, 9);
            history.alloc(id, 10);
        }
        history.add(events::Step{2, 1});
        history.add(events::Rows{id, 1, 41, 0, reserved ? 6u : 4u});
        const Ledger ledger = fold(history.events, false);
        std::string rows;
        for (const Violation& violation : ledger.violations()) {
            if (violation.kind == ViolationKind::unwritten_row) {
                CHECK(violation.reader == owner(1, 1));
                CHECK_FALSE(violation.writer.has_value());
                rows += violation.page == kNoPage ? "nowhere"
                                                  : std::to_string(violation.page) + ":" +
                                                        std::to_string(violation.row_begin) + "-" +
                                                        std::to_string(violation.row_end) + " ";
            }
        }
        CHECK(rows == (reserved ? "9:0-16 10:0-8 " : "nowhere"));
        CHECK(has(kinds(ledger), "event_gap@ledger") == !reserved);
    }
    // The row that was to follow is there in the record, not in the pages.
    Split split;
    CHECK(has(split.changed([](auto& events) {
        event(events, EventKind::transfer).fields[1] -= 1;
        event(events, EventKind::transfer).fields[2] -= 1;
    }),
              "unwritten_row@ledger"));
}

TEST_CASE("a transfer moves what was written, in order, once, between tables that hold it") {
    const auto with = [](std::size_t field, std::uint64_t value, std::size_t n = 1) {
        return Split(1).changed(
            [&](auto& events) { event(events, EventKind::transfer, n).fields[field] = value; });
    };
    CHECK(has(with(2, 33), "event_gap@ledger"));  // one row too far on
    CHECK(has(with(2, 31), "event_gap@ledger"));
    CHECK(has(with(1, 17), "event_gap@ledger"));
    CHECK(has(with(1, 0), "event_gap@ledger"));
    CHECK(has(with(1, ~std::uint64_t{0}), "event_gap@ledger"));
    CHECK(has(with(2, ~std::uint64_t{0}), "event_gap@ledger"));
    CHECK(with(3, 4) == "event_gap@ledger");
    CHECK(has(with(0, 7), "event_gap@ledger"));
    CHECK(has(Split(1).changed([](auto& events) { erase(events, EventKind::transfer, 1); }),
              "event_gap@ledger"));
    CHECK(has(Split(1).changed([](auto& events) {
        events.insert(
            events.begin() + static_cast<std::ptrdiff_t>(nth(events, EventKind::transfer, 1)),
            Event(event(events, EventKind::transfer, 1)));
    }),
              "event_gap@ledger"));
    CHECK(has(Split().changed([](auto& events) {  // all were moved
        put_before(events, EventKind::step, 1, events::Transfer{1, 1, 41, 6});
    }),
              "event_gap@ledger"));

    // Rows 40 to 47 of the last page were never written.
    Split beyond;
    beyond.history.add(events::Pool{});  // nothing behind it matters
    event(beyond.history.events, EventKind::transfer).fields[1] = 48;
    event(beyond.history.events, EventKind::transfer).fields[2] = 48;
    const Ledger ledger = fold(beyond.history.events, false);
    const Violation* unwritten = find(ledger, ViolationKind::unwritten_row);
    REQUIRE(unwritten != nullptr);
    CHECK(unwritten->page == 2);
    CHECK(unwritten->row_begin == 8);
    CHECK(unwritten->row_end == 16);

    History unified(8);
    const std::uint64_t id = unified.begin(unified.tenant("acme"), 40);
    unified.step({id});
    unified.add(events::Transfer{id, 40, 40, 3});
    CHECK(kinds(fold(unified.events, false)) == "event_gap@ledger");
}

TEST_CASE("the witness of a transfer is that of its sources and of its destinations") {
    for (std::size_t n = 1; n < 4; ++n) {
        CHECK(Split(1).changed([&](auto& events) {
            event(events, EventKind::witness, n).fields[1] ^= 1;
        }) == "witness_mismatch@kernel");
        CHECK(has(Split(1).changed([&](auto& events) { erase(events, EventKind::witness, n); }),
                  "event_gap@kernel"));
    }
    // Rows that are moved count as read and as written.
    History history(8, 8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 40);
    history.step({id});
    const LedgerCounts before = fold(history.events, false).counts();
    history.transfer(id);
    const LedgerCounts after = fold(history.events, false).counts();
    const std::uint64_t tiles = History::kLayers * History::kHeads;
    CHECK(after.rows_covered == before.rows_covered + 40 * tiles);
    CHECK(after.rows_written == before.rows_written + 40 * tiles);
}

TEST_CASE("a source that is no longer the request's, and a destination that is not, are named") {
    const auto planted = [](const std::function<void(History&, std::uint64_t thief)>& plant) {
        History history(8, 8);
        const std::uint64_t id = history.begin(history.tenant("acme"), 40);
        history.step({id});
        const std::uint64_t thief = history.begin(history.tenant("blue"), 40);
        history.transfer(id, 1);
        plant(history, thief);
        history.transfer(id, 1);
        return fold(history.events, false);
    };
    const Ledger source =
        planted([](History& history, std::uint64_t thief) { history.alloc(thief, 1); });
    const Violation* read = find(source, ViolationKind::foreign_row);
    REQUIRE(read != nullptr);
    CHECK(read->reader == owner(1, 1));
    CHECK(read->writer == owner(2, 2));
    CHECK(read->page == 1);
    CHECK(read->row_end == 16);

    const Ledger destination = planted([](History& history, std::uint64_t thief) {
        history.alloc(1, 9);
        history.alloc(thief, 9);
    });
    const Violation* write = find(destination, ViolationKind::late_write);
    REQUIRE(write != nullptr);
    CHECK(write->reader == owner(1, 1));
    CHECK(write->writer == owner(2, 2));
    CHECK(write->page == 9);

    const Ledger scrubbed = planted([](History& history, std::uint64_t) { history.scrub(1); });
    CHECK(find(scrubbed, ViolationKind::unwritten_row) != nullptr);
}

TEST_CASE("adopted rows are moved like one's own, with the witness of who wrote them") {
    History history(8, 8);
    history.shares = true;
    const std::uint64_t a = history.tenant("acme");
    const std::uint64_t donor = history.begin(a, 40, History::Sharing{.text = 1});
    history.step({donor});
    history.transfer(donor);
    const std::uint64_t reader = history.begin(a, 40, History::Sharing{.text = 1});
    CHECK(history.length(reader) == 32);
    history.step({reader, donor});
    history.transfer(reader, 1);
    history.transfer(reader, 2);
    history.step({reader, donor});
    CHECK(kinds(fold(history.events, false)) == "");
    history.finish(donor);
    history.finish(reader);
    history.end();
    CHECK(kinds(fold(history.events)) == "");
    // In the decode pool there is nothing to share.
    put_before(history.events, EventKind::finish, 0, events::Share{donor, 0, 8, 1, 2, 1, 1});
    CHECK(kinds(fold(history.events)) == "event_gap@ledger");
}

TEST_CASE("prefill pages are let go of when all rows were moved, not before and not never") {
    CHECK(has(Split(1).changed([](auto& events) {
        put_before(events, EventKind::transfer, 2, events::Free{1, 0, 6});
    }),
              "event_gap@ledger"));
    CHECK(has(Split().changed([](auto& events) { erase(events, EventKind::free, 2); }),
              "lost_page@ledger"));
    for (const std::uint64_t reason : {1, 3, 5}) {
        CHECK(Split().changed([&](auto& events) {
            event(events, EventKind::free, 0).fields[2] = reason;
        }) == "event_gap@ledger");
    }
    History unified(8);
    const std::uint64_t id = unified.begin(unified.tenant("acme"), 4);
    unified.step({id});
    unified.finish(id);
    unified.end();
    event(unified.events, EventKind::free).fields[2] = 6;
    CHECK(kinds(fold(unified.events)) == "event_gap@ledger");
}

TEST_CASE("there are two pools at most, and a page is of one of them") {
    const auto with = [](const Change& change) {
        Split split;
        split.end();
        change(split.history.events);
        return kinds(fold(split.history.events, false));
    };
    CHECK(with([](auto&) {}) == "");
    CHECK(has(with([](auto& events) { event(events, EventKind::pool, 1).fields[0] = 0; }),
              "event_gap@ledger"));
    CHECK(has(with([](auto& events) { event(events, EventKind::pool, 1).fields[0] = 2; }),
              "event_gap@ledger"));
    CHECK(has(with([](auto& events) { event(events, EventKind::pool, 1).fields[1] = 1; }),
              "event_gap@ledger"));
    CHECK(has(with([](auto& events) { event(events, EventKind::pool, 1).fields[2] = 7; }),
              "event_gap@ledger"));
    CHECK(has(with([](auto& events) { event(events, EventKind::pool, 1).fields[3] = 1; }),
              "event_gap@ledger"));
    CHECK(with([](auto& events) { event(events, EventKind::reserve, 1).fields[1] = 2; }) ==
          "event_gap@ledger");
}

// ---- slots

TEST_CASE(
    "a token comes out of the slot that was computed for it in this step, and each out of one") {
    const auto with = [](const Change& change, const LedgerOptions& options = {}) {
        History history(8);
        const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
        const std::uint64_t first = history.begin(a, 20), second = history.begin(b, 10);
        history.step({first, second});
        history.step({first, second});
        history.finish(first);
        history.finish(second);
        history.end();
        change(history.events);
        return kinds(fold(history.events, true, options));
    };
    const auto field = [&](std::size_t n, std::size_t which, std::uint64_t value) {
        return with([&](auto& events) { event(events, EventKind::slot, n).fields[which] = value; });
    };
    CHECK(with([](auto&) {}) == "");
    CHECK(field(3, 1, 0) == "consumed_mismatch@ends");  // the other request's rows are there
    CHECK(field(3, 2, 1) == "consumed_mismatch@ends");
    CHECK(field(3, 2, 9) == "consumed_mismatch@ends");
    CHECK(field(3, 3, 1) == "consumed_mismatch@ends");  // left from the step before
    CHECK(field(3, 3, 3) == "consumed_mismatch@ends");
    CHECK(field(3, 0, 9) == "event_gap@ledger event_gap@ends");
    CHECK(field(3, 0, 1) == "consumed_mismatch@ends event_gap@ends");
    CHECK(with([](auto& events) { erase(events, EventKind::slot, 3); }) == "event_gap@ends");
    CHECK(with([](auto& events) { erase(events, EventKind::slot, 3); }, {.slots = false}) == "");
    CHECK(with([](auto& events) {
              events.insert(
                  events.begin() + static_cast<std::ptrdiff_t>(nth(events, EventKind::slot, 3)),
                  Event(event(events, EventKind::slot, 3)));
          }) == "event_gap@ends");
    CHECK(with([](auto& events) {  // two tokens out of one slot
              put_before(events, EventKind::sample, 3, events::Sample{2, 11, 0});
              ++event(events, EventKind::sample, 4).fields[1];
              ++event(events, EventKind::finish, 1).fields[3];
          }) != "");
    CHECK(with([](auto& events) {  // a slot of a request that has no rows in this step
              put_before(events, EventKind::rows, 2, events::Slot{1, 0, 1, 2});
          }) == "consumed_mismatch@ends event_gap@ends");
}

}  // namespace
}  // namespace kvw
