#include "src/engine/engine.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>

#include "src/engine/content.h"
#include "src/ledger/ledger.h"
#include "tests/engine/support.h"

namespace kvw {
namespace {

using namespace test;

TEST_CASE("one request from submit to scrub, event by event") {
    Run run({.context = 64});
    GenerateRequest request = asking(15, 3);
    request.sampling.stops = {"never said"};
    run.submit(request);
    run.to_the_end();
    CHECK(first_words(run.sink.lines.lines()) ==
          "run model pool config "
          "tenant text:key submit sampling text:prompt text:prompt_ids text:stop admit reserve "
          "step scrub poison_check alloc rows witness slot sourced layer layer sample text:ids "
          "step rows witness slot sample text:ids share "
          "reserve step scrub poison_check alloc rows witness slot sample text:ids "
          "layer layer rendered emitted witness_sum finish free free drain scrub "
          "evict drain scrub run_end");
    CHECK(run.ids[1].size() == 3);
    CHECK(run.ends[1] == FinishReason::length);
    const RequestFacts facts = run.engine->facts(RequestId{1});
    CHECK(facts.prompt_tokens == 15);
    CHECK(facts.prefilled == 17);
    CHECK(facts.completion_tokens == 3);
    CHECK(run.sink.events[facts.first_event - 1].kind == EventKind::submit);
    CHECK(run.sink.events[facts.last_event - 1].kind == EventKind::finish);
    CHECK(run.engine->events_noted() == run.sink.events.size());
    check_clean(run.sink.proof());
}

TEST_CASE("a full witness sum stands at every 256th position and at the end") {
    Run run({.batch_rows = 100});
    run.submit(asking(250, 20));
    run.to_the_end();
    const auto sums = run.sink.all<events::WitnessSum>();
    REQUIRE(sums.size() == 2);
    CHECK(sums[0].positions == 256);
    CHECK(sums[1].positions == 269);
    check_clean(run.sink.proof());
}

// ---- the same bits, whatever shares the step

struct Traits {
    RowDigest logits;
    std::vector<TokenId> ids;
    friend bool operator==(const Traits&, const Traits&) = default;
};

Traits run_alone(const GenerateRequest& request, EngineConfig config, Isa isa, unsigned threads,
                 bool checked = false) {
    Run run(config, {}, isa, threads, checked);
    const RequestId id = run.submit(request);
    run.to_the_end();
    check_clean(run.sink.proof());
    return {run.engine->facts(id).logits, run.ids[number(id)]};
}

TEST_CASE("logits are the same for every instruction set, thread count and chunk size") {
    for (const std::uint32_t seed : {1u, 2u}) {
        const GenerateRequest request = asking(70, 12, "acme", seed);
        const Traits expected = run_alone(request, {}, Isa::ref, 1);
        CHECK(expected.logits != RowDigest{});
        for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
            if (kernels_for(isa) == nullptr) {
                MESSAGE("this processor lacks one of the instruction sets");
                continue;
            }
            for (const unsigned threads : {1u, 2u}) {
                for (const std::uint32_t batch_rows : {1u, 7u, 64u, 512u}) {
                    CAPTURE(threads);
                    CAPTURE(batch_rows);
                    CHECK(run_alone(request, {.batch_rows = batch_rows}, isa, threads) == expected);
                }
            }
        }
        CHECK(run_alone(request, {}, Isa::ref, 2, true) == expected);  // the checking accessor
    }
}

TEST_CASE("logits are the same alone and beside seven other requests") {
    for (const std::uint32_t batch_rows : {5u, 32u, 512u}) {
        Run run({.pool_rows = 1000, .batch_rows = batch_rows}, {}, Isa::ref, 2);
        std::vector<GenerateRequest> requests;
        for (std::uint32_t i = 1; i <= 8; ++i) {
            requests.push_back(asking(5 + 11 * i, 3 + 2 * i, "tenant-" + std::to_string(i % 3), i));
            run.submit(requests.back());
        }
        run.to_the_end();
        check_clean(run.sink.proof());
        for (std::uint32_t i = 1; i <= 8; ++i) {
            const Traits together{run.engine->facts(RequestId{i}).logits, run.ids[i]};
            CHECK(together.ids.size() == 3 + 2 * i);
            CHECK(together == run_alone(requests[i - 1], {}, Isa::ref, 1));
        }
    }
}

TEST_CASE("the whole record is the same on every instruction set and thread count") {
    const auto record = [](Isa isa, unsigned threads) {
        Run run({.pool_rows = 96, .batch_rows = 16}, {}, isa, threads);
        for (std::uint32_t i = 1; i <= 5; ++i) {
            run.submit(asking(10 + i, 9, i % 2 == 0 ? "a" : "b", i));
        }
        run.to_the_end();
        return run.sink.lines.lines();
    };
    const std::string expected = record(Isa::ref, 1);
    for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        if (kernels_for(isa) != nullptr) {
            CHECK(record(isa, 1) == expected);
            CHECK(record(isa, 2) == expected);
        }
    }
}

