#include "src/ledger/ledger.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>

#include "kernels/tile.h"
#include "tests/ledger/history.h"
#include "tests/ledger/told.h"
#include "traces/schema.h"

namespace kvw {
namespace {

// Two tenants, two requests that decode together, a third one in pages that were used before.
History two_tenants() {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t first = history.begin(a, 20), second = history.begin(b, 10);
    history.step({first, second}, 16);
    history.step({first, second});
    history.step({first, second});
    history.finish(first);
    history.clean_pages();
    history.reject(history.submit(a, 100, 1));
    history.pages_next = {0};
    const std::uint64_t third = history.begin(b, 5);
    history.step({second, third});
    history.step({third});
    history.finish(second);
    history.finish(third);
    history.end();
    return history;
}

// What the ledger says when one event of two_tenants() is changed.
std::string after(EventKind kind, std::size_t n,
                  const std::function<void(std::vector<Event>&, std::size_t)>& change) {
    History history = two_tenants();
    change(history.events, nth(history.events, kind, n));
    return kinds(fold(history.events));
}
std::string with_field(EventKind kind, std::size_t n, std::size_t field, std::uint64_t difference) {
    return after(kind, n,
                 [&](auto& events, std::size_t i) { events[i].fields[field] += difference; });
}
std::string without(EventKind kind, std::size_t n = 0) {
    return after(kind, n, [](auto& events, std::size_t i) {
        events.erase(events.begin() + static_cast<std::ptrdiff_t>(i));
    });
}
std::string twice(EventKind kind, std::size_t n = 0) {
    return after(kind, n, [](auto& events, std::size_t i) {
        events.insert(events.begin() + static_cast<std::ptrdiff_t>(i), Event(events[i]));
    });
}

TEST_CASE("a run in good order has no violation, and its counts are those of its events") {
    const History history = two_tenants();
    const Ledger ledger = fold(history.events);
    CHECK(kinds(ledger) == "");
    CHECK(ledger.counts().events == history.events.size());
    CHECK(ledger.counts().requests == 4);
    CHECK(ledger.counts().rejects == 1);
    CHECK(ledger.counts().tenants == 2);
    CHECK(ledger.counts().pages == 4);
    CHECK(ledger.counts().reads == 9);
    CHECK(ledger.counts().steps == 5);
    CHECK(ledger.counts().rows_covered == history.events.back().as<events::RunEnd>().rows_read);
    CHECK(ledger.counts().sources == 3);
    CHECK(ledger.counts().ends == 3);
    CHECK(ledger.ran_to_end());
    CHECK(ledger.tenants().at(2).name == "blue");
    CHECK(ledger.tenants().at(2).requests == 2);
    CHECK(ledger.tenants().at(1).reads == 3);
}

TEST_CASE("a page that two requests own is named when it is handed out and when it is read") {
    for (const bool planted : {false, true}) {
        History history(8);
        const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
        const std::uint64_t victim = history.begin(a, 20), thief = history.begin(b, 10);
        history.step({victim});
        if (planted) {
            history.pages_next = {history.table(victim)[0]};
        }
        history.step({thief});
        history.step({victim});
        history.step({victim});
        history.finish(victim);
        history.finish(thief);
        history.end();
        const Ledger ledger = fold(history.events, false);
        if (!planted) {
            CHECK(kinds(ledger) == "");
            continue;
        }
        const Violation* owned = find(ledger, ViolationKind::double_owner);
        REQUIRE(owned != nullptr);
        CHECK(owned->reader == owner(2, 2));
        CHECK(owned->writer == owner(1, 1));
        CHECK(owned->row_end == 16);
        const Violation* foreign = find(ledger, ViolationKind::foreign_row);
        REQUIRE(foreign != nullptr);
        CHECK(foreign->reader == owner(1, 1));
        CHECK(foreign->writer == owner(2, 2));
        CHECK(foreign->page == 0);
        CHECK(foreign->generation == 2);
        CHECK(foreign->row_begin == 0);
        CHECK(foreign->row_end == 16);
        CHECK(foreign->emitted_after == 2);  // the step of the read, and the one after
        CHECK(find(ledger, ViolationKind::witness_mismatch, ProofLayer::kernel) != nullptr);
    }
}

TEST_CASE("rows left by the last owner are stale, and the ledger names who left them") {
    for (const bool planted : {false, true}) {
        History history(8);
        const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
        const std::uint64_t first = history.begin(a, 40);
        history.step({first});
        history.finish(first);
        history.scrubs = !planted;
        history.clean_pages();
        history.pages_next = {0, 1, 2};
        const std::uint64_t second = history.begin(b, 40);
        history.add(events::Step{2, 1});
        // The placeholder: one row is written, and all of them are read.
        history.rows(second, planted ? 1 : 40, 40);
        history.witness(second);
        const Ledger ledger = fold(history.events, false);
        if (!planted) {
            CHECK(kinds(ledger) == "");
            continue;
        }
        const Violation* scrub = find(ledger, ViolationKind::missing_scrub);
        REQUIRE(scrub != nullptr);
        CHECK(scrub->writer == owner(1, 1));
        std::uint64_t stale = 0;
        for (const Violation& violation : ledger.violations()) {
            if (violation.kind == ViolationKind::stale_row) {
                CHECK(violation.reader == owner(2, 2));
                CHECK(violation.writer == owner(1, 1));
                stale += violation.row_end - violation.row_begin;
            }
        }
        CHECK(stale == 39);  // row 39 is its own
    }
}

TEST_CASE("a row that nobody wrote is named without a writer") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 40);
    history.add(events::Step{1, 1});
    history.rows(id, 1, 40);
    history.witness(id);
    const Ledger ledger = fold(history.events, false);
    std::uint64_t rows = 0;
    for (const Violation& violation : ledger.violations()) {
        CHECK(violation.kind == ViolationKind::unwritten_row);
        CHECK_FALSE(violation.writer.has_value());
        rows += violation.row_end - violation.row_begin;
    }
    CHECK(rows == 39);
}

