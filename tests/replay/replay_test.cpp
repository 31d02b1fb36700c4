// replay end to end on small random models: what a run records is executed again and each request
// alone.
#include "replay/replay.h"

#include <doctest/doctest.h>

#include <memory>

#include "replay/recorded_run.h"
#include "src/engine/engine.h"
#include "src/ledger/ledger.h"
#include "tests/model/tiny_model.h"
#include "tests/replay/scratch.h"
#include "traces/trace.h"

using namespace kvw;
using namespace kvw::test;

namespace {

// A tiny model with a byte vocabulary, loaded; the same shape and seed give the same weights.
struct Loaded {
    std::vector<std::uint8_t> vocabulary_file, model_file;
    std::unique_ptr<Gguf> vocabulary, gguf;
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<ThreadPool> threads;
    std::unique_ptr<Model> model;
    Digest256 sha256{};

    // `changed_byte`: this byte of the model file, counted from its end, is inverted.
    explicit Loaded(std::size_t changed_byte = 0, unsigned thread_count = 2) {
        GgufBuilder builder;
        add_byte_vocabulary(builder, {.control = {"<a>", "<b>", "<c>"}, .eos = "<c>"});
        vocabulary_file = builder.bytes();
        model_file = TinyModel({}).file();
        if (changed_byte > 0) {
            model_file[model_file.size() - changed_byte] ^= 0xff;
        }
        vocabulary = std::make_unique<Gguf>(*Gguf::parse(vocabulary_file, "vocabulary"));
        gguf = std::make_unique<Gguf>(*Gguf::parse(model_file, "tiny"));
        tokenizer = std::make_unique<Tokenizer>(*Tokenizer::create(*vocabulary));
        threads = std::make_unique<ThreadPool>(thread_count);
        auto loaded = Model::load(*gguf, *threads);
        REQUIRE(loaded.has_value());
        model = std::move(*loaded);
        kvw::Sha256 sha;
        sha.update(model_file);
        sha256 = sha.digest();
    }
    ReplayModel for_replay(const Kernels& kernels = best_kernels()) const {
        return {*model, *tokenizer, kernels, *threads, sha256};
    }
};

Digest256 key_for(TenantId tenant) {
    Digest256 key{};
    key[0] = static_cast<std::uint8_t>(number(tenant));
    return key;
}

GenerateRequest ask(const std::string& tenant, const std::string& prompt, std::uint32_t tokens,
                    float temperature) {
    GenerateRequest request;
    request.tenant = tenant;
    request.prompt = prompt;
    for (const char c : prompt) {
        request.prompt_ids.push_back(static_cast<unsigned char>(c));
    }
    request.tokens_max = tokens;
    request.sampling.temperature = temperature;
    request.sampling.seed = 7;
    request.sampling.ignore_eos = true;
    return request;
}

// Ten requests of three tenants on a pool that holds about three at a time, one cancelled, one
// refused.
void record(const Path& path, const Loaded& loaded, std::uint32_t batch_rows = 24) {
    SystemClock clock;
    auto writer = TraceWriter::create({.path = path, .run_id = new_run_id()}, clock);
    REQUIRE(writer.has_value());
    LiveLedger live(true);
    // The engine knows no text sections' place; it is the writer's.
    TeeSink sink({writer->get(), &live});
    RunContext context;
    context.sink = &sink;
    context.tenant_key = [&](TenantId tenant, const std::string&) { return key_for(tenant); };
    auto engine = Engine::create(*loaded.model, *loaded.tokenizer, best_kernels(), *loaded.threads,
                                 {.context = 256, .pool_rows = 320, .batch_rows = batch_rows},
                                 {"tiny", loaded.sha256}, context);
    REQUIRE(engine.has_value());
    std::vector<RequestId> ids;
    for (int i = 0; i < 10; ++i) {
        const auto id = (*engine)->submit(ask("tenant-" + std::to_string(i % 3),
                                              std::string(std::size_t(5 + 9 * i), char('a' + i)),
                                              std::uint32_t(4 + i), i % 2 == 0 ? 0.0f : 0.9f));
        REQUIRE(id.has_value());
        ids.push_back(*id);
    }
    CHECK_FALSE((*engine)->submit(ask("tenant-1", std::string(300, 'x'), 4, 0)).has_value());
    int steps = 0;
    while (!(*engine)->idle()) {
        const auto outputs = (*engine)->step();
        REQUIRE(outputs.has_value());
        for (const Output& output : *outputs) {
            if (!output.bytes.empty()) {
                (*engine)->delivered(output.request, output.bytes);
            }
        }
        if (++steps == 3) {
            CHECK((*engine)->cancel(ids[9]));
        }
    }
    REQUIRE((*engine)->finish().has_value());
    REQUIRE((*writer)->close().has_value());
    CHECK(live.ledger().violations().empty());
}

}  // namespace

