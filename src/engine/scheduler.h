// Who waits, who runs, and what the next step computes. Policy only: it touches no page and notes
// no event, and everything follows from the order of arrivals and the sizes of requests.
//
// Age is the request number, and it never changes: who was preempted waits as one of the oldest,
// and the oldest request of all is never preempted, so something always gets done. Admission takes
// the head of the tenant that holds the fewest rows. The tokens of a step go first to requests that
// decode, one each, and then to prompts by deficit round robin between tenants (Shreedhar and
// Varghese 1995), so that a tenant with fifty long prompts delays one with a short one by no more
// than a share of a step.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "src/engine/request.h"

namespace kvw {

// One request's part of a step: positions [first, first + count).
struct Slot {
    Request* request = nullptr;
    std::uint32_t first = 0, count = 0;
    bool samples = false;  // the step computes its last token, so one more is sampled
};

class Scheduler {
  public:
    explicit Scheduler(const EngineConfig& config) : config_(&config) {}

    void wait(Request& request);   // joins its tenant's queue, in order of age
    void start(Request& request);  // from the queue
    void stop(Request& request);   // wherever it is
    std::size_t waiting() const { return waiting_; }
    std::vector<Request*> all_waiting() const;                         // oldest first
    const std::vector<Request*>& running() const { return running_; }  // oldest first
    std::uint64_t rows_held(TenantId tenant) const;  // granted to its running requests

    // The head of the queue of the tenant that holds the fewest rows (ties: lowest number) and is
    // not in `except`; null when there is none.
    Request* next_waiting(const std::set<std::uint32_t>& except) const;
    // The youngest running request younger than `than` that may be preempted; null when there is
    // none.
    Request* victim(const Request& than) const;
    // Whom a tenant with nothing running may push out, youngest first: requests of the tenant that
    // holds the most rows and has at least two, but for that tenant's oldest and the oldest of all.
    std::vector<Request*> over_share(TenantId for_tenant) const;
    // Could it be recomputed after a preemption? split: prompt and sampled tokens must fit the
    // prefill side again.
    bool recomputable(const Request& request) const;

    // Divides the step's tokens. Leaves out who is stalled or moving. In order of age.
    void plan(std::vector<Slot>& slots);

  private:
    static constexpr std::uint32_t kQuantum = 64;  // tokens a turn of a tenant adds

    std::uint32_t tenant_of_step();
    void plan_decodes(std::map<Request*, std::uint32_t>& counts, std::uint32_t& budget,
                      std::uint32_t only_tenant);
    void plan_prompts(std::map<Request*, std::uint32_t>& counts, std::uint32_t& budget,
                      std::uint32_t only_tenant);

    const EngineConfig* config_;
    std::map<std::uint32_t, std::map<std::uint64_t, Request*>> queues_;  // by tenant, by age
    std::size_t waiting_ = 0;
    std::vector<Request*> running_;
    std::uint64_t decode_turn_ = 0;  // the age from which the next step's decodes begin
    std::uint32_t step_tenant_ = 0;  // cotenancy off: whose step the last one was
    std::uint32_t turn_ = 0;         // the tenant whose turn it is with prompts
    bool turn_open_ = false;         // it was interrupted by the end of a step
    std::map<std::uint32_t, std::uint32_t> deficits_;
};

}  // namespace kvw
