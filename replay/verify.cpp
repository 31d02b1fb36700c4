#include "replay/verify.h"

#include <algorithm>
#include <utility>

#include "replay/controls.h"
#include "src/base/sha256.h"

namespace kvw {

namespace {

constexpr std::uint64_t kProgressEvery = 65536;  // events

LayerState state_of(const Ledger& ledger, ProofLayer layer) {
    return ledger.violations_of(layer) > 0 ? LayerState::violation : LayerState::ok;
}

const char* code_of(TraceEnd end) {
    switch (end) {
        case TraceEnd::closed:
            return nullptr;
        case TraceEnd::not_closed:
            return "not_closed";
        case TraceEnd::torn:
            return "torn";
        case TraceEnd::live:
            return "live";
    }
    return "torn";
}

void take_ledger(Certificate& certificate, const Ledger& ledger) {
    certificate.counts = ledger.counts();
    certificate.shares_used = ledger.counts().shares > 0;  // nobody adopts what is its own
    certificate.violations = ledger.violations();
    certificate.violations_total = ledger.violations_total();
    for (const ProofLayer layer : {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends}) {
        certificate.layers[layer] = state_of(ledger, layer);
    }
    for (const auto& [number, facts] : ledger.tenants()) {
        certificate.tenant_names.emplace(number, facts.name);
        certificate.tenants.push_back(
            {.tenant = facts.name, .number = number, .reads = facts.reads});
    }
}

// A trace that is cut before anything can be read from it is evidence of nothing, not bad input.
Certificate nothing_readable() {
    Certificate certificate;
    for (const ProofLayer layer : {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends}) {
        certificate.layers[layer] = LayerState::unproven;
    }
    add_incomplete(certificate, "torn");
    conclude(certificate);
    return certificate;
}

}  // namespace

Result<Certificate> verify(const Path& trace, const VerifyOptions& options) {
    Result<TraceReader> reader = TraceReader::open(trace, {.texts = false});
    if (!reader) {
        if (reader.error().code == ErrorCode::torn) {
            return nothing_readable();
        }
        return reader.error();
    }
    // Version 1.0 knew no slots.
    const TraceHeader& header = reader->header();
    Ledger ledger({.strict = options.strict, .slots = header.major > 1 || header.minor > 0});
    Controls controls;
    TraceChunk chunk;
    std::uint64_t progress_at = kProgressEvery;
    while (true) {
        const Result<bool> more = reader->next(chunk);
        if (!more) {
            return more.error();
        }
        if (!*more) {
            break;
        }
        const std::span<const Event> events = chunk.events;
        std::uint64_t number = chunk.first_event;
        for (std::size_t i = 0; i < events.size(); ++i) {
            if (!events[i].numbered()) {
                continue;
            }
            if (options.controls) {
                controls.before(ledger, events.subspan(i));
            }
            ledger.apply(events[i], number++);
        }
        if (options.progress && ledger.counts().events >= progress_at) {
            options.progress(ledger.counts().events);
            progress_at = ledger.counts().events + kProgressEvery;
        }
    }
    const TraceEnding& ending = reader->ending();
    const bool closed = ending.end == TraceEnd::closed;
    ledger.finish(closed && ledger.ran_to_end());

    Certificate certificate;
    certificate.run = to_string(header.run_id);
    certificate.closed = closed;
    certificate.imported = header.imported;
    certificate.ledger_digest = hex(reader->ledger_digest());
    if (ending.totals) {
        certificate.root = hex(ending.totals->root);
    }
    take_ledger(certificate, ledger);
    certificate.controls = controls.counts();
    if (const char* code = code_of(ending.end); code != nullptr) {
        add_incomplete(certificate, code);
        certificate.reasons.push_back("last_event: the last whole event is " +
                                      std::to_string(ending.last_event) +
                                      (ending.reason.empty() ? "" : "; " + ending.reason));
    } else if (!ledger.ran_to_end()) {
        add_incomplete(certificate, "no_run_end");
    }
    if (ending.unknown_critical > 0) {
        add_incomplete(certificate, "unknown_critical_event");
    }
    if (ledger.gap_seen()) {
        add_incomplete(certificate, "gap");
    }
    if (ledger.fault_plan_active()) {
        add_incomplete(certificate, "fault_plan_active");
    }
    if (!ledger.headers_checked()) {
        add_incomplete(certificate, "headers_not_checked");
    }
    if (!ledger.numerics_known()) {
        add_incomplete(certificate, "unknown_numerics");
    }
    if (!options.controls) {
        add_incomplete(certificate, "controls_off");
    }
    conclude(certificate);
    return certificate;
}

}  // namespace kvw
