// Requests: what was asked, admitted, consumed, sampled and answered.
#include "src/ledger/ledger.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/kernels.h"
#include "src/base/check.h"
#include "src/base/text.h"
#include "src/base/witness_mix.h"

namespace kvw {

namespace {

constexpr std::uint64_t kClassDevice =
    2;  // model.class: 0 (files of version 1.0) and 1 portable, 2 device
constexpr std::uint64_t kTilesMax = 1u << 20;
constexpr std::size_t kFaultsKept = 64;
constexpr std::size_t kNameBytesMax = 64;

std::string str(std::uint64_t number) { return std::to_string(number); }

}  // namespace

const char* name_of(ViolationKind kind) {
    switch (kind) {
        case ViolationKind::foreign_row:
            return "foreign_row";
        case ViolationKind::stale_row:
            return "stale_row";
        case ViolationKind::unwritten_row:
            return "unwritten_row";
        case ViolationKind::freed_page:
            return "freed_page";
        case ViolationKind::double_owner:
            return "double_owner";
        case ViolationKind::undeclared_share:
            return "undeclared_share";
        case ViolationKind::missing_scrub:
            return "missing_scrub";
        case ViolationKind::late_write:
            return "late_write";
        case ViolationKind::unrecorded_read:
            return "unrecorded_read";
        case ViolationKind::witness_mismatch:
            return "witness_mismatch";
        case ViolationKind::consumed_mismatch:
            return "consumed_mismatch";
        case ViolationKind::emitted_not_sampled:
            return "emitted_not_sampled";
        case ViolationKind::wrong_text_section:
            return "wrong_text_section";
        case ViolationKind::lost_page:
            return "lost_page";
        case ViolationKind::unfinished_request:
            return "unfinished_request";
        case ViolationKind::event_gap:
            return "event_gap";
        case ViolationKind::bit_divergence:
            return "bit_divergence";
        case ViolationKind::solo_divergence:
            return "solo_divergence";
    }
    return "unknown";
}

const char* name_of(ProofLayer layer) {
    switch (layer) {
        case ProofLayer::ledger:
            return "ledger";
        case ProofLayer::kernel:
            return "kernel";
        case ProofLayer::ends:
            return "ends";
        case ProofLayer::execution:
            return "execution";
        case ProofLayer::solo:
            return "solo";
    }
    return "unknown";
}

void Ledger::apply(const Event& event, std::uint64_t event_number) {
    if (!event.numbered()) {
        return;
    }
    event_ = event_number;
    if (event_number != next_event_) [[unlikely]] {
        gap({}, "event " + str(event_number) + " follows event " + str(next_event_ - 1));
    }
    next_event_ = event_number + 1;
    ++counts_.events;
    if (run_end_seen_) [[unlikely]] {
        gap({}, "an event after the end of the run");
    }
    if (!run_seen_ && event.kind != EventKind::run) [[unlikely]] {
        run_seen_ = true;  // said once
        gap({}, "the first event is not the start of a run");
    }
    switch (event.kind) {
        case EventKind::run:
            return on_run(event);
        case EventKind::model:
            return on_model(event);
        case EventKind::pool:
            return on_pool(event);
        case EventKind::config:
            return;
        case EventKind::tenant:
            return on_tenant(event);
        case EventKind::submit:
            return on_submit(event);
        case EventKind::sampling:
            open(event.fields[0], "sampling");
            return;
        case EventKind::reject:
            return on_reject(event);
        case EventKind::queue:
            open(event.fields[0], "queue");
            return;
        case EventKind::admit:
            return on_admit(event);
        case EventKind::cancel:
            open(event.fields[0], "cancel");
            return;
        case EventKind::finish:
            return on_finish(event);
        case EventKind::preempt:
            return on_preempt(event);
        case EventKind::resume:
            return on_resume(event);
        case EventKind::reserve:
            return on_reserve(event);
        case EventKind::alloc:
            return on_alloc(event);
        case EventKind::poison_check:
            return on_poison_check(event);
        case EventKind::free:
            return on_free(event);
        case EventKind::drain:
            return on_drain(event);
        case EventKind::scrub:
            return on_scrub(event);
        case EventKind::quarantine:
            return on_quarantine(event);
        case EventKind::share:
            return on_share(event);
        case EventKind::adopt:
            return on_adopt(event);
        case EventKind::evict:
            return on_evict(event);
        case EventKind::step:
            return on_step(event);
        case EventKind::rows:
            return on_rows(event);
        case EventKind::sourced:
            return on_sourced(event);
        case EventKind::witness:
            return on_witness(event);
        case EventKind::witness_sum:
            return on_witness_sum(event);
        case EventKind::loaded:
            return on_loaded(event);
        case EventKind::layer:
            begun(event.fields[0], "layer");
            return;
        case EventKind::sample:
            return on_sample(event);
        case EventKind::rendered:
            return on_bytes(event, &Request::rendered, &Request::emitted);
        case EventKind::emitted:
            return on_bytes(event, &Request::emitted, &Request::rendered);
        case EventKind::transfer:
            return on_transfer(event);
        case EventKind::slot:
            return on_slot(event);
        case EventKind::fault:
            if (faults_.size() < kFaultsKept) {
                faults_.emplace_back(event.bytes.substr(0, kNameBytesMax));
            }
            return;
        case EventKind::violation:
            return;  // a conclusion; the evidence for it stands elsewhere
        case EventKind::gap:
            gap_seen_ = true;
            return;
        case EventKind::run_end:
            return on_run_end(event);
        case EventKind::note_clock:
        case EventKind::note_host:
            return;
    }
}

void Ledger::finish(bool closed) {
    if (!closed) {
        return;
    }
    close_step();
    std::map<std::uint64_t, Owner> unfinished;  // by request, so that slot numbers do not show
    for (const auto& [request, slot] : slots_of_) {
        if (slots_[slot].phase != Phase::finished) {
            unfinished.emplace(request, slots_[slot].owner);
        }
    }
    for (const auto& [request, owner] : unfinished) {
        report({.kind = ViolationKind::unfinished_request,
                .layer = ProofLayer::ledger,
                .reader = owner,
                .detail = "request " + str(request) + " has no end in a trace that was closed"});
    }
    struct Lost {
        std::uint64_t page = 0, pages = 0;
    };
    // By owner: one violation names its first page. A page that only the prefix tree still has
    // counts as its writer's.
    std::map<std::uint64_t, Lost> lost;
    for (std::size_t page = 0; page < pages_.size(); ++page) {
        if (pages_[page].state == PageState::owned) {
            Lost& of_owner = lost[pages_[page].request];
            of_owner.page = of_owner.pages == 0 ? page : of_owner.page;
            ++of_owner.pages;
        }
    }
    for (const auto& [request, found] : lost) {
        const Page& page = pages_[found.page];
        report({.kind = ViolationKind::lost_page,
                .layer = ProofLayer::ledger,
                .reader = owner_of(page),
                .page = found.page,
                .generation = page.generation,
                .detail = str(found.pages) + " pages that request " + str(request) +
                          " wrote were never given back" +
                          (page.slot == kNone ? "; the first one is still shared" : "")});
    }
}

std::uint64_t Ledger::violations_of(ProofLayer layer) const {
    std::uint64_t total = 0;
    for (const std::uint64_t of_kind : violations_by_[static_cast<std::size_t>(layer)]) {
        total += of_kind;
    }
    return total;
}

std::uint64_t Ledger::violations_of(ProofLayer layer, ViolationKind kind) const {
    return violations_by_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(kind)];
}