// ---- many requests

TEST_CASE(
    "eight requests in a pool too small for them wait, reuse pages, and read only their own") {
    Run run({.pool_rows = 80, .batch_rows = 24, .scrub_pages = 2}, {}, Isa::ref, 2);
    for (std::uint32_t i = 1; i <= 8; ++i) {
        run.submit(asking(9 + i, 12, "tenant-" + std::to_string(i % 4), i));
    }
    run.to_the_end();
    CHECK(run.sink.count(EventKind::queue) > 0);
    const Ledger ledger = run.sink.proof();
    check_clean(ledger);
    CHECK(ledger.ran_to_end());
    CHECK(ledger.counts().requests == 8);
    CHECK(ledger.counts().tenants == 4);
    CHECK(ledger.counts().samples == 8 * 12);
    CHECK(ledger.counts().ends == 8);
    std::uint64_t generations = 0;
    for (const auto& alloc : run.sink.all<events::Alloc>()) {
        CHECK(alloc.page < 5);
        generations = std::max(generations, alloc.generation);
    }
    CHECK(generations > 2);  // pages changed hands
    CHECK(run.engine->pool().pages_allocatable() == 5);
    // First come, first served.
    std::uint64_t last = 0;
    for (const auto& admit : run.sink.all<events::Admit>()) {
        CHECK(admit.request == last + 1);
        last = admit.request;
    }
}

TEST_CASE("one token per step is shared out so that everyone comes to an end") {
    Run run({.pool_rows = 400, .batch_rows = 3, .sequences_max = 5});
    for (std::uint32_t i = 1; i <= 9; ++i) {
        run.submit(asking(2 + i % 4, 10, "t", i));
    }
    for (int steps = 0; steps < 8; ++steps) {
        REQUIRE(run.step());
    }
    for (const auto& step : run.sink.all<events::Step>()) {
        CHECK(step.sequences <= 3);
    }
    run.to_the_end();
    for (std::uint64_t i = 1; i <= 9; ++i) {
        CHECK(run.ids[i].size() == 10);
    }
    check_clean(run.sink.proof());
}

TEST_CASE("steps that only scrub end by themselves, and a second wave finds clean pages") {
    Run run({.pool_rows = 320, .scrub_pages = 1});
    GenerateRequest first = asking(200, 4);
    first.scope = CacheScope::request;
    run.submit(first);
    run.until_idle();
    CHECK(run.engine->pool().pages_draining() == 0);
    run.submit(asking(250, 4, "other", 2));
    run.to_the_end();
    check_clean(run.sink.proof());
    CHECK(run.sink.count(EventKind::queue) == 0);
}

// ---- limits

struct Refusal {
    std::uint64_t prompt;
    std::optional<std::uint32_t> tokens;
    const char* code;  // null: it fits
    std::uint64_t n_max = 0, limit = 0;
};