TEST_CASE("what several tenants ran is proven alone, request by request") {
    const Scratch folder;
    const Loaded loaded;
    record(folder / "run.kvw.zst", loaded);

    const auto result = replay(folder / "run.kvw.zst", loaded.for_replay(), {});

    REQUIRE(result.has_value());
    for (const Violation& violation : result->certificate.violations) {
        MESSAGE(violation.detail);
    }
    CHECK(result->certificate.verdict == Verdict::proven);
    CHECK(result->certificate.level == Level::solo);
    CHECK(result->certificate.counts.requests == 11);
    CHECK_FALSE(result->divergence);
    CHECK(result->certificate.controls.at(ProofLayer::execution).caught == 2);
    CHECK(result->certificate.controls.at(ProofLayer::solo).caught == 2);
}

TEST_CASE("a replay gives the same verdict on every instruction set and thread count") {
    const Scratch folder;
    record(folder / "run.kvw.zst", Loaded());
    for (const unsigned threads : {1u, 3u}) {
        const Loaded loaded(0, threads);
        for (const char* isa : {"ref", "avx2", "avx512"}) {
            const Kernels* kernels = kernels_named(isa);
            if (kernels == nullptr) {
                MESSAGE(isa << " is not on this processor: skipped");
                continue;
            }
            CAPTURE(isa);
            const auto result = replay(folder / "run.kvw.zst", loaded.for_replay(*kernels), {});
            REQUIRE(result.has_value());
            CHECK(result->certificate.verdict == Verdict::proven);
            CHECK(result->certificate.level == Level::solo);
        }
    }
}

TEST_CASE("another model is refused, and with --other-model request, token and layer are named") {
    const Scratch folder;
    record(folder / "run.kvw.zst", Loaded());
    // The file ends with output_norm; a byte well before it lies in the last layer's feed-forward.
    const Loaded changed(700);

    const auto refused = replay(folder / "run.kvw.zst", changed.for_replay(), {});
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().code == ErrorCode::bad_model);

    const auto result = replay(folder / "run.kvw.zst", changed.for_replay(), {.other_model = true});
    REQUIRE(result.has_value());
    CHECK(result->certificate.verdict == Verdict::violation);
    REQUIRE(result->divergence);
    CHECK(result->divergence->request >= 1);
    CHECK(result->divergence->token.has_value());
    REQUIRE(result->divergence->layer.has_value());
    CHECK(*result->divergence->layer == 1);
    REQUIRE_FALSE(result->certificate.violations.empty());
    CHECK(result->certificate.violations.front().kind == ViolationKind::bit_divergence);
}

TEST_CASE("one changed weight behind the recorded digest diverges just the same") {
    const Scratch folder;
    record(folder / "run.kvw.zst", Loaded());
    const Loaded changed(700);
    ReplayModel model = changed.for_replay();
    const ReplayModel dressed{model.model, model.tokenizer, model.kernels, model.threads,
                              Loaded().sha256};

    const auto result = replay(folder / "run.kvw.zst", dressed, {});

    REQUIRE(result.has_value());
    CHECK(result->certificate.verdict == Verdict::violation);
    REQUIRE(result->divergence);
    CHECK(result->divergence->layer.has_value());
}

TEST_CASE("solo of one request is level execution, and says that others were not re-run") {
    const Scratch folder;
    const Loaded loaded;
    record(folder / "run.kvw.zst", loaded);

    const auto result =
        replay(folder / "run.kvw.zst", loaded.for_replay(), {.solo = {.request = 3}});

    REQUIRE(result.has_value());
    CHECK(result->certificate.verdict == Verdict::proven);
    CHECK(result->certificate.level == Level::execution);
    bool said = false;
    for (const std::string& reason : result->certificate.reasons) {
        said |= reason.starts_with("solo_sampled");
    }
    CHECK(said);
}

TEST_CASE("solo of a request that is not there or was refused is an error that names it") {
    const Scratch folder;
    const Loaded loaded;
    record(folder / "run.kvw.zst", loaded);
    const auto refusal = [&](std::uint64_t request) {
        const auto result =
            replay(folder / "run.kvw.zst", loaded.for_replay(), {.solo = {.request = request}});
        REQUIRE_FALSE(result.has_value());
        CHECK(result.error().code == ErrorCode::usage);
        return result.error().message;
    };

    CHECK(refusal(99) == "request 99 is not among the 11 of this trace");
    CHECK(refusal(11) == "request 11 sampled nothing, so there is nothing to run alone");
}

TEST_CASE("execution can stop at a moment, and then claims no more than the record") {
    const Scratch folder;
    const Loaded loaded;
    record(folder / "run.kvw.zst", loaded);

    const auto result = replay(folder / "run.kvw.zst", loaded.for_replay(), {.until = 60});

    REQUIRE(result.has_value());
    CHECK(result->certificate.verdict == Verdict::proven);
    CHECK(result->certificate.level == Level::record);
    CHECK_FALSE(result->divergence);
}