std::map<std::uint32_t, TenantFacts> Ledger::tenants() const {
    std::map<std::uint32_t, TenantFacts> facts;
    for (std::size_t i = 0; i < tallies_.size(); ++i) {
        facts.emplace_hint(facts.end(), static_cast<std::uint32_t>(i + 1),
                           TenantFacts{.name = names_->by_number[i],
                                       .requests = tallies_[i].requests,
                                       .reads = tallies_[i].reads,
                                       .violations = tallies_[i].violations});
    }
    return facts;
}

std::string_view Ledger::tenant_name(TenantId id) const {
    const std::size_t index = number(id);
    return index == 0 || index > tallies_.size() ? std::string_view{}
                                                 : names_->by_number[index - 1];
}

std::uint32_t Ledger::last_tenant() const { return static_cast<std::uint32_t>(tallies_.size()); }

bool Ledger::source_expected(RequestId request) const {
    const auto found = slots_of_.find(number(request));
    return found != slots_of_.end() && slots_[found->second].source_due &&
           slots_[found->second].phase == Phase::admitted;
}

std::optional<TableEntry> Ledger::table_entry(RequestId request, std::uint64_t index) const {
    const auto found = slots_of_.find(number(request));
    if (found == slots_of_.end()) {
        return std::nullopt;
    }
    const Request& open = slots_[found->second];
    if (open.table.irregular || index >= open.table.entries.size()) {
        return std::nullopt;
    }
    return open.table.entries[index];
}

