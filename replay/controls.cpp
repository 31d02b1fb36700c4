#include "replay/controls.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace kvw {

namespace {

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kLookAhead = 4096;      // events that a control may need to show itself
constexpr std::uint64_t kRetryAfter = 16384;  // events, when this place did not lend itself

void feed(Ledger& ledger, const Event& event) { ledger.apply(event, ledger.next_event()); }

// The event, changed in one field, must raise the violations of `layer`.
bool seen_at_once(const Ledger& before, Event event, std::size_t field, std::uint64_t value,
                  ProofLayer layer) {
    Ledger ledger = before;
    event.fields[field] = value;
    feed(ledger, event);
    return ledger.violations_of(layer) > before.violations_of(layer);
}

// Before the read, the first page of the reader's table goes to a made-up request of a made-up
// tenant, in good order (freed, drained, scrubbed, handed out, written). Nothing when the table is
// not whole.
std::optional<bool> sees_stranger(const Ledger& before, const Event& event) {
    const auto rows = event.as<events::Rows>();
    const auto entry = before.table_entry(RequestId(rows.request), 0);
    if (!entry) {
        return std::nullopt;
    }
    const std::uint64_t page = entry->page;
    const std::uint64_t tenant = std::uint64_t{before.last_tenant()} + 1;
    const std::uint64_t stranger = before.last_request() + 1;
    Ledger ledger = before;
    feed(ledger, Event::of(events::Tenant{tenant}, "(control)"));
    feed(ledger, Event::of(events::Submit{stranger, tenant, kPageTokens, 1, 0, 0, 0, 0}));
    feed(ledger, Event::of(events::Admit{stranger, kPageTokens + 1, 0, 0}));
    feed(ledger, Event::of(events::Free{rows.request, page,
                                        static_cast<std::uint64_t>(FreeReason::finished)}));
    feed(ledger, Event::of(events::Drain{page}));
    feed(ledger, Event::of(events::Scrub{page, 0}));
    feed(ledger, Event::of(events::PoisonCheck{page, 1, 0}));
    feed(ledger,
         Event::of(events::Alloc{stranger, 0, 0, page, std::uint64_t{entry->generation} + 1}));
    feed(ledger, Event::of(events::Rows{stranger, kPageTokens, kPageTokens, 0, 1}));
    feed(ledger, event);
    return ledger.violations_of(ProofLayer::ledger, ViolationKind::foreign_row) >
           before.violations_of(ProofLayer::ledger, ViolationKind::foreign_row);
}

// The shared page goes to a made-up request of a made-up tenant, too. Nothing where another one has
// to come before it.
std::optional<bool> sees_foreign_adopt(const Ledger& before, const Event& event) {
    auto adopt = event.as<events::Adopt>();
    if (adopt.index != 0) {
        return std::nullopt;
    }
    const std::uint64_t tenant = std::uint64_t{before.last_tenant()} + 1;
    const std::uint64_t stranger = before.last_request() + 1;
    Ledger ledger = before;
    feed(ledger, Event::of(events::Tenant{tenant}, "(control)"));
    feed(ledger, Event::of(events::Submit{stranger, tenant, 2 * kPageTokens, 1, 0, 0, 0,
                                          static_cast<std::uint64_t>(CacheScope::tenant)}));
    feed(ledger, Event::of(events::Admit{stranger, 2 * kPageTokens + 1, 0, 0}));
    adopt.request = stranger;
    feed(ledger, Event::of(adopt));
    return ledger.violations_of(ProofLayer::ledger, ViolationKind::foreign_row) >
           before.violations_of(ProofLayer::ledger, ViolationKind::foreign_row);
}

// The first of `rest` of `kind` with `value` in `field`, and not behind one of `kind_before` with
// the value in its first field; 0 when it is not near.
std::size_t place_of(std::span<const Event> rest, EventKind kind, std::size_t field,
                     std::uint64_t value, EventKind kind_before = {}) {
    const std::size_t end = std::min(rest.size(), kLookAhead);
    for (std::size_t i = 1; i < end; ++i) {
        if (rest[i].kind == kind && rest[i].fields[field] == value) {
            return i;
        }
        if (rest[i].kind == kind_before && rest[i].fields[0] == value) {
            return 0;
        }
    }
    return 0;
}

// rest[0] is left out: the event at `place` must show it as a violation of the ledger, of whatever
// kind (a page that was not shared may be free by then).
bool shows_missing(const Ledger& before, std::span<const Event> rest, std::size_t place) {
    Ledger ledger = before;
    for (const Event& event : rest.subspan(1, place - 1)) {
        if (event.numbered()) {
            feed(ledger, event);
        }
    }
    const std::uint64_t violations = ledger.violations_of(ProofLayer::ledger);
    feed(ledger, rest[place]);
    return ledger.violations_of(ProofLayer::ledger) > violations;
}

// The scrub of a page is missing when the page is handed out.
std::optional<bool> sees_missing_scrub(const Ledger& before, std::span<const Event> rest) {
    const std::size_t alloc = place_of(rest, EventKind::alloc, 3, rest[0].as<events::Scrub>().page);
    return alloc == 0 ? std::nullopt : std::optional(shows_missing(before, rest, alloc));
}

// The share of a page is missing when the page is adopted.
std::optional<bool> sees_missing_share(const Ledger& before, std::span<const Event> rest) {
    const std::size_t adopt =
        place_of(rest, EventKind::adopt, 2, rest[0].as<events::Share>().page, EventKind::evict);
    return adopt == 0 ? std::nullopt : std::optional(shows_missing(before, rest, adopt));
}

// The emitted digest is another one; its rendered twin or the request's end must show it.
std::optional<bool> sees_emitted(const Ledger& before, std::span<const Event> rest) {
    const std::uint64_t request = rest[0].as<events::Emitted>().request;
    Ledger ledger = before;
    Event changed = rest[0];
    changed.fields[2] ^= 1;
    feed(ledger, changed);
    const auto seen = [&] {
        return ledger.violations_of(ProofLayer::ends) > before.violations_of(ProofLayer::ends);
    };
    const std::size_t end = std::min(rest.size(), kLookAhead);
    for (std::size_t i = 1; i < end && !seen(); ++i) {
        if (rest[i].numbered()) {
            feed(ledger, rest[i]);
        }
        if (rest[i].kind == EventKind::finish && rest[i].fields[0] == request) {
            return seen();
        }
    }
    return seen() ? std::optional(true) : std::nullopt;
}

}  // namespace

