#include "src/engine/admission.h"

#include <doctest/doctest.h>

using namespace kvw;

namespace {

EngineConfig unified(std::uint32_t context, std::uint64_t pool) {
    EngineConfig config;
    config.context = context;
    config.pool_rows = pool;
    config.queue_max = 2;
    return config;
}

EngineConfig split(std::uint32_t context, std::uint64_t prefill, std::uint64_t decode) {
    EngineConfig config = unified(context, decode);
    config.split = true;
    config.prefill_rows = prefill;
    return config;
}

TEST_CASE("each limit holds at limit - 1 and limit, and refuses at limit + 1 by its own name") {
    struct Case {
        EngineConfig config;
        std::uint64_t quota;
        std::uint64_t fits;  // the longest prompt beside 20 tokens to generate
        RejectReason reason;
        std::uint64_t limit;
    };
    const Case cases[] = {
        {unified(100, 1000), 0, 80, RejectReason::exceed_context_size, 100},
        {unified(1000, 100), 0, 80, RejectReason::out_of_pages, 100},
        {unified(1000, 1000), 100, 80, RejectReason::tenant_quota, 100},
        {split(1000, 90, 1000), 0, 90, RejectReason::prefill_pool, 90},
        {split(1000, 1000, 100), 0, 80, RejectReason::decode_pool, 100},
    };
    for (const Case& c : cases) {
        CAPTURE(name_of(c.reason));
        CHECK_FALSE(admission_of(c.config, c.fits - 1, 20, c.quota, 0).refusal);
        CHECK_FALSE(admission_of(c.config, c.fits, 20, c.quota, 0).refusal);
        const Admission over = admission_of(c.config, c.fits + 1, 20, c.quota, 0);
        REQUIRE(over.refusal);
        CHECK(over.refusal->reason == c.reason);
        CHECK(std::string(error_name(over.refusal->error.code)) == name_of(c.reason));
        CHECK(over.refusal->error.limit->n_prompt == c.fits + 1);
        CHECK(over.refusal->error.limit->n_max == c.fits);
        CHECK(over.refusal->error.limit->limit == c.limit);
        CHECK(over.refusal->error.message.find(std::to_string(c.limit)) != std::string::npos);
    }
}

TEST_CASE("the queue refuses the request that comes when it is full, and says how long it is") {
    const EngineConfig config = unified(100, 100);
    CHECK_FALSE(admission_of(config, 10, 10, 0, 1).refusal);
    const Admission full = admission_of(config, 10, 10, 0, 2);
    REQUIRE(full.refusal);
    CHECK(full.refusal->reason == RejectReason::queue_full);
    CHECK(full.refusal->error.limit->limit == 2);
}

TEST_CASE("when several limits fail, the first is named and n_max meets them all") {
    const Admission over = admission_of(split(100, 50, 60), 200, 20, 70, 5);
    REQUIRE(over.refusal);
    CHECK(over.refusal->reason == RejectReason::exceed_context_size);
    CHECK(over.refusal->error.limit->n_max == 40);
    CHECK_FALSE(admission_of(split(100, 50, 60), 40, 20, 70, 0).refusal);
    CHECK(admission_of(split(100, 50, 60), 41, 20, 70, 0).refusal);
}

TEST_CASE("left open, the answer may take what the smallest limit leaves") {
    CHECK(admission_of(unified(100, 90), 30, std::nullopt, 0, 0).tokens_max == 60);
    CHECK(admission_of(unified(100, 90), 30, std::nullopt, 50, 0).tokens_max == 20);
    CHECK(admission_of(split(100, 40, 90), 40, std::nullopt, 0, 0).tokens_max == 50);
    CHECK_FALSE(admission_of(unified(100, 90), 89, std::nullopt, 0, 0).refusal);
    const Admission none = admission_of(unified(100, 90), 90, std::nullopt, 0, 0);
    REQUIRE(none.refusal);
    CHECK(none.refusal->error.limit->n_max == 89);
}

TEST_CASE("a prompt that fits the context and the decode pool, but not the prefill pool") {
    const EngineConfig config = split(1'048'576, 681'000, 1'048'576);
    CHECK_FALSE(admission_of(config, 681'000, 16, 0, 0).refusal);
    const Admission over = admission_of(config, 681'001, 16, 0, 0);
    REQUIRE(over.refusal);
    CHECK(over.refusal->reason == RejectReason::prefill_pool);
    CHECK(over.refusal->error.message ==
          "prompt of 681001 tokens needs 681001 rows; the prefill pool has 681000 "
          "(--prefill-rows): at most 681000 prompt tokens fit");
}

}  // namespace