void Ledger::on_run(const Event& event) {
    const auto run = event.as<events::Run>();
    if (run_seen_ && event_ != 1) {
        gap({}, "a second start of a run");
    }
    run_seen_ = true;
    headers_checked_ = run.check_headers != 0;
    numerics_known_ &= run.numerics == kNumericsVersion;
    if (run.page_tokens != kPageTokens) {
        gap({}, "pages of " + str(run.page_tokens) + " rows; this reader follows pages of " +
                    str(kPageTokens));
    }
}

void Ledger::on_model(const Event& event) {
    const auto model = event.as<events::Model>();
    numerics_known_ &= model.klass <= kClassDevice;
    if (tiles_ != 0) {
        return gap({}, "a second model in one run");
    }
    if (model.layers == 0 || model.heads == 0 || model.layers > kTilesMax ||
        model.heads > kTilesMax || model.layers * model.heads > kTilesMax) {
        return gap({}, "a model of " + str(model.layers) + " layers and " + str(model.heads) +
                           " heads; this reader follows up to " + str(kTilesMax) + " tiles a page");
    }
    tiles_ = model.layers * model.heads;
    for (std::uint32_t layer = 0; layer < model.layers; ++layer) {
        for (std::uint32_t head = 0; head < model.heads; ++head) {
            read_factor_ += access_factor(layer, head, AccessKind::read);
            write_factor_ += access_factor(layer, head, AccessKind::write);
            move_factor_ += access_factor(layer, head, AccessKind::move);
            scrub_factor_ += access_factor(layer, head, AccessKind::scrub) * kPageTokens;
        }
    }
    // A virgin tile is all zero: its header names page 0, layer 0, head 0 wherever it lies.
    virgin_witness_ =
        page_mix(0, 0, 0, 0) * access_factor(0, 0, AccessKind::scrub) * kPageTokens * tiles_;
}

void Ledger::on_pool(const Event& event) {
    const auto pool = event.as<events::Pool>();
    if (pool.first_page > kLedgerPagesMax || pool.pages > kLedgerPagesMax - pool.first_page) {
        return gap({}, "a pool of " + str(pool.pages) + " pages from page " + str(pool.first_page) +
                           "; this reader follows up to " + str(kLedgerPagesMax));
    }
    if (pool.pool >= pools_.size() || pool.group != 0 || pools_[pool.pool].pages > 0) {
        return gap({}, "a pool with number " + str(pool.pool) + " for group " + str(pool.group) +
                           "; this reader follows one with number 0 and one with number 1");
    }
    const Pool& other = pools_[1 - pool.pool];
    if (pool.first_page < other.first_page + other.pages &&
        other.first_page < pool.first_page + pool.pages) {
        return gap({}, "two pools hold page " + str(std::max(pool.first_page, other.first_page)));
    }
    pools_[pool.pool] = {pool.first_page, pool.pages};
}

