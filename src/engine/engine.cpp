#include "src/engine/engine.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <unordered_map>
#include <utility>

#include "src/base/check.h"
#include "src/base/random.h"
#include "src/engine/content.h"
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

struct Tenant {
    TenantId id{};
    std::string name;
    Digest256 key{};
};

// A request that was not refused, until its pages are given back.
struct Request {
    Owner owner;
    const Tenant* tenant;
    std::vector<TokenId> tokens;  // prompt, then what was sampled
    std::uint32_t prompt_tokens;
    std::uint32_t tokens_max;
    std::uint32_t top_logits;
    std::array<std::uint64_t, 2> admitted_digest;
    Sampler sampler;
    Answer answer;
    PositionDigest sourced;             // of what forward passes consumed, up to the prompt's end
    std::vector<std::uint64_t> layers;  // running digest of each layer's outputs
    std::string emitted;                // as the caller's sink took it
    RequestFacts facts;
    bool holds_pages = false;
    std::optional<FinishReason> finish;

    std::uint64_t id() const { return number(owner.request); }
    std::uint32_t pending() const {
        return static_cast<std::uint32_t>(tokens.size() - facts.prefilled);
    }
    std::uint32_t rows_needed() const { return prompt_tokens + tokens_max; }
    std::uint32_t pages_needed() const { return (rows_needed() + kPageTokens - 1) / kPageTokens; }
};

// One request's part of a step.
struct Slot {
    Request* request;
    std::uint32_t first, count;
    bool samples;  // the step computes its last token, so one more is sampled
};

// A limit that prompt and answer together must stay within.
struct RowLimit {
    RejectReason reason;
    ErrorCode code;
    std::uint64_t rows;
    const char* holder;
    const char* flag;
};

std::string refusal(const RowLimit& limit, std::uint64_t prompt, std::uint64_t tokens,
                    std::uint64_t n_max) {
    std::string message = "prompt of " + std::to_string(prompt) + " tokens and " +
                          std::to_string(tokens) + " to generate need " +
                          std::to_string(prompt + tokens) + " rows; the " + limit.holder + " has " +
                          std::to_string(limit.rows) + " (" + limit.flag + "): ";
    if (n_max == 0) {
        return message + "no prompt fits beside them; generate fewer (-n) or raise the limit";
    }
    return message + "at most " + std::to_string(n_max) + " prompt tokens fit";
}

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

    std::unordered_map<std::string, std::unique_ptr<Tenant>> tenants;
    std::uint64_t requests_submitted = 0;
    std::uint64_t steps = 0;
    std::unordered_map<std::uint64_t, std::unique_ptr<Request>> requests;  // not settled yet
    std::unordered_map<std::uint64_t, RequestFacts> settled;
    std::deque<Request*> queue;       // waiting for pages, in order of submission
    std::vector<Request*> active;     // admitted and not ended, in order of admission
    std::vector<Request*> cancelled;  // ended by the caller; the next step says so
    std::vector<Request*> ended;      // the next step records their end
    std::size_t turn = 0;             // whose turn it is when a step cannot take all of `active`
    std::optional<Error> stopped;
    bool finished = false;

    std::vector<TokenId> batch;
    std::vector<Slot> slots;
    std::vector<Lease> leases;
    std::vector<SequenceView> views;
    StepOutput computed;

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

    const Tenant& tenant_named(const std::string& name);
    std::array<RowLimit, 2> limits() const;
    Result<std::uint32_t> tokens_allowed(const GenerateRequest& asked,
                                         std::optional<RowLimit>& met) const;
    void note_submission(std::uint64_t id, const Tenant& tenant, const GenerateRequest& asked,
                         std::uint32_t tokens_max);
    bool fits_now(const Request& request) const;
    void admit(Request& request);
    void end(Request& request, FinishReason reason);
    void settle(Request& request);
    void announce_cancelled(std::vector<Output>& outputs);
    void admit_waiting(std::vector<Output>& outputs);
    void plan();
    void compute();
    void collect(std::vector<Output>& outputs, std::optional<Error>& violation);
    std::optional<Error> check_source(Request& request);
    Output sample(Request& request, const LogitsRow& row);
    Output end_faulty(Request& request, FinishReason reason, Error error);
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
    const auto refuse = [](const std::string& what) { return Error{ErrorCode::usage, what}; };
    if (config.context > shape.context) {
        return refuse("a context of " + std::to_string(config.context) + " (-c) is more than the " +
                      std::to_string(shape.context) + " positions the model was trained for");
    }
    if (config.batch_rows == 0 || config.sequences_max == 0 || config.scrub_pages == 0) {
        return refuse(
            "a step of 0 tokens (-ub), 0 requests or 0 scrubbed pages would never end; "
            "each must be at least 1");
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
                                  .shadow_writers = state->context.checked},
                                 kernels, sink, &faults);
    if (!pool) {
        return pool.error();
    }
    state->pool = std::move(*pool);
    sink.note(Event::of(events::Config{kConfigVersion}, to_json(config)));
    if (faults.active()) {
        sink.note(Event::of(events::Fault{1}, faults.names()));
    }
    return std::unique_ptr<Engine>(new Engine(std::move(state)));
}