TEST_CASE(
    "an unscrubbed page that its new owner fills before reading is a missing scrub and no stale "
    "row") {
    History history(4);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t first = history.begin(a, 10);
    history.step({first});
    history.finish(first);
    history.scrubs = false;
    history.clean_pages();
    const std::uint64_t second = history.begin(b, 12);
    for (int i = 0; i < 12; ++i) {
        history.step({second}, 1);
    }
    history.step({second});
    history.step({second});
    const Ledger ledger = fold(history.events, false);
    CHECK(kinds(ledger) == "missing_scrub@ledger");
    CHECK(ledger.violations()[0].row_end == 10);
}

TEST_CASE("what an owner wrote over old rows is its own, whatever happens to the page later") {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t first = history.begin(a, 16), late = history.begin(a, 12);
    history.step({first, late});
    history.finish(first);
    history.scrubs = false;
    history.clean_pages();
    history.pages_next = {0};
    const std::uint64_t second = history.begin(b, 10);
    history.step({second});  // over rows 0 to 9 of the first
    history.table(late)[0] = 0;
    // The late writer's table is said to hold page 0 too; from then on row 12 of it is not the
    // owner's.
    history.add(events::PoisonCheck{0, 1, 0});
    history.add(events::Alloc{late, 0, 1, 0, 3});
    history.add(events::Step{3, 1});
    history.add(events::Rows{second, 1, 11, 0, 1});
    const Ledger ledger = fold(history.events, false);
    for (const Violation& violation : ledger.violations()) {
        if (violation.kind == ViolationKind::foreign_row) {
            CHECK(violation.reader == owner(2, 3));
            CHECK(violation.writer == owner(1, 2));  // who took the page, not who left rows in it
        }
    }
    CHECK(find(ledger, ViolationKind::foreign_row) != nullptr);
}

TEST_CASE("after a scrub nothing is left of earlier owners") {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t first = history.begin(a, 16);
    history.step({first});
    history.finish(first);
    history.scrubs = false;
    history.clean_pages();
    const std::uint64_t second = history.begin(b, 4);
    history.pages_next = {0};
    history.step({second});
    history.finish(second);
    history.scrubs = true;
    history.clean_pages();
    const std::uint64_t third = history.begin(b, 16);
    history.pages_next = {0};
    history.add(events::Step{3, 1});
    history.rows(third, 1, 16);
    history.witness(third);
    const Ledger ledger = fold(history.events, false);
    CHECK(kinds(ledger) == "missing_scrub@ledger unwritten_row@ledger");
}

TEST_CASE("a page that was freed is neither read nor written by the one who let go of it") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 20);
    history.step({id});
    for (const std::uint64_t page : history.table(id)) {
        history.add(events::Free{id, page, 1});
    }
    history.step({id});
    history.step({id});
    const Ledger ledger = fold(history.events, false);
    const Violation* freed = find(ledger, ViolationKind::freed_page);
    REQUIRE(freed != nullptr);
    CHECK(freed->writer == owner(1, 1));
    CHECK(freed->row_end == 16);
    const Violation* late = find(ledger, ViolationKind::late_write);
    REQUIRE(late != nullptr);
    CHECK(late->page == 1);
    CHECK(late->row_begin == 4);
    CHECK(late->row_end == 5);
    CHECK(kinds(ledger) ==
          "event_gap@ledger event_gap@ledger "                       // it lets go and did not end
          "late_write@ledger freed_page@ledger freed_page@ledger");  // each said once
}

