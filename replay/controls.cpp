#include "replay/controls.h"

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
    feed(ledger, Event::of(events::Submit{stranger, tenant, kPageTokens, 1, 0, 0}));
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

// The scrub is left out; the page's next alloc must show it. Nothing when that is not near.
std::optional<bool> sees_missing_scrub(const Ledger& before, std::span<const Event> rest) {
    const std::uint64_t page = rest[0].as<events::Scrub>().page;
    const std::size_t end = std::min(rest.size(), kLookAhead);
    for (std::size_t i = 1; i < end; ++i) {
        if (rest[i].kind != EventKind::alloc || rest[i].as<events::Alloc>().page != page) {
            continue;
        }
        Ledger ledger = before;
        for (const Event& event : rest.subspan(1, i)) {
            if (event.numbered()) {
                feed(ledger, event);
            }
        }
        return ledger.violations_of(ProofLayer::ledger, ViolationKind::missing_scrub) >
               before.violations_of(ProofLayer::ledger, ViolationKind::missing_scrub);
    }
    return std::nullopt;
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
          EventKind::sourced, EventKind::emitted, EventKind::finish}) {
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
            if (ledger.prompt_expected(RequestId(event.fields[0]))) {
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
        due = event.kind == EventKind::rows || event.kind == EventKind::sourced ? now + 1
                                                                                : now + kRetryAfter;
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
