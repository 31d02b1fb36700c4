#include "src/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "src/base/check.h"
#include "src/base/random.h"
#include "src/engine/admission.h"
#include "src/engine/content.h"
#include "src/engine/request.h"
#include "src/engine/scheduler.h"
#include "src/ledger/ledger.h"

namespace kvw {

namespace {

constexpr std::uint64_t kConfigVersion = 1;
constexpr std::uint64_t kClassPortable = 1;
constexpr std::size_t kTenantLengthMax = 64;

// Passes everything on and knows the numbers of what it passed.
class NumberingSink final : public EventSink {
  public:
    explicit NumberingSink(EventSink& to) : to_(to) {}
    void note(const Event& event) override {
        if (event.numbered()) {
            ++numbered_;
        }
        if (event.kind == EventKind::violation) {
            last_violation_ = numbered_;
        }
        to_.note(event);
    }
    void text(const TextRecord& record) override { to_.text(record); }
    Status commit() override { return to_.commit(); }
    std::uint64_t numbered() const { return numbered_; }
    std::uint64_t last_violation() const { return last_violation_; }

  private:
    EventSink& to_;
    std::uint64_t numbered_ = 0;
    std::uint64_t last_violation_ = 0;
};

bool is_tenant_name(std::string_view name) {
    return !name.empty() && name.size() <= kTenantLengthMax &&
           std::all_of(name.begin(), name.end(), [](char c) {
               return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
                      c == '-';
           });
}

Digest256 random_key() {
    Digest256 key{};
    for (std::size_t i = 0; i < key.size(); i += 8) {
        const std::uint64_t bits = entropy64();
        std::memcpy(key.data() + i, &bits, 8);
    }
    return key;
}

std::uint64_t big_endian_word(const Digest256& digest, std::size_t index) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < 8; ++i) {
        word = word << 8 | digest[index * 8 + i];
    }
    return word;
}

std::uint64_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

std::string_view bytes_of(const Digest256& key) {
    return {reinterpret_cast<const char*>(key.data()), key.size()};
}

std::string little_endian_ids(std::span<const TokenId> ids) {
    std::string bytes;
    bytes.reserve(ids.size() * 4);
    for (const TokenId id : ids) {
        for (int i = 0; i < 4; ++i) {
            bytes.push_back(static_cast<char>(static_cast<std::uint32_t>(id) >> (8 * i)));
        }
    }
    return bytes;
}

std::string leb128(std::uint32_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) {
        bytes.push_back(static_cast<char>(value | 0x80));
    }
    bytes.push_back(static_cast<char>(value));
    return bytes;
}

FreeReason free_reason(FinishReason reason) {
    switch (reason) {
        case FinishReason::cancelled:
        case FinishReason::deadline:
            return FreeReason::cancelled;
        case FinishReason::error:
            return FreeReason::error;
        case FinishReason::violation:
            return FreeReason::violation;
        default:
            return FreeReason::finished;
    }
}

std::vector<TopLogit> top_logits(std::span<const float> logits, std::size_t count) {
    std::vector<TopLogit> all(logits.size());
    for (std::size_t i = 0; i < logits.size(); ++i) {
        all[i] = {static_cast<TokenId>(i), logits[i]};
    }
    count = std::min(count, all.size());
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), all.end(),
                      [](const TopLogit& a, const TopLogit& b) {
                          return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
                      });
    all.resize(count);
    return all;
}

// ln of the softmax over the whole vocabulary, of `id` and then of the likeliest.
std::vector<Logprob> logprobs_of(std::span<const float> logits, TokenId id, std::size_t count) {
    const std::vector<TopLogit> top = top_logits(logits, count);
    double sum = 0;
    const double largest = top.front().logit;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit) - largest);
    }
    const double norm = largest + std::log(sum);
    std::vector<Logprob> all{{id, static_cast<float>(logits[static_cast<std::size_t>(id)] - norm)}};
    for (const TopLogit& one : top) {
        all.push_back({one.id, static_cast<float>(one.logit - norm)});
    }
    return all;
}

// Whose turn it is not to wait, and how long a large request lets others pass.
constexpr std::uint32_t kPassedOverMax = 16;
constexpr std::size_t kSessionBytesMax = 64;

}  // namespace

struct Engine::State {
    const Model& model;
    const Tokenizer& tokenizer;
    const Kernels& kernels;
    EngineConfig config;
    RunContext context;
    NumberingSink sink;
    std::unique_ptr<ForwardPass> forward;
    std::unique_ptr<PagePool> pool;
    std::unique_ptr<PrefixTree> tree;
    Scheduler scheduler{config};

    std::unordered_map<std::string, std::unique_ptr<Tenant>> tenants;
    std::uint64_t sessions = 0;
    std::uint64_t requests_submitted = 0;
    std::uint64_t steps = 0;
    std::unordered_map<std::uint64_t, std::unique_ptr<Request>> requests;  // not settled yet
    std::unordered_map<std::uint64_t, RequestFacts> settled;
    std::vector<Request*> cancelled;  // ended by the caller; the next step says and records it
    std::vector<Request*> ended;      // the next step records their end
    std::optional<Error> stopped;
    bool finished = false;
    std::uint32_t scrubs_left = 0;  // in this step
    std::chrono::nanoseconds forward_time{};

    std::vector<TokenId> batch;
    std::vector<Slot> slots;
    std::vector<Lease> leases;
    std::vector<SequenceView> views;
    StepOutput computed;

    // What one step gives its caller.
    struct Step {
        std::vector<Output> outputs;
        std::optional<Error> violation;
    };

    template <class T>
    void note(Request& request, const T& event, std::string_view bytes = {}) {
        sink.note(Event::of(event, bytes));
        request.facts.last_event = sink.numbered();
    }
    // The caller sees a failure once; afterwards the engine only repeats it.
    Error stop(Error error) {
        stopped = error;
        return error;
    }