TEST_CASE("a late write into the next owner's page is a foreign row for that owner") {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t first = history.begin(a, 4), second = history.begin(b, 4);
    history.step({first});
    history.add(events::Free{first, 0, 1});
    history.add(events::Drain{0});
    history.scrub(0);
    history.pages_next = {0};
    history.step({second});  // rows 0..3
    history.step({first});   // writes its row 4 through the old table
    history.step({second});  // row 4 is written by its owner
    CHECK(find(fold(history.events, false), ViolationKind::late_write)->writer == owner(2, 2));
    history.step({first});  // and row 5 before the owner gets there
    history.add(events::Step{6, 1});
    history.rows(second, 1, 7);
    history.witness(second);
    const Ledger ledger = fold(history.events, false);
    bool named = false;
    for (const Violation& violation : ledger.violations()) {
        named |= violation.kind == ViolationKind::foreign_row && violation.reader == owner(2, 2) &&
                 violation.writer == owner(1, 1) && violation.row_begin == 5 &&
                 violation.row_end == 6;
    }
    CHECK(named);
}

TEST_CASE("a scrub that is missing or was not done is a missing scrub") {
    CHECK(has(without(EventKind::scrub, 0), "missing_scrub@ledger"));
    // The scrub between two owners of page 0.
    CHECK(has(without(EventKind::scrub, 3), "missing_scrub@ledger"));
    CHECK(with_field(EventKind::poison_check, 3, 2, 1) == "missing_scrub@kernel");
    CHECK(without(EventKind::poison_check, 0) == "event_gap@kernel");
}

TEST_CASE("a witness that differs in one bit is a mismatch, whichever event carries it") {
    CHECK(with_field(EventKind::witness, 0, 1, 1) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::witness, 7, 1, 1) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::witness_sum, 0, 2, std::uint64_t{1} << 63) ==
          "witness_mismatch@kernel");
    CHECK(with_field(EventKind::finish, 0, 7, std::uint64_t{1} << 63) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::scrub, 0, 1, 1) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::scrub, 3, 1, 1) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::run_end, 0, 5, 1) == "witness_mismatch@kernel");
    CHECK(without(EventKind::witness, 2) == "event_gap@kernel");
    CHECK(has(twice(EventKind::witness, 2), "event_gap@kernel"));
}

TEST_CASE("the kernels' counters must be those of the events") {
    CHECK(with_field(EventKind::run_end, 0, 2, 1) == "unrecorded_read@kernel");
    CHECK(with_field(EventKind::run_end, 0, 2, ~std::uint64_t{0}) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::run_end, 0, 3, 1) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::run_end, 0, 4, 1) == "witness_mismatch@kernel");
    CHECK(with_field(EventKind::run_end, 0, 0, 1) == "event_gap@ledger");
    CHECK(with_field(EventKind::run_end, 0, 1, 1) == "event_gap@ledger");
}

TEST_CASE("what was consumed must be what was admitted, once, before the first token") {
    for (const std::size_t field : {1, 2, 3}) {
        CHECK(with_field(EventKind::sourced, 0, field, 1) == "consumed_mismatch@ends");
    }
    CHECK(with_field(EventKind::admit, 0, 2, 1) == "consumed_mismatch@ends");
    CHECK(without(EventKind::sourced, 1) == "consumed_mismatch@ends");
    CHECK(twice(EventKind::sourced, 1) == "consumed_mismatch@ends");
}

TEST_CASE("a placeholder instead of the prompt shows at both ends of the record") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 40);
    history.add(events::Step{1, 1});
    history.rows(id, 1, 1);
    history.witness(id);
    history.add(events::Slot{id, 0, id, 1});
    history.add(events::Sourced{id, 1, 5, 5});
    history.add(events::Sample{id, 40, 0});
    CHECK(kinds(fold(history.events, false)) == "consumed_mismatch@ends consumed_mismatch@ends");
}

TEST_CASE("the right digest over rows that were not written is no source") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("acme"), 40);
    history.add(events::Step{1, 1});
    history.rows(id, 1, 1);
    history.witness(id);
    const auto [first, second] = History::source(id, 40);
    history.add(events::Sourced{id, 40, first, second});
    CHECK(kinds(fold(history.events, false)) == "consumed_mismatch@ends");
}

