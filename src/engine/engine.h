// Requests in, tokens out: admission, the step loop, sampling, and every event in between.
//
// One thread calls it. A step goes down the layers once and up once: requests → leases → forward
// pass → evidence → sampler → events → commit → outputs. Nothing is revealed that was not recorded.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/sha256.h"
#include "src/engine/answer.h"
#include "src/engine/content.h"
#include "src/engine/sampler.h"
#include "src/kv/fault_plan.h"
#include "src/kv/page_pool.h"
#include "src/model/model.h"
#include "src/text/tokenizer.h"
#include "traces/sink.h"

namespace kvw {

// What a run can be rebuilt from (the `config` event, canonical JSON). No host facts. Rows and
// tokens throughout, never pages.
struct EngineConfig {
    std::uint32_t context = 0;              // most positions of a request; 0 = the model's
    std::uint64_t pool_rows = 0;            // split: of the decode pool; 0 = one context
    bool split = false;                     // --roles
    std::uint64_t prefill_rows = 0;         // split: of the prefill pool; 0 = one context
    std::uint32_t batch_rows = 512;         // most tokens in one step (-ub)
    std::uint32_t sequences_max = 64;       // most requests that hold pages (-np)
    std::uint32_t scrub_pages = 64;         // most pages scrubbed in one step
    std::uint32_t transfer_pages = 32;      // split: most pages moved in one step
    CacheScope scope = CacheScope::tenant;  // who may be given a prefix; a request can ask for less
    bool cotenancy = true;                  // false: requests of two tenants never share a step
    std::uint64_t queue_max = 1024;         // most requests that wait; one more is refused
    std::uint64_t quota_rows = 0;           // most rows a tenant holds at once; 0 = no quota
    std::map<std::string, std::uint64_t> tenant_quota_rows;  // in place of quota_rows, by name
    bool stop_on_violation = true;  // a violation ends step() with an error; else only its request
};
std::string to_json(const EngineConfig& config);
Result<EngineConfig> engine_config_from_json(std::string_view json);  // bad_trace when malformed

// Identity of the model, for the `model` event.
struct ModelIdentity {
    std::string name;
    Digest256 sha256{};
};

// Everything a run is given from outside; nothing is looked up behind its back.
struct RunContext {
    EventSink* sink = nullptr;
    FaultPlan faults;
    // The key of a tenant's keyed digests: fresh random bytes when recording, the recorded ones in
    // replay.
    std::function<Digest256(TenantId, const std::string& name)> tenant_key;
    bool checked = false;  // execution: shadow table and checking accessors
    // Decides when a deadline has passed. Null: never (replay, where the recorded cancel says it).
    const Clock* clock = nullptr;
};

struct GenerateRequest {
    std::string tenant = "local";  // [a-z0-9._-]{1,64}
    std::string prompt;            // the bytes that prompt_ids were made from
    std::vector<TokenId> prompt_ids;
    std::optional<std::uint32_t> tokens_max;  // unset: the smallest limit minus the prompt
    SamplingOptions sampling;
    std::uint32_t top_logits = 0;     // report that many of the first sample's logits
    std::uint32_t logprobs = 0;       // with every token, report that many alternatives; 0 = none
    std::string session;              // "" = none; up to 64 bytes, any: only its identity counts
    std::optional<CacheScope> scope;  // narrower than the configured one; unset = that one. session
                                      // without a session name is request
    std::int64_t deadline_ms = 0;     // from submit(), by the context's clock; 0 = none
};

struct Logprob {
    TokenId id = 0;
    float logprob = 0;  // natural, over the whole vocabulary at temperature 1, no penalties
};

struct TopLogit {
    TokenId id = 0;
    float logit = 0;
};

// What a step did for one request.
struct Output {
    RequestId request{};
    std::optional<TokenId> id;           // one sampled token
    std::string bytes;                   // what may now be delivered
    std::optional<FinishReason> finish;  // the request ended; nothing follows
    std::optional<Error> error;          // with finish error or violation
    std::vector<TopLogit> first_logits;  // with the first token, when asked for
    std::vector<Logprob> logprobs;  // of `id`, then the likeliest (ties: lowest id), when asked for
};

// Where a request stands; final once finished.
struct RequestFacts {
    std::uint64_t prompt_tokens = 0, completion_tokens = 0;
    std::uint64_t cached_tokens = 0;  // rows adopted from the prefix tree
    std::uint64_t prefilled = 0;      // positions computed or adopted so far
    std::uint64_t preemptions = 0;
    std::uint64_t first_step = 0;                   // that sampled for it; 0 = none did
    RowDigest logits;                               // running digest, unkeyed
    std::uint64_t first_event = 0, last_event = 0;  // numbers of its first and last event (moments)
};

class Engine {
  public:
    // Notes run, model, pool, config (and fault). Fails: usage (a limit that makes no sense),
    // out_of_memory.
    static Result<std::unique_ptr<Engine>> create(const Model& model, const Tokenizer& tokenizer,
                                                  const Kernels& kernels, ThreadPool& threads,
                                                  const EngineConfig& config,
                                                  const ModelIdentity& identity,
                                                  RunContext context);
    ~Engine();

    // Queues or refuses; the next step admits. A refusal is an Error with its LimitFacts
    // (exceed_context_size, prefill_pool, decode_pool or out_of_pages, tenant_quota, queue_full;
    // the first that fails); it leaves submit and reject in the record, is committed, and can never
    // become work. Also fails: usage (tenant grammar, session, sampling options), bad_input (empty
    // prompt, id out of range), which leave nothing.
    Result<RequestId> submit(GenerateRequest request);
    // Leaves a submit of no tokens and a reject (malformed) in the record, for input that no prompt
    // could be read from, and commits them. `input` counts as text. Fails: usage (tenant grammar).
    Result<RequestId> note_malformed(const std::string& tenant, std::string_view input);
    // Takes effect within the next step. False when the request has ended already.
    bool cancel(RequestId request, FinishReason reason = FinishReason::cancelled);
    // The caller's sink took these bytes of the request's answer. Call for every non-empty
    // Output::bytes.
    void delivered(RequestId request, std::string_view bytes);
    // The caller's sink broke: what it did not take is not part of this answer, however it ends.
    void undelivered(RequestId request);

    // True when a step would do nothing: no request runs or waits, every end is recorded, and every
    // page that was let go of is scrubbed.
    bool idle() const;
    // One step; empty when idle, and when it only tidied up. Fails: violation (code 7), or what
    // commit() failed with; the engine is then stopped and only destruction may follow.
    Result<std::vector<Output>> step();
    // Ends the run: settles ended requests, scrubs what drained, notes run_end, commits.
    Status finish();

    RequestFacts facts(RequestId request) const;
    std::uint64_t events_noted() const;  // number of the last numbered event
    std::uint64_t steps() const;         // made so far
    // Spent in forward passes so far, for benchmarks: nothing follows from it.
    std::chrono::nanoseconds forward_time() const;
    std::size_t waiting() const;         // requests in the queue
    const EngineConfig& config() const;  // with defaults filled in
    PagePool& pool();                    // for tests

  private:
    struct State;
    explicit Engine(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace kvw
