// Many tenants on one pool: whatever is drawn (roles, scope, chunk size, arrivals, cancels,
// deadlines), every request ends exactly once, computes what it would compute alone, and the trace
// is proven.
//
// KVW_SEEDS=N runs N seeds of each load on sim (else a few), KVW_SEED=S that one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <set>

#include "replay/replay.h"
#include "src/engine/engine.h"
#include "src/ledger/ledger.h"
#include "tests/replay/scratch.h"
#include "traces/trace.h"

using namespace kvw;
using namespace kvw::test;

namespace {

struct FakeClock final : Clock {
    std::int64_t now = 0;
    std::int64_t wall_ns() const override { return now; }
    std::int64_t monotonic_ns() const override { return now; }
};

// How much work a seed makes.
struct Load {
    std::uint64_t rows;
    std::uint32_t prompt_least, prompt_most;
    std::uint32_t requests = 64, tenants = 8;
};

struct Drawn {
    EngineConfig config;
    std::vector<GenerateRequest> requests;
    std::vector<std::uint32_t> arrives;                   // at which step
    std::vector<std::optional<std::uint32_t>> cancelled;  // so many steps after that
};

std::uint32_t between(std::mt19937_64& random, std::uint32_t least, std::uint32_t most) {
    return least + static_cast<std::uint32_t>(random() % (most - least + 1));
}

// Lengths of prompts spread over orders of magnitude, as real ones do.
std::uint32_t drawn_length(std::mt19937_64& random, const Load& load) {
    const double low = std::log(load.prompt_least), high = std::log(load.prompt_most);
    const double at = static_cast<double>(random() % 10001) / 10000.0;
    return static_cast<std::uint32_t>(std::lround(std::exp(low + (high - low) * at)));
}

Drawn draw(std::uint64_t seed, const Load& load, std::uint32_t context) {
    std::mt19937_64 random(seed);
    Drawn drawn;
    EngineConfig& config = drawn.config;
    config.context = std::min<std::uint32_t>(context, static_cast<std::uint32_t>(load.rows));
    config.pool_rows = load.rows;
    config.split = random() % 2 == 0;
    config.prefill_rows = config.split ? load.rows : 0;
    config.scope = static_cast<CacheScope>(random() % 3);
    config.cotenancy = random() % 4 != 0;
    constexpr std::uint32_t kChunks[] = {1, 3, 7, 16, 64, 512};
    // One token a step is for short loads: the number of steps is the number of tokens.
    config.batch_rows = kChunks[between(random, load.prompt_most > 1000 ? 3 : 2, 5)];
    config.sequences_max = between(random, 2, 24);
    config.scrub_pages = between(random, 4, 64);
    config.transfer_pages = between(random, 1, 32);
    if (random() % 4 == 0) {
        config.quota_rows = load.rows / 2;
    }

    // What a tenant's requests begin with: the same for all of them, up to somewhere.
    std::vector<std::vector<TokenId>> beginnings(load.tenants);
    for (auto& beginning : beginnings) {
        beginning.resize(load.prompt_most);
        for (TokenId& id : beginning) {
            id = static_cast<TokenId>(random() % 256);
        }
    }
    std::uint32_t step = 0;
    for (std::uint32_t i = 0; i < load.requests; ++i) {
        const std::uint32_t tenant = between(random, 0, load.tenants - 1);
        GenerateRequest request;
        request.tenant = "tenant-" + std::to_string(tenant);
        request.prompt = "request " + std::to_string(i);
        const std::uint32_t length = drawn_length(random, load);
        const std::uint32_t shared = random() % 3 == 0 ? 0 : between(random, 0, length);
        request.prompt_ids.assign(beginnings[tenant].begin(), beginnings[tenant].begin() + shared);
        while (request.prompt_ids.size() < length) {
            request.prompt_ids.push_back(static_cast<TokenId>(random() % 256));
        }
        request.tokens_max = between(random, 1, 48);
        request.sampling.temperature = random() % 3 == 0 ? 0.0f : 0.9f;
        request.sampling.seed = random();
        if (random() % 2 == 0) {
            request.session = "s" + std::to_string(random() % 3);
        }
        if (random() % 8 == 0) {
            request.scope = static_cast<CacheScope>(random() % 3);
        }
        if (random() % 10 == 0) {
            request.deadline_ms = between(random, 1, 200);
        }
        drawn.requests.push_back(std::move(request));
        step += between(random, 0, 3);
        drawn.arrives.push_back(step);
        drawn.cancelled.push_back(random() % 6 == 0 ? std::optional(between(random, 0, 60))
                                                    : std::nullopt);
    }
    return drawn;
}

struct Facts {
    std::uint64_t preemptions = 0, adopts = 0, cancels = 0, deadlines = 0, refusals = 0,
                  transfers = 0, generations_most = 0, tenant_changes = 0;
};

// Counts what the record shows, and checks what every request is owed.
class Observer final : public EventSink {
  public:
    void note(const Event& event) override {
        switch (event.kind) {
            case EventKind::submit: {
                const auto submit = event.as<events::Submit>();
                tenants_[submit.request] = submit.tenant;
                break;
            }
            case EventKind::adopt: {
                const auto adopt = event.as<events::Adopt>();
                ++facts.adopts;
                adopted[adopt.request] += kPageTokens;
                const std::uint64_t donor = owners_[adopt.page].request;
                CHECK(tenants_[donor] == tenants_[adopt.request]);
                break;
            }
            case EventKind::alloc: {
                const auto alloc = event.as<events::Alloc>();
                facts.generations_most = std::max(facts.generations_most, alloc.generation);
                Last& last = owners_[alloc.page];
                facts.tenant_changes +=
                    last.request != 0 && tenants_[last.request] != tenants_[alloc.request] ? 1 : 0;
                last.request = alloc.request;
                break;
            }
            case EventKind::preempt:
                ++facts.preemptions;
                break;
            case EventKind::transfer:
                ++facts.transfers;
                break;
            case EventKind::reject:
                ++facts.refusals;
                ++ends[event.fields[0]];
                break;
            case EventKind::finish: {
                const auto finish = event.as<events::Finish>();
                ++ends[finish.request];
                facts.cancels +=
                    finish.reason == static_cast<std::uint64_t>(FinishReason::cancelled) ? 1 : 0;
                facts.deadlines +=
                    finish.reason == static_cast<std::uint64_t>(FinishReason::deadline) ? 1 : 0;
                CHECK(finish.cached_tokens == adopted[finish.request]);
                break;
            }
            default:
                break;
        }
    }
    void text(const TextRecord&) override {}
    Status commit() override { return {}; }