TEST_CASE("what was emitted must be what was rendered, and as many tokens as were sampled") {
    for (const EventKind kind : {EventKind::rendered, EventKind::emitted}) {
        for (const std::size_t field : {1, 2, 3}) {
            CHECK(has(with_field(kind, 0, field, 1), "emitted_not_sampled@ends"));
        }
        CHECK(has(without(kind, 1), "emitted_not_sampled@ends"));
        CHECK(twice(kind, 1) == "emitted_not_sampled@ends");
    }
    CHECK(with_field(EventKind::finish, 0, 3, 1) == "emitted_not_sampled@ends");
    CHECK(with_field(EventKind::finish, 0, 4, 1) == "emitted_not_sampled@ends");
    CHECK(with_field(EventKind::finish, 0, 2, 1) == "event_gap@ends");
    CHECK(has(with_field(EventKind::sample, 2, 1, 1), "event_gap@ends"));
    CHECK(has(without(EventKind::sample, 2), "@ends"));
    // Neither digest, and no byte: but tokens were sampled.
    CHECK(after(EventKind::finish, 0, [](auto& events, std::size_t i) {
              events[i].fields[4] = 0;
              std::erase_if(events, [](const Event& event) {
                  return (event.kind == EventKind::rendered || event.kind == EventKind::emitted) &&
                         event.fields[0] == 1;
              });
          }) == "emitted_not_sampled@ends");
    // A request that ended for a violation is compared like any other.
    History history = two_tenants();
    history.events[nth(history.events, EventKind::finish, 0)].fields[1] = 6;
    for (Event& event : history.events) {
        if (event.kind == EventKind::free && event.fields[0] == 1) {
            event.fields[2] = static_cast<std::uint64_t>(FreeReason::violation);
        }
    }
    CHECK(kinds(fold(history.events)) == "");
    history.events[nth(history.events, EventKind::emitted, 0)].fields[2] ^= 1;
    CHECK(kinds(fold(history.events)) == "emitted_not_sampled@ends");
}

TEST_CASE(
    "a request without an end and pages that nobody let go of are named when the trace was "
    "closed") {
    History history = two_tenants();
    const std::size_t finish = nth(history.events, EventKind::finish, 2);
    history.events.erase(history.events.begin() + static_cast<std::ptrdiff_t>(finish));
    // It lets go of its page, too, and nothing says why.
    CHECK(kinds(fold(history.events)) == "event_gap@ledger unfinished_request@ledger");
    CHECK(kinds(fold(history.events, false)) == "event_gap@ledger");

    History lost = two_tenants();
    std::erase_if(lost.events, [](const Event& event) {
        return event.kind == EventKind::free && event.as<events::Free>().request == 4;
    });
    // Its drain and scrub are now those of a page in use.
    CHECK(has(kinds(fold(lost.events)), "lost_page@ledger"));
    CHECK_FALSE(has(kinds(fold(lost.events, false)), "lost_page@ledger"));
}

TEST_CASE("a header that a kernel met and should not have met is named by what was loaded") {
    const auto loaded = [](AccessKind access, std::uint64_t tenant, std::uint64_t request,
                           std::uint64_t generation, std::uint64_t rows, TileState state) {
        return after(EventKind::witness, 2, [&](auto& events, std::size_t i) {
            events.insert(events.begin() + static_cast<std::ptrdiff_t>(i),
                          Event::of(events::Loaded{1, 0, 1, 2, static_cast<std::uint64_t>(access),
                                                   16, tenant, request, generation, 0, rows,
                                                   static_cast<std::uint64_t>(state)}));
        });
    };
    CHECK(loaded(AccessKind::read, 2, 2, 1, 16, TileState::owned) == "foreign_row@kernel");
    CHECK(loaded(AccessKind::read, 1, 7, 1, 16, TileState::owned) == "foreign_row@kernel");
    CHECK(loaded(AccessKind::read, 1, 1, 9, 16, TileState::owned) == "stale_row@kernel");
    CHECK(loaded(AccessKind::read, 1, 1, 1, 3, TileState::owned) == "unwritten_row@kernel");
    CHECK(loaded(AccessKind::read, 0, 0, 0, 0, TileState::freed) == "freed_page@kernel");
    CHECK(loaded(AccessKind::read, 0, 0, 0, 0, TileState::virgin) == "unwritten_row@kernel");
    CHECK(loaded(AccessKind::write, 2, 2, 1, 16, TileState::owned) == "late_write@kernel");
}

