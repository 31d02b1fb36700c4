// Several tenants on one pool: who shares what with whom, who waits for whom, who gives way.
#include <doctest/doctest.h>

#include <algorithm>

#include "tests/engine/support.h"

namespace kvw {
namespace {

using namespace test;

// The same prompt for everybody who names the same seed.
GenerateRequest same_prompt(const std::string& tenant, std::size_t tokens, std::uint32_t answer,
                            std::uint32_t seed = 1) {
    return asking(tokens, answer, tenant, seed);
}

std::vector<std::uint64_t> order_of_first_tokens(Run& run) {
    std::vector<std::uint64_t> order;
    for (int steps = 0; !run.engine->idle(); ++steps) {
        REQUIRE(steps < 5000);
        const auto outputs = run.step();
        REQUIRE(outputs);
        for (const Output& output : *outputs) {
            const std::uint64_t id = number(output.request);
            if (output.id && std::find(order.begin(), order.end(), id) == order.end()) {
                order.push_back(id);
            }
        }
    }
    return order;
}

// ---- prefixes

TEST_CASE("one tenant twice: the second time the full pages of the prefix are there already") {
    Run run;
    const RequestId first = run.submit(same_prompt("acme", 50, 4));
    run.until_idle();
    const RequestId second = run.submit(same_prompt("acme", 50, 4));
    run.to_the_end();
    CHECK(run.engine->facts(first).cached_tokens == 0);
    CHECK(run.engine->facts(second).cached_tokens == 48);
    CHECK(run.engine->facts(first).logits == run.engine->facts(second).logits);
    CHECK(run.ids[1] == run.ids[2]);
    CHECK(run.sink.count(EventKind::adopt) == 3);
    check_clean(run.sink.proof());
}

TEST_CASE("at most floor((n - 1) / 16) pages are adopted: something is left to compute") {
    for (const std::uint32_t tokens : {1u, 15u, 16u, 17u, 31u, 32u, 33u, 48u, 49u}) {
        CAPTURE(tokens);
        Run run;
        run.submit(same_prompt("acme", tokens, 3));
        run.until_idle();
        const RequestId second = run.submit(same_prompt("acme", tokens, 3));
        run.to_the_end();
        CHECK(run.engine->facts(second).cached_tokens == (tokens - 1) / 16 * 16);
        CHECK(run.ids[1] == run.ids[2]);
        check_clean(run.sink.proof());
    }
}

TEST_CASE("two tenants with the same prompt share no row") {
    Run run;
    run.submit(same_prompt("acme", 100, 4));
    run.until_idle();
    const RequestId other = run.submit(same_prompt("bolt", 100, 4));
    const RequestId own = run.submit(same_prompt("acme", 100, 4));
    run.to_the_end();
    CHECK(run.engine->facts(other).cached_tokens == 0);
    CHECK(run.engine->facts(own).cached_tokens == 96);  // or the test would pass with the tree off
    CHECK(run.ids[1] == run.ids[2]);
    CHECK(run.ids[1] == run.ids[3]);
    check_clean(run.sink.proof());
}

TEST_CASE("names that look alike when they are joined are not alike") {
    struct Who {
        const char* tenant;
        const char* session;
    };
    constexpr Who kAll[] = {{"a", "bc"}, {"ab", "c"}, {"a", ""},
                            {"a", "b"},  {"ab", ""},  {"a.b", "c"}};
    Run run({.context = 128, .pool_rows = 1024, .scope = CacheScope::session});
    for (const Who& who : kAll) {
        GenerateRequest request = same_prompt(who.tenant, 50, 2);
        request.session = who.session;
        const RequestId id = run.submit(request);
        run.until_idle();
        CHECK(run.engine->facts(id).cached_tokens == 0);
    }
    for (const Who& who : kAll) {  // and each finds its own
        GenerateRequest request = same_prompt(who.tenant, 50, 2);
        request.session = who.session;
        const RequestId id = run.submit(request);
        run.until_idle();
        CHECK(run.engine->facts(id).cached_tokens == (*who.session == '\0' ? 0 : 48));
    }
    REQUIRE(run.engine->finish());
    check_clean(run.sink.proof());
}

TEST_CASE("a session name of bytes nobody expects is a name like any other, up to 64 bytes") {
    Run run({.context = 128, .pool_rows = 1024, .scope = CacheScope::session});
    for (const std::string& session : {std::string("\0", 1), std::string("\0\0", 2),
                                       std::string("\xff/../"), std::string(64, 'x')}) {
        for (const std::uint64_t expected : {0, 48}) {
            GenerateRequest request = same_prompt("acme", 50, 2);
            request.session = session;
            const RequestId id = run.submit(request);
            run.until_idle();
            CHECK(run.engine->facts(id).cached_tokens == expected);
        }
    }
    GenerateRequest request = same_prompt("acme", 50, 2);
    request.session = std::string(65, 'x');
    CHECK(run.engine->submit(request).error().code == ErrorCode::usage);
    request.session.clear();
    request.tenant = std::string(10'240, 'a');
    CHECK(run.engine->submit(request).error().code == ErrorCode::usage);
}

TEST_CASE("the scope of a request bounds what it takes and what it gives") {
    Run run({.context = 128});
    GenerateRequest private_one = same_prompt("acme", 50, 2);
    private_one.scope = CacheScope::request;
    run.submit(private_one);
    run.until_idle();
    const RequestId after_private = run.submit(same_prompt("acme", 50, 2));
    run.until_idle();
    CHECK(run.engine->facts(after_private).cached_tokens == 0);
    const RequestId again_private = run.submit(private_one);
    run.until_idle();
    CHECK(run.engine->facts(again_private).cached_tokens == 0);
    const RequestId open = run.submit(same_prompt("acme", 50, 2));
    run.to_the_end();
    CHECK(run.engine->facts(open).cached_tokens == 48);
    check_clean(run.sink.proof());
}

TEST_CASE("a hit and a recomputation give the same bits, whatever the chunks") {
    std::vector<std::vector<TokenId>> answers;
    std::vector<RowDigest> digests;
    for (const std::uint32_t chunk : {1u, 7u, 16u, 64u}) {
        for (const CacheScope scope : {CacheScope::request, CacheScope::tenant}) {
            Run run({.context = 256, .batch_rows = chunk, .scope = scope});
            run.submit(same_prompt("acme", 90, 5, 3));
            run.until_idle();
            GenerateRequest longer = same_prompt("acme", 90, 5, 3);
            longer.prompt_ids.resize(70);
            longer.prompt_ids.insert(longer.prompt_ids.end(), 30, 7);
            const RequestId id = run.submit(longer);
            run.to_the_end();
            CHECK(run.engine->facts(id).cached_tokens == (scope == CacheScope::tenant ? 64 : 0));
            answers.push_back(run.ids[2]);
            digests.push_back(run.engine->facts(id).logits);
            check_clean(run.sink.proof());
        }
    }
    for (std::size_t i = 1; i < answers.size(); ++i) {
        CHECK(answers[i] == answers[0]);
        CHECK(digests[i] == digests[0]);
    }
}

TEST_CASE("A = P+x, B = P+y, C = P+z in all orders, together and one after the other") {
    for (const std::size_t prefix : {5u, 16u, 17u, 40u}) {
        std::map<int, RowDigest> alone;
        std::vector<int> order{0, 1, 2};
        do {
            for (const bool together : {false, true}) {
                Run run({.context = 128});
                std::map<int, RequestId> ids;
                for (const int who : order) {
                    GenerateRequest request = same_prompt("acme", prefix, 6, 5);
                    request.prompt_ids.insert(request.prompt_ids.end(), 9,
                                              static_cast<TokenId>(10 + who));
                    ids[who] = run.submit(request);
                    if (!together) {
                        run.until_idle();
                    }
                }
                run.to_the_end();
                for (const int who : order) {
                    const RowDigest logits = run.engine->facts(ids[who]).logits;
                    CHECK(alone.try_emplace(who, logits).first->second == logits);
                }
                check_clean(run.sink.proof());
            }
        } while (std::next_permutation(order.begin(), order.end()));
    }
}

TEST_CASE("a full pool gives up prefixes before it makes anybody wait") {
    Run run({.context = 64, .pool_rows = 64});
    for (std::uint32_t seed = 1; seed <= 6; ++seed) {
        run.submit(asking(40, 8, "acme", seed));
        run.until_idle();
    }
    run.to_the_end();
    CHECK(run.sink.count(EventKind::evict) > 0);
    CHECK(run.ends.size() == 6);
    check_clean(run.sink.proof());
}

// ---- limits and quotas

TEST_CASE("a tenant over its quota waits while others go on") {
    EngineConfig config{.context = 128, .pool_rows = 1024};
    config.tenant_quota_rows["acme"] = 60;
    Run run(config);
    run.submit(asking(40, 10, "acme", 1));
    run.submit(asking(40, 10, "acme", 2));
    run.submit(asking(40, 10, "bolt", 3));
    CHECK(order_of_first_tokens(run) == std::vector<std::uint64_t>{1, 3, 2});
    const auto over = run.engine->submit(asking(51, 10, "acme", 4));
    REQUIRE_FALSE(over);
    CHECK(over.error().code == ErrorCode::tenant_quota);
    CHECK(over.error().limit->n_max == 50);
    REQUIRE(run.engine->finish());
    check_clean(run.sink.proof());
}

TEST_CASE("a request that comes when the queue is full never becomes work") {
    Run run({.context = 64, .queue_max = 2});
    run.submit(asking(10, 4, "acme", 1));
    run.submit(asking(10, 4, "acme", 2));
    const auto third = run.engine->submit(asking(10, 4, "acme", 3));
    REQUIRE_FALSE(third);
    CHECK(third.error().code == ErrorCode::queue_full);
    run.to_the_end();
    CHECK(run.ends.size() == 2);
    CHECK(run.sink.all<events::Reject>().size() == 1);
    check_clean(run.sink.proof());
}

TEST_CASE("input that no prompt could be read from leaves a submit and a reject") {
    Run run;
    const auto id = run.engine->note_malformed("acme", "{not json");
    REQUIRE(id);
    run.submit(asking(10, 2));
    run.to_the_end();
    const auto rejects = run.sink.all<events::Reject>();
    REQUIRE(rejects.size() == 1);
    CHECK(rejects[0].request == number(*id));
    CHECK(rejects[0].reason == static_cast<std::uint64_t>(RejectReason::malformed));
    CHECK(run.ends.size() == 1);
    check_clean(run.sink.proof());
}

// ---- steps

TEST_CASE("a late arrival starts before the first request ends") {
    Run run({.context = 320, .batch_rows = 16});
    const RequestId first = run.submit(asking(20, 60, "acme", 1));
    for (int i = 0; i < 10; ++i) {
        REQUIRE(run.step());
    }
    const RequestId late = run.submit(asking(100, 4, "acme", 2));
    while (run.engine->facts(late).completion_tokens == 0) {
        REQUIRE(run.step());
    }
    CHECK(run.engine->facts(first).completion_tokens > 10);
    CHECK(run.engine->facts(first).completion_tokens < 60);
    run.to_the_end();
    check_clean(run.sink.proof());
}

TEST_CASE("one long prompt and many: a short one of another tenant is not kept waiting") {
    const EngineConfig config{.context = 320, .pool_rows = 4096, .batch_rows = 64};
    std::uint64_t alone = 0;
    {
        Run run(config);
        const RequestId id = run.submit(asking(12, 2, "short", 99));
        run.to_the_end();
        alone = run.engine->facts(id).first_step;
    }
    constexpr std::uint64_t kLongChunk = 1;           // the step that is under way
    for (const std::uint64_t pool : {4096u, 608u}) {  // 608: two long prompts fill it
        EngineConfig tight = config;
        tight.pool_rows = pool;
        Run run(tight, {}, kernels_for(Isa::avx2) != nullptr ? Isa::avx2 : Isa::ref);
        for (std::uint32_t i = 0; i < 50; ++i) {
            run.submit(asking(300, 20, "long", 100 + i));
        }
        for (int i = 0; i < 20; ++i) {
            REQUIRE(run.step());
        }
        for (std::uint32_t i = 0; i < 4; ++i) {
            const std::uint64_t before = run.engine->steps();
            const RequestId id = run.submit(asking(12, 2, "short", 200 + i));
            for (int steps = 0; run.engine->facts(id).first_step == 0; ++steps) {
                REQUIRE(steps < 1000);
                REQUIRE(run.step());
            }
            CAPTURE(pool);
            CHECK(run.engine->facts(id).first_step - before <= alone + kLongChunk + 3);
            for (int more = 0; more < 7; ++more) {
                REQUIRE(run.step());
            }
        }
        run.to_the_end();
        CHECK(run.ends.size() == 54);
        check_clean(run.sink.proof());
    }
}

TEST_CASE("without co-tenancy no step mixes tenants, and everybody comes to an end") {
    Run run({.context = 128, .pool_rows = 1024, .batch_rows = 32, .cotenancy = false});
    for (std::uint32_t i = 0; i < 9; ++i) {
        run.submit(asking(20 + i, 6, "tenant-" + std::to_string(i % 3), i + 1));
    }
    run.to_the_end();
    CHECK(run.ends.size() == 9);
    std::map<std::uint64_t, std::uint64_t> tenant_of;
    std::uint64_t of_step = 0;
    for (const Event& event : run.sink.events) {
        if (event.kind == EventKind::submit) {
            tenant_of[event.fields[0]] = event.as<events::Submit>().tenant;
        } else if (event.kind == EventKind::step) {
            of_step = 0;
        } else if (event.kind == EventKind::rows) {
            const std::uint64_t tenant = tenant_of[event.fields[0]];
            CHECK((of_step == 0 || of_step == tenant));
            of_step = tenant;
        }
    }
    check_clean(run.sink.proof());
}

TEST_CASE("when pages run out the youngest give way, and lose nothing of what they said") {
    std::map<std::uint64_t, RowDigest> roomy;
    for (const std::uint64_t pool : {4096u, 160u}) {
        Run run({.context = 128, .pool_rows = pool});
        for (std::uint32_t i = 0; i < 8; ++i) {
            run.submit(asking(20, 60, i % 2 == 0 ? "acme" : "bolt", i + 1));
        }
        run.to_the_end();
        std::uint64_t preemptions = 0;
        for (std::uint64_t id = 1; id <= 8; ++id) {
            const RequestFacts facts = run.engine->facts(RequestId{id});
            CHECK(roomy.try_emplace(id, facts.logits).first->second == facts.logits);
            preemptions += facts.preemptions;
        }
        CHECK((preemptions > 0) == (pool == 160));
        CHECK(run.engine->facts(RequestId{1}).preemptions == 0);  // the oldest is protected
        check_clean(run.sink.proof());
    }
}

TEST_CASE("a request can be cancelled while it waits to be computed anew") {
    Run run({.context = 128, .pool_rows = 96});
    for (std::uint32_t i = 0; i < 4; ++i) {
        run.submit(asking(20, 60, "acme", i + 1));
    }
    bool cancelled = false;
    for (int steps = 0; !run.engine->idle(); ++steps) {
        REQUIRE(steps < 2000);
        REQUIRE(run.step());
        for (std::uint64_t id = 2; id <= 4 && !cancelled; ++id) {
            const RequestFacts facts = run.engine->facts(RequestId{id});
            if (facts.preemptions > 0 && facts.prefilled == 0 && facts.completion_tokens > 0) {
                cancelled = run.engine->cancel(RequestId{id});
            }
        }
    }
    CHECK(cancelled);
    REQUIRE(run.engine->finish());
    check_clean(run.sink.proof());
}

// ---- deadlines

TEST_CASE("a deadline ends a request within one step, whatever it is doing") {
    for (const int steps_before : {0, 1, 3, 6}) {
        CAPTURE(steps_before);
        FakeClock clock;
        Run run({.context = 128, .batch_rows = 8}, {}, Isa::ref, 1, false, &clock);
        GenerateRequest request = asking(40, 20);
        request.deadline_ms = 10;
        run.submit(request);
        for (int i = 0; i < steps_before; ++i) {
            REQUIRE(run.step());
        }
        clock.now = 10'000'000;
        const auto outputs = run.step();
        REQUIRE(outputs);
        REQUIRE(outputs->size() == 1);
        CHECK(outputs->front().finish == FinishReason::deadline);
        CHECK_FALSE(outputs->front().id);
        run.to_the_end();
        check_clean(run.sink.proof());
    }
}

// ---- split roles

EngineConfig split_config(std::uint64_t prefill, std::uint64_t decode) {
    EngineConfig config{.context = 320, .pool_rows = decode};
    config.split = true;
    config.prefill_rows = prefill;
    return config;
}

TEST_CASE("split and unified give the same bits, and rows are moved once") {
    std::map<std::uint64_t, RowDigest> digests;
    for (const bool split : {false, true}) {
        EngineConfig config = split ? split_config(256, 512) : EngineConfig{.context = 320};
        config.pool_rows = 512;
        config.transfer_pages = 2;
        Run run(config);
        for (std::uint32_t i = 0; i < 6; ++i) {
            run.submit(asking(10 + 40 * (i % 4), 10, i % 2 == 0 ? "acme" : "bolt", i + 1));
        }
        run.to_the_end();
        for (std::uint64_t id = 1; id <= 6; ++id) {
            const RowDigest logits = run.engine->facts(RequestId{id}).logits;
            CHECK(digests.try_emplace(id, logits).first->second == logits);
        }
        std::uint64_t moved = 0;
        for (const auto& transfer : run.sink.all<events::Transfer>()) {
            moved += transfer.count;
        }
        CHECK(moved == (split ? 10 + 50 + 90 + 130 + 10 + 50 : 0));
        check_clean(run.sink.proof());
    }
}

TEST_CASE("in split a prefix is adopted on the prefill side and moved like any other row") {
    EngineConfig config = split_config(256, 512);
    Run run(config);
    run.submit(same_prompt("acme", 70, 6));
    run.until_idle();
    const RequestId second = run.submit(same_prompt("acme", 70, 6));
    run.to_the_end();
    CHECK(run.engine->facts(second).cached_tokens == 64);
    CHECK(run.ids[1] == run.ids[2]);
    check_clean(run.sink.proof());
}

TEST_CASE("a prompt that fits everything but the prefill pool touches no page") {
    Run run(split_config(100, 320));
    const auto over = run.engine->submit(asking(101, 10));
    REQUIRE_FALSE(over);
    CHECK(over.error().code == ErrorCode::prefill_pool);
    CHECK(over.error().limit->n_prompt == 101);
    CHECK(over.error().limit->limit == 100);
    run.submit(asking(100, 10));
    run.to_the_end();
    CHECK(run.ends.size() == 1);
    for (const auto& alloc : run.sink.all<events::Alloc>()) {
        CHECK(alloc.request == 2);
    }
    check_clean(run.sink.proof());
}

TEST_CASE("a transfer can be broken off at every point") {
    std::uint64_t transfers = 0;
    for (int at = 0; at < 14; ++at) {
        CAPTURE(at);
        EngineConfig config = split_config(256, 512);
        config.transfer_pages = 1;
        Run run(config);
        const RequestId first = run.submit(asking(100, 10, "acme", 1));
        run.submit(asking(100, 10, "bolt", 2));
        for (int i = 0; i < at; ++i) {
            REQUIRE(run.step());
        }
        run.engine->cancel(first);
        run.to_the_end();
        CHECK(run.ends.size() == 2);
        transfers = std::max<std::uint64_t>(transfers, run.sink.count(EventKind::transfer));
        check_clean(run.sink.proof());
    }
    CHECK(transfers == 14);
}

TEST_CASE("in split, who could not be computed anew has all its pages from the beginning") {
    EngineConfig config = split_config(64, 160);
    Run run(config);
    run.submit(asking(60, 60, "acme", 5));  // 119 rows would not fit the prefill pool again
    run.submit(asking(20, 30, "bolt", 6));
    run.submit(asking(20, 30, "bolt", 8));
    run.to_the_end();
    CHECK(run.ends.size() == 3);
    CHECK(run.engine->facts(RequestId{1}).preemptions == 0);
    for (std::uint64_t id = 1; id <= 3; ++id) {
        CHECK(run.ends[id] == FinishReason::length);
    }
    check_clean(run.sink.proof());
}

// ---- violations

TEST_CASE("who built on the rows of a violator ends with it, and nobody else does") {
    // Request 3 is handed a page of request 2, another tenant's, in the middle of its prompt; 4 has
    // adopted what 3 published before.
    FaultPlan faults;
    faults.stale_page_table = FaultPlan::StalePageTable{.reader = 3, .victim = 2, .at_step = 8};
    EngineConfig config{.context = 320, .batch_rows = 64, .stop_on_violation = false};
    Run run(config, faults);
    run.submit(asking(20, 40, "quiet", 1));
    run.submit(asking(20, 40, "bolt", 6));
    run.submit(asking(60, 40, "acme", 3));
    for (int i = 0; i < 4; ++i) {
        REQUIRE(run.step());
    }
    const RequestId adopter = run.submit(asking(60, 40, "acme", 3));
    run.to_the_end();
    CHECK(run.engine->facts(adopter).cached_tokens == 48);
    CHECK(run.ends[1] == FinishReason::length);
    CHECK(run.ends[2] == FinishReason::length);
    CHECK(run.ends[3] == FinishReason::violation);
    CHECK(run.ends[4] == FinishReason::violation);
    const RequestId later = RequestId{4};
    CHECK(run.engine->facts(later).completion_tokens < 40);
}

}  // namespace
}  // namespace kvw