    Facts facts;
    std::map<std::uint64_t, std::uint64_t> ends, adopted;

  private:
    struct Last {
        std::uint64_t request = 0;
    };
    std::map<std::uint64_t, std::uint64_t> tenants_;
    std::map<std::uint64_t, Last> owners_;
};

Digest256 key_for(TenantId tenant) {
    Digest256 key{};
    key[0] = static_cast<std::uint8_t>(number(tenant));
    return key;
}

std::unique_ptr<Engine> engine_for(const ReplayModel& model, const EngineConfig& config,
                                   const ModelIdentity& identity, EventSink& sink,
                                   const Clock* clock = nullptr) {
    RunContext context{.sink = &sink,
                       .tenant_key = [](TenantId id, const std::string&) { return key_for(id); },
                       .clock = clock};
    auto engine = Engine::create(model.model, model.tokenizer, model.kernels, model.threads, config,
                                 identity, std::move(context));
    REQUIRE_MESSAGE(engine, (engine ? "" : engine.error().message));
    return std::move(*engine);
}

// The running logits digest after `tokens` tokens, in an engine of its own.
RowDigest alone(const ReplayModel& model, const ModelIdentity& identity, GenerateRequest request,
                std::uint64_t tokens) {
    NullSink sink;
    const auto rows = static_cast<std::uint32_t>(request.prompt_ids.size() + *request.tokens_max);
    auto engine = engine_for(model, {.context = rows, .batch_rows = 128}, identity, sink);
    request.deadline_ms = 0;
    const auto id = engine->submit(std::move(request));
    REQUIRE(id);
    while (engine->facts(*id).completion_tokens < tokens) {
        const auto outputs = engine->step();
        REQUIRE(outputs);
        for (const Output& output : *outputs) {
            engine->delivered(output.request, output.bytes);
        }
    }
    return engine->facts(*id).logits;
}

// One seed of one load, from draw to proof.
Facts run_load(const ReplayModel& model, const ModelIdentity& identity, const Load& load,
               std::uint64_t seed, const Scratch& scratch, std::uint32_t context,
               std::size_t alone_of) {
    CAPTURE(seed);
    CAPTURE(load.rows);
    const Drawn drawn = draw(seed, load, context);
    const Path path = scratch / ("seed-" + std::to_string(seed) + ".kvw.zst");
    FakeClock clock;
    auto writer = TraceWriter::create({.path = path, .replace = true}, clock);
    REQUIRE_MESSAGE(writer, (writer ? "" : writer.error().message));
    Observer observer;
    LiveLedger live(true);
    TeeSink tee({&**writer, &observer, &live});
    auto engine = engine_for(model, drawn.config, identity, tee, &clock);

    std::map<std::uint64_t, std::size_t> index_of;
    std::map<std::uint64_t, std::uint32_t> cancel_at;
    std::map<std::uint64_t, FinishReason> finished;
    std::set<std::uint64_t> submitted, refused;
    std::size_t next = 0;
    std::uint32_t step = 0;
    while (next < drawn.requests.size() || !engine->idle()) {
        for (; next < drawn.requests.size() && drawn.arrives[next] <= step; ++next) {
            const auto id = engine->submit(drawn.requests[next]);
            const std::uint64_t number_of = submitted.size() + 1;
            submitted.insert(number_of);
            if (!id) {
                REQUIRE_MESSAGE(id.error().limit.has_value(), id.error().message);
                refused.insert(number_of);
                continue;
            }
            REQUIRE(number(*id) == number_of);
            index_of[number_of] = next;
            if (drawn.cancelled[next]) {
                cancel_at[number_of] = step + *drawn.cancelled[next];
            }
        }
        for (const auto& [id, at] : cancel_at) {
            if (at == step) {
                engine->cancel(RequestId{id});
            }
        }
        const auto outputs = engine->step();
        REQUIRE_MESSAGE(outputs, (outputs ? "" : outputs.error().message));
        for (const Output& output : *outputs) {
            const std::uint64_t id = number(output.request);
            CHECK_FALSE(finished.contains(id));  // nothing follows an end
            if (!output.bytes.empty()) {
                engine->delivered(output.request, output.bytes);
            }
            if (output.finish) {
                finished[id] = *output.finish;
            }
        }
        clock.now += 1'000'000;
        ++step;
        REQUIRE(step < 2'000'000);
    }
    REQUIRE(engine->finish());
    REQUIRE((*writer)->close());
    for (const std::uint64_t id : submitted) {
        CHECK(observer.ends[id] == 1);
        CHECK(finished.contains(id) != refused.contains(id));
    }

    std::size_t compared = 0;
    for (const auto& [id, index] : index_of) {
        const RequestFacts facts = engine->facts(RequestId{id});
        if (facts.completion_tokens > 0 && compared < alone_of) {
            CAPTURE(id);
            ++compared;
            CHECK(alone(model, identity, drawn.requests[index], facts.completion_tokens) ==
                  facts.logits);
        }
    }

    const auto result = replay(path, model, {});
    REQUIRE_MESSAGE(result, (result ? "" : result.error().message));
    const Certificate& certificate = result->certificate;
    CHECK(certificate.verdict == Verdict::proven);
    CHECK(certificate.level == Level::solo);
    for (const Violation& violation : certificate.violations) {
        FAIL_CHECK("event " << violation.event << ": " << name_of(violation.kind) << ": "
                            << violation.detail);
    }
    for (const auto& [layer, controls] : certificate.controls) {
        CAPTURE(name_of(layer));
        CHECK(controls.caught == controls.planted);
    }
    for (const std::string& reason : certificate.reasons) {
        FAIL_CHECK(reason);
    }
    std::filesystem::remove(path);
    return observer.facts;
}

constexpr Load kLarge{.rows = 4096, .prompt_least = 3, .prompt_most = 3000};
constexpr Load kSmall{.rows = 1024, .prompt_least = 3, .prompt_most = 900};

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Added up over seeds: what a load must show, or it tests nothing.
void add(Facts& sum, const Facts& more) {
    sum.preemptions += more.preemptions;
    sum.adopts += more.adopts;
    sum.cancels += more.cancels;
    sum.deadlines += more.deadlines;
    sum.refusals += more.refusals;
    sum.transfers += more.transfers;
    sum.tenant_changes += more.tenant_changes;
    sum.generations_most = std::max(sum.generations_most, more.generations_most);
}

void run_on_sim(const Load& load, std::uint64_t first_seed) {
    const std::unique_ptr<Model> model = Model::sim();
    const Tokenizer tokenizer = Tokenizer::of_bytes();
    ThreadPool threads(1);
    const ReplayModel sim{*model, tokenizer, sim_kernels(), threads, sim_sha256()};
    const Scratch scratch;
    const std::uint64_t one = from_environment("KVW_SEED", 0);
    const std::uint64_t seeds = one != 0 ? 1 : from_environment("KVW_SEEDS", 12);
    Facts sum;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
        add(sum, run_load(sim, {"sim", sim_sha256()}, load, one != 0 ? one : first_seed + seed,
                          scratch, 4096, 4));
    }
    if (one == 0) {
        CHECK(sum.preemptions > 0);
        CHECK(sum.adopts > 0);
        CHECK(sum.cancels > 0);
        CHECK(sum.deadlines > 0);
        CHECK(sum.transfers > 0);
        CHECK(sum.tenant_changes > 0);
    }
    MESSAGE(seeds << " seeds on " << load.rows << " rows: " << sum.preemptions << " preemptions, "
                  << sum.adopts << " adopts, " << sum.cancels << " cancels, " << sum.deadlines
                  << " deadlines, " << sum.refusals << " refusals, " << sum.transfers
                  << " transfers, generations up to " << sum.generations_most);
}