TEST_CASE(
    "a foreign page in the table shows by its loaded header, and by the witness when nothing "
    "checks") {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t victim = history.begin(a, 20), reader = history.begin(b, 20);
    history.step({victim, reader});
    history.table(reader)[0] = history.table(victim)[0];  // no event says so
    history.step({reader});
    const Ledger by_witness = fold(history.events, false);
    CHECK(kinds(by_witness) == "witness_mismatch@kernel");
    CHECK(by_witness.violations()[0].reader == owner(2, 2));

    // The kernel that checks says what it met; the conclusion in the record changes nothing.
    const std::size_t at = nth(history.events, EventKind::witness, 2);
    history.events.insert(
        history.events.begin() + static_cast<std::ptrdiff_t>(at),
        Event::of(events::Loaded{reader, 2, 0, 0, 1, 16, a, victim, 1, 0, 16, 2}));
    const Ledger by_header = fold(history.events, false);
    CHECK(kinds(by_header) == "foreign_row@kernel witness_mismatch@kernel");
    CHECK(by_header.violations()[0].reader == owner(2, 2));
    CHECK(by_header.violations()[0].writer == owner(1, 1));
    history.events.insert(
        history.events.begin() + static_cast<std::ptrdiff_t>(at),
        Event::of(events::Violation{reader, 2, 1, 0, 16, a, victim}, "foreign_row"));
    CHECK(kinds(fold(history.events, false)) == kinds(by_header));
}

TEST_CASE("events out of order, missing, twice or of nobody are gaps") {
    CHECK(has(without(EventKind::run), "event_gap"));
    CHECK(has(twice(EventKind::run), "event_gap"));
    CHECK(has(with_field(EventKind::run, 0, 1, 1), "event_gap"));
    CHECK(has(without(EventKind::model), "event_gap"));
    CHECK(has(twice(EventKind::model), "event_gap"));
    CHECK(has(without(EventKind::pool), "event_gap"));
    CHECK(has(twice(EventKind::pool), "event_gap"));
    CHECK(has(without(EventKind::tenant, 0), "event_gap"));
    CHECK(has(twice(EventKind::tenant, 1), "event_gap"));
    CHECK(has(with_field(EventKind::tenant, 1, 0, 1), "event_gap"));
    CHECK(has(without(EventKind::submit, 1), "event_gap"));
    CHECK(has(twice(EventKind::submit, 1), "event_gap"));
    CHECK(has(with_field(EventKind::submit, 1, 0, 1), "event_gap"));
    CHECK(has(with_field(EventKind::submit, 1, 1, 9), "event_gap"));
    CHECK(has(without(EventKind::admit, 1), "event_gap"));
    CHECK(has(twice(EventKind::admit, 1), "event_gap"));
    CHECK(has(with_field(EventKind::admit, 1, 1, ~std::uint64_t{39}), "event_gap"));
    CHECK(has(twice(EventKind::reject), "event_gap"));
    CHECK(has(with_field(EventKind::reject, 0, 0, ~std::uint64_t{0}), "event_gap"));
    CHECK(has(without(EventKind::alloc, 1), "event_gap"));
    CHECK(has(with_field(EventKind::alloc, 1, 2, 1), "event_gap"));
    CHECK(has(with_field(EventKind::alloc, 1, 3, 100), "event_gap"));
    CHECK(has(with_field(EventKind::alloc, 1, 4, 1), "event_gap"));
    CHECK(has(twice(EventKind::free, 0), "event_gap"));
    CHECK(has(with_field(EventKind::free, 0, 0, 1), "event_gap"));
    CHECK(has(without(EventKind::drain, 0), "event_gap"));
    CHECK(has(twice(EventKind::scrub, 0), "event_gap"));
    CHECK(has(without(EventKind::step, 1), "event_gap"));
    CHECK(has(with_field(EventKind::step, 1, 0, 1), "event_gap"));
    CHECK(has(with_field(EventKind::step, 1, 1, 1), "event_gap"));
    CHECK(has(with_field(EventKind::rows, 3, 4, 1), "event_gap"));  // another version of the table
    CHECK(has(with_field(EventKind::rows, 3, 0, 40), "event_gap"));
    CHECK(has(without(EventKind::rows, 3), "event_gap"));
    CHECK(has(twice(EventKind::rows, 3), "event_gap"));
    CHECK(has(twice(EventKind::finish, 0), "event_gap"));
    CHECK(has(with_field(EventKind::finish, 0, 1, 40), "event_gap"));
    CHECK(has(twice(EventKind::run_end), "event_gap"));
}