    Tenant& tenant_named(const std::string& name);
    std::uint64_t session_number(Tenant& tenant, const std::string& name);
    Status check_request(const GenerateRequest& asked) const;
    Status reject(std::uint64_t id, RejectReason reason, const LimitFacts& facts);

    void pass_deadlines();
    void settle_cancelled(Step& step);
    void end(Request& request, FinishReason reason);
    void settle(Request& request);

    std::uint32_t scrub(std::uint32_t pages_wanted);
    bool make_room(std::uint32_t pages, std::uint32_t pages_kept);
    enum class Fit { admitted, quota, pages };
    Fit admit(Request& request);
    void adopt_prefix(Request& request, std::uint32_t pages);
    bool push_out(Request& request);
    void admit_waiting(Step& step);
    void note_waiting();
    void preempt(Request& request);
    bool grow(Request& request);
    void grow_decodes();

    void move_rows(Step& step);
    void compute();
    void collect(Step& step);
    void publish(Request& request);
    std::optional<Error> check_source(Request& request);
    std::optional<Error> check_slot(Request& request, std::size_t slot, const LogitsRow& row);
    Output sample(Request& request, const LogitsRow& row);
    Output end_faulty(Request& request, FinishReason reason, Error error);
    void end_violator(Request& request, Error error, Step& step);
    Error describe_violation(const Request& request, const PageFinding& finding) const;
    Error note_violation(Request& request, const PageFinding& finding);
};