TEST_CASE("a request over a limit is refused with both numbers, and touches no page") {
    const EngineConfig context{.context = 128, .pool_rows = 300};
    const EngineConfig pool{.context = 256, .pool_rows = 100};
    const std::pair<EngineConfig, Refusal> cases[] = {
        {context, {123, 4, nullptr}},
        {context, {124, 4, nullptr}},
        {context, {125, 4, "exceed_context_size", 124, 128}},
        {context, {127, 4, "exceed_context_size", 124, 128}},
        {context, {1, 128, "exceed_context_size", 0, 128}},
        {context, {127, std::nullopt, nullptr}},
        {context, {128, std::nullopt, "exceed_context_size", 127, 128}},
        {pool, {95, 4, nullptr}},
        {pool, {96, 4, nullptr}},
        {pool, {97, 4, "out_of_pages", 96, 100}},
        {pool, {99, std::nullopt, nullptr}},
        {pool, {100, std::nullopt, "out_of_pages", 99, 100}},
        {pool, {253, 4, "exceed_context_size", 96, 256}},  // both: the context is named first
        {pool, {1, 4294967295u, "exceed_context_size", 0, 256}},
    };
    for (const auto& each : cases) {
        const EngineConfig& config = each.first;
        const Refusal& refusal = each.second;
        CAPTURE(refusal.prompt);
        Run run(config);
        const auto submitted = run.engine->submit(asking(refusal.prompt, refusal.tokens));
        REQUIRE(submitted.has_value() == (refusal.code == nullptr));
        if (submitted) {
            run.to_the_end();
            CHECK(run.ids[1].size() == refusal.tokens.value_or(1));
            check_clean(run.sink.proof());
            continue;
        }
        const Error& error = submitted.error();
        CHECK(error_name(error.code) == std::string(refusal.code));
        CHECK(exit_code(error.code) == 4);
        REQUIRE(error.limit);
        CHECK(error.limit->n_prompt == refusal.prompt);
        CHECK(error.limit->n_max == refusal.n_max);
        CHECK(error.limit->limit == refusal.limit);
        CHECK(error.message.find(std::to_string(refusal.prompt)) != std::string::npos);
        CHECK(error.message.find(std::to_string(refusal.limit)) != std::string::npos);
        CHECK(run.sink.since_commit == 0);
        run.to_the_end();
        CHECK(first_words(run.sink.lines.lines()) ==
              "run model pool config tenant text:key submit sampling text:prompt "
              "text:prompt_ids reject run_end");
        check_clean(run.sink.proof());
    }
}

TEST_CASE("a refusal says in words what to do") {
    Run run({.context = 128});
    CHECK(run.engine->submit(asking(131, 4)).error().message ==
          "prompt of 131 tokens and 4 to generate need 135 rows; the context has 128 (-c): at most "
          "124 prompt tokens fit");
    CHECK(run.engine->submit(asking(5, 200)).error().message ==
          "prompt of 5 tokens and 200 to generate need 205 rows; the context has 128 (-c): no "
          "prompt fits beside them; generate fewer (-n) or raise the limit");
}

TEST_CASE("at the limit nothing is cut: each end of the prompt changes the logits") {
    const auto digest = [](std::size_t changed) {
        GenerateRequest request = asking(124, 4);
        if (changed < request.prompt_ids.size()) {
            request.prompt_ids[changed] ^= 1;
        }
        return run_alone(request, {.context = 128}, Isa::ref, 1).logits;
    };
    const RowDigest whole = digest(1000);
    for (const std::size_t at : {0, 62, 123}) {
        CHECK(digest(at) != whole);
    }
}

TEST_CASE("what makes no sense is refused before anything is recorded") {
    Run run;
    const std::uint64_t before = run.engine->events_noted();
    const auto code_of = [&](auto change) {
        GenerateRequest request = asking(4, 4);
        change(request);
        const auto submitted = run.engine->submit(std::move(request));
        REQUIRE_FALSE(submitted);
        return submitted.error().code;
    };
    CHECK(code_of([](GenerateRequest& r) { r.tenant = ""; }) == ErrorCode::usage);
    CHECK(code_of([](GenerateRequest& r) { r.tenant = "Acme"; }) == ErrorCode::usage);
    CHECK(code_of([](GenerateRequest& r) { r.tenant = std::string(65, 'a'); }) == ErrorCode::usage);
    CHECK(code_of([](GenerateRequest& r) { r.tenant = "a/b"; }) == ErrorCode::usage);
    CHECK(code_of([](GenerateRequest& r) { r.tokens_max = 0; }) == ErrorCode::usage);
    CHECK(code_of([](GenerateRequest& r) { r.sampling.temperature = -1; }) == ErrorCode::usage);
    CHECK(code_of([](GenerateRequest& r) { r.prompt_ids.clear(); }) == ErrorCode::bad_input);
    CHECK(code_of([](GenerateRequest& r) { r.prompt_ids[2] = -1; }) == ErrorCode::bad_input);
    CHECK(code_of([](GenerateRequest& r) {
              r.prompt_ids[3] = static_cast<TokenId>(TinyModel::shared().vocab());
          }) == ErrorCode::bad_input);
    CHECK(run.engine->events_noted() == before);
    CHECK(number(run.submit(asking(4, 4))) == 1);  // no number was spent
}