TEST_CASE("each rule about order is seen by itself, and says one thing") {
    const std::uint64_t minus_one = ~std::uint64_t{0};
    CHECK(with_field(EventKind::rows, 3, 4, minus_one) == "event_gap@ledger");
    CHECK(with_field(EventKind::step, 1, 1, minus_one) == "event_gap@ledger");
    CHECK(without(EventKind::witness, 0) == "event_gap@kernel");  // a chunk that samples nothing
    CHECK(with_field(EventKind::witness_sum, 0, 1, 1) == "event_gap@kernel");
    CHECK(after(EventKind::tenant, 1, [](auto& events, std::size_t i) {
              events[i].bytes = "acme";
          }) == "event_gap@ledger");
    // Admitted for its prompt alone: the row that follows is one too many.
    CHECK(with_field(EventKind::admit, 0, 1, minus_one - 31) == "event_gap@ledger");

    const auto with_last_request = [](std::uint64_t id, const std::function<void(History&)>& then) {
        History history(8);
        const std::uint64_t first = history.begin(history.tenant("acme"), 4);
        history.step({first});
        history.finish(first);
        const std::size_t begin = history.events.size();
        history.submit(1, 8, 8);
        then(history);
        for (std::size_t i = begin; i < history.events.size(); ++i) {
            history.events[i].fields[0] = id;
        }
        history.end();
        return kinds(fold(history.events));
    };
    const auto refused = [](History& history) { history.reject(2); };
    CHECK(with_last_request(2, refused) == "");
    CHECK(with_last_request(5, refused) == "event_gap@ledger");
    CHECK(with_last_request(1, refused) ==  // submitted, sampling set, refused
          "event_gap@ledger event_gap@ledger event_gap@ledger");
    CHECK(with_last_request(
              2, [](History& history) { history.finish(2, FinishReason::deadline); }) == "");
    CHECK(with_last_request(2, [](History& history) { history.finish(2, FinishReason::stop); }) ==
          "event_gap@ledger");
    CHECK(with_last_request(2, [](History& history) {
              history.admit(2);
              history.events[history.events.size() - 2].fields[1] = 7;
              history.finish(2, FinishReason::cancelled);
          }) == "event_gap@ledger");
}

TEST_CASE("a refused request does nothing, and an ended one nothing more") {
    for (const EventKind kind :
         {EventKind::admit, EventKind::alloc, EventKind::rows, EventKind::sample}) {
        CHECK(has(after(kind, 0, [](auto& events, std::size_t i) { events[i].fields[0] = 3; }),
                  "event_gap"));
    }
    CHECK(
        has(after(EventKind::rows, 8, [](auto& events, std::size_t i) { events[i].fields[0] = 1; }),
            "event_gap"));
}

TEST_CASE("a missing number is a gap even when the events around it fit") {
    const History history = two_tenants();
    Ledger ledger;
    std::uint64_t number = 0;
    for (const Event& event : history.events) {
        number += number == 20 ? 2 : 1;
        ledger.apply(event, number);
    }
    ledger.finish(true);
    CHECK(kinds(ledger) == "event_gap@ledger");
    CHECK(ledger.violations()[0].event == 22);
}

TEST_CASE("a gap, a fault plan and unchecked headers are facts about the record and no violation") {
    History history = two_tenants();
    history.events.insert(history.events.begin() + 4, Event::of(events::Fault{1}, "skip-scrub"));
    history.events.insert(history.events.begin() + 5, Event::of(events::Gap{1, 2}));
    history.events.insert(history.events.begin() + 6, Event::of(events::NoteClock{1, 2}));
    history.events[0].fields[2] = 0;
    const Ledger ledger = fold(history.events);
    CHECK(kinds(ledger) == "");
    CHECK(ledger.fault_plan_active());
    CHECK(ledger.faults() == std::vector<std::string>{"skip-scrub"});
    CHECK(ledger.gap_seen());
    CHECK_FALSE(ledger.headers_checked());
}

TEST_CASE("a preempted request starts anew, and what it consumed is sourced again") {
    for (const bool sourced : {true, false}) {
        History history(8);
        const std::uint64_t id = history.begin(history.tenant("acme"), 20);
        history.step({id});
        history.step({id});
        history.preempt(id);
        history.clean_pages();
        history.resume(id);
        history.step({id}, 16);
        history.step({id});
        history.finish(id);
        history.end();
        if (!sourced) {
            history.events.erase(
                history.events.begin() +
                static_cast<std::ptrdiff_t>(nth(history.events, EventKind::sourced, 1)));
        }
        CHECK(kinds(fold(history.events)) == (sourced ? "" : "consumed_mismatch@ends"));
    }
}

// One of four kinds of random run: with prefixes in common or without, in one pool or in two.
History random_run(std::uint32_t seed, std::size_t steps = 150) {
    History history(32, seed % 4 >= 2 ? 24 : 0);
    history.shares = seed % 2 == 1;
    random_history(history, seed, steps, 5);
    return history;
}

TEST_CASE("random runs in good order have no violation") {
    std::uint64_t events = 0, reused = 0;
    LedgerCounts sum;
    for (std::uint32_t seed = 0; seed < 240; ++seed) {
        CAPTURE(seed);
        const Ledger ledger = fold(random_run(seed).events);
        const std::string detail = ledger.violations().empty() ? "" : ledger.violations()[0].detail;
        INFO(detail);
        REQUIRE(kinds(ledger) == "");
        events += ledger.counts().events;
        reused += ledger.counts().pages > 48 ? 1 : 0;
        sum.shares += ledger.counts().shares;
        sum.evictions += ledger.counts().evictions;
        sum.preemptions += ledger.counts().preemptions;
        sum.transfers += ledger.counts().transfers;
    }
    CHECK(events > 200000);
    CHECK(reused > 200);  // pages had several owners
    CHECK(sum.shares > 1000);
    CHECK(sum.evictions > 5000);
    CHECK(sum.preemptions > 1000);
    CHECK(sum.transfers > 1000);
}