// ---- admission

const Tenant& Engine::State::tenant_named(const std::string& name) {
    std::unique_ptr<Tenant>& tenant = tenants[name];
    if (tenant == nullptr) {
        tenant = std::make_unique<Tenant>();
        tenant->id = TenantId{static_cast<std::uint32_t>(tenants.size())};
        tenant->name = name;
        tenant->key = context.tenant_key ? context.tenant_key(tenant->id, name) : random_key();
        sink.note(Event::of(events::Tenant{number(tenant->id)}, name));
        sink.text({.tenant = tenant->id, .kind = TextKind::key, .bytes = bytes_of(tenant->key)});
    }
    return *tenant;
}

// In the order in which they are named when several fail.
std::array<RowLimit, 2> Engine::State::limits() const {
    return {{{RejectReason::exceed_context_size, ErrorCode::exceed_context_size, config.context,
              "context", "-c"},
             {RejectReason::out_of_pages, ErrorCode::out_of_pages, config.pool_rows, "pool",
              "--pool-rows"}}};
}

// How many tokens the request may generate; sets `met` when a limit forbids it.
Result<std::uint32_t> Engine::State::tokens_allowed(const GenerateRequest& asked,
                                                    std::optional<RowLimit>& met) const {
    const std::uint64_t prompt = asked.prompt_ids.size();
    const std::uint64_t tokens = asked.tokens_max.value_or(1);
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (const RowLimit& limit : limits()) {
        least = std::min(least, limit.rows);
        if (prompt + tokens > limit.rows && !met) {
            met = limit;
        }
    }
    if (met) {
        const std::uint64_t n_max = least > tokens ? least - tokens : 0;
        Error error{met->code, refusal(*met, prompt, tokens, n_max)};
        error.limit = LimitFacts{.n_prompt = prompt, .n_max = n_max, .limit = met->rows};
        return error;
    }
    return asked.tokens_max.value_or(static_cast<std::uint32_t>(least - prompt));
}

void Engine::State::note_submission(std::uint64_t id, const Tenant& tenant,
                                    const GenerateRequest& asked, std::uint32_t tokens_max) {
    const SamplingOptions& sampling = asked.sampling;
    const auto input = keyed_digest(tenant.key, "prompt", asked.prompt);
    sink.note(Event::of(events::Submit{id, number(tenant.id), asked.prompt_ids.size(), tokens_max,
                                       input[0], input[1]}));
    sink.note(Event::of(events::Sampling{
        id, sampling.seed, bits_of(sampling.temperature), sampling.top_k, bits_of(sampling.top_p),
        bits_of(sampling.min_p), bits_of(sampling.repeat_penalty),
        bits_of(sampling.presence_penalty), bits_of(sampling.frequency_penalty),
        sampling.penalty_last, sampling.ignore_eos ? 1u : 0u, sampling.stops.size()}));
    const RequestId request{id};
    sink.text({tenant.id, request, TextKind::prompt, asked.prompt});
    sink.text({tenant.id, request, TextKind::prompt_ids, little_endian_ids(asked.prompt_ids)});
    for (const std::string& stop : sampling.stops) {
        sink.text({tenant.id, request, TextKind::stop, stop});
    }
}

bool Engine::State::fits_now(const Request& request) const {
    return active.size() < config.sequences_max &&
           request.pages_needed() <= pool->pages_allocatable();
}