Engine::Engine(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::create(const Model& model, const Tokenizer& tokenizer,
                                               const Kernels& kernels, ThreadPool& threads,
                                               const EngineConfig& asked,
                                               const ModelIdentity& identity, RunContext context) {
    check(context.sink != nullptr, "a run has a sink");
    const ModelConfig& shape = model.config();
    EngineConfig config = asked;
    config.context = config.context == 0 ? shape.context : config.context;
    config.pool_rows = config.pool_rows == 0 ? config.context : config.pool_rows;
    if (config.split) {
        config.prefill_rows = config.prefill_rows == 0 ? config.context : config.prefill_rows;
    } else if (config.prefill_rows != 0) {
        return Error{ErrorCode::usage, "a prefill pool of " + std::to_string(config.prefill_rows) +
                                           " rows (--prefill-rows) needs --roles split"};
    }
    const auto refuse = [](const std::string& what) { return Error{ErrorCode::usage, what}; };
    if (config.context > shape.context) {
        return refuse("a context of " + std::to_string(config.context) + " (-c) is more than the " +
                      std::to_string(shape.context) + " positions the model was trained for");
    }
    if (config.batch_rows == 0 || config.sequences_max == 0 || config.scrub_pages == 0 ||
        config.transfer_pages == 0 || config.queue_max == 0) {
        return refuse(
            "a step of 0 tokens (-ub), 0 requests (-np), 0 scrubbed or moved pages, or a queue of "
            "0 (--queue) would never end; each must be at least 1");
    }
    if (tokenizer.size() != shape.vocab) {
        return Error{ErrorCode::bad_model,
                     "the vocabulary has " + std::to_string(tokenizer.size()) +
                         " tokens and the model scores " + std::to_string(shape.vocab)};
    }
    auto forward =
        ForwardPass::create(model, kernels, threads, config.batch_rows,
                            std::min(config.batch_rows, config.sequences_max), config.context);
    if (!forward) {
        return forward.error();
    }
    EventSink& out = *context.sink;
    std::unique_ptr<State> state(new State{.model = model,
                                           .tokenizer = tokenizer,
                                           .kernels = kernels,
                                           .config = config,
                                           .context = std::move(context),
                                           .sink = NumberingSink(out),
                                           .forward = std::move(*forward)});
    const FaultPlan& faults = state->context.faults;
    EventSink& sink = state->sink;
    sink.note(
        Event::of(events::Run{kNumericsVersion, kPageTokens, faults.disabled_checker ? 0u : 1u}));
    sink.note(Event::of(
        events::Model{big_endian_word(identity.sha256, 0), big_endian_word(identity.sha256, 1),
                      big_endian_word(identity.sha256, 2), big_endian_word(identity.sha256, 3),
                      shape.layers, shape.kv_heads, shape.head_dim, shape.vocab, shape.context,
                      kClassPortable},
        identity.name));
    auto pool = PagePool::create({.shape = shape.tile_shape(),
                                  .rows_max = config.pool_rows,
                                  .prefill_rows = config.prefill_rows,
                                  .shadow_writers = state->context.checked},
                                 kernels, sink, &faults);
    if (!pool) {
        return pool.error();
    }
    state->pool = std::move(*pool);
    state->tree = std::make_unique<PrefixTree>(*state->pool);
    sink.note(Event::of(events::Config{kConfigVersion}, to_json(config)));
    if (faults.active()) {
        sink.note(Event::of(events::Fault{1}, faults.names()));
    }
    return std::unique_ptr<Engine>(new Engine(std::move(state)));
}

// ---- admission

Tenant& Engine::State::tenant_named(const std::string& name) {
    std::unique_ptr<Tenant>& tenant = tenants[name];
    if (tenant == nullptr) {
        tenant = std::make_unique<Tenant>();
        tenant->id = TenantId{static_cast<std::uint32_t>(tenants.size())};
        tenant->name = name;
        tenant->key = context.tenant_key ? context.tenant_key(tenant->id, name) : random_key();
        const auto own = config.tenant_quota_rows.find(name);
        tenant->quota_rows =
            own == config.tenant_quota_rows.end() ? config.quota_rows : own->second;
        sink.note(Event::of(events::Tenant{number(tenant->id)}, name));
        sink.text({.tenant = tenant->id, .kind = TextKind::key, .bytes = bytes_of(tenant->key)});
    }
    return *tenant;
}

// 0: no session.
std::uint64_t Engine::State::session_number(Tenant& tenant, const std::string& name) {
    if (name.empty()) {
        return 0;
    }
    const auto [entry, fresh] = tenant.sessions.try_emplace(name, sessions + 1);
    sessions += fresh ? 1 : 0;
    return entry->second;
}

Status check_tenant(const std::string& tenant) {
    if (is_tenant_name(tenant)) {
        return {};
    }
    return Error{ErrorCode::usage,
                 "a tenant is named with 1 to " + std::to_string(kTenantLengthMax) +
                     " of a-z 0-9 . _ -; this name has " + std::to_string(tenant.size()) +
                     " bytes, or others among them"};
}

// What no limit decides: a request that says something it cannot mean.
Status Engine::State::check_request(const GenerateRequest& asked) const {
    if (Status status = check_tenant(asked.tenant); !status) {
        return status;
    }
    if (asked.session.size() > kSessionBytesMax) {
        return Error{ErrorCode::usage,
                     "a session is named with up to " + std::to_string(kSessionBytesMax) +
                         " bytes; this name has " + std::to_string(asked.session.size())};
    }
    if (Status status = check_options(asked.sampling); !status) {
        return status;
    }
    if (asked.tokens_max == 0u) {
        return Error{ErrorCode::usage, "0 tokens to generate (-n); it must be at least 1"};
    }
    if (asked.prompt_ids.empty()) {
        return Error{ErrorCode::bad_input, "the prompt has no tokens; it must have at least 1"};
    }
    const std::uint32_t vocab = model.config().vocab;
    for (std::size_t i = 0; i < asked.prompt_ids.size(); ++i) {
        const TokenId id = asked.prompt_ids[i];
        if (id < 0 || static_cast<std::uint32_t>(id) >= vocab) {
            return Error{ErrorCode::bad_input,
                         "prompt token " + std::to_string(i) + " has the id " + std::to_string(id) +
                             "; the model knows 0 to " + std::to_string(vocab - 1)};
        }
    }
    return {};
}

Status Engine::State::reject(std::uint64_t id, RejectReason reason, const LimitFacts& facts) {
    sink.note(Event::of(events::Reject{id, static_cast<std::uint64_t>(reason), facts.n_prompt,
                                       facts.n_max, facts.limit}));
    if (Status status = sink.commit(); !status) {
        return stop(status.error());
    }
    return {};
}

Result<RequestId> Engine::submit(GenerateRequest asked) {
    State& state = *state_;
    if (state.stopped) {
        return *state.stopped;
    }
    check(!state.finished, "nothing is submitted to a run that has ended");
    if (Status status = state.check_request(asked); !status) {
        return status.error();
    }

    Tenant& tenant = state.tenant_named(asked.tenant);
    const std::uint64_t id = ++state.requests_submitted;
    const std::uint64_t first_event = state.sink.numbered() + 1;
    const Admission admission =
        admission_of(state.config, asked.prompt_ids.size(), asked.tokens_max, tenant.quota_rows,
                     state.scheduler.waiting());
    const std::uint64_t session = state.session_number(tenant, asked.session);
    CacheScope scope = std::min(state.config.scope, asked.scope.value_or(state.config.scope));
    scope = scope == CacheScope::session && session == 0 ? CacheScope::request : scope;

    const SamplingOptions& sampling = asked.sampling;
    const auto input = keyed_digest(tenant.key, "prompt", asked.prompt);
    state.sink.note(Event::of(events::Submit{id, number(tenant.id), asked.prompt_ids.size(),
                                             admission.tokens_max, input[0], input[1], session,
                                             static_cast<std::uint64_t>(scope)}));
    state.sink.note(Event::of(events::Sampling{
        id, sampling.seed, bits_of(sampling.temperature), sampling.top_k, bits_of(sampling.top_p),
        bits_of(sampling.min_p), bits_of(sampling.repeat_penalty),
        bits_of(sampling.presence_penalty), bits_of(sampling.frequency_penalty),
        sampling.penalty_last, sampling.ignore_eos ? 1u : 0u, sampling.stops.size()}));
    const RequestId request_id{id};
    state.sink.text({tenant.id, request_id, TextKind::prompt, asked.prompt});
    state.sink.text(
        {tenant.id, request_id, TextKind::prompt_ids, little_endian_ids(asked.prompt_ids)});
    for (const std::string& stop : sampling.stops) {
        state.sink.text({tenant.id, request_id, TextKind::stop, stop});
    }
    if (admission.refusal) {
        const Refusal& refusal = *admission.refusal;
        if (Status status = state.reject(id, refusal.reason, *refusal.error.limit); !status) {
            return status.error();
        }
        return refusal.error;
    }

    PositionDigest prompt;
    Sampler sampler(asked.sampling, state.kernels, state.tokenizer);
    for (std::size_t i = 0; i < asked.prompt_ids.size(); ++i) {
        prompt.add(i, asked.prompt_ids[i]);
        sampler.accept(asked.prompt_ids[i]);
    }
    const auto prompt_tokens = static_cast<std::uint32_t>(asked.prompt_ids.size());
    const bool timed = asked.deadline_ms > 0 && state.context.clock != nullptr;
    auto request = std::unique_ptr<Request>(new Request{
        .owner = {tenant.id, request_id},
        .tenant = &tenant,
        .tokens = std::move(asked.prompt_ids),
        .prompt_tokens = prompt_tokens,
        .tokens_max = admission.tokens_max,
        .top_logits = asked.top_logits,
        .logprobs = asked.logprobs,
        .scope = scope,
        .session = session,
        .deadline_ns =
            timed ? state.context.clock->monotonic_ns() + asked.deadline_ms * 1'000'000 : 0,
        .source_digest = prompt.digest(tenant.key),
        .sampler = std::move(sampler),
        .answer = Answer(state.tokenizer, std::move(asked.sampling.stops)),
        .layers = std::vector<std::uint64_t>(state.model.config().layers),
        .source_target = prompt_tokens});
    request->facts.prompt_tokens = prompt_tokens;
    request->facts.first_event = first_event;
    request->facts.last_event = state.sink.numbered();
    state.scheduler.wait(*request);
    state.requests.emplace(id, std::move(request));
    return request_id;
}

Result<RequestId> Engine::note_malformed(const std::string& tenant_name, std::string_view input) {
    State& state = *state_;
    if (state.stopped) {
        return *state.stopped;
    }
    check(!state.finished, "nothing is submitted to a run that has ended");
    if (Status status = check_tenant(tenant_name); !status) {
        return status.error();
    }
    const Tenant& tenant = state.tenant_named(tenant_name);
    const std::uint64_t id = ++state.requests_submitted;
    const auto digest = keyed_digest(tenant.key, "prompt", input);
    RequestFacts facts{.first_event = state.sink.numbered() + 1};
    state.sink.note(Event::of(events::Submit{id, number(tenant.id), 0, 0, digest[0], digest[1], 0,
                                             static_cast<std::uint64_t>(CacheScope::request)}));
    state.sink.text({tenant.id, RequestId{id}, TextKind::prompt, input});
    if (Status status = state.reject(id, RejectReason::malformed, {}); !status) {
        return status.error();
    }
    facts.last_event = state.sink.numbered();
    state.settled.emplace(id, facts);
    return RequestId{id};
}

bool Engine::cancel(RequestId id, FinishReason reason) {
    State& state = *state_;
    const auto found = state.requests.find(number(id));
    if (state.stopped || found == state.requests.end() || found->second->finish) {
        return false;
    }
    Request& request = *found->second;
    state.note(request, events::Cancel{request.id(), static_cast<std::uint64_t>(reason)});
    state.end(request, reason);
    state.cancelled.push_back(&request);
    return true;
}

void Engine::delivered(RequestId id, std::string_view bytes) {
    if (bytes.empty()) {
        return;
    }
    const auto found = state_->requests.find(number(id));
    check(found != state_->requests.end(),
          "bytes are delivered before their request's end is recorded");
    found->second->emitted += bytes;
}

void Engine::undelivered(RequestId id) {
    const auto found = state_->requests.find(number(id));
    if (found != state_->requests.end()) {
        found->second->broken_off = true;
    }
}

bool Engine::idle() const {
    const State& state = *state_;
    return state.requests.empty() && state.pool->pages_draining() == 0;
}

// ---- the end of a request

// From here on nothing is computed or sampled for it; the reason is final.
void Engine::State::end(Request& request, FinishReason reason) {
    check(!request.finish, "a request ends once");
    request.finish = reason;
    scheduler.stop(request);
}

// Records the end and gives the pages back. The request is gone afterwards; its facts stay.
void Engine::State::settle(Request& request) {
    const Digest256& key = request.tenant->key;
    const std::uint64_t id = request.id();
    const FinishReason reason = *request.finish;
    const bool computed_rows = request.facts.prefilled > 0;
    if (computed_rows) {
        for (std::uint32_t layer = 0; layer < request.layers.size(); ++layer) {
            note(request, events::Layer{id, static_cast<std::uint64_t>(Checkpoint::finish), layer,
                                        layer_digest(key, layer, request.layers[layer])});
        }
    }
    if (request.admitted) {
        // An answer that broke off was rendered as far as its caller took it.
        std::string_view rendered = request.answer.delivered();
        if (request.broken_off ||
            (reason != FinishReason::stop && reason != FinishReason::length)) {
            rendered = rendered.substr(0, request.emitted.size());
        }
        const auto made = keyed_digest(key, "bytes", rendered);
        note(request, events::Rendered{id, rendered.size(), made[0], made[1]});
        const auto taken = keyed_digest(key, "bytes", request.emitted);
        note(request, events::Emitted{id, request.emitted.size(), taken[0], taken[1]});
    }
    const std::uint64_t witness = request.admitted ? pool->running_witness(request.owner) : 0;
    if (computed_rows) {
        note(request, events::WitnessSum{id, request.facts.prefilled, witness});
    }
    const auto logits = logits_digest(key, request.facts.logits);
    note(request, events::Finish{id, static_cast<std::uint64_t>(reason), request.prompt_tokens,
                                 request.facts.completion_tokens, request.emitted.size(), logits[0],
                                 logits[1], witness, request.facts.cached_tokens});
    if (request.admitted && reason == FinishReason::violation) {
        tree->unpublish(request.owner.request);
        pool->quarantine(request.owner, free_reason(reason));
    } else if (request.admitted) {
        pool->release(request.owner, free_reason(reason));
    }
    settled.emplace(id, request.facts);
    requests.erase(id);
}

// ---- who ends

void Engine::State::pass_deadlines() {
    if (context.clock == nullptr) {
        return;
    }
    std::vector<Request*> timed = scheduler.all_waiting();
    timed.insert(timed.end(), scheduler.running().begin(), scheduler.running().end());
    std::erase_if(timed, [](const Request* request) { return request->deadline_ns == 0; });
    if (timed.empty()) {
        return;
    }
    std::sort(timed.begin(), timed.end(),
              [](const Request* a, const Request* b) { return a->id() < b->id(); });
    const std::int64_t now = context.clock->monotonic_ns();
    for (Request* request : timed) {
        if (now >= request->deadline_ns) {
            note(*request,
                 events::Cancel{request->id(), static_cast<std::uint64_t>(FinishReason::deadline)});
            end(*request, FinishReason::deadline);
            cancelled.push_back(request);
        }
    }
}

// A cancel is said and recorded by the next step, whole: a step that left nothing in the record
// could not be made again. What was held back of the answer is dropped; nobody is there to take it.
void Engine::State::settle_cancelled(Step& step) {
    for (Request* request : std::exchange(cancelled, {})) {
        step.outputs.push_back({.request = request->owner.request, .finish = request->finish});
        settle(*request);
    }
}

// ---- room for pages

std::uint32_t Engine::State::scrub(std::uint32_t pages_wanted) {
    const std::uint32_t done = pool->scrub_drained(std::min(pages_wanted, scrubs_left));
    scrubs_left -= done;
    return done;
}

// Brings the prefill side to `pages` allocatable ones, if need be out of the prefix tree, of which
// `pages_kept` are about to be used. False: not in this step, perhaps not at all.
bool Engine::State::make_room(std::uint32_t pages, std::uint32_t pages_kept) {
    const auto lacking = [&] {
        const std::uint32_t free = pool->pages_allocatable();
        return pages > free ? pages - free : 0;
    };
    if (lacking() > 0 && pool->pages_draining() < lacking()) {
        const std::uint32_t wanted = lacking() - pool->pages_draining();
        const std::uint32_t there = tree->evictable();
        if (there < wanted + pages_kept) {
            return false;  // nothing is thrown away in vain
        }
        tree->evict(wanted);
    }
    while (lacking() > 0 && scrub(lacking()) > 0) {
    }
    return lacking() == 0;
}

// Gives a waiting request pages for all it has to compute, and for its first row after that. What
// it may grow to is not set aside, but for a request that a preemption would end (split).
Engine::State::Fit Engine::State::admit(Request& request) {
    const std::uint64_t quota = request.tenant->quota_rows;
    if (quota > 0 && scheduler.rows_held(request.owner.tenant) + request.rows_needed() > quota) {
        return Fit::quota;
    }
    if (scheduler.running().size() >= config.sequences_max) {
        return Fit::pages;
    }
    const std::uint64_t rows = request.tokens.size();
    const std::uint32_t decode =
        !config.split
            ? 0
            : pages_for(scheduler.recomputable(request) ? rows + 1 : request.rows_needed());
    if (config.split && decode > pool->pages_allocatable(PoolSide::decode)) {
        scrub(pool->pages_draining());
        if (decode > pool->pages_allocatable(PoolSide::decode)) {
            return Fit::pages;
        }
    }
    const std::uint32_t all = pages_for(config.split ? rows : rows + 1);
    const bool adopts = request.scope != CacheScope::request && !request.admitted;
    std::uint32_t adopted = 0;
    for (bool fits = false; !fits;) {
        adopted = adopts ? tree->match(request.space(), request.tokens) : 0;
        if (!make_room(all - adopted, adopted)) {
            return Fit::pages;
        }
        // Room may have cost what was matched.
        fits = !adopts || tree->match(request.space(), request.tokens) == adopted;
    }

    scheduler.start(request);
    if (request.admitted) {
        note(request, events::Resume{request.id()});
    } else {
        note(request, events::Admit{request.id(), request.rows_needed(), request.source_digest[0],
                                    request.source_digest[1]});
    }
    request.admitted = true;
    Status reserved = pool->reserve(request.owner, all - adopted);
    if (reserved && decode > 0) {
        reserved = pool->reserve(request.owner, decode, PoolSide::decode);
    }
    check(reserved.has_value(), "who is admitted gets what was free");
    request.prefill_pages = all;
    request.decode_pages = decode;
    request.passed_over = 0;
    if (adopted > 0) {
        adopt_prefix(request, adopted);
    }
    request.facts.last_event = sink.numbered();
    return Fit::admitted;
}

// Its first pages are those that another request of its scope has computed.
void Engine::State::adopt_prefix(Request& request, std::uint32_t pages) {
    for (std::uint32_t page = 0; page < pages; ++page) {
        for (std::uint32_t i = page * kPageTokens; i < (page + 1) * kPageTokens; ++i) {
            request.prefix.add(i, request.tokens[i]);
        }
        request.page_digests.push_back(request.prefix.digest(request.tenant->key));
    }
    const std::vector<TokenId> ids =
        tree->adopt(request.owner, request.space(), request.tokens, pages, request.page_digests);
    // What counts as consumed is what the rows were computed from, not what was asked for.
    for (std::size_t i = 0; i < ids.size(); ++i) {
        request.sourced.add(i, ids[i]);
    }
    request.facts.cached_tokens = ids.size();
    request.facts.prefilled = ids.size();
    request.pages_offered = pages;
}

// A tenant with nothing running does not wait for a tenant with much: makes that one's youngest
// requests wait again. True when it did; their pages can be had in a step or two.
bool Engine::State::push_out(Request& request) {
    const std::vector<Request*> candidates = scheduler.over_share(request.owner.tenant);
    const std::uint32_t wanted = pages_for(request.tokens.size() + 1);
    const PoolSide side = config.split ? PoolSide::decode : PoolSide::prefill;
    std::uint32_t coming = pool->pages_allocatable(side) + pool->pages_draining() +
                           (config.split ? 0 : tree->evictable());
    std::vector<Request*> chosen;
    bool slot = scheduler.running().size() < config.sequences_max;
    for (Request* candidate : candidates) {
        if (coming >= wanted && slot) {
            break;
        }
        chosen.push_back(candidate);
        coming += config.split ? candidate->decode_pages : candidate->prefill_pages;
        slot = true;
    }
    if (chosen.empty() || coming < wanted || !slot) {
        return false;
    }
    for (Request* candidate : chosen) {
        preempt(*candidate);
    }
    return true;
}

void Engine::State::admit_waiting(Step& step) {
    const auto stalled = [](const Request* request) { return request->stalled; };
    if (std::any_of(scheduler.running().begin(), scheduler.running().end(), stalled)) {
        return;  // who runs comes first
    }
    std::set<std::uint32_t> except;
    std::vector<Request*> without_pages;
    while (Request* next = scheduler.next_waiting(except)) {
        Request& request = *next;
        const Fit fit = admit(request);
        if (fit == Fit::admitted) {
            for (Request* waiting : without_pages) {
                ++waiting->passed_over;
            }
            continue;
        }
        except.insert(number(request.owner.tenant));
        if (fit == Fit::quota) {
            continue;
        }
        if (push_out(request) || request.passed_over >= kPassedOverMax) {
            return;  // what comes free is for this one
        }
        without_pages.push_back(&request);
        if (!scheduler.running().empty() || !ended.empty() || pool->pages_draining() > 0) {
            continue;
        }
        // Quarantined pages do not come back, and waiting for them would never end.
        step.outputs.push_back(end_faulty(
            request, FinishReason::error,
            {ErrorCode::out_of_pages, "request " + std::to_string(request.id()) + " needs " +
                                          std::to_string(pages_for(request.tokens.size() + 1)) +
                                          " pages; " + std::to_string(pool->pages_allocatable()) +
                                          " of " + std::to_string(pool->pages_total()) +
                                          " are not in quarantine"}));
        ended.push_back(&request);
        except.erase(number(request.owner.tenant));
        without_pages.pop_back();
    }
}

// Says once of each request that it could not be admitted at once.
void Engine::State::note_waiting() {
    for (Request* request : scheduler.all_waiting()) {
        if (!request->told_waiting) {
            request->told_waiting = true;
            note(*request, events::Queue{request->id()});
        }
    }
}

// Gives up its pages and waits again; what it has sampled stays said, and is computed anew.
void Engine::State::preempt(Request& request) {
    PositionDigest all;
    for (std::size_t i = 0; i < request.tokens.size(); ++i) {
        all.add(i, request.tokens[i]);
    }
    request.source_digest = all.digest(request.tenant->key);
    request.source_target = static_cast<std::uint32_t>(request.tokens.size());
    request.source_due = true;
    request.sourced = {};
    std::fill(request.layers.begin(), request.layers.end(), 0);
    note(request, events::Preempt{request.id(), request.tokens.size(), request.source_digest[0],
                                  request.source_digest[1]});
    pool->release(request.owner, FreeReason::preempted);
    request.facts.last_event = sink.numbered();
    request.facts.prefilled = 0;
    ++request.facts.preemptions;
    request.pages_offered = 0;
    request.prefill_pages = request.decode_pages = 0;
    request.moving = request.moved = request.stalled = false;
    scheduler.wait(request);
}

// A page more for the next row of a request that decodes: free, out of the prefix tree, or from the
// youngest that runs. False: it is stalled for this step.
bool Engine::State::grow(Request& request) {
    std::uint32_t& pages = request.moved ? request.decode_pages : request.prefill_pages;
    if (pages_for(request.facts.prefilled + 1) <= pages) {
        return true;
    }
    const PoolSide side = request.moved ? PoolSide::decode : PoolSide::prefill;
    const auto there = [&] {
        if (side == PoolSide::prefill) {
            return make_room(1, 0);
        }
        while (pool->pages_allocatable(side) == 0 && scrub(pool->pages_draining()) > 0) {
        }
        return pool->pages_allocatable(side) > 0;
    };
    while (!there()) {
        if (pool->pages_draining() > 0) {
            return false;  // they can be had in the next step
        }
        Request* victim = scheduler.victim(request);
        if (victim == nullptr) {
            return false;
        }
        preempt(*victim);
    }
    const Status reserved = pool->reserve(request.owner, 1, side);
    check(reserved.has_value(), "the page is there");
    request.facts.last_event = sink.numbered();
    ++pages;
    return true;
}

// Oldest first: only younger ones lose their pages.
void Engine::State::grow_decodes() {
    const std::vector<Request*> running = scheduler.running();
    for (Request* request : running) {
        const auto& now = scheduler.running();
        if (std::find(now.begin(), now.end(), request) != now.end()) {
            request->stalled = !request->moving && request->decoding() && !grow(*request);
        }
    }
}

// split: rows of prompts that are done go to the decode side, oldest request first.
void Engine::State::move_rows(Step& step) {
    std::uint32_t left = config.transfer_pages;
    const std::vector<Request*> running = scheduler.running();
    for (Request* request : running) {
        if (!request->moving || left == 0) {
            continue;
        }
        const PagePool::Moved moved = pool->transfer(request->owner, left);
        left -= std::min(left, moved.pages);
        request->facts.last_event = sink.numbered();
        if (!moved.clean) {
            end_violator(*request, describe_violation(*request, *pool->finding(request->owner)),
                         step);
            continue;
        }
        if (moved.complete) {
            request->moving = false;
            request->moved = true;
            request->prefill_pages = 0;
        }
    }
}

// ---- one step

void Engine::State::compute() {
    ++steps;
    pool->begin_step(steps);
    sink.note(Event::of(events::Step{steps, slots.size()}));
    batch.clear();
    leases.clear();
    views.clear();
    for (const Slot& slot : slots) {
        Request& request = *slot.request;
        pool->extend(request.owner, slot.first + slot.count);
        leases.push_back(pool->open(request.owner, slot.first, slot.count));
        const auto batch_row = static_cast<std::uint32_t>(batch.size());
        views.push_back(leases.back().view(batch_row, slot.samples ? slot.count - 1 : slot.count));
        const auto first = request.tokens.begin() + slot.first;
        batch.insert(batch.end(), first, first + slot.count);
    }
    const auto begun = std::chrono::steady_clock::now();
    forward->run({.tokens = batch,
                  .sequences = views,
                  .memory = pool->memory(),
                  .checked = context.checked,
                  .step = steps},
                 computed);
    forward_time += std::chrono::steady_clock::now() - begun;
}

// Looks at the evidence before it uses a result: a request whose rows were not all its own, or its
// scope's, ends here.
void Engine::State::collect(Step& step) {
    bool withheld = false;  // a violation ends the run, so nothing of this step may be sampled
    for (std::size_t i = 0; i < slots.size() && config.stop_on_violation; ++i) {
        withheld |= leases[i].report().faults.load() != 0 ||
                    pool->finding(slots[i].request->owner) != nullptr;
    }
    const std::size_t layers = model.config().layers;
    std::size_t next_row = 0;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const Slot& slot = slots[i];
        Request& request = *slot.request;
        const std::uint32_t batch_row = views[i].batch_row;
        const bool clean = pool->settle(std::move(leases[i]));
        request.facts.last_event = sink.numbered();
        for (std::uint32_t t = 0; t < slot.count; ++t) {
            if (slot.first + t < request.source_target) {
                request.sourced.add(slot.first + t, batch[batch_row + t]);
            }
        }
        for (std::size_t layer = 0; layer < layers; ++layer) {
            request.layers[layer] += computed.layer_digests[i * layers + layer];
        }
        request.facts.prefilled += slot.count;
        const LogitsRow* row = slot.samples ? &computed.logits[next_row++] : nullptr;
        if (request.finish) {
            continue;  // an adopter whose donor was found out earlier in this step
        }

        std::optional<Error> foreign;
        if (!clean) {
            foreign = describe_violation(request, *pool->finding(request.owner));
        } else if (row != nullptr && row->nonfinite) {
            if (const auto poison = pool->find_poison(request.owner)) {
                foreign = note_violation(request, *poison);
            } else {
                step.outputs.push_back(end_faulty(
                    request, FinishReason::error,
                    {ErrorCode::nonfinite, "the model computed NaN or infinity for request " +
                                               std::to_string(request.id()) + " at position " +
                                               std::to_string(row->position) +
                                               "; its weights do not fit this input"}));
                ended.push_back(&request);
                continue;
            }
        } else if (row != nullptr && !withheld) {
            foreign = check_slot(request, i, *row);
            if (!foreign && request.source_due) {
                foreign = check_source(request);
            }
            if (!foreign) {
                step.outputs.push_back(sample(request, *row));
            }
        }
        if (foreign) {
            end_violator(request, std::move(*foreign), step);
        } else if (!withheld && !request.moved) {
            publish(request);
        }
    }
    leases.clear();
    computed.logits.clear();  // used, or never to be used
}