TEST_CASE(
    "a single event that is missing or there twice is seen, but for those that state nothing") {
    // Without these the record says less, and nothing wrong: settings, courtesies, layers that only
    // a re-execution can compare, sums that the next one contains, promises that nobody relies on.
    const auto states_nothing = [](EventKind kind) {
        switch (kind) {
            case EventKind::config:
            case EventKind::sampling:
            case EventKind::queue:
            case EventKind::cancel:
            case EventKind::reserve:
            case EventKind::witness_sum:
            case EventKind::layer:
                return true;
            default:
                return false;
        }
    };
    std::mt19937_64 random(29);
    std::map<EventKind, int> tried;
    for (int round = 0; round < 1600; ++round) {
        History history = random_run(static_cast<std::uint32_t>(random() % 24), 60);
        // Kinds in turn, or most would be rows and witnesses.
        const EventKind kind =
            event_schema()[static_cast<std::size_t>(round) % event_schema().size()].kind;
        std::vector<std::size_t> places;
        for (std::size_t i = 0; i < history.events.size(); ++i) {
            if (history.events[i].kind == kind) {
                places.push_back(i);
            }
        }
        if (places.empty()) {
            continue;
        }
        const auto at =
            history.events.begin() + static_cast<std::ptrdiff_t>(places[random() % places.size()]);
        const bool twice = random() % 2 == 0;
        const Event changed = *at;
        const std::string text = to_text(changed);
        CAPTURE(text);
        CAPTURE(twice);
        if (twice) {
            history.events.insert(at, Event(*at));
        } else {
            history.events.erase(at);
        }
        const Ledger ledger = fold(history.events);
        const bool seen = ledger.violations_total() > 0 || !ledger.ran_to_end();
        // A tenant may have asked for nothing.
        const bool idle =
            kind == EventKind::tenant &&
            std::none_of(history.events.begin(), history.events.end(), [&](const Event& event) {
                return event.kind == EventKind::submit && event.fields[1] == changed.fields[0];
            });
        if (!idle) {  // and a look at poison may be taken twice
            CHECK(seen == !(states_nothing(kind) || (kind == EventKind::poison_check && twice)));
        }
        ++tried[kind];
    }
    for (const EventKind kind :
         {EventKind::share, EventKind::adopt, EventKind::evict, EventKind::preempt,
          EventKind::resume, EventKind::transfer, EventKind::slot, EventKind::free,
          EventKind::drain, EventKind::scrub, EventKind::finish, EventKind::run_end}) {
        CAPTURE(static_cast<int>(kind));
        CHECK(tried[kind] > 5);
    }
}

TEST_CASE("runs that were cut to pieces and put together wrongly never make the ledger fall over") {
    std::mt19937_64 random(31);
    std::uint64_t violations = 0;
    for (int round = 0; round < 400; ++round) {
        History history = random_run(static_cast<std::uint32_t>(random() % 24), 60);
        std::vector<Event>& events = history.events;
        for (std::uint64_t changes = random() % 30; changes > 0; --changes) {
            const auto place = [&] {
                return events.begin() + static_cast<std::ptrdiff_t>(random() % events.size());
            };
            switch (random() % 4) {
                case 0:
                    std::iter_swap(place(), place());
                    break;
                case 1:
                    events.erase(place());
                    break;
                case 2:
                    events.insert(place(), Event(*place()));
                    break;
                default:
                    place()->fields[random() % 5] = random() % 40;
            }
        }
        violations += fold(events).violations_total();
    }
    CHECK(violations > 10000);
}

TEST_CASE("a copy goes on by itself") {
    const History history = two_tenants();
    Ledger ledger;
    std::uint64_t number = 0;
    for (const Event& event : history.events) {
        Ledger copy = ledger;
        copy.apply(Event::of(events::Tenant{std::uint64_t{copy.last_tenant()} + 1}, "only here"),
                   copy.next_event());
        copy.apply(Event::of(events::Submit{1, 1, 1, 1, 1, 1, 0, 0}), copy.next_event());
        ledger.apply(event, ++number);
    }
    ledger.finish(true);
    CHECK(kinds(ledger) == "");
    CHECK(ledger.tenants().size() == 2);
    CHECK(ledger.tenants().at(2).name == "blue");
}