void Ledger::on_tenant(const Event& event) {
    const auto tenant = event.as<events::Tenant>();
    if (tenant.tenant != tallies_.size() + 1 || tallies_.size() == kLedgerTenantsMax) {
        return gap({}, "tenant number " + str(tenant.tenant) + " after " + str(tallies_.size()));
    }
    if (event.bytes.empty() || event.bytes.size() > kNameBytesMax) {
        gap({}, "the name of tenant " + str(tenant.tenant) + " has " + str(event.bytes.size()) +
                    " bytes; 1 to " + str(kNameBytesMax) + " are allowed");
    }
    if (names_ == nullptr || names_.use_count() > 1) {
        auto mine = std::make_shared<Names>();
        if (names_ != nullptr) {
            mine->by_number = names_->by_number;
        }
        mine->known.insert(mine->by_number.begin(), mine->by_number.end());
        names_ = std::move(mine);
    }
    const std::string& name = names_->by_number.emplace_back(event.bytes.substr(0, kNameBytesMax));
    if (!names_->known.insert(name).second) {
        gap({}, "tenant numbers up to " + str(tenant.tenant) + " name one tenant twice");
    }
    tallies_.emplace_back();
    ++counts_.tenants;
}

void Ledger::on_submit(const Event& event) {
    const auto submit = event.as<events::Submit>();
    const bool named = submit.tenant != 0 && submit.tenant <= tallies_.size();
    const Owner owner{TenantId(named ? static_cast<std::uint32_t>(submit.tenant) : 0),
                      RequestId(submit.request)};
    ++counts_.requests;
    if (submit.request <= last_request_) {
        return gap(owner, "request " + str(submit.request) + " is submitted again");
    }
    if (submit.request != last_request_ + 1) {
        gap(owner, "request " + str(submit.request) + " follows request " + str(last_request_));
    }
    last_request_ = submit.request;
    if (named) {
        ++tallies_[submit.tenant - 1].requests;
    } else {
        gap(owner, "request " + str(submit.request) + " of tenant number " + str(submit.tenant) +
                       ", which nothing names");
    }
    if (slots_of_.size() == kLedgerOpenRequestsMax) {
        return gap(owner, "more than " + str(kLedgerOpenRequestsMax) + " open requests");
    }
    std::uint32_t slot = static_cast<std::uint32_t>(slots_.size());
    if (slots_free_.empty()) {
        slots_.emplace_back();
    } else {
        slot = slots_free_.back();
        slots_free_.pop_back();
    }
    slots_of_.emplace(submit.request, slot);
    Request& request = slots_[slot];
    request.owner = owner;
    request.prompt_tokens = submit.prompt_tokens;
    request.session = submit.session;
    request.scope = static_cast<CacheScope>(submit.scope);
    if (submit.scope > static_cast<std::uint64_t>(CacheScope::tenant) ||
        (request.scope == CacheScope::session && submit.session == 0)) {
        request.scope = CacheScope::request;
        gap(owner, "request " + str(submit.request) + " is submitted with scope number " +
                       str(submit.scope) + " and session " + str(submit.session));
    }
    if (submit.session == 0) {
        return;
    }
    if (submit.session == session_tenants_.size() + 1 && submit.session <= kLedgerSessionsMax) {
        session_tenants_.push_back(number(owner.tenant));
    } else if (submit.session > session_tenants_.size()) {
        gap(owner,
            "session number " + str(submit.session) + " after " + str(session_tenants_.size()));
    } else if (session_tenants_[submit.session - 1] != number(owner.tenant)) {
        gap(owner, "session " + str(submit.session) + " is one of tenant number " +
                       str(session_tenants_[submit.session - 1]) + ", request " +
                       str(submit.request) + " is of tenant number " + str(submit.tenant));
    }
}

void Ledger::on_reject(const Event& event) {
    const auto reject = event.as<events::Reject>();
    Request* request = open(reject.request, "reject");
    if (request == nullptr) {
        return;
    }
    ++counts_.rejects;
    if (reject.reason < static_cast<std::uint64_t>(RejectReason::exceed_context_size) ||
        reject.reason > static_cast<std::uint64_t>(RejectReason::malformed)) {
        gap(request->owner, "request " + str(reject.request) + " is refused for reason number " +
                                str(reject.reason));
    }
    if (request->phase != Phase::submitted) {
        return gap(request->owner,
                   "request " + str(reject.request) + " is refused after it was admitted");
    }
    release(slots_of_.at(reject.request));
}