// The same on a real model, KVW_REAL_MODEL=FILE: minutes, so only where it is asked for.
TEST_CASE("64 requests of 8 tenants on a real model, on every instruction set") {
    const char* path = std::getenv("KVW_REAL_MODEL");
    if (path == nullptr) {
        MESSAGE("KVW_REAL_MODEL is not set: skipped");
        return;
    }
    const auto gguf = Gguf::open(path);
    REQUIRE_MESSAGE(gguf, (gguf ? "" : gguf.error().message));
    const auto tokenizer = Tokenizer::create(*gguf);
    REQUIRE(tokenizer);
    ThreadPool threads(2);
    const auto model = Model::load(*gguf, threads);
    REQUIRE_MESSAGE(model, (model ? "" : model.error().message));
    struct Share {
        const char* isa;
        Load load;
    };
    const Share shares[] = {
        {"avx512", kLarge},
        {"avx512", kSmall},
        {"avx2", {.rows = 1024, .prompt_least = 3, .prompt_most = 900, .requests = 16}},
        {"ref", {.rows = 256, .prompt_least = 3, .prompt_most = 40, .requests = 4, .tenants = 2}},
    };
    const Digest256 sha256{7};
    const Scratch scratch;
    for (const Share& share : shares) {
        const Kernels* kernels = kernels_named(share.isa);
        if (kernels == nullptr) {
            MESSAGE(share.isa << " is not on this processor: skipped");
            continue;
        }
        CAPTURE(share.isa);
        const ReplayModel real{**model, *tokenizer, *kernels, threads, sha256};
        run_load(real, {"real", sha256}, share.load, from_environment("KVW_SEED", 7), scratch,
                 (*model)->config().context, 4);
    }
}