Controls::Controls()
    : counts_{{ProofLayer::ledger, {}}, {ProofLayer::kernel, {}}, {ProofLayer::ends, {}}} {
    due_.fill(kNever);
    for (const EventKind kind :
         {EventKind::rows, EventKind::scrub, EventKind::witness, EventKind::run_end,
          EventKind::sourced, EventKind::emitted, EventKind::finish, EventKind::share,
          EventKind::adopt, EventKind::transfer, EventKind::slot}) {
        due_[static_cast<std::size_t>(kind)] = 0;
    }
}

void Controls::plant(const Ledger& ledger, std::span<const Event> rest) {
    const Event& event = rest[0];
    std::optional<bool> caught;
    ProofLayer layer = ProofLayer::ledger;
    switch (event.kind) {
        case EventKind::rows: {
            caught = sees_stranger(ledger, event);
            if (caught) {
                const std::uint64_t end = event.as<events::Rows>().end + 1;
                count(layer, seen_at_once(ledger, event, 2, end, layer));
            }
            break;
        }
        case EventKind::scrub:
            caught = sees_missing_scrub(ledger, rest);
            break;
        case EventKind::share:
            caught = sees_missing_share(ledger, rest);
            break;
        case EventKind::adopt:
            caught = sees_foreign_adopt(ledger, event);
            if (caught) {
                count(ProofLayer::ends,
                      seen_at_once(ledger, event, 4, event.as<events::Adopt>().digest0 ^ 1,
                                   ProofLayer::ends));
            }
            break;
        case EventKind::transfer:
            caught = seen_at_once(ledger, event, 2, event.as<events::Transfer>().end + 1, layer);
            break;
        case EventKind::slot:
            layer = ProofLayer::ends;
            caught =
                seen_at_once(ledger, event, 2, event.as<events::Slot>().stamped_request + 1, layer);
            break;
        case EventKind::witness: {
            layer = ProofLayer::kernel;
            const std::uint64_t sum = (event.as<events::Witness>().sum + 1) & 0xffffffff;
            caught = seen_at_once(ledger, event, 1, sum, layer);
            break;
        }
        case EventKind::run_end:
            layer = ProofLayer::kernel;
            caught =
                seen_at_once(ledger, event, 2, event.as<events::RunEnd>().rows_read + 1, layer);
            break;
        case EventKind::sourced:
            layer = ProofLayer::ends;
            if (ledger.source_expected(RequestId(event.fields[0]))) {
                caught =
                    seen_at_once(ledger, event, 2, event.as<events::Sourced>().sourced0 ^ 1, layer);
            }
            break;
        case EventKind::emitted:
            layer = ProofLayer::ends;
            caught = sees_emitted(ledger, rest);
            break;
        case EventKind::finish:
            layer = ProofLayer::ends;
            caught = seen_at_once(ledger, event, 3,
                                  event.as<events::Finish>().completion_tokens + 1, layer);
            break;
        default:
            return;
    }
    const std::uint64_t now = ledger.next_event();
    std::uint64_t& due = due_[static_cast<std::size_t>(event.kind)];
    if (!caught) {
        // Cheap to ask again, except where the events ahead were searched.
        const bool searched = event.kind == EventKind::scrub || event.kind == EventKind::share ||
                              event.kind == EventKind::emitted;
        due = searched ? now + kRetryAfter : now + 1;
        return;
    }
    count(layer, *caught);
    due = 2 * now + 1024;
}

void Controls::count(ProofLayer layer, bool caught) {
    ++counts_[layer].planted;
    counts_[layer].caught += caught ? 1 : 0;
}

}  // namespace kvw