void Ledger::on_admit(const Event& event) {
    const auto admit = event.as<events::Admit>();
    Request* request = open(admit.request, "admit");
    if (request == nullptr) {
        return;
    }
    if (request->phase != Phase::submitted) {
        return gap(request->owner, "request " + str(admit.request) + " is admitted twice");
    }
    if (admit.rows < request->prompt_tokens) {
        gap(request->owner, "request " + str(admit.request) + " is admitted with " +
                                str(admit.rows) + " rows for a prompt of " +
                                str(request->prompt_tokens));
    }
    request->phase = Phase::admitted;
    request->rows_max = admit.rows;
    request->source0 = admit.admitted0;
    request->source1 = admit.admitted1;
    request->source_positions = request->prompt_tokens;
}

void Ledger::on_preempt(const Event& event) {
    const auto preempt = event.as<events::Preempt>();
    Request* request = running(preempt.request, "preempt");
    if (request == nullptr) {
        return;
    }
    ++counts_.preemptions;
    if (request->witness_due) {
        request->witness_due = false;
        gap(request->owner,
            "request " + str(preempt.request) + " is preempted without the witness of its rows",
            ProofLayer::kernel);
    }
    const std::uint64_t positions = request->prompt_tokens + request->samples;
    if (preempt.positions != positions) {
        ends(ViolationKind::consumed_mismatch, *request,
             "it is preempted with " + str(preempt.positions) +
                 " positions to compute anew, it has " + str(positions));
    } else if (positions == request->source_positions &&
               (preempt.digest0 != request->source0 || preempt.digest1 != request->source1)) {
        ends(ViolationKind::consumed_mismatch, *request,
             "the " + str(positions) + " tokens to compute anew are not those it had");
    }
    request->phase = Phase::preempted;
    request->was_preempted = true;
    request->source_due = true;
    request->slot_ready = false;
    request->source0 = preempt.digest0;
    request->source1 = preempt.digest1;
    request->source_positions = positions;
}

void Ledger::on_resume(const Event& event) {
    const std::uint64_t id = event.as<events::Resume>().request;
    Request* request = open(id, "resume");
    if (request == nullptr) {
        return;
    }
    if (request->phase != Phase::preempted) {
        return gap(request->owner, "request " + str(id) + " resumes and was not preempted");
    }
    request->phase = Phase::admitted;
    if (request->pages_held > 0) {
        return gap(request->owner, "request " + str(id) + " resumes and still has " +
                                       str(request->pages_held) + " pages");
    }
    entries_ -= request->table.entries.size() + request->other.entries.size();
    for (Table* table : {&request->table, &request->other}) {
        table->entries.clear();
        table->marked.clear();
        table->written.clear();
        table->irregular = false;
        table->length = 0;
    }
    request->seats.clear();
    request->on_decode = false;
}

void Ledger::on_reserve(const Event& event) {
    const auto reserve = event.as<events::Reserve>();
    const Request* request = running(reserve.request, "reserve");
    if (request != nullptr && (reserve.pool >= pools_.size() || pools_[reserve.pool].pages == 0)) {
        gap(request->owner, "pages of pool " + str(reserve.pool) + ", which there is not");
    }
}

void Ledger::on_sourced(const Event& event) {
    const auto sourced = event.as<events::Sourced>();
    Request* request = running(sourced.request, "sourced");
    if (request == nullptr) {
        return;
    }
    ++counts_.sources;
    const std::uint64_t positions = request->prompt_tokens + request->samples;
    if (!request->source_due) {
        ends(ViolationKind::consumed_mismatch, *request, "its positions are sourced again");
    } else if (sourced.positions != positions) {
        ends(ViolationKind::consumed_mismatch, *request,
             str(sourced.positions) + " positions are sourced, " + str(positions) +
                 " were admitted");
    } else if (request->table.length != positions) {
        ends(ViolationKind::consumed_mismatch, *request,
             str(positions) + " positions are sourced, " + str(request->table.length) +
                 " rows were written");
    } else if (sourced.sourced0 != request->source0 || sourced.sourced1 != request->source1) {
        ends(ViolationKind::consumed_mismatch, *request,
             "the tokens consumed are not the " + str(positions) +
                 (request->was_preempted ? " it was preempted with" : " admitted"));
    }
    request->source_due = false;
}

