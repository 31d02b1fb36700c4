#include "src/engine/scheduler.h"

#include <algorithm>

#include "src/base/check.h"

namespace kvw {

namespace {

// Prompt tokens still to be computed, as opposed to the one token of a decode.
bool reads_prompt(const Request& request) {
    return !request.moving && !request.stalled && !request.decoding() && request.pending() > 0;
}
bool can_decode(const Request& request) {
    return !request.moving && !request.stalled && request.decoding();
}

}  // namespace

void Scheduler::wait(Request& request) {
    queues_[number(request.owner.tenant)].emplace(request.id(), &request);
    ++waiting_;
    std::erase(running_, &request);
}

void Scheduler::start(Request& request) {
    stop(request);
    const auto at =
        std::lower_bound(running_.begin(), running_.end(), &request,
                         [](const Request* a, const Request* b) { return a->id() < b->id(); });
    running_.insert(at, &request);
}

void Scheduler::stop(Request& request) {
    const auto queue = queues_.find(number(request.owner.tenant));
    if (queue != queues_.end() && queue->second.erase(request.id()) > 0) {
        --waiting_;
        if (queue->second.empty()) {
            queues_.erase(queue);
        }
    }
    std::erase(running_, &request);
}

std::vector<Request*> Scheduler::all_waiting() const {
    std::map<std::uint64_t, Request*> by_age;
    for (const auto& [tenant, queue] : queues_) {
        by_age.insert(queue.begin(), queue.end());
    }
    std::vector<Request*> all;
    for (const auto& [age, request] : by_age) {
        all.push_back(request);
    }
    return all;
}

std::uint64_t Scheduler::rows_held(TenantId tenant) const {
    std::uint64_t rows = 0;
    for (const Request* request : running_) {
        rows += request->owner.tenant == tenant ? request->rows_needed() : 0;
    }
    return rows;
}

Request* Scheduler::next_waiting(const std::set<std::uint32_t>& except) const {
    std::map<std::uint32_t, std::uint64_t> held;
    for (const Request* request : running_) {
        held[number(request->owner.tenant)] += request->rows_needed();
    }
    Request* best = nullptr;
    std::uint64_t least = 0;
    for (const auto& [tenant, queue] : queues_) {
        if (except.contains(tenant)) {
            continue;
        }
        const auto of_tenant = held.find(tenant);
        const std::uint64_t rows = of_tenant == held.end() ? 0 : of_tenant->second;
        if (best == nullptr || rows < least) {
            best = queue.begin()->second;
            least = rows;
        }
    }
    return best;
}

bool Scheduler::recomputable(const Request& request) const {
    return !config_->split || std::uint64_t{request.rows_needed()} - 1 <= config_->prefill_rows;
}

Request* Scheduler::victim(const Request& than) const {
    for (auto it = running_.rbegin(); it != running_.rend() && (*it)->id() > than.id(); ++it) {
        if (recomputable(**it)) {
            return *it;
        }
    }
    return nullptr;
}

std::vector<Request*> Scheduler::over_share(TenantId for_tenant) const {
    struct Share {
        std::uint64_t rows = 0;
        std::vector<Request*> requests;  // oldest first
    };
    std::map<std::uint32_t, Share> shares;
    for (Request* request : running_) {
        if (request->owner.tenant == for_tenant) {
            return {};
        }
        Share& share = shares[number(request->owner.tenant)];
        share.rows += request->rows_needed();
        share.requests.push_back(request);
    }
    const Share* most = nullptr;
    for (const auto& [tenant, share] : shares) {
        if (share.requests.size() >= 2 && (most == nullptr || share.rows > most->rows)) {
            most = &share;
        }
    }
    if (most == nullptr) {
        return {};
    }
    std::vector<Request*> youngest_first;
    for (std::size_t i = most->requests.size() - 1; i > 0; --i) {
        if (recomputable(*most->requests[i])) {
            youngest_first.push_back(most->requests[i]);
        }
    }
    return youngest_first;
}

// The tenant after the last one that has something to compute; 0 when none has.
std::uint32_t Scheduler::tenant_of_step() {
    std::set<std::uint32_t> with_work;
    for (const Request* request : running_) {
        if (reads_prompt(*request) || can_decode(*request)) {
            with_work.insert(number(request->owner.tenant));
        }
    }
    if (with_work.empty()) {
        return 0;
    }
    const auto next = with_work.upper_bound(step_tenant_);
    return next == with_work.end() ? *with_work.begin() : *next;
}

// One token each, from where the last step had to stop.
void Scheduler::plan_decodes(std::map<Request*, std::uint32_t>& counts, std::uint32_t& budget,
                             std::uint32_t only_tenant) {
    std::vector<Request*> ready;
    for (Request* request : running_) {
        if (can_decode(*request) &&
            (only_tenant == 0 || number(request->owner.tenant) == only_tenant)) {
            ready.push_back(request);
        }
    }
    const auto start = std::find_if(ready.begin(), ready.end(), [&](const Request* request) {
        return request->id() >= decode_turn_;
    });
    std::rotate(ready.begin(), start, ready.end());
    decode_turn_ = 0;
    for (Request* request : ready) {
        if (budget == 0) {
            decode_turn_ = request->id();
            return;
        }
        counts[request] = 1;
        --budget;
    }
}

void Scheduler::plan_prompts(std::map<Request*, std::uint32_t>& counts, std::uint32_t& budget,
                             std::uint32_t only_tenant) {
    struct Part {
        Request* request;
        std::uint32_t left;
    };
    std::map<std::uint32_t, std::vector<Part>> parts;  // by tenant, oldest first
    for (Request* request : running_) {
        const std::uint32_t tenant = number(request->owner.tenant);
        if (reads_prompt(*request) && (only_tenant == 0 || tenant == only_tenant)) {
            parts[tenant].push_back({request, request->pending()});
        }
    }
    while (budget > 0 && !parts.empty()) {
        auto at = parts.lower_bound(turn_);
        at = at == parts.end() ? parts.begin() : at;
        std::uint32_t& deficit = deficits_[at->first];
        if (!turn_open_ || at->first != turn_) {
            deficit += kQuantum;
        }
        for (Part& part : at->second) {
            const std::uint32_t taken = std::min({part.left, deficit, budget});
            if (taken > 0) {
                counts[part.request] += taken;
            }
            part.left -= taken;
            deficit -= taken;
            budget -= taken;
        }
        std::erase_if(at->second, [](const Part& part) { return part.left == 0; });
        turn_open_ = budget == 0 && deficit > 0 && !at->second.empty();
        turn_ = turn_open_ ? at->first : at->first + 1;
        if (at->second.empty()) {
            deficits_.erase(at->first);
            parts.erase(at);
        }
    }
}

void Scheduler::plan(std::vector<Slot>& slots) {
    slots.clear();
    std::uint32_t only_tenant = 0;
    if (!config_->cotenancy) {
        only_tenant = tenant_of_step();
        if (only_tenant == 0) {
            return;
        }
        step_tenant_ = only_tenant;
    }
    std::map<Request*, std::uint32_t> counts;
    std::uint32_t budget = config_->batch_rows;
    plan_decodes(counts, budget, only_tenant);
    plan_prompts(counts, budget, only_tenant);
    for (Request* request : running_) {
        const auto count = counts.find(request);
        if (count != counts.end()) {
            slots.push_back({.request = request,
                             .first = static_cast<std::uint32_t>(request->facts.prefilled),
                             .count = count->second,
                             .samples = count->second == request->pending()});
        }
    }
}

}  // namespace kvw
