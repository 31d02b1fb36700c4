// The verdict of verify and replay, and its JSON form (kvwitness/certificate v1).
//
// verify fills a certificate from the record alone; execute and solo add their layers with
// merge_layer() and call conclude() again, which is the only place where a verdict is drawn.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/ledger/ledger.h"
#include "traces/trace.h"

namespace kvw {

enum class Verdict : std::uint8_t { proven, violation, unproven, nothing_read };
enum class Level : std::uint8_t { none, record, execution, solo };
enum class LayerState : std::uint8_t { not_run, ok, violation, unproven };
const char* name_of(Verdict verdict);  // "PROVEN", "VIOLATION", "UNPROVEN", "nothing_read"
const char* name_of(Level level);      // "record", …
const char* name_of(LayerState state);
// "record", "execution", "solo"; none when unknown.
std::optional<Level> level_named(std::string_view name);

struct ControlCount {
    std::uint64_t planted = 0;
    std::uint64_t caught = 0;
};

struct TenantVerdict {
    std::string tenant;
    Verdict verdict = Verdict::nothing_read;
    Level level = Level::none;
    // What conclude() goes by.
    std::uint32_t number = 0;
    std::uint64_t reads = 0;
    Level level_max = Level::solo;  // lowered by cap_tenant()
};

struct Certificate {
    Verdict verdict = Verdict::unproven;
    Level level = Level::none;
    bool shares_used = false;         // claim: writer_only, or writer_or_declared_share
    std::string run;                  // hex run id
    std::string root, ledger_digest;  // hex; root is empty while there is no footer
    bool closed = false, imported = false;
    LedgerCounts counts;
    std::map<ProofLayer, LayerState> layers;
    std::map<ProofLayer, ControlCount> controls;
    std::vector<TenantVerdict> tenants;
    std::map<std::uint32_t, std::string> tenant_names;  // by number, for printing violations
    std::vector<Violation> violations;  // the first kViolationsKept; violations_total counts all
    std::uint64_t violations_total = 0;
    std::vector<std::string> not_excluded;
    // Why it is not PROVEN, or not at a higher level: "code" or "code: words". conclude() draws
    // some of them anew and keeps the others.
    std::vector<std::string> reasons;
    // Codes of what the record lacks; each one makes the verdict UNPROVEN. conclude() goes by them.
    std::vector<std::string> incomplete;
};

// Sets one layer's result: its state, its controls and what it found (appended; a layer with
// violations is in state violation). Replaces what the layer said before; call conclude() when all
// are merged.
void merge_layer(Certificate& certificate, ProofLayer layer, LayerState state,
                 ControlCount controls, std::vector<Violation> violations);
// This tenant reaches `level` at most, for the reason `code` (text shredded, solo only sampled, …).
void cap_tenant(Certificate& certificate, TenantId tenant, Level level, std::string_view code);
// The record lacks something: UNPROVEN with this code.
void add_incomplete(Certificate& certificate, std::string_view code);
// Draws verdict, level, tenant verdicts, reasons and not_excluded anew from layers, controls,
// violations and codes. A layer that is ok without a caught control, or with one that was not
// caught, becomes unproven here.
void conclude(Certificate& certificate);

nlohmann::json to_json(const Certificate& certificate);
// The same for people: a few lines, every violation with reader, writer, page, rows, moment.
std::string to_text(const Certificate& certificate);
// 0 proven at `required` or above, 1 violation, 6 unproven or below.
int exit_code(const Certificate& certificate, Level required);

}  // namespace kvw