void Ledger::on_slot(const Event& event) {
    const auto slot = event.as<events::Slot>();
    Request* request = running(slot.request, "slot");
    if (request == nullptr) {
        return;
    }
    ++counts_.slots;
    if (slot.stamped_request != slot.request || slot.stamped_step != step_) {
        ends(ViolationKind::consumed_mismatch, *request,
             "the slot it takes in step " + str(step_) + " carries the stamp of request " +
                 str(slot.stamped_request) + " and step " + str(slot.stamped_step));
    } else if (request->rows_step != step_ || request->slot_row != slot.slot) {
        ends(
            ViolationKind::consumed_mismatch, *request,
            "it takes slot " + str(slot.slot) + " in step " + str(step_) +
                (request->rows_step != step_ ? ", which computed no rows of it"
                                             : ", its rows are in slot " + str(request->slot_row)));
    } else if (request->slot_step == step_) {
        gap(request->owner,
            "request " + str(slot.request) + " takes two slots in step " + str(step_),
            ProofLayer::ends);
    }
    request->slot_step = step_;
    request->slot_ready = true;
}

void Ledger::on_sample(const Event& event) {
    const auto sample = event.as<events::Sample>();
    Request* request = running(sample.request, "sample");
    if (request == nullptr) {
        return;
    }
    ++counts_.samples;
    if (request->witness_due) {
        request->witness_due = false;
        gap(request->owner,
            "a token of request " + str(sample.request) + " without the witness of its rows",
            ProofLayer::kernel);
    }
    if (options_.slots && (!request->slot_ready || request->slot_step != step_)) {
        gap(request->owner,
            "a token of request " + str(sample.request) + " without the slot it comes from",
            ProofLayer::ends);
    }
    request->slot_ready = false;
    const std::uint64_t position = request->prompt_tokens + request->samples;
    if (request->source_due) {
        ends(ViolationKind::consumed_mismatch, *request,
             "a token at position " + str(sample.position) + " before its prompt was sourced");
        request->source_due = false;  // said once
    } else if (sample.position != position) {
        gap(request->owner,
            "a token at position " + str(sample.position) + ", the next one is " + str(position),
            ProofLayer::ends);
    } else if (request->table.length != position) {
        ends(ViolationKind::consumed_mismatch, *request,
             "a token at position " + str(position) + " after " + str(request->table.length) +
                 " rows were written");
    }
    for (const std::uint32_t index : request->violations) {
        ++violations_[index].emitted_after;
    }
    ++request->samples;
}

void Ledger::on_bytes(const Event& event, Bytes Request::*mine, Bytes Request::*other) {
    const auto answer = event.as<events::Rendered>();  // emitted has the same fields
    Request* request = begun(answer.request, "answer bytes");
    if (request == nullptr) {
        return;
    }
    Bytes& bytes = request->*mine;
    if (bytes.seen) {
        return ends(ViolationKind::emitted_not_sampled, *request, "its answer is recorded twice");
    }
    bytes = {true, answer.bytes_out, answer.digest0, answer.digest1};
    const Bytes& twin = request->*other;
    if (!twin.seen) {
        return;
    }
    ++counts_.ends;
    if (bytes.count != twin.count) {
        ends(ViolationKind::emitted_not_sampled, *request,
             str(request->rendered.count) + " bytes were rendered, " + str(request->emitted.count) +
                 " were emitted");
    } else if (bytes.digest0 != twin.digest0 || bytes.digest1 != twin.digest1) {
        ends(ViolationKind::emitted_not_sampled, *request,
             "the " + str(bytes.count) + " bytes emitted are not those rendered");
    }
}