void Engine::State::admit(Request& request) {
    note(request, events::Admit{request.id(), request.rows_needed(), request.admitted_digest[0],
                                request.admitted_digest[1]});
    const Status reserved = pool->reserve(request.owner, request.pages_needed());
    check(reserved.has_value(), "who is admitted gets what was free");
    request.facts.last_event = sink.numbered();
    request.holds_pages = true;
    active.push_back(&request);
}

Result<RequestId> Engine::submit(GenerateRequest asked) {
    State& state = *state_;
    if (state.stopped) {
        return *state.stopped;
    }
    check(!state.finished, "nothing is submitted to a run that has ended");
    if (!is_tenant_name(asked.tenant)) {
        return Error{ErrorCode::usage,
                     "a tenant is named with 1 to " + std::to_string(kTenantLengthMax) +
                         " of a-z 0-9 . _ -; this name has " + std::to_string(asked.tenant.size()) +
                         " bytes, or others among them"};
    }
    if (Status status = check_options(asked.sampling); !status) {
        return status.error();
    }
    if (asked.tokens_max == 0u) {
        return Error{ErrorCode::usage, "0 tokens to generate (-n); it must be at least 1"};
    }
    if (asked.prompt_ids.empty()) {
        return Error{ErrorCode::bad_input, "the prompt has no tokens; it must have at least 1"};
    }
    for (std::size_t i = 0; i < asked.prompt_ids.size(); ++i) {
        const TokenId id = asked.prompt_ids[i];
        if (id < 0 || static_cast<std::uint32_t>(id) >= state.model.config().vocab) {
            return Error{ErrorCode::bad_input, "prompt token " + std::to_string(i) +
                                                   " has the id " + std::to_string(id) +
                                                   "; the model knows 0 to " +
                                                   std::to_string(state.model.config().vocab - 1)};
        }
    }

    const std::uint64_t id = ++state.requests_submitted;
    const Tenant& tenant = state.tenant_named(asked.tenant);
    std::optional<RowLimit> met;
    const Result<std::uint32_t> allowed = state.tokens_allowed(asked, met);
    const std::uint64_t first_event = state.sink.numbered() + 1;
    state.note_submission(id, tenant, asked, allowed ? *allowed : asked.tokens_max.value_or(0));
    if (!allowed) {
        const LimitFacts& facts = *allowed.error().limit;
        state.sink.note(Event::of(events::Reject{id, static_cast<std::uint64_t>(met->reason),
                                                 facts.n_prompt, facts.n_max, facts.limit}));
        if (Status status = state.sink.commit(); !status) {
            return state.stop(status.error());
        }
        return allowed.error();
    }

    PositionDigest admitted;
    Sampler sampler(asked.sampling, state.kernels, state.tokenizer);
    for (std::size_t i = 0; i < asked.prompt_ids.size(); ++i) {
        admitted.add(i, asked.prompt_ids[i]);
        sampler.accept(asked.prompt_ids[i]);
    }
    auto request = std::unique_ptr<Request>(
        new Request{.owner = {tenant.id, RequestId{id}},
                    .tenant = &tenant,
                    .tokens = std::move(asked.prompt_ids),
                    .prompt_tokens = static_cast<std::uint32_t>(admitted.positions()),
                    .tokens_max = *allowed,
                    .top_logits = asked.top_logits,
                    .admitted_digest = admitted.digest(tenant.key),
                    .sampler = std::move(sampler),
                    .answer = Answer(state.tokenizer, std::move(asked.sampling.stops)),
                    .layers = std::vector<std::uint64_t>(state.model.config().layers)});
    request->facts.prompt_tokens = request->prompt_tokens;
    request->facts.first_event = first_event;
    request->facts.last_event = state.sink.numbered();
    if (state.queue.empty() && state.fits_now(*request)) {
        state.admit(*request);
    } else {
        state.note(*request, events::Queue{id});
        state.queue.push_back(request.get());
    }
    state.requests.emplace(id, std::move(request));
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
    const auto found = state_->requests.find(number(id));
    check(found != state_->requests.end(),
          "bytes are delivered before their request's end is recorded");
    found->second->emitted += bytes;
}