TEST_CASE("64 requests of 8 tenants on 4,096 rows, seed after seed") { run_on_sim(kLarge, 1000); }
TEST_CASE("64 requests of 8 tenants on 1,024 rows, seed after seed") { run_on_sim(kSmall, 5000); }

TEST_CASE("a long run on 1,024 rows hands each page out more than a hundred times") {
    const std::unique_ptr<Model> model = Model::sim();
    const Tokenizer tokenizer = Tokenizer::of_bytes();
    ThreadPool threads(1);
    const ReplayModel sim{*model, tokenizer, sim_kernels(), threads, sim_sha256()};
    const Scratch scratch;
    Facts sum;
    for (const std::uint64_t seed : {21, 22}) {  // unified and split among them
        const Facts facts =
            run_load(sim, {"sim", sim_sha256()},
                     {.rows = 1024, .prompt_least = 3, .prompt_most = 900, .requests = 700}, seed,
                     scratch, 4096, 0);
        CHECK(facts.generations_most > 100);
        CHECK(facts.tenant_changes > 1000);
        CHECK(facts.cancels > 0);
        add(sum, facts);
    }
    CHECK(sum.preemptions > 0);
    CHECK(sum.adopts > 0);
    CHECK(sum.transfers > 0);
}

}  // namespace