void Ledger::on_finish(const Event& event) {
    const auto finish = event.as<events::Finish>();
    Request* request = open(finish.request, "finish");
    if (request == nullptr) {
        return;
    }
    const bool complete = finish.reason == static_cast<std::uint64_t>(FinishReason::stop) ||
                          finish.reason == static_cast<std::uint64_t>(FinishReason::length);
    if (finish.reason < static_cast<std::uint64_t>(FinishReason::stop) ||
        finish.reason > static_cast<std::uint64_t>(FinishReason::violation)) {
        gap(request->owner,
            "request " + str(finish.request) + " ends for reason number " + str(finish.reason));
    }
    if (complete && request->phase == Phase::submitted) {
        gap(request->owner,
            "request " + str(finish.request) + " is complete and was never admitted");
    }
    if (finish.prompt_tokens != request->prompt_tokens) {
        gap(request->owner,
            "request " + str(finish.request) + " ends with a prompt of " +
                str(finish.prompt_tokens) + " tokens, submitted were " +
                str(request->prompt_tokens),
            ProofLayer::ends);
    }
    if (finish.cached_tokens != request->adopts * kPageTokens) {
        gap(request->owner,
            "request " + str(finish.request) + " ends with " + str(finish.cached_tokens) +
                " cached tokens, it adopted " + str(request->adopts * kPageTokens),
            ProofLayer::ends);
    }
    if (finish.completion_tokens != request->samples) {
        ends(ViolationKind::emitted_not_sampled, *request,
             str(finish.completion_tokens) + " tokens were answered, " + str(request->samples) +
                 " were sampled");
    }
    if (request->rendered.seen != request->emitted.seen ||
        (request->samples > 0 && !request->emitted.seen)) {
        ends(ViolationKind::emitted_not_sampled, *request,
             "its answer has no digest of what was " +
                 std::string(request->emitted.seen ? "rendered" : "emitted"));
    } else if (finish.bytes_out != request->emitted.count) {
        ends(ViolationKind::emitted_not_sampled, *request,
             "it ends with " + str(finish.bytes_out) + " bytes, " + str(request->emitted.count) +
                 " were emitted");
    }
    if (request->witness_due) {
        gap(request->owner,
            "request " + str(finish.request) + " ends without the witness of its rows",
            ProofLayer::kernel);
    }
    compare_witness(*request, finish.witness, std::numeric_limits<std::uint64_t>::max());
    request->phase = Phase::finished;
    request->finish_reason = static_cast<FinishReason>(finish.reason);
    if (request->pages_held == 0) {
        release(slots_of_.at(finish.request));
    }
}

void Ledger::on_run_end(const Event& event) {
    close_step();
    const auto end = event.as<events::RunEnd>();
    run_end_seen_ = true;
    const auto count = [&](const char* what, std::uint64_t by_engine, std::uint64_t by_events) {
        if (by_engine != by_events) {
            gap({}, "the run counted " + str(by_engine) + " " + what + ", its events say " +
                        str(by_events));
        }
    };
    const auto kernels = [&](const char* what, std::uint64_t by_kernels, std::uint64_t by_events,
                             ViolationKind when_more) {
        if (by_kernels != by_events) {
            report({.kind = by_kernels > by_events ? when_more : ViolationKind::witness_mismatch,
                    .layer = ProofLayer::kernel,
                    .detail = std::string("the kernels counted ") + str(by_kernels) + " " + what +
                              ", the events say " + str(by_events)});
        }
    };
    count("requests", end.requests, counts_.requests);
    count("steps", end.steps, counts_.steps);
    kernels("rows read", end.rows_read, counts_.rows_covered, ViolationKind::unrecorded_read);
    kernels("rows written", end.rows_written, counts_.rows_written,
            ViolationKind::witness_mismatch);
    kernels("scrubs", end.scrubs, counts_.scrubs, ViolationKind::witness_mismatch);
    if (end.scrub_witness != scrub_witness_ && !scrub_mismatch_) {
        report({.kind = ViolationKind::witness_mismatch,
                .layer = ProofLayer::kernel,
                .detail = "the headers that were scrubbed over the whole run are not those of the "
                          "pages' last owners"});
    }
}

