#include "replay/certificate.h"

#include <algorithm>
#include <array>
#include <set>

#include "src/base/text.h"

namespace kvw {

namespace {

constexpr std::array kLayers = {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends,
                                ProofLayer::execution, ProofLayer::solo};
constexpr std::array kRecordLayers = {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends};

// The reasons that conclude() draws itself.
constexpr std::string_view kNothingRead = "nothing_read";
constexpr std::string_view kNoControl = "no_control";
constexpr std::string_view kControlNotCaught = "control_not_caught";
constexpr std::string_view kImported = "imported";

LayerState state_of(const Certificate& certificate, ProofLayer layer) {
    const auto found = certificate.layers.find(layer);
    return found == certificate.layers.end() ? LayerState::not_run : found->second;
}

// It looked, and every control shows that it can see: what it says about a tenant counts.
bool decided(const Certificate& certificate, ProofLayer layer) {
    const LayerState state = state_of(certificate, layer);
    return state == LayerState::ok || state == LayerState::violation;
}

void add_once(std::vector<std::string>& codes, std::string_view code) {
    if (std::find(codes.begin(), codes.end(), code) == codes.end()) {
        codes.emplace_back(code);
    }
}

// Lowers layers whose controls say that they prove nothing, and says why.
void weigh_controls(Certificate& certificate, std::vector<std::string>& reasons) {
    for (auto& [layer, state] : certificate.layers) {
        if (state != LayerState::ok && state != LayerState::unproven) {
            continue;
        }
        const ControlCount controls = certificate.controls[layer];
        if (controls.caught < controls.planted) {
            state = LayerState::unproven;
            add_once(reasons, kControlNotCaught);
        } else if (controls.planted == 0) {
            state = LayerState::unproven;
            if (certificate.counts.reads > 0) {
                add_once(reasons, kNoControl);
            }
        }
    }
}

struct Involved {
    std::set<std::uint32_t> tenants;  // that read or were read in some violation
    bool all_named = true;            // false: a violation names nobody, so it may be about anyone
};

Involved involved_in(const Certificate& certificate) {
    Involved involved;
    involved.all_named = certificate.violations.size() == certificate.violations_total;
    for (const Violation& violation : certificate.violations) {
        const std::uint32_t reader = number(violation.reader.tenant);
        const std::uint32_t writer = violation.writer ? number(violation.writer->tenant) : 0;
        involved.all_named &= reader != 0 || writer != 0;
        involved.tenants.insert({reader, writer});
    }
    return involved;
}

std::vector<std::string> open_questions(const Certificate& certificate) {
    std::vector<std::string> list;
    if (certificate.level < Level::execution) {
        list.emplace_back(
            "the record is not what the hardware computed: run replay for level execution");
    }
    if (certificate.level < Level::solo) {
        list.emplace_back(
            "influence of another request by other ways than KV rows: run replay with solo");
    }
    if (certificate.level < Level::execution) {
        list.emplace_back(
            "text in another tenant's section, and text that was not rendered from the sampled "
            "tokens");
    }
    list.emplace_back(
        "a consistent forgery: a tenant renamed, a whole request dropped with its pages and "
        "counters, "
        "an id swapped together with its digests (the trace is not signed)");
    list.emplace_back("a modified recorder, engine or verifier binary");
    list.emplace_back("timing side channels");
    list.emplace_back(
        "other processes on the device, and registers and memory outside the KV pages");
    list.emplace_back("whether the caller told the truth about its tenant");
    return list;
}

// What a violation that is not about a page leaves open in JSON.
nlohmann::json page_json(const Violation& violation, std::uint64_t value) {
    return violation.page == kNoPage ? nlohmann::json(nullptr) : nlohmann::json(value);
}

std::string tenant_of(const Certificate& certificate, TenantId tenant) {
    const auto found = certificate.tenant_names.find(number(tenant));
    return found == certificate.tenant_names.end() ? std::string{} : found->second;
}

nlohmann::json owner_json(const Certificate& certificate, const Owner& owner) {
    return {{"tenant", tenant_of(certificate, owner.tenant)},
            {"request", std::to_string(number(owner.request))}};
}

nlohmann::json level_json(Level level) {
    return level == Level::none ? nlohmann::json(nullptr) : nlohmann::json(name_of(level));
}

std::string owner_text(const Certificate& certificate, const Owner& owner) {
    if (owner == Owner{}) {
        return "nobody";
    }
    const std::string tenant = tenant_of(certificate, owner.tenant);
    return (tenant.empty() ? "tenant " + std::to_string(number(owner.tenant)) : printable(tenant)) +
           "/" + std::to_string(number(owner.request));
}

std::string violation_text(const Certificate& certificate, const Violation& violation) {
    std::string line = "  " + certificate.run + ":" + std::to_string(violation.event) + "  " +
                       name_of(violation.kind) + " (" + name_of(violation.layer) + "): reader " +
                       owner_text(certificate, violation.reader);
    if (violation.writer) {
        line += ", writer " + owner_text(certificate, *violation.writer);
    }
    if (violation.page != kNoPage) {
        line += ", page " + std::to_string(violation.page) + " generation " +
                std::to_string(violation.generation) + " rows [" +
                std::to_string(violation.row_begin) + "," + std::to_string(violation.row_end) + ")";
    }
    line += ", " + std::to_string(violation.emitted_after) + " tokens sampled after it\n";
    if (!violation.detail.empty()) {
        line += "      " + violation.detail + "\n";
    }
    return line;
}

// One sentence for a reason code; reasons with words of their own are shown as they are.
std::string_view reason_text(std::string_view code) {
    struct Words {
        std::string_view code, words;
    };
    static constexpr Words kWords[] = {
        {"not_closed", "the recorder did not close this trace"},
        {"torn", "the trace ends in the middle of something"},
        {"live", "a recorder is still writing this trace"},
        {"no_run_end", "the trace was closed before its run ended"},
        {"unknown_critical_event", "it has events that this version does not know"},
        {"gap", "the recorder says that events are missing"},
        {"fault_plan_active", "the run was made with faults switched on"},
        {"headers_not_checked", "the kernels did not check headers in this run"},
        {"controls_off", "the controls were switched off"},
        {"answers_missing", "the output does not answer every line of the input"},
        {"answers_without_moment", "answers of a run that was not recorded are among them"},
        {"answers_of_other_traces", "answers are among them whose traces were not given"},
        {"answers_without_text", "without the text sections no answer can be compared"},
        {"answers_without_end", "the recorder was gone before it recorded the end of an answer"},
        {kNothingRead, "no row was read, so there is nothing to prove"},
        {kNoControl, "a layer had nothing on which a control could be tried"},
        {kControlNotCaught, "a layer did not see a fault that was planted to be seen"},
        {kImported, "an imported trace proves its record at most"},
    };
    for (const Words& entry : kWords) {
        if (entry.code == code) {
            return entry.words;
        }
    }
    return {};
}

}  // namespace

const char* name_of(Verdict verdict) {
    switch (verdict) {
        case Verdict::proven:
            return "PROVEN";
        case Verdict::violation:
            return "VIOLATION";
        case Verdict::unproven:
            return "UNPROVEN";
        case Verdict::nothing_read:
            return "nothing_read";
    }
    return "unknown";
}

const char* name_of(Level level) {
    switch (level) {
        case Level::none:
            return "none";
        case Level::record:
            return "record";
        case Level::execution:
            return "execution";
        case Level::solo:
            return "solo";
    }
    return "unknown";
}

const char* name_of(LayerState state) {
    switch (state) {
        case LayerState::not_run:
            return "not_run";
        case LayerState::ok:
            return "ok";
        case LayerState::violation:
            return "violation";
        case LayerState::unproven:
            return "unproven";
    }
    return "unknown";
}

std::optional<Level> level_named(std::string_view name) {
    for (const Level level : {Level::record, Level::execution, Level::solo}) {
        if (name == name_of(level)) {
            return level;
        }
    }
    return std::nullopt;
}

void merge_layer(Certificate& certificate, ProofLayer layer, LayerState state,
                 ControlCount controls, std::vector<Violation> violations) {
    certificate.violations_total -=
        std::erase_if(certificate.violations, [&](const Violation& v) { return v.layer == layer; });
    certificate.layers[layer] = violations.empty() ? state : LayerState::violation;
    certificate.controls[layer] = controls;
    for (Violation& violation : violations) {
        violation.layer = layer;
        ++certificate.violations_total;
        if (certificate.violations.size() < kViolationsKept) {
            certificate.violations.push_back(std::move(violation));
        }
    }
}

void cap_tenant(Certificate& certificate, TenantId tenant, Level level, std::string_view code) {
    for (TenantVerdict& entry : certificate.tenants) {
        if (entry.number == number(tenant)) {
            entry.level_max = std::min(entry.level_max, level);
        }
    }
    add_once(certificate.reasons, code);
}

void add_incomplete(Certificate& certificate, std::string_view code) {
    add_once(certificate.incomplete, code);
}

void conclude(Certificate& certificate) {
    std::vector<std::string> reasons = certificate.incomplete;
    if (certificate.counts.reads == 0) {
        add_once(reasons, kNothingRead);
    }
    weigh_controls(certificate, reasons);

    const bool record_decided =
        certificate.incomplete.empty() && certificate.counts.reads > 0 &&
        std::all_of(kRecordLayers.begin(), kRecordLayers.end(),
                    [&](ProofLayer layer) { return decided(certificate, layer); });
    Level reached = Level::record;
    if (certificate.imported) {
        add_once(reasons, kImported);
    } else if (decided(certificate, ProofLayer::execution)) {
        reached = decided(certificate, ProofLayer::solo) ? Level::solo : Level::execution;
    }

    const Involved involved = involved_in(certificate);
    Level lowest = reached;
    for (TenantVerdict& tenant : certificate.tenants) {
        tenant.level = Level::record;
        if (involved.tenants.contains(tenant.number)) {
            tenant.verdict = Verdict::violation;
            tenant.level = std::min(reached, tenant.level_max);
        } else if (tenant.reads == 0) {
            tenant.verdict = Verdict::nothing_read;
            tenant.level = Level::none;
        } else if (!involved.all_named || !record_decided) {
            tenant.verdict = Verdict::unproven;
        } else {
            tenant.verdict = Verdict::proven;
            tenant.level = std::min(reached, tenant.level_max);
        }
        if (tenant.reads > 0) {
            lowest = std::min(lowest, tenant.level);
        }
    }

    if (certificate.violations_total > 0) {
        certificate.verdict = Verdict::violation;
        certificate.level = reached;
    } else if (!record_decided) {
        certificate.verdict = Verdict::unproven;
        certificate.level = Level::record;
    } else {
        certificate.verdict = Verdict::proven;
        certificate.level = lowest;
    }
    certificate.not_excluded = open_questions(certificate);
    for (const std::string& reason : certificate.reasons) {
        const bool drawn_here = reason == kNothingRead || reason == kNoControl ||
                                reason == kControlNotCaught || reason == kImported;
        if (!drawn_here) {
            add_once(reasons, reason);
        }
    }
    certificate.reasons = std::move(reasons);
}

nlohmann::json to_json(const Certificate& certificate) {
    using nlohmann::json;
    json layers = json::object();
    json controls = json::object();
    for (const ProofLayer layer : kLayers) {
        layers[name_of(layer)] = name_of(state_of(certificate, layer));
    }
    for (const auto& [layer, count] : certificate.controls) {
        controls[name_of(layer)] = {{"planted", count.planted}, {"caught", count.caught}};
    }
    json tenants = json::array();
    for (const TenantVerdict& tenant : certificate.tenants) {
        tenants.push_back({{"tenant", tenant.tenant},
                           {"verdict", name_of(tenant.verdict)},
                           {"level", level_json(tenant.level)}});
    }
    json violations = json::array();
    for (const Violation& violation : certificate.violations) {
        violations.push_back(
            {{"moment", certificate.run + ":" + std::to_string(violation.event)},
             {"kind", name_of(violation.kind)},
             {"layer", name_of(violation.layer)},
             {"reader", owner_json(certificate, violation.reader)},
             {"writer",
              violation.writer ? owner_json(certificate, *violation.writer) : json(nullptr)},
             {"page", page_json(violation, violation.page)},
             {"generation", page_json(violation, violation.generation)},
             {"rows", {violation.row_begin, violation.row_end}},
             {"emitted_after", violation.emitted_after}});
    }
    const LedgerCounts& counts = certificate.counts;
    json out = {
        {"schema", "kvwitness/certificate"},
        {"v", 1},
        {"verdict", name_of(certificate.verdict)},
        {"level", level_json(certificate.level)},
        {"claim", certificate.shares_used ? "writer_or_declared_share" : "writer_only"},
        {"trace",
         {{"run", certificate.run},
          {"root", certificate.root.empty() ? json(nullptr) : json(certificate.root)},
          {"ledger_digest",
           certificate.ledger_digest.empty() ? json(nullptr) : json(certificate.ledger_digest)},
          {"events", counts.events},
          {"closed", certificate.closed},
          {"signed", "none"},
          {"imported", certificate.imported}}},
        {"layers", std::move(layers)},
        {"counts",
         {{"requests", counts.requests},
          {"tenants", counts.tenants},
          {"pages", counts.pages},
          {"reads", counts.reads},
          {"rows_covered", counts.rows_covered},
          {"shares", counts.shares},
          {"witnesses", counts.witnesses},
          {"controls", std::move(controls)}}},
        {"tenants", std::move(tenants)},
        {"violations", std::move(violations)},
        {"not_excluded", certificate.not_excluded},
        {"reasons", certificate.reasons}};
    if (certificate.violations_total > certificate.violations.size()) {
        out["violations_total"] = certificate.violations_total;
    }
    return out;
}

std::string to_text(const Certificate& certificate) {
    const LedgerCounts& counts = certificate.counts;
    std::string out =
        std::string(name_of(certificate.verdict)) + " at level " + name_of(certificate.level);
    if (certificate.verdict == Verdict::proven) {
        out += certificate.shares_used ? ": no row was read by a request other than its writer or "
                                         "one with a declared share"
                                       : ": no row was read by a request other than its writer";
    }
    out += "\ntrace " + certificate.run + (certificate.closed ? ", closed, " : ", not closed, ") +
           std::to_string(counts.events) + " events, not signed" +
           (certificate.imported ? ", imported" : "") + "\n";
    out += std::to_string(counts.requests) + " requests of " + std::to_string(counts.tenants) +
           " tenants, " + std::to_string(counts.pages) + " pages handed out, " +
           std::to_string(counts.reads) + " reads of " + std::to_string(counts.rows_covered) +
           " rows, " + std::to_string(counts.witnesses) + " witnesses" +
           (counts.shares > 0 ? ", " + std::to_string(counts.shares) + " pages adopted" : "") +
           (counts.transfers > 0 ? ", " + std::to_string(counts.transfers) + " transfers" : "") +
           "\n";
    out += "layers:";
    for (const ProofLayer layer : kLayers) {
        out += std::string(layer == ProofLayer::ledger ? " " : ", ") + name_of(layer) + " " +
               name_of(state_of(certificate, layer));
        if (const auto found = certificate.controls.find(layer);
            found != certificate.controls.end()) {
            out += " (" + std::to_string(found->second.caught) + " of " +
                   std::to_string(found->second.planted) + " controls caught)";
        }
    }
    out += "\n";
    if (certificate.violations_total > 0) {
        out += std::to_string(certificate.violations_total) + " violations";
        if (certificate.violations_total > certificate.violations.size()) {
            out += ", the first " + std::to_string(certificate.violations.size()) + " are shown";
        }
        out += ":\n";
        for (const Violation& violation : certificate.violations) {
            out += violation_text(certificate, violation);
        }
    }
    for (const TenantVerdict& tenant : certificate.tenants) {
        if (tenant.verdict != certificate.verdict || tenant.level != certificate.level) {
            out +=
                "tenant " + printable(tenant.tenant) + ": " + name_of(tenant.verdict) +
                (tenant.level == Level::none ? ""
                                             : std::string(" at level ") + name_of(tenant.level)) +
                "\n";
        }
    }
    for (const std::string& reason : certificate.reasons) {
        const std::string_view words = reason_text(reason);
        out += "reason: " + printable(reason) +
               (words.empty() ? std::string{} : ": " + std::string(words)) + "\n";
    }
    for (const std::string& question : certificate.not_excluded) {
        out += "not excluded: " + question + "\n";
    }
    return out;
}

int exit_code(const Certificate& certificate, Level required) {
    switch (certificate.verdict) {
        case Verdict::violation:
            return 1;
        case Verdict::proven:
            return certificate.level >= required ? 0 : 6;
        case Verdict::unproven:
        case Verdict::nothing_read:
            return 6;
    }
    return 6;
}

}  // namespace kvw