TEST_CASE("one changed field of a fact is nearly always seen, and never crashes the ledger") {
    // Facts that the ledger alone cannot check: settings, names, limits and reasons without a
    // counterpart in the record. The chunk digests and the re-execution hold those.
    const auto checked = [](EventKind kind, std::size_t field) {
        switch (kind) {
            case EventKind::run:
                return field == 1;
            case EventKind::model:
                return field == 4 || field == 5;
            case EventKind::pool:
                return field < 3;
            case EventKind::tenant:
                return true;
            case EventKind::submit:
                return field < 3;  // another session or scope may be as good
            case EventKind::admit:
                return field != 1;
            case EventKind::reserve:
                return field < 2;
            case EventKind::preempt:
            case EventKind::resume:
            case EventKind::evict:
            case EventKind::transfer:
            case EventKind::slot:
                return true;
            case EventKind::share:
                return field < 5;  // digests matter to who adopts it
            case EventKind::adopt:
                return true;
            case EventKind::finish:
                return field != 1 && field != 5 && field != 6;
            case EventKind::alloc:
            case EventKind::scrub:
            case EventKind::drain:
            case EventKind::step:
            case EventKind::rows:
            case EventKind::sourced:
            case EventKind::witness:
            case EventKind::witness_sum:
            case EventKind::rendered:
            case EventKind::emitted:
            case EventKind::run_end:
                return true;
            case EventKind::free:
                return true;
            case EventKind::sample:
                return field < 2;
            case EventKind::poison_check:
                return field != 1;
            case EventKind::reject:
                return field == 0;
            default:
                return false;
        }
    };
    std::mt19937_64 random(17);
    std::size_t facts = 0, seen = 0;
    std::string missed;
    for (int round = 0; round < 2000; ++round) {
        History history = random_run(static_cast<std::uint32_t>(round % 20), 30);
        Event& event = history.events[random() % history.events.size()];
        const KindSchema* schema = schema_of(event.kind);
        REQUIRE(schema != nullptr);
        const std::size_t field = random() % schema->fields.size();
        const std::uint64_t changes[] = {
            event.fields[field] + 1, event.fields[field] - 1, random(),
            random() % 32,           ~std::uint64_t{0},       event.fields[field] ^ (1ull << 32)};
        const std::uint64_t old = event.fields[field];
        event.fields[field] = changes[random() % 6];
        const Ledger ledger = fold(history.events);
        if (event.fields[field] != old && checked(event.kind, field)) {
            ++facts;
            seen += ledger.violations_total() > 0 ? 1 : 0;
            if (ledger.violations_total() == 0) {
                missed += to_text(event) + " [" + std::string(schema->fields[field].name) + "]\n";
            }
        }
    }
    CHECK(facts > 1000);
    INFO(missed);
    CHECK(seen * 100 >= facts * 97);
}

TEST_CASE("the ledger stays within its bounds on events made of noise") {
    std::mt19937_64 random(23);
    for (const std::uint64_t decode_pages : {0, 32}) {
        Ledger ledger;
        History start(64, decode_pages);
        std::uint64_t number = 0;
        for (const Event& event : start.events) {
            ledger.apply(event, ++number);
        }
        for (int i = 0; i < 50000; ++i) {
            Event event;
            event.kind = event_schema()[random() % event_schema().size()].kind;
            for (std::uint64_t& field : event.fields) {
                field = random() % 4 == 0 ? random() : random() % 8;
            }
            ledger.apply(event, event.numbered() ? ++number : 0);
        }
        ledger.finish(true);
        CHECK(ledger.violations().size() == kViolationsKept);
        CHECK(ledger.violations_total() > kViolationsKept);
    }
}

TEST_CASE(
    "the live ledger stops the engine at the first violation, or lets it go on and remembers") {
    History history = two_tenants();
    const std::size_t alloc = nth(history.events, EventKind::alloc, 3);
    history.events.erase(history.events.begin() +
                         static_cast<std::ptrdiff_t>(nth(history.events, EventKind::scrub, 3)));
    LiveLedger stops(true), goes_on(false);
    for (std::size_t i = 0; i < history.events.size(); ++i) {
        stops.note(history.events[i]);
        goes_on.note(history.events[i]);
        CHECK(bool(stops.commit()) == (i + 1 < alloc));
        CHECK(goes_on.commit());
    }
    REQUIRE_FALSE(stops.commit());
    CHECK(stops.commit().error().code == ErrorCode::violation);
    CHECK(stops.commit().error().message ==
          "missing_scrub at event " + std::to_string(alloc) +
              ": page 0 goes to request 4 with what request 1 left in it");
    CHECK(kinds(goes_on.ledger()).starts_with("missing_scrub@ledger"));
}

}  // namespace
}  // namespace kvw