Ledger::Request* Ledger::find(std::uint64_t request) {
    Found& found = found_[request % kFoundSize];
    if (found.request == request && found.slot != kNone) {
        return &slots_[found.slot];
    }
    const auto known = slots_of_.find(request);
    if (known == slots_of_.end()) {
        return nullptr;
    }
    found = {request, known->second};
    return &slots_[known->second];
}

Ledger::Request* Ledger::open(std::uint64_t request, const char* what) {
    Request* found = find(request);
    if (found != nullptr && found->phase != Phase::finished) {
        return found;
    }
    gap({{}, RequestId(request)},
        std::string(what) + " of request " + str(request) +
            (request != 0 && request <= last_request_ ? ", which had ended"
                                                      : ", which was never submitted"));
    return nullptr;
}

Ledger::Request* Ledger::begun(std::uint64_t request, const char* what) {
    Request* found = open(request, what);
    if (found != nullptr && found->phase == Phase::submitted) {
        gap(found->owner,
            std::string(what) + " of request " + str(request) + ", which was not admitted");
        return nullptr;
    }
    return found;
}

Ledger::Request* Ledger::running(std::uint64_t request, const char* what) {
    Request* found = find(request);
    if (found != nullptr && found->phase == Phase::admitted) [[likely]] {
        return found;
    }
    found = begun(request, what);
    if (found != nullptr) {
        gap(found->owner, std::string(what) + " of request " + str(request) +
                              ", which was preempted and did not resume");
    }
    return nullptr;
}

void Ledger::release(std::uint32_t slot) {
    Request& request = slots_[slot];
    const std::uint64_t id = number(request.owner.request);
    entries_ -= request.table.entries.size() + request.other.entries.size();
    Request empty;
    for (auto [from, to] : {std::pair(&request.table.entries, &empty.table.entries),
                            std::pair(&request.other.entries, &empty.other.entries)}) {
        to->swap(*from);  // its memory serves the next request
        to->clear();
    }
    empty.seats.swap(request.seats);
    empty.seats.clear();
    request = std::move(empty);
    slots_of_.erase(id);
    if (Found& found = found_[id % kFoundSize]; found.request == id) {
        found = {};
    }
    slots_free_.push_back(slot);
}

void Ledger::let_go(std::uint32_t slot) {
    Request& request = slots_[slot];
    if (--request.pages_held == 0 && request.phase == Phase::finished) {
        release(slot);
    }
}

std::uint32_t Ledger::slot_of(const Request& request) const {
    return static_cast<std::uint32_t>(&request - slots_.data());
}

void Ledger::report(Violation violation) {
    violation.event = event_;
    Request* reader = find(number(violation.reader.request));
    if (reader != nullptr) {
        violation.reader = reader->owner;
    }
    ++violations_total_;
    ++violations_by_[static_cast<std::size_t>(violation.layer)]
                    [static_cast<std::size_t>(violation.kind)];
    if (const std::size_t tenant = number(violation.reader.tenant);
        tenant != 0 && tenant <= tallies_.size()) {
        ++tallies_[tenant - 1].violations;
    }
    if (violations_.size() == kViolationsKept) {
        return;
    }
    if (reader != nullptr) {
        reader->violations.push_back(static_cast<std::uint32_t>(violations_.size()));
    }
    violations_.push_back(std::move(violation));
}

void Ledger::gap(Owner who, std::string detail, ProofLayer layer) {
    report({.kind = ViolationKind::event_gap,
            .layer = layer,
            .reader = who,
            .detail = std::move(detail)});
}

void Ledger::ends(ViolationKind kind, const Request& request, std::string detail) {
    report({.kind = kind,
            .layer = ProofLayer::ends,
            .reader = request.owner,
            .detail = "request " + str(number(request.owner.request)) + ": " + std::move(detail)});
}

void LiveLedger::note(const Event& event) {
    if (event.numbered()) {
        ledger_.apply(event, ++events_);
    }
}

Status LiveLedger::commit() {
    if (!stop_ || ledger_.violations().empty()) {
        return {};
    }
    const Violation& first = ledger_.violations().front();
    return Error{ErrorCode::violation, std::string(name_of(first.kind)) + " at event " +
                                           str(first.event) + ": " + first.detail};
}

}  // namespace kvw