TEST_CASE("a configuration that cannot work is refused") {
    const TinyModel& tiny = TinyModel::shared();
    ThreadPool threads(1);
    NullSink sink;
    const auto code_of = [&](const EngineConfig& config) {
        RunContext context{.sink = &sink};
        auto made = Engine::create(tiny.model(), tiny.tokenizer(), *kernels_for(Isa::ref), threads,
                                   config, {}, context);
        REQUIRE_FALSE(made);
        return made.error().code;
    };
    CHECK(code_of({.context = kTinyContext + 1}) == ErrorCode::usage);
    CHECK(code_of({.batch_rows = 0}) == ErrorCode::usage);
    CHECK(code_of({.sequences_max = 0}) == ErrorCode::usage);
    CHECK(code_of({.scrub_pages = 0}) == ErrorCode::usage);
    CHECK(code_of({.pool_rows = std::uint64_t{1} << 50}) == ErrorCode::out_of_memory);
}

TEST_CASE("an engine's configuration comes back from its JSON, and nothing else does") {
    EngineConfig config{.context = 100, .batch_rows = 9, .scope = CacheScope::session};
    config.tenant_quota_rows["acme"] = 1'000'000'000'000;
    Run run(config);
    const std::string json = to_json(run.engine->config());
    CHECK(json ==
          R"({"batch_rows":9,"context":100,"cotenancy":true,"pool_rows":100,"prefill_rows":0,)"
          R"("queue_max":1024,"quota_rows":0,"scope":"session","scrub_pages":64,)"
          R"("sequences_max":64,"split":false,"stop_on_violation":true,)"
          R"("tenant_quota_rows":{"acme":1000000000000},"transfer_pages":32})");
    const auto read = engine_config_from_json(json);
    REQUIRE(read);
    CHECK(to_json(*read) == json);
    const auto with = [&](const std::string& old, const std::string& fresh) {
        std::string changed = json;
        return changed.replace(changed.find(old), old.size(), fresh);
    };
    for (const std::string& wrong :
         {std::string(), std::string("[]"), std::string("{}"), std::string(R"({"batch_rows":-1})"),
          with(R"("context")", R"("extra":1,"context")"),
          with(R"("context":100)", R"("context":4294967296)"),
          with(R"("split":false)", R"("split":0)"), with(R"("session")", R"("world")"),
          with(R"("stop_on_violation":true)", R"("stop_on_violation":1)"),
          with(R"({"acme":1000000000000})", R"({"acme":-1})"),
          with(R"({"acme":1000000000000})", R"([])")}) {
        CHECK(engine_config_from_json(wrong).error().code == ErrorCode::bad_trace);
    }
}

// ---- cancelling

TEST_CASE("a request can be cancelled in every state, and never samples again") {
    // Steps to take first; what the state is then: waiting, in its prompt, decoding.
    for (const int steps : {0, 1, 2, 3, 5, 9}) {
        CAPTURE(steps);
        Run run({.pool_rows = 96, .batch_rows = 8});
        run.submit(asking(12, 30, "first", 2));
        const RequestId second = run.submit(asking(10, 30, "second", 4));
        const RequestId waiting = run.submit(asking(10, 30, "third", 6));
        for (int i = 0; i < steps; ++i) {
            REQUIRE(run.step());
        }
        const std::size_t sampled = run.ids[2].size();
        const bool prefilling = run.engine->facts(second).prefilled < 10;
        CHECK(run.engine->cancel(second));
        CHECK_FALSE(run.engine->cancel(second, FinishReason::deadline));  // the first word is final
        CHECK(run.engine->cancel(waiting, FinishReason::deadline));
        run.to_the_end();
        CHECK(run.ends[2] == FinishReason::cancelled);
        CHECK(run.ends[3] == FinishReason::deadline);
        CHECK(run.ends[1] == FinishReason::length);
        CHECK(run.ids[2].size() == sampled);
        CHECK((sampled == 0 || !prefilling));
        CHECK(run.ids[1].size() == 30);
        CHECK_FALSE(run.engine->cancel(second));
        CHECK_FALSE(run.engine->cancel(RequestId{77}));
        check_clean(run.sink.proof());
        for (const auto& finish : run.sink.all<events::Finish>()) {
            CHECK(finish.reason == static_cast<std::uint64_t>(run.ends[finish.request]));
        }
    }
}