// Its pages that are full now may be read by others of its scope.
void Engine::State::publish(Request& request) {
    const auto pages = static_cast<std::uint32_t>(request.facts.prefilled / kPageTokens);
    if (request.scope == CacheScope::request || pages <= request.pages_offered) {
        return;
    }
    while (request.page_digests.size() < pages) {
        const std::size_t first = request.page_digests.size() * kPageTokens;
        for (std::size_t i = first; i < first + kPageTokens; ++i) {
            request.prefix.add(i, request.tokens[i]);
        }
        request.page_digests.push_back(request.prefix.digest(request.tenant->key));
    }
    tree->publish(request.owner, request.space(), request.scope,
                  std::span(request.tokens).first(std::size_t{pages} * kPageTokens),
                  request.page_digests);
    request.pages_offered = pages;
    request.facts.last_event = sink.numbered();
}

// The row of logits is the one computed for this request, in this step.
std::optional<Error> Engine::State::check_slot(Request& request, std::size_t slot,
                                               const LogitsRow& row) {
    note(request, events::Slot{request.id(), slot, number(row.owner.request), row.step});
    if (row.owner != request.owner || row.step != steps || row.sequence != slot ||
        row.position + 1 != request.tokens.size()) {
        return note_violation(request, {.kind = name_of(ViolationKind::consumed_mismatch)});
    }
    return std::nullopt;
}