bool Engine::idle() const {
    const State& state = *state_;
    return state.active.empty() && state.queue.empty() && state.cancelled.empty() &&
           state.ended.empty() && state.pool->pages_draining() == 0;
}

// ---- the end of a request

// From here on nothing is computed or sampled for it; the reason is final.
void Engine::State::end(Request& request, FinishReason reason) {
    check(!request.finish, "a request ends once");
    request.finish = reason;
    std::erase(active, &request);
    std::erase(queue, &request);
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
    if (request.holds_pages) {
        const std::string& rendered = request.answer.delivered();
        const auto made = keyed_digest(key, "bytes", rendered);
        note(request, events::Rendered{id, rendered.size(), made[0], made[1]});
        const auto taken = keyed_digest(key, "bytes", request.emitted);
        note(request, events::Emitted{id, request.emitted.size(), taken[0], taken[1]});
    }
    const std::uint64_t witness = request.holds_pages ? pool->running_witness(request.owner) : 0;
    if (computed_rows) {
        note(request, events::WitnessSum{id, request.facts.prefilled, witness});
    }
    const auto logits = logits_digest(key, request.facts.logits);
    note(request, events::Finish{id, static_cast<std::uint64_t>(reason), request.prompt_tokens,
                                 request.facts.completion_tokens, request.emitted.size(), logits[0],
                                 logits[1], witness});
    if (request.holds_pages && reason == FinishReason::violation) {
        pool->quarantine(request.owner, free_reason(reason));
    } else if (request.holds_pages) {
        pool->release(request.owner, free_reason(reason));
    }
    settled.emplace(id, request.facts);
    requests.erase(id);
}

// ---- one step

void Engine::State::announce_cancelled(std::vector<Output>& outputs) {
    for (Request* request : cancelled) {
        outputs.push_back({.request = request->owner.request,
                           .bytes = request->answer.finish(),
                           .finish = request->finish});
        ended.push_back(request);
    }
    cancelled.clear();
}

void Engine::State::admit_waiting(std::vector<Output>& outputs) {
    while (!queue.empty()) {
        Request& request = *queue.front();
        if (fits_now(request)) {
            queue.pop_front();
            admit(request);
            continue;
        }
        if (!active.empty() || !ended.empty() || pool->pages_draining() > 0) {
            return;  // pages will come back
        }
        // Quarantined pages do not, and waiting for them would never end.
        outputs.push_back(end_faulty(
            request, FinishReason::error,
            {ErrorCode::out_of_pages, "request " + std::to_string(request.id()) + " needs " +
                                          std::to_string(request.pages_needed()) + " pages; " +
                                          std::to_string(pool->pages_allocatable()) + " of " +
                                          std::to_string(pool->pages_total()) +
                                          " are not in quarantine"}));
        ended.push_back(&request);
    }
}

// Divides the step's tokens: one to each request that has one to compute, in turn when there are
// too many; what is left to prompts, in order of admission. Which tokens share a step changes no
// bit.
void Engine::State::plan() {
    std::vector<std::uint32_t> counts(active.size(), 0);
    std::uint32_t budget = config.batch_rows;
    const std::size_t start = turn < active.size() ? turn : 0;
    turn = 0;
    for (std::size_t k = 0; k < active.size(); ++k) {
        const std::size_t i = (start + k) % active.size();
        if (active[i]->pending() == 1) {
            if (budget == 0) {
                turn = i;
                break;
            }
            counts[i] = 1;
            --budget;
        }
    }
    for (std::size_t i = 0; i < active.size() && budget > 0; ++i) {
        if (counts[i] == 0) {
            counts[i] = std::min(active[i]->pending(), budget);
            budget -= counts[i];
        }
    }
    slots.clear();
    for (std::size_t i = 0; i < active.size(); ++i) {
        if (counts[i] > 0) {
            slots.push_back({.request = active[i],
                             .first = static_cast<std::uint32_t>(active[i]->facts.prefilled),
                             .count = counts[i],
                             .samples = counts[i] == active[i]->pending()});
        }
    }
}

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
    forward->run(
        {.tokens = batch, .sequences = views, .memory = pool->memory(), .checked = context.checked},
        computed);
}