TEST_CASE("what ended by itself cannot be cancelled") {
    Run run;
    const RequestId id = run.submit(asking(4, 1));
    REQUIRE(run.step());
    CHECK(run.ends[1] == FinishReason::length);
    CHECK_FALSE(run.engine->cancel(id));
    run.to_the_end();
    CHECK(run.sink.count(EventKind::cancel) == 0);
}

TEST_CASE("a run that ends early cancels what is left and closes its books") {
    Run run({.pool_rows = 64});
    run.submit(asking(12, 30));
    run.submit(asking(12, 30));  // waits
    REQUIRE(run.step());
    REQUIRE(run.engine->finish());
    CHECK(run.sink.count(EventKind::cancel) == 2);
    CHECK(run.sink.count(EventKind::finish) == 2);
    check_clean(run.sink.proof());
}

// ---- what must not happen

TEST_CASE("a request that is handed another's page is stopped before it can sample") {
    for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        if (kernels_for(isa) == nullptr) {
            continue;
        }
        Run run({}, {.stale_page_table = {{.reader = 2, .victim = 1, .at_step = 3}}}, isa);
        run.submit(asking(20, 30, "victim"));
        run.submit(asking(20, 30, "reader", 3));
        REQUIRE(run.step());
        REQUIRE(run.step());
        CHECK(run.ids[1].size() == 2);
        CHECK(run.ids[2].size() == 2);
        const std::uint64_t samples = run.sink.count(EventKind::sample);
        const auto stopped = run.step();
        REQUIRE_FALSE(stopped);
        CHECK(stopped.error().code == ErrorCode::violation);
        CHECK(exit_code(stopped.error().code) == 7);
        const auto violations = run.sink.all<events::Violation>();
        REQUIRE(violations.size() == 1);
        CHECK(violations[0].request == 2);
        CHECK(violations[0].writer_request == 1);
        CHECK(violations[0].writer_tenant == 1);
        CHECK(violations[0].page == 0);
        std::uint64_t moment = 0;
        while (run.sink.events[moment++].kind != EventKind::violation) {
        }
        CHECK(stopped.error().message ==
              "foreign_row at event " + std::to_string(moment) +
                  ": request 2 of tenant reader met rows [0,16) of page 0 generation 1, which "
                  "belong to request 1 of tenant victim; it was stopped before it could sample "
                  "from them");
        CHECK(run.sink.since_commit == 0);                               // the evidence is safe
        CHECK(run.sink.count(EventKind::sample) == samples);             // for nobody
        CHECK(run.sink.count(EventKind::quarantine) == 2);               // the reader's pages
        CHECK(run.engine->step().error().code == ErrorCode::violation);  // it stays stopped
        CHECK(run.engine->finish().error().code == ErrorCode::violation);
        CHECK_FALSE(run.engine->submit(asking(4, 4)));
        for (const bool without_conclusion : {false, true}) {
            const Ledger ledger = run.sink.proof(without_conclusion);
            REQUIRE_FALSE(ledger.violations().empty());
            const Violation& first = ledger.violations().front();
            CHECK(first.kind == ViolationKind::foreign_row);
            CHECK(number(first.reader.request) == 2);
            REQUIRE(first.writer);
            CHECK(number(first.writer->request) == 1);
            CHECK(first.page == 0);
            CHECK(first.emitted_after == 0);
            CHECK(ledger.fault_plan_active());
        }
    }
}

TEST_CASE("with the check off the witness alone exposes it, on every instruction set") {
    for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        if (kernels_for(isa) == nullptr) {
            continue;
        }
        Run run({},
                {.stale_page_table = {{.reader = 2, .victim = 1, .at_step = 3}},
                 .disabled_checker = true},
                isa);
        run.submit(asking(20, 30, "victim"));
        run.submit(asking(20, 5, "reader", 3));
        run.to_the_end();
        CHECK(run.sink.count(EventKind::loaded) == 0);
        const Ledger ledger = run.sink.proof();
        REQUIRE_FALSE(ledger.violations().empty());
        CHECK(ledger.violations().front().kind == ViolationKind::witness_mismatch);
        CHECK(number(ledger.violations().front().reader.request) == 2);
        CHECK_FALSE(ledger.headers_checked());
    }
}