// Before the first sample, and the first one after a preemption: what was computed is what was
// admitted, position for position.
std::optional<Error> Engine::State::check_source(Request& request) {
    const Digest256& key = request.tenant->key;
    const auto sourced = request.sourced.digest(key);
    note(request,
         events::Sourced{request.id(), request.sourced.positions(), sourced[0], sourced[1]});
    if (sourced != request.source_digest || request.sourced.positions() != request.source_target) {
        return note_violation(request, {.kind = name_of(ViolationKind::consumed_mismatch)});
    }
    request.source_due = false;
    if (request.facts.completion_tokens == 0) {
        for (std::uint32_t layer = 0; layer < request.layers.size(); ++layer) {
            note(request,
                 events::Layer{request.id(), static_cast<std::uint64_t>(Checkpoint::first_sample),
                               layer, layer_digest(key, layer, request.layers[layer])});
        }
    }
    return std::nullopt;
}

Output Engine::State::sample(Request& request, const LogitsRow& row) {
    Output output{.request = request.owner.request};
    if (request.facts.completion_tokens == 0 && request.top_logits > 0) {
        output.first_logits = top_logits(row.logits, request.top_logits);
    }
    if (request.facts.first_step == 0) {
        request.facts.first_step = steps;
    }
    fold_row(request.facts.logits, row.digest, row.position);
    const std::uint64_t position = request.tokens.size();
    const TokenId id = request.sampler.sample(row.logits, position);
    note(request, events::Sample{request.id(), position,
                                 sample_digest(request.tenant->key, request.facts.logits)});
    sink.text({request.owner.tenant, request.owner.request, TextKind::ids,
               leb128(static_cast<std::uint32_t>(id))});
    request.tokens.push_back(id);
    request.sampler.accept(id);
    ++request.facts.completion_tokens;

    if (request.logprobs > 0) {
        output.logprobs = logprobs_of(row.logits, id, request.logprobs);
    }
    Answer::Delta delta = request.answer.push(id);
    output.id = id;
    output.bytes = std::move(delta.bytes);
    if (delta.stopped) {
        output.finish = FinishReason::stop;
    } else if (request.facts.completion_tokens == request.tokens_max) {
        output.finish = FinishReason::length;
        output.bytes += request.answer.finish();
    }
    if (output.finish) {
        end(request, *output.finish);
        ended.push_back(&request);
    } else if (config.split && !request.moved) {
        request.moving = true;
    }
    return output;
}