// Looks at the evidence before it uses a result: a request whose rows were not all its own ends
// here.
void Engine::State::collect(std::vector<Output>& outputs, std::optional<Error>& violation) {
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
            if (slot.first + t < request.prompt_tokens) {
                request.sourced.add(slot.first + t, batch[batch_row + t]);
            }
        }
        for (std::size_t layer = 0; layer < layers; ++layer) {
            request.layers[layer] += computed.layer_digests[i * layers + layer];
        }
        request.facts.prefilled += slot.count;
        const LogitsRow* row = nullptr;
        if (slot.samples) {
            row = &computed.logits[next_row++];
            check(row->sequence == i && row->position == slot.first + slot.count - 1,
                  "a row of logits goes to the request it was computed for");
        }

        std::optional<Error> foreign;
        if (!clean) {
            foreign = describe_violation(request, *pool->finding(request.owner));
        } else if (row != nullptr && row->nonfinite) {
            if (const auto poison = pool->find_poison(request.owner)) {
                foreign = note_violation(request, *poison);
            } else {
                outputs.push_back(end_faulty(
                    request, FinishReason::error,
                    {ErrorCode::nonfinite, "the model computed NaN or infinity for request " +
                                               std::to_string(request.id()) + " at position " +
                                               std::to_string(row->position) +
                                               "; its weights do not fit this input"}));
                ended.push_back(&request);
                continue;
            }
        } else if (row != nullptr && !withheld) {
            if (request.facts.completion_tokens == 0) {
                foreign = check_source(request);
            }
            if (!foreign) {
                outputs.push_back(sample(request, *row));
            }
        }
        if (foreign) {
            violation = violation ? violation : foreign;
            outputs.push_back(end_faulty(request, FinishReason::violation, std::move(*foreign)));
            settle(request);
        }
    }
    leases.clear();
}

// Before the first sample: what was computed is what was admitted, position for position.
std::optional<Error> Engine::State::check_source(Request& request) {
    const Digest256& key = request.tenant->key;
    const auto sourced = request.sourced.digest(key);
    note(request,
         events::Sourced{request.id(), request.sourced.positions(), sourced[0], sourced[1]});
    if (sourced != request.admitted_digest ||
        request.sourced.positions() != request.prompt_tokens) {
        return note_violation(request, {.kind = name_of(ViolationKind::consumed_mismatch)});
    }
    for (std::uint32_t layer = 0; layer < request.layers.size(); ++layer) {
        note(request,
             events::Layer{request.id(), static_cast<std::uint64_t>(Checkpoint::first_sample),
                           layer, layer_digest(key, layer, request.layers[layer])});
    }
    return std::nullopt;
}

Output Engine::State::sample(Request& request, const LogitsRow& row) {
    Output output{.request = request.owner.request};
    if (request.facts.completion_tokens == 0 && request.top_logits > 0) {
        output.first_logits = top_logits(row.logits, request.top_logits);
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
    }
    return output;
}

Output Engine::State::end_faulty(Request& request, FinishReason reason, Error error) {
    end(request, reason);
    return {.request = request.owner.request, .finish = reason, .error = std::move(error)};
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
    for (Request* request : std::exchange(state.ended, {})) {
        state.settle(*request);
    }
    state.pool->scrub_drained(state.config.scrub_pages);
    std::vector<Output> outputs;
    std::optional<Error> violation;
    state.announce_cancelled(outputs);
    state.admit_waiting(outputs);
    state.plan();
    if (!state.slots.empty()) {
        state.compute();
        state.collect(outputs, violation);
    }

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
    return outputs;
}

Status Engine::finish() {
    State& state = *state_;
    if (state.stopped) {
        return *state.stopped;
    }
    check(!state.finished, "a run ends once");
    std::vector<Request*> unfinished = state.active;
    unfinished.insert(unfinished.end(), state.queue.begin(), state.queue.end());
    for (Request* request : unfinished) {
        cancel(request->owner.request);
    }
    state.ended.insert(state.ended.end(), state.cancelled.begin(), state.cancelled.end());
    state.cancelled.clear();
    for (Request* request : std::exchange(state.ended, {})) {
        state.settle(*request);
    }
    state.pool->scrub_drained(state.pool->pages_total());
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
const EngineConfig& Engine::config() const { return state_->config; }
PagePool& Engine::pool() { return *state_->pool; }

}  // namespace kvw