TEST_CASE("a live ledger in the sink stops the engine where the kernels saw nothing") {
    const TinyModel& tiny = TinyModel::shared();
    ThreadPool threads(1);
    LiveLedger live(true);
    RunContext context{.sink = &live,
                       .faults = {.stale_page_table = {{.reader = 2, .victim = 1, .at_step = 2}},
                                  .disabled_checker = true}};
    auto engine =
        Engine::create(tiny.model(), tiny.tokenizer(), best_kernels(), threads, {}, {}, context);
    REQUIRE(engine);
    REQUIRE((*engine)->submit(asking(20, 5, "a")));
    REQUIRE((*engine)->submit(asking(20, 5, "b")));
    REQUIRE((*engine)->step());
    const auto stopped = (*engine)->step();
    REQUIRE_FALSE(stopped);
    CHECK(stopped.error().code == ErrorCode::violation);
    CHECK(stopped.error().message.find("witness_mismatch") != std::string::npos);
}

TEST_CASE("told to continue, a violation ends its request and nobody else's") {
    const GenerateRequest bystander = asking(20, 9, "bystander", 5);
    Run run({.stop_on_violation = false},
            {.stale_page_table = {{.reader = 2, .victim = 1, .at_step = 3}}});
    run.submit(asking(20, 9, "victim"));
    run.submit(asking(20, 9, "reader", 3));
    run.submit(bystander);
    run.to_the_end();
    CHECK(run.ends[2] == FinishReason::violation);
    CHECK(run.ids[2].size() == 2);
    CHECK(run.ids[1].size() == 9);
    CHECK(Traits{run.engine->facts(RequestId{3}).logits, run.ids[3]} ==
          run_alone(bystander, {}, Isa::ref, 1));
    CHECK(run.engine->pool().pages_allocatable() == run.engine->pool().pages_total() - 2);
    const Ledger ledger = run.sink.proof();
    for (const Violation& violation : ledger.violations()) {
        CHECK(number(violation.reader.request) == 2);
    }
}

TEST_CASE("who waits for pages that are quarantined for good is told so") {
    Run run({.pool_rows = 64, .stop_on_violation = false},
            {.stale_page_table = {{.reader = 2, .victim = 1, .at_step = 3}}});
    run.submit(asking(17, 9, "victim"));
    run.submit(asking(17, 9, "reader", 3));
    run.submit(asking(40, 20, "late", 4));  // all four pages, and two are gone
    run.to_the_end();
    CHECK(run.ends[3] == FinishReason::error);
    CHECK(run.ids[3].empty());
}

TEST_CASE("a page that was not scrubbed stops whoever is given it") {
    for (const FaultPlan& faults :
         {FaultPlan{.skip_scrub = true}, FaultPlan{.scrub_without_effect = true}}) {
        Run run({.pool_rows = 32}, faults);
        run.submit(asking(20, 4, "before"));
        run.until_idle();
        run.submit(asking(20, 4, "after", 3));
        const auto stopped = run.step();
        REQUIRE_FALSE(stopped);
        CHECK(stopped.error().code == ErrorCode::violation);
        CHECK(stopped.error().message.starts_with("missing_scrub at event "));
        CHECK(stopped.error().message.find("request 1 of tenant before") != std::string::npos);
        CHECK(run.ids[2].empty());
        const Ledger ledger = run.sink.proof(true);
        REQUIRE_FALSE(ledger.violations().empty());
        CHECK(ledger.violations().front().kind == ViolationKind::missing_scrub);
    }
}