Output Engine::State::end_faulty(Request& request, FinishReason reason, Error error) {
    end(request, reason);
    return {.request = request.owner.request, .finish = reason, .error = std::move(error)};
}

// What it wrote is taken from everybody, and who had built on it ends too.
void Engine::State::end_violator(Request& request, Error error, Step& step) {
    const RequestId id = request.owner.request;
    step.violation = step.violation ? step.violation : error;
    step.outputs.push_back(end_faulty(request, FinishReason::violation, std::move(error)));
    std::vector<Request*> adopters;
    for (Request* other : scheduler.running()) {
        if (other->facts.cached_tokens > 0 && pool->reads_rows_of(other->owner, id)) {
            adopters.push_back(other);
        }
    }
    settle(request);
    // Their part of this step may still have to be looked at: their end is recorded by the next
    // one.
    for (Request* adopter : adopters) {
        step.outputs.push_back(end_faulty(
            *adopter, FinishReason::violation,
            {ErrorCode::violation, "request " + std::to_string(adopter->id()) + " of tenant " +
                                       adopter->tenant->name + " reads rows of request " +
                                       std::to_string(number(id)) +
                                       ", which was stopped for what it read"}));
        ended.push_back(adopter);
    }
}

Error Engine::State::note_violation(Request& request, const PageFinding& finding) {
    note(request,
         events::Violation{request.id(), finding.page, finding.generation, finding.row_begin,
                           finding.row_end, number(finding.writer.tenant),
                           number(finding.writer.request)},
         finding.kind);
    return describe_violation(request, finding);
}