TEST_CASE("NaN in the model ends the request it came up in, and no other") {
    const GenerateRequest healthy = asking(20, 6, "healthy", 5);
    GenerateRequest broken = asking(12, 6, "broken", 2);
    broken.prompt_ids[7] = kTinyBroken;
    Run run;
    run.submit(broken);
    run.submit(healthy);
    const auto outputs = run.step();
    REQUIRE(outputs);
    REQUIRE(outputs->size() == 2);
    REQUIRE(outputs->front().error);
    CHECK(outputs->front().error->code == ErrorCode::nonfinite);
    CHECK(outputs->front().finish == FinishReason::error);
    CHECK_FALSE(outputs->front().id);
    run.to_the_end();
    CHECK(run.ids[1].empty());
    CHECK(Traits{run.engine->facts(RequestId{2}).logits, run.ids[2]} ==
          run_alone(healthy, {}, Isa::ref, 1));
    check_clean(run.sink.proof());
}

TEST_CASE("an answer that was not delivered as rendered does not pass") {
    Run run;
    run.submit(asking(4, 6));
    while (!run.ends.contains(1)) {
        REQUIRE(run.step());
    }
    run.engine->delivered(RequestId{1}, "one byte too many");
    run.to_the_end();
    const Ledger ledger = run.sink.proof();
    REQUIRE_FALSE(ledger.violations().empty());
    CHECK(ledger.violations().front().kind == ViolationKind::emitted_not_sampled);
}

TEST_CASE("an answer whose reader went away is recorded as far as it was taken") {
    for (const bool told : {true, false}) {
        Run run;
        const RequestId id = run.submit(asking(10, 8));
        std::string all;
        for (int steps = 0; !run.engine->idle(); ++steps) {
            REQUIRE(steps < 100);
            const auto outputs = run.engine->step();
            REQUIRE(outputs);
            for (const Output& output : *outputs) {
                if (all.empty()) {
                    run.engine->delivered(id, output.bytes);
                } else if (told) {
                    run.engine->undelivered(id);
                }
                all += output.bytes;
            }
        }
        REQUIRE(run.engine->finish());
        CHECK(run.sink.proof().violations().empty() == told);
    }
}

TEST_CASE("nothing is revealed that could not be recorded") {
    Run run;
    run.submit(asking(4, 6));
    run.sink.fails_at = 3;
    REQUIRE(run.step());
    REQUIRE(run.step());
    const auto failed = run.step();
    REQUIRE_FALSE(failed);
    CHECK(failed.error().code == ErrorCode::disk_full);
    CHECK(run.ids[1].size() == 2);
    CHECK(run.engine->step().error().code == ErrorCode::disk_full);
}

// ---- answers

TEST_CASE("a token that ends the generation ends the answer, and is told but not shown") {
    // Whatever the model says first becomes what it must not go on after: a stop string of one
    // byte.
    Run first;
    GenerateRequest request = asking(9, 8, "acme", 1);
    first.submit(request);
    first.to_the_end();
    REQUIRE(first.text[1].size() >= 4);
    request.sampling.stops = {first.text[1].substr(2, 2)};
    Run run;
    run.submit(request);
    run.to_the_end();
    const std::size_t stop = first.text[1].find(request.sampling.stops[0]);
    CHECK(run.text[1] == first.text[1].substr(0, stop));
    CHECK(run.ends[1] == FinishReason::stop);
    CHECK(run.ids[1].size() <= first.ids[1].size());
    check_clean(run.sink.proof());
}

TEST_CASE("the first logits are reported when asked for, largest first") {
    Run run;
    GenerateRequest request = asking(9, 2);
    request.top_logits = 5;
    run.submit(request);
    const auto outputs = run.step();
    REQUIRE(outputs);
    const auto& top = outputs->front().first_logits;
    REQUIRE(top.size() == 5);
    CHECK(top[0].id == *outputs->front().id);  // greedy
    CHECK(std::is_sorted(top.begin(), top.end(),
                         [](const TopLogit& a, const TopLogit& b) { return a.logit > b.logit; }));
    const auto second = run.step();
    REQUIRE(second);
    CHECK(second->front().first_logits.empty());
    run.to_the_end();
}

TEST_CASE("a request draws the same tokens from the same seed, and others from another") {
    GenerateRequest request = asking(9, 16, "acme", 2);
    request.sampling.temperature = 1.5f;
    const Traits first = run_alone(request, {}, Isa::ref, 1);
    CHECK(run_alone(request, {}, Isa::ref, 1) == first);
    request.sampling.seed += 1;
    CHECK(run_alone(request, {}, Isa::ref, 1).ids != first.ids);
}

}  // namespace
}  // namespace kvw