Error Engine::State::describe_violation(const Request& request, const PageFinding& finding) const {
    const auto name_of_tenant = [&](TenantId id) {
        for (const auto& [name, tenant] : tenants) {
            if (tenant->id == id) {
                return name;
            }
        }
        return std::to_string(number(id));
    };
    std::string message = std::string(finding.kind) + " at event " +
                          std::to_string(sink.last_violation()) + ": request " +
                          std::to_string(request.id()) + " of tenant " + request.tenant->name;
    if (finding.row_end > finding.row_begin) {
        message += " met rows [" + std::to_string(finding.row_begin) + "," +
                   std::to_string(finding.row_end) + ") of page " + std::to_string(finding.page) +
                   " generation " + std::to_string(finding.generation) + ", ";
        message += finding.writer == Owner{}
                       ? "which nobody has written"
                       : "which belong to request " +
                             std::to_string(number(finding.writer.request)) + " of tenant " +
                             name_of_tenant(finding.writer.tenant);
    } else {
        message += " computed other tokens than it was admitted with";
    }
    return {ErrorCode::violation, message + "; it was stopped before it could sample from them"};
}

Result<std::vector<Output>> Engine::step() {
    State& state = *state_;
    if (state.stopped) {
        return *state.stopped;
    }
    check(!state.finished, "a run that has ended makes no steps");
    state.pass_deadlines();  // first, so that a re-execution can cancel where the record does
    state.scrubs_left = state.config.scrub_pages;
    for (Request* request : std::exchange(state.ended, {})) {
        state.settle(*request);
    }
    State::Step step;
    state.settle_cancelled(step);
    state.scrub(state.scrubs_left);
    state.move_rows(step);
    state.grow_decodes();
    state.admit_waiting(step);
    state.note_waiting();
    state.scheduler.plan(state.slots);
    if (!state.slots.empty()) {
        state.compute();
        state.collect(step);
    }
    std::optional<Error>& violation = step.violation;

    const Status committed = state.sink.commit();
    // Both may have seen the same violation; the engine's own words name more. Any other failure
    // means that the record is not whole, and says so first.
    const bool told = violation && state.config.stop_on_violation;
    if (!committed && !(told && committed.error().code == ErrorCode::violation)) {
        return state.stop(committed.error());
    }
    if (told) {
        return state.stop(std::move(*violation));
    }
    return std::move(step.outputs);
}

Status Engine::finish() {
    State& state = *state_;
    if (state.stopped) {
        return *state.stopped;
    }
    check(!state.finished, "a run ends once");
    std::vector<Request*> unfinished = state.scheduler.running();
    const std::vector<Request*> waiting = state.scheduler.all_waiting();
    unfinished.insert(unfinished.end(), waiting.begin(), waiting.end());
    for (Request* request : unfinished) {
        cancel(request->owner.request);
    }
    // Steps that compute nothing: a re-execution, which sees the cancels one by one, makes the
    // same.
    while (!idle()) {
        if (const auto tidied = step(); !tidied) {
            return tidied.error();
        }
    }
    state.tree->clear();
    state.pool->scrub_drained(state.pool->pages_draining());
    const PagePool::Counters counters = state.pool->counters();
    state.sink.note(
        Event::of(events::RunEnd{state.requests_submitted, state.steps, counters.rows_read,
                                 counters.rows_written, counters.scrubs, counters.scrub_witness}));
    state.finished = true;
    if (Status status = state.sink.commit(); !status) {
        return state.stop(status.error());
    }
    return {};
}

RequestFacts Engine::facts(RequestId request) const {
    const auto live = state_->requests.find(number(request));
    if (live != state_->requests.end()) {
        return live->second->facts;
    }
    const auto settled = state_->settled.find(number(request));
    check(settled != state_->settled.end(), "facts are asked of a request that was accepted");
    return settled->second;
}

std::uint64_t Engine::events_noted() const { return state_->sink.numbered(); }
std::uint64_t Engine::steps() const { return state_->steps; }
std::chrono::nanoseconds Engine::forward_time() const { return state_->forward_time; }
std::size_t Engine::waiting() const { return state_->scheduler.waiting(); }
const EngineConfig& Engine::config() const { return state_->config; }
PagePool& Engine::pool() { return *state_->pool; }

}  // namespace kvw
