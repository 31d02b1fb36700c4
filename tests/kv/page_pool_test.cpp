#include "src/kv/page_pool.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/transfer.h"
#include "tests/kv/pool_world.h"

namespace kvw {
namespace {

using namespace test;

bool is_poison(const KvMemory& memory, std::uint32_t page) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        std::uint8_t* tile = memory.tile(page, layer, 0);
        const std::uint16_t* halves = tile_keys(tile);
        if (!std::all_of(halves, halves + kShape.key_bytes(),
                         [](std::uint16_t half) { return half == kPoisonHalf; })) {
            return false;
        }
    }
    return true;
}

TEST_CASE("one small life of a page reads like a story") {
    TextSink events;
    auto pool = make_pool(events, 40);
    REQUIRE(pool->reserve(kA, 2));
    CHECK(write(*pool, kA, 0, 3));
    CHECK(write(*pool, kA, 3, 14));
    pool->release(kA, FreeReason::finished);
    CHECK(pool->scrub_drained(1) == 1);
    REQUIRE(pool->reserve(kB, 1));
    CHECK(write(*pool, kB, 0, 1));
    pool->quarantine(kB, FreeReason::violation);

    CHECK(events.lines() ==
          "pool pool=0 group=0 first_page=0 pages=3 rows_max=40\n"
          "reserve request=1 pool=0 pages=2\n"
          "scrub page=0 witness=0x579763e0\n"
          "poison_check page=0 words=8 wrong=0\n"
          "alloc request=1 group=0 index=0 page=0 generation=1\n"
          "rows request=1 count=3 end=3 group=0 version=1\n"
          "witness request=1 sum=0x7ef2d206\n"
          "scrub page=1 witness=0x579763e0\n"
          "poison_check page=1 words=8 wrong=0\n"
          "alloc request=1 group=0 index=1 page=1 generation=1\n"
          "rows request=1 count=14 end=17 group=0 version=2\n"
          "witness request=1 sum=0x1c092a50\n"
          "free request=1 page=0 reason=1\n"
          "free request=1 page=1 reason=1\n"
          "drain page=0\n"
          "drain page=1\n"
          "scrub page=0 witness=0x8284ade0\n"
          "reserve request=2 pool=0 pages=1\n"
          "poison_check page=0 words=8 wrong=0\n"
          "alloc request=2 group=0 index=0 page=0 generation=2\n"
          "rows request=2 count=1 end=1 group=0 version=1\n"
          "witness request=2 sum=0x4570ea0\n"
          "free request=2 page=0 reason=4\n"
          "quarantine page=0\n");
}

TEST_CASE("a freed page holds only poison for its next owner") {
    NullSink events;
    auto pool = make_pool(events, 16);
    REQUIRE(pool->reserve(kA, 1));
    REQUIRE(write(*pool, kA, 0, 16));
    pool->release(kA, FreeReason::finished);
    CHECK(pool->pages_allocatable() == 0);  // not before it is scrubbed
    CHECK(pool->pages_draining() == 1);
    CHECK(pool->scrub_drained(7) == 1);
    REQUIRE(pool->reserve(kB, 1));
    pool->extend(kB, 1);
    REQUIRE(pool->table(kB).front().page == 0);  // there is only one to give
    CHECK(pool->table(kB).front().generation == 2);
    CHECK(is_poison(pool->memory(), 0));
}

TEST_CASE("a reservation is whole or refused, and touches no page") {
    TextSink events;
    auto pool = make_pool(events, 5 * kPageTokens + 1);
    CHECK(pool->pages_total() == 6);
    REQUIRE(pool->reserve(kA, 4));
    CHECK(pool->pages_allocatable() == 2);
    events.clear();
    const Status refused = pool->reserve(kB, 3);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == ErrorCode::out_of_pages);
    CHECK(refused.error().message == "3 pages are wanted and 2 of 6 can be had");
    CHECK(events.lines().empty());
    pool->release(kA, FreeReason::cancelled);
    CHECK(events.lines().empty());  // nothing was allocated, so nothing is freed
    CHECK(pool->pages_allocatable() == 6);
}

TEST_CASE("a pool that cannot be addressed is refused with its size") {
    NullSink events;
    for (const std::uint64_t rows : {~std::uint64_t{0}, std::uint64_t{1} << 40}) {
        const auto pool =
            PagePool::create({.shape = kShape, .rows_max = rows}, *kernels_for(Isa::ref), events);
        REQUIRE_FALSE(pool);
        CHECK(pool.error().code == ErrorCode::out_of_memory);
        CHECK(pool.error().message.find(std::to_string(rows)) != std::string::npos);
    }
}

TEST_CASE("a lease is used once, and only for the rows that come next") {
    CHECK(status_of_child([] {
              NullSink events;
              auto pool = make_pool(events, 16);
              (void)pool->reserve(kA, 1);
              pool->extend(kA, 2);
              Lease lease = pool->open(kA, 0, 2);
              lease.view(0, 0);
              lease.view(0, 0);
          }) == 7);
    CHECK(status_of_child([] {
              NullSink events;
              auto pool = make_pool(events, 16);
              (void)pool->reserve(kA, 1);
              pool->extend(kA, 2);
              pool->open(kA, 1, 1);  // row 0 is not written
          }) == 7);
    CHECK(status_of_child([] {
              NullSink events;
              auto pool = make_pool(events, 16);
              (void)pool->reserve(kA, 1);
              pool->extend({TenantId{2}, kA.request}, 1);  // the request, but not its tenant
          }) == 7);
}

TEST_CASE("a page somebody wrote to after the free is quarantined when it is scrubbed") {
    TextSink events;
    auto pool = make_pool(events, 16);
    REQUIRE(pool->reserve(kA, 1));
    REQUIRE(write(*pool, kA, 0, 4));
    pool->release(kA, FreeReason::finished);
    tile_header(pool->memory().tile(0, 1, 0))->request = 99;
    CHECK(pool->scrub_drained(1) == 1);
    CHECK(events.lines().ends_with("quarantine page=0\n"));
    CHECK(pool->pages_allocatable() == 0);
}

// ---- faults

TEST_CASE("a stale page table is seen by the kernels and named by the pool") {
    TextSink events;
    auto pool =
        make_pool(events, 64, {.stale_page_table = {{.reader = 2, .victim = 1, .at_step = 2}}});
    REQUIRE(pool->reserve(kA, 1));
    REQUIRE(pool->reserve(kB, 2));
    pool->begin_step(1);
    CHECK(write(*pool, kA, 0, 16));
    CHECK(write(*pool, kB, 0, 16));
    CHECK(pool->faults_injected() == 0);
    pool->begin_step(2);
    events.clear();
    CHECK_FALSE(write(*pool, kB, 16, 1));
    CHECK(pool->faults_injected() == 1);
    CHECK(events.lines().find("loaded request=2 page=0") != std::string::npos);
    const PageFinding* found = pool->finding(kB);
    REQUIRE(found != nullptr);
    CHECK(found->kind == std::string("foreign_row"));
    CHECK(found->page == 0);
    CHECK(found->generation == 1);
    CHECK(found->row_begin == 0);
    CHECK(found->row_end == 16);
    CHECK(found->writer == kA);
    CHECK(pool->table(kB).front().page == 1);  // the table itself was never wrong
}

TEST_CASE("without the check in the kernels only the witness tells, and it follows the header") {
    for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        const Kernels* kernels = kernels_for(isa);
        if (kernels == nullptr) {
            MESSAGE("this processor lacks one of the instruction sets");
            continue;
        }
        CAPTURE(kernels->isa);
        // B has a full page and reads it again with its next token; the table is right, but where
        // it points there are the headers of A.
        const auto sum_of_b = [&](bool swapped) {
            NullSink events;
            auto pool = make_pool(events, 64, {.disabled_checker = true});
            REQUIRE(pool->reserve(kA, 1));
            REQUIRE(pool->reserve(kB, 2));
            REQUIRE(write(*pool, kA, 0, 16));
            REQUIRE(write(*pool, kB, 0, 16));
            for (std::uint32_t layer = 0; swapped && layer < kShape.layers; ++layer) {
                *tile_header(pool->memory().tile(1, layer, 0)) =
                    *tile_header(pool->memory().tile(0, layer, 0));
            }
            pool->extend(kB, 17);
            Lease lease = pool->open(kB, 16, 1);
            compute(*pool, lease, *kernels, false);
            CHECK(pool->settle(std::move(lease)));  // nothing was checked, so nothing was found
            return pool->running_witness(kB);
        };
        std::uint64_t difference = 0;
        for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
            difference += (page_mix(1, 1, 1, 0) - page_mix(2, 2, 1, 1)) *
                          access_factor(layer, 0, AccessKind::read) * 16;
        }
        CHECK(difference != 0);
        CHECK(sum_of_b(true) == sum_of_b(false) + difference);
    }
}

TEST_CASE("a scrub that is skipped, or recorded and not done, is seen at the next allocation") {
    for (const FaultPlan& faults :
         {FaultPlan{.skip_scrub = true}, FaultPlan{.scrub_without_effect = true}}) {
        TextSink events;
        auto pool = make_pool(events, 16, faults);
        REQUIRE(pool->reserve(kA, 1));
        CHECK(write(*pool, kA, 0, 16));  // a page never used before is scrubbed under any plan
        pool->release(kA, FreeReason::finished);
        events.clear();
        CHECK(pool->scrub_drained(1) == 1);
        CHECK(events.lines().empty() == faults.skip_scrub);
        REQUIRE(pool->reserve(kB, 1));
        CHECK_FALSE(write(*pool, kB, 0, 1));
        REQUIRE(pool->finding(kB) != nullptr);
        CHECK(pool->finding(kB)->kind == std::string("missing_scrub"));
        CHECK(pool->finding(kB)->writer == kA);
    }
}

TEST_CASE("a scrub that is not done records the witness of one that is") {
    const auto scrub_line = [](const FaultPlan& faults) {
        TextSink events;
        auto pool = make_pool(events, 16, faults);
        REQUIRE(pool->reserve(kA, 1));
        REQUIRE(write(*pool, kA, 0, 9));
        pool->release(kA, FreeReason::finished);
        events.clear();
        pool->scrub_drained(1);
        return events.lines();
    };
    CHECK(scrub_line({.scrub_without_effect = true}) == scrub_line({}));
}

TEST_CASE("a row that was never stored is found by its poison") {
    NullSink events;
    auto pool = make_pool(events, 32);
    REQUIRE(pool->reserve(kA, 2));
    REQUIRE(write(*pool, kA, 0, 20));
    CHECK_FALSE(pool->find_poison(kA));
    std::uint8_t* tile = pool->memory().tile(pool->table(kA)[1].page, 1, 0);
    tile_values(tile, kShape)[3 * kShape.head_dim + 7] = kPoisonHalf;
    const auto found = pool->find_poison(kA);
    REQUIRE(found);
    CHECK(found->kind == std::string("unwritten_row"));
    CHECK(found->page == pool->table(kA)[1].page);
    CHECK(found->row_begin == 3);
    CHECK(found->row_end == 4);
}

TEST_CASE("fault plans are named as the command line names them") {
    CHECK(FaultPlan{}.names().empty());
    CHECK_FALSE(FaultPlan{}.active());
    const FaultPlan all{.stale_page_table = FaultPlan::StalePageTable{},
                        .disabled_checker = true,
                        .skip_scrub = true,
                        .scrub_without_effect = true};
    CHECK(all.names() == "stale-page-table,disabled-checker,skip-scrub,scrub-without-effect");
    CHECK(all.active());
}

// ---- split roles

// A pool with a prefill side of 3 pages and a decode side of 4.
std::unique_ptr<PagePool> make_split(EventSink& sink, const FaultPlan& faults = {}) {
    return make_pool(sink, 4 * kPageTokens, faults, 3 * kPageTokens);
}

// kA with `rows` rows computed on the prefill side, and room for `pages` on the decode side.
void prefill(PagePool& pool, std::uint32_t rows, std::uint32_t pages) {
    REQUIRE(pool.reserve(kA, 3));
    REQUIRE(pool.reserve(kA, pages, PoolSide::decode));
    REQUIRE(write(pool, kA, 0, rows));
}

// The bytes of one row in every tile, keys then values.
std::vector<std::uint16_t> row_of(const KvMemory& memory, std::uint32_t page, std::uint32_t row) {
    std::vector<std::uint16_t> halves;
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        std::uint8_t* tile = memory.tile(page, layer, 0);
        for (std::uint32_t d = 0; d < kShape.head_dim; ++d) {
            halves.push_back(tile_keys(tile)[d * kPageTokens + row]);
            halves.push_back(tile_values(tile, kShape)[row * kShape.head_dim + d]);
        }
    }
    return halves;
}

TEST_CASE("two roles: a prompt is computed on one side, moved, and goes on at the other") {
    TextSink events;
    auto pool = make_split(events);
    CHECK(pool->split());
    CHECK(pool->rows_max(PoolSide::prefill) == 48);
    CHECK(pool->rows_max(PoolSide::decode) == 64);
    CHECK(pool->pages_total(PoolSide::prefill) == 3);
    CHECK(pool->pages_total(PoolSide::decode) == 4);
    CHECK(events.lines() ==
          "pool pool=0 group=0 first_page=0 pages=3 rows_max=48\n"
          "pool pool=1 group=0 first_page=3 pages=4 rows_max=64\n");
    prefill(*pool, 19, 2);
    events.clear();

    PagePool::Moved moved = pool->transfer(kA, 1);
    CHECK(moved.rows == 16);
    CHECK(moved.pages == 1);
    CHECK_FALSE(moved.complete);
    CHECK(moved.clean);
    CHECK(pool->table(kA).front().page == 0);  // until the last row is there
    moved = pool->transfer(kA, 7);
    CHECK(moved.rows == 19);
    CHECK(moved.pages == 1);
    CHECK(moved.complete);
    CHECK(pool->table(kA).front().page == 3);
    CHECK(pool->rows_held(kA) == 19);
    CHECK(pool->reserved(kA, PoolSide::prefill) == 0);  // one was left of it
    CHECK(write(*pool, kA, 19, 2));
    pool->release(kA, FreeReason::finished);

    CHECK(events.lines() ==
          "scrub page=3 witness=0x579763e0\n"
          "poison_check page=3 words=8 wrong=0\n"
          "alloc request=1 group=0 index=0 page=3 generation=1\n"
          "transfer request=1 count=16 end=16 version=3\n"
          "witness request=1 sum=0x98d0ba28\n"
          "scrub page=4 witness=0x579763e0\n"
          "poison_check page=4 words=8 wrong=0\n"
          "alloc request=1 group=0 index=1 page=4 generation=1\n"
          "transfer request=1 count=3 end=19 version=4\n"
          "witness request=1 sum=0x7db81cf0\n"
          "free request=1 page=0 reason=6\n"
          "free request=1 page=1 reason=6\n"
          "drain page=0\n"
          "drain page=1\n"
          "rows request=1 count=2 end=21 group=0 version=4\n"
          "witness request=1 sum=0xa73c68c8\n"
          "free request=1 page=3 reason=1\n"
          "free request=1 page=4 reason=1\n"
          "drain page=3\n"
          "drain page=4\n");
}

TEST_CASE("what arrives is what was computed, and the rows behind it are poison") {
    for (const bool shadow : {false, true}) {
        NullSink events;
        auto created = PagePool::create({.shape = kShape,
                                         .rows_max = 4 * kPageTokens,
                                         .prefill_rows = 3 * kPageTokens,
                                         .shadow_writers = shadow},
                                        *kernels_for(Isa::ref), events);
        REQUIRE(created);
        PagePool& pool = **created;
        REQUIRE(pool.reserve(kA, 2));
        REQUIRE(pool.reserve(kA, 2, PoolSide::decode));
        pool.extend(kA, 21);
        Lease lease = pool.open(kA, 0, 21);
        compute(pool, lease, *kernels_for(Isa::ref), shadow);
        REQUIRE(pool.settle(std::move(lease)));
        REQUIRE(pool.transfer(kA, 2).complete);
        for (std::uint32_t position = 0; position < 21; ++position) {
            const std::uint32_t page = position / kPageTokens, row = position % kPageTokens;
            CHECK(row_of(pool.memory(), 3 + page, row) == row_of(pool.memory(), page, row));
        }
        for (std::uint32_t row = 5; row < kPageTokens; ++row) {
            for (const std::uint16_t half : row_of(pool.memory(), 4, row)) {
                REQUIRE(half == kPoisonHalf);
            }
        }
        CHECK(tile_header(pool.memory().tile(4, 1, 0))->rows_written == 5);
    }
}

TEST_CASE("a pool in two parts gives the bits of one that is whole") {
    for (std::uint32_t rows : {1u, 15u, 16u, 17u, 32u, 40u, 48u}) {
        CAPTURE(rows);
        const auto next_token = [&](bool split) {
            NullSink events;
            auto pool = split ? make_split(events) : make_pool(events, 4 * kPageTokens);
            REQUIRE(pool->reserve(kA, 3 + (split ? 0 : 1)));
            REQUIRE(write(*pool, kA, 0, rows));
            if (split) {
                REQUIRE(pool->reserve(kA, 4, PoolSide::decode));
                while (!pool->transfer(kA, 1).complete) {
                }
            }
            pool->extend(kA, rows + 1);
            Lease lease = pool->open(kA, rows, 1);
            const auto out = compute(*pool, lease, std::vector<float>(kShape.head_dim, 0.5f));
            CHECK(pool->settle(std::move(lease)));
            return out;
        };
        CHECK(next_token(true) == next_token(false));
    }
}

TEST_CASE("at every point of a transfer a request can go, and leaves nothing behind") {
    for (const FreeReason reason :
         {FreeReason::cancelled, FreeReason::error, FreeReason::preempted}) {
        for (std::uint32_t moved = 0; moved <= 3; ++moved) {
            CAPTURE(moved);
            Recording noted;
            auto pool = make_split(noted);
            prefill(*pool, 41, 4);
            for (std::uint32_t i = 0; i < moved; ++i) {
                CHECK(pool->transfer(kA, 1).complete == (i == 2));
            }
            noted.events.clear();
            pool->release(kA, reason);
            std::size_t drains = 0;
            for (const Event& event : noted.events) {
                drains += event.kind == EventKind::drain ? 1 : 0;
            }
            CHECK(drains == (moved == 3 ? 3 : 3 + moved));  // once complete, only the decode side's
            CHECK(pool->scrub_drained(100) == 3 + moved);
            CHECK(pool->pages_allocatable(PoolSide::prefill) == 3);
            CHECK(pool->pages_allocatable(PoolSide::decode) == 4);
            for (std::uint32_t page = 0; page < 3 + moved; ++page) {
                CHECK(is_poison(pool->memory(), page));
            }
            if (reason == FreeReason::preempted) {  // it comes back, and its sum goes on
                CHECK(pool->rows_held(kA) == 0);
                const std::uint64_t before = pool->running_witness(kA);
                CHECK(before != 0);
                prefill(*pool, 41, 4);
                CHECK(pool->running_witness(kA) != before);
                CHECK(pool->transfer(kA, 9).complete);
            }
        }
    }
}

TEST_CASE("a reservation for a whole prompt gives no right to read it before it came") {
    const auto decode_reserved = [](auto then) {
        return status_of_child([&] {
            NullSink events;
            auto pool = make_split(events);
            prefill(*pool, 33, 3);
            then(*pool);
        });
    };
    CHECK(decode_reserved([](PagePool& pool) {
              pool.transfer(kA, 2);
              pool.open(kA, 33, 1);  // row 32 is not there yet
          }) == 7);
    CHECK(decode_reserved([](PagePool& pool) {
              pool.transfer(kA, 3);
              pool.transfer(kA, 1);  // all has come
          }) == 7);
    CHECK(decode_reserved([](PagePool& pool) {
              pool.transfer(kA, 3);
              pool.open(kA, 48, 1);  // a placeholder for rows that were never computed
          }) == 7);
    CHECK(decode_reserved([](PagePool& pool) { pool.transfer(kA, 3); }) == 0);
}

TEST_CASE("a prompt that fits one side only is refused by name, with nothing reserved") {
    TextSink events;
    auto pool = make_split(events);
    events.clear();
    const Status prefill = pool->reserve(kA, 4);
    REQUIRE_FALSE(prefill);
    CHECK(prefill.error().code == ErrorCode::out_of_pages);
    CHECK(prefill.error().message ==
          "4 pages are wanted and 3 of 3 can be had in the prefill pool");
    const Status decode = pool->reserve(kA, 5, PoolSide::decode);
    REQUIRE_FALSE(decode);
    CHECK(decode.error().message == "5 pages are wanted and 4 of 4 can be had in the decode pool");
    CHECK(events.lines().empty());
}

TEST_CASE(
    "a source that is not the request's own stops its transfer, and quarantine finds it all") {
    TextSink events;
    auto pool = make_split(events);
    prefill(*pool, 33, 3);
    tile_header(pool->memory().tile(1, 1, 0))->request = 99;
    CHECK(pool->transfer(kA, 1).clean);
    events.clear();
    const PagePool::Moved moved = pool->transfer(kA, 5);
    CHECK_FALSE(moved.clean);
    CHECK_FALSE(moved.complete);
    CHECK(events.lines().find("loaded request=1 page=1 layer=1 head=0 access=3 rows=16 "
                              "tenant_loaded=1 request_loaded=99") != std::string::npos);
    REQUIRE(pool->finding(kA) != nullptr);
    CHECK(pool->finding(kA)->kind == std::string("foreign_row"));
    CHECK(tile_header(pool->memory().tile(4, 1, 0))->rows_written == 0);  // nothing foreign arrived
    CHECK_FALSE(pool->transfer(kA, 5).clean);                             // nor will anything
    events.clear();
    pool->quarantine(kA, FreeReason::violation);
    CHECK(events.lines() ==
          "free request=1 page=0 reason=4\nfree request=1 page=1 reason=4\n"
          "free request=1 page=2 reason=4\nfree request=1 page=3 reason=4\n"
          "free request=1 page=4 reason=4\nfree request=1 page=5 reason=4\n"
          "quarantine page=0\nquarantine page=1\nquarantine page=2\n"
          "quarantine page=3\nquarantine page=4\nquarantine page=5\n");
    CHECK(pool->pages_allocatable(PoolSide::prefill) == 0);
    CHECK(pool->pages_allocatable(PoolSide::decode) == 1);
}

TEST_CASE("a copy that lands after the free is refused by the header, whoever has the page then") {
    NullSink events;
    auto pool = make_split(events);
    prefill(*pool, 20, 2);
    REQUIRE_FALSE(pool->transfer(kA, 1).complete);
    const KvMemory memory = pool->memory();
    const PageRef source = pool->table(kA)[0];
    const PageRef destination{3, 1};
    const auto land = [&] {
        SequenceReport report;
        const std::vector<std::uint16_t> before = row_of(memory, 3, 0);
        transfer_page(memory, {.reader = kA,
                               .source = source,
                               .destination = destination,
                               .row_begin = 0,
                               .row_end = 16,
                               .check_headers = false,  // the copy was read before the free
                               .report = &report});
        CHECK(row_of(memory, 3, 0) == before);
        REQUIRE(report.faults == kShape.layers);
        CHECK(report.first_faults.front().access == AccessKind::write);
        CHECK(report.rows_written == 0);
        return report.first_faults.front().loaded.state;
    };
    pool->release(kA, FreeReason::cancelled);
    CHECK(land() == TileState::owned);  // still draining: its rows are there already
    CHECK(pool->scrub_drained(9) == 3);
    CHECK(land() == TileState::freed);
    REQUIRE(pool->reserve(kB, 4, PoolSide::decode));
    REQUIRE(pool->reserve(kB, 1));
    REQUIRE(write(*pool, kB, 0, 1));
    REQUIRE(pool->transfer(kB, 1).complete);
    pool->extend(kB, 64);
    CHECK(land() == TileState::owned);
    CHECK(pool->table(kB).front().page == 3);  // reserved for more rows than were received
    CHECK(write(*pool, kB, 1, 63));
    CHECK(pool->finding(kB) == nullptr);
}

TEST_CASE("a late append that the header allows is found when the page is scrubbed") {
    TextSink events;
    auto pool = make_pool(events, 32);
    REQUIRE(pool->reserve(kA, 1));
    REQUIRE(write(*pool, kA, 0, 4));
    const PageRef page = pool->table(kA).front();
    const std::vector<float> rows(kShape.head_dim, 1.0f);
    const auto late = [&](SequenceReport& report) {
        const SequenceView view{
            .reader = kA, .pages = {&page, 1}, .first = 4, .count = 1, .report = &report};
        kernels_for(Isa::ref)->append(pool->memory(), view, 1, 0, rows.data(), rows.data());
    };
    pool->release(kA, FreeReason::cancelled);
    SequenceReport draining, scrubbed;
    late(draining);
    CHECK(draining.faults == 0);  // the headers are still the writer's
    CHECK(pool->scrub_drained(1) == 1);
    CHECK(events.lines().ends_with("quarantine page=0\n"));
    CHECK(pool->pages_allocatable() == 1);
    late(scrubbed);
    REQUIRE(scrubbed.faults == 1);
    CHECK(scrubbed.first_faults.front().loaded.state == TileState::freed);
}

// ---- shared pages

TEST_CASE("a published page outlives its writer and is read by others of its tenant") {
    TextSink events;
    auto pool = make_pool(events, 80);
    REQUIRE(pool->reserve(kA, 2));
    REQUIRE(write(*pool, kA, 0, 20));
    events.clear();
    pool->publish(kA, 0, CacheScope::tenant, {7, 8});
    pool->release(kA, FreeReason::finished);
    CHECK(pool->holders(0) == 0);
    REQUIRE(pool->reserve(kA3, 1));
    pool->adopt(kA3, {.page = 0, .generation = 1}, {7, 8});
    CHECK(pool->holders(0) == 1);
    CHECK(pool->rows_held(kA3) == 16);
    CHECK(pool->table(kA3).front() == PageRef{0, 1, kA.request});
    CHECK(pool->reads_rows_of(kA3, kA.request));
    CHECK_FALSE(pool->reads_rows_of(kA3, kA3.request));  // it has written nothing yet
    CHECK(write(*pool, kA3, 16, 2));
    pool->evict(0);
    CHECK(pool->pages_draining() == 1);  // A's second page; the first is still being read
    pool->release(kA3, FreeReason::finished);

    CHECK(events.lines() ==
          "share request=1 index=0 page=0 generation=1 scope=2 digest0=0x7 digest1=0x8\n"
          "free request=1 page=0 reason=1\n"
          "free request=1 page=1 reason=1\n"
          "drain page=1\n"
          "reserve request=3 pool=0 pages=1\n"
          "adopt request=3 index=0 page=0 generation=1 digest0=0x7 digest1=0x8\n"
          "scrub page=2 witness=0x579763e0\n"
          "poison_check page=2 words=8 wrong=0\n"
          "alloc request=3 group=0 index=1 page=2 generation=1\n"
          "rows request=3 count=2 end=18 group=0 version=2\n"
          "witness request=3 sum=0xc3760302\n"
          "evict page=0 generation=1\n"
          "free request=3 page=0 reason=1\n"
          "free request=3 page=2 reason=1\n"
          "drain page=0\n"
          "drain page=2\n");
}

TEST_CASE("what is shared is checked: full, its writer's, published, of the tenant, in order") {
    const auto status = [](auto then) {
        return status_of_child([&] {
            NullSink events;
            auto pool = make_pool(events, 160);
            (void)pool->reserve(kA, 2);
            (void)pool->reserve(kB, 2);
            (void)pool->reserve(kA3, 2);
            write(*pool, kA, 0, 31);
            then(*pool);
        });
    };
    const auto publish = [](PagePool& pool, Owner owner, std::uint32_t index) {
        pool.publish(owner, index, CacheScope::tenant, {});
    };
    CHECK(status([&](PagePool& pool) { publish(pool, kA, 0); }) == 0);
    CHECK(status([&](PagePool& pool) { publish(pool, kA, 1); }) == 7);  // one row is missing
    CHECK(status([&](PagePool& pool) {
              pool.extend(kA, 32);
              Lease lease = pool.open(kA, 31, 1);
              publish(pool, kA, 1);  // allowed to be written, and not written yet
          }) == 7);
    CHECK(status([&](PagePool& pool) {
              publish(pool, kA, 0);
              publish(pool, kA, 0);
          }) == 7);
    CHECK(status([&](PagePool& pool) { pool.adopt(kA3, {0, 1}, {}); }) == 7);
    CHECK(status([&](PagePool& pool) {
              publish(pool, kA, 0);
              pool.adopt(kA3, {0, 2}, {});  // another generation
          }) == 7);
    CHECK(status([&](PagePool& pool) {
              publish(pool, kA, 0);
              pool.adopt(kB, {0, 1}, {});  // another tenant
          }) == 7);
    CHECK(status([&](PagePool& pool) {
              publish(pool, kA, 0);
              write(pool, kA3, 0, 16);
              pool.adopt(kA3, {0, 1}, {});  // behind its own rows
          }) == 7);
    CHECK(status([&](PagePool& pool) {
              publish(pool, kA, 0);
              pool.adopt(kA3, {0, 1}, {});
              publish(pool, kA3, 0);  // somebody else's
          }) == 7);
    CHECK(status([&](PagePool& pool) { pool.evict(0); }) == 7);
    CHECK(status([&](PagePool& pool) { pool.evict(1000); }) == 7);
}

TEST_CASE("a shared page cannot be written, not even by a request that reads it") {
    NullSink events;
    auto pool = make_pool(events, 64);
    REQUIRE(pool->reserve(kA, 1));
    REQUIRE(write(*pool, kA, 0, 16));
    pool->publish(kA, 0, CacheScope::tenant, {});
    REQUIRE(pool->reserve(kA3, 1));
    pool->adopt(kA3, pool->table(kA).front(), {});
    const auto before = row_of(pool->memory(), 0, 15);
    const std::vector<float> rows(kShape.head_dim, 1.0f);
    for (const Kernels* kernels : {kernels_for(Isa::ref), &best_kernels()}) {
        SequenceReport report;
        const SequenceView view{
            .reader = kA3, .pages = pool->table(kA3), .first = 15, .count = 1, .report = &report};
        kernels->append(pool->memory(), view, 0, 0, rows.data(), rows.data());
        CHECK(report.faults == 1);
    }
    CHECK(row_of(pool->memory(), 0, 15) == before);
}

TEST_CASE("three prompts with one beginning do not see each other's ends, in any order") {
    std::vector<int> order{0, 1, 2};
    do {
        for (const std::uint32_t shared : {5u, 16u, 17u, 40u}) {
            CAPTURE(shared);
            // What attention gives a request whose first `shared` tokens are everybody's.
            const auto answer = [&](PagePool& pool, Owner owner, std::uint32_t adopted) {
                std::vector<float> rows;
                for (std::uint32_t t = adopted * kPageTokens; t < shared + 20; ++t) {
                    const float value =
                        t < shared ? static_cast<float>(t % 9 + 1) : stamp(owner, t) / 64;
                    rows.insert(rows.end(), kShape.head_dim, value);
                }
                pool.extend(owner, shared + 20);
                Lease lease =
                    pool.open(owner, adopted * kPageTokens, shared + 20 - adopted * kPageTokens);
                const auto out = compute(pool, lease, rows);
                CHECK(pool.settle(std::move(lease)));
                return std::vector<float>(out.end() - 20 * kShape.head_dim, out.end());
            };
            NullSink events;
            auto pool = make_pool(events, 640);
            std::vector<PageRef> prefix;
            for (const int i : order) {
                const Owner owner{TenantId{1}, RequestId{10u + static_cast<unsigned>(i)}};
                REQUIRE(pool->reserve(owner, 4));
                for (const PageRef& page : prefix) {
                    pool->adopt(owner, page, {});
                }
                const auto together =
                    answer(*pool, owner, static_cast<std::uint32_t>(prefix.size()));
                for (std::uint32_t index = 0; prefix.size() < shared / kPageTokens; ++index) {
                    pool->publish(owner, index, CacheScope::tenant, {});
                    prefix.push_back(pool->table(owner)[index]);
                }
                auto alone = make_pool(events, 640);
                REQUIRE(alone->reserve(owner, 4));
                CHECK(answer(*alone, owner, 0) == together);
            }
        }
    } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("pages of a writer that is not trusted are never given out again, whoever reads them") {
    TextSink events;
    auto pool = make_pool(events, 96);
    REQUIRE(pool->reserve(kA, 3));
    REQUIRE(write(*pool, kA, 0, 40));
    pool->publish(kA, 0, CacheScope::tenant, {});
    pool->publish(kA, 1, CacheScope::tenant, {});
    REQUIRE(pool->reserve(kA3, 1));
    pool->adopt(kA3, pool->table(kA)[0], {});
    REQUIRE(write(*pool, kA3, 16, 1));
    events.clear();
    pool->quarantine(kA, FreeReason::violation);
    CHECK(events.lines() ==
          "free request=1 page=0 reason=4\n"
          "free request=1 page=1 reason=4\n"
          "free request=1 page=2 reason=4\n"
          "evict page=0 generation=1\n"
          "evict page=1 generation=1\n"
          "quarantine page=1\n"
          "quarantine page=2\n");
    events.clear();
    pool->release(kA3, FreeReason::finished);
    CHECK(events.lines() ==
          "free request=3 page=0 reason=1\nfree request=3 page=3 reason=1\n"
          "quarantine page=0\ndrain page=3\n");
    CHECK(pool->scrub_drained(9) == 1);
    CHECK(pool->pages_allocatable() == 3);
}

TEST_CASE("a request that lost its pages keeps its running witness and starts anew") {
    TextSink events;
    auto pool = make_pool(events, 32);
    REQUIRE(pool->reserve(kA, 2));
    REQUIRE(write(*pool, kA, 0, 20));
    const std::uint64_t before = pool->running_witness(kA);
    pool->release(kA, FreeReason::preempted);
    CHECK(pool->rows_held(kA) == 0);
    CHECK(pool->table(kA).empty());
    CHECK(pool->reserved(kA) == 0);
    CHECK(pool->running_witness(kA) == before);
    CHECK(pool->scrub_drained(2) == 2);
    REQUIRE(pool->reserve(kA, 2));
    events.clear();
    REQUIRE(write(*pool, kA, 0, 1));
    CHECK(events.lines().find("rows request=1 count=1 end=1 group=0 version=3\n") !=
          std::string::npos);
    std::uint64_t once = 0;  // a row written and read, in page 0 at generation 2
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        for (const AccessKind kind : {AccessKind::write, AccessKind::read}) {
            once += page_mix(1, 1, 2, 0) * access_factor(layer, 0, kind);
        }
    }
    CHECK(pool->running_witness(kA) == before + once);
}

TEST_CASE("the full witness is recorded where 256 positions are passed") {
    TextSink events;
    auto pool = make_pool(events, 600);
    REQUIRE(pool->reserve(kA, 38));
    REQUIRE(write(*pool, kA, 0, 255));
    CHECK(events.lines().find("witness_sum") == std::string::npos);
    REQUIRE(write(*pool, kA, 255, 1));
    CHECK(events.lines().find("witness_sum request=1 positions=256") != std::string::npos);
    events.clear();
    REQUIRE(write(*pool, kA, 256, 300));
    CHECK(events.lines().find("witness_sum request=1 positions=556") != std::string::npos);
}

// ---- the same bits, whatever was in the pool before and however a prompt is cut

std::vector<float> answer_in_chunks(PagePool& pool, Owner owner, std::uint32_t rows,
                                    std::uint32_t chunk) {
    std::vector<float> last;
    for (std::uint32_t first = 0; first < rows; first += chunk) {
        const std::uint32_t count = std::min(chunk, rows - first);
        std::vector<float> values;
        for (std::uint32_t t = first; t < first + count; ++t) {
            for (std::uint32_t d = 0; d < kShape.head_dim; ++d) {
                values.push_back(static_cast<float>((t * 7 + d * 3) % 11) - 5.0f);
            }
        }
        pool.extend(owner, first + count);
        Lease lease = pool.open(owner, first, count);
        last = compute(pool, lease, values);
        REQUIRE(pool.settle(std::move(lease)));
    }
    return {last.end() - kShape.head_dim, last.end()};
}

TEST_CASE("a recycled page gives the bits of a fresh one, for every chunk size") {
    for (const std::uint32_t rows : {1u, 15u, 16u, 17u, 31u, 32u, 33u, 47u}) {
        NullSink events;
        auto fresh = make_pool(events, 48);
        REQUIRE(fresh->reserve(kB, 3));
        const auto expected = answer_in_chunks(*fresh, kB, rows, rows);
        for (const std::uint32_t chunk : {1u, 3u, 7u, 15u, 16u}) {
            for (const float dirt : {std::numeric_limits<float>::quiet_NaN(),
                                     std::numeric_limits<float>::infinity(), 65504.0f}) {
                CAPTURE(rows);
                CAPTURE(chunk);
                auto pool = make_pool(events, 48);
                REQUIRE(pool->reserve(kA, 3));
                pool->extend(kA, 48);
                Lease lease = pool->open(kA, 0, 48);
                compute(*pool, lease, std::vector<float>(48 * kShape.head_dim, dirt));
                REQUIRE(pool->settle(std::move(lease)));
                pool->release(kA, FreeReason::finished);
                CHECK(pool->scrub_drained(3) == 3);
                REQUIRE(pool->reserve(kB, 3));
                const auto found = answer_in_chunks(*pool, kB, rows, chunk);
                CHECK(std::memcmp(found.data(), expected.data(), found.size() * 4) == 0);
            }
        }
    }
}

TEST_CASE("two tenants at the same positions give the bits that each gives alone") {
    const auto alone = [&](Owner owner) {
        NullSink events;
        auto pool = make_pool(events, 64);
        REQUIRE(pool->reserve(owner, 2));
        for (std::uint32_t t = 0; t < 31; ++t) {
            REQUIRE(write(*pool, owner, t, 1));
        }
        pool->extend(owner, 32);
        Lease lease = pool->open(owner, 31, 1);
        return compute(*pool, lease, std::vector<float>(kShape.head_dim, stamp(owner, 31)));
    };
    NullSink events;
    auto pool = make_pool(events, 64);
    REQUIRE(pool->reserve(kA, 2));
    REQUIRE(pool->reserve(kB, 2));
    for (std::uint32_t t = 0; t < 31; ++t) {
        REQUIRE(write(*pool, kA, t, 1));
        REQUIRE(write(*pool, kB, t, 1));
    }
    for (const Owner owner : {kA, kB}) {
        pool->extend(owner, 32);
        Lease lease = pool->open(owner, 31, 1);
        CHECK(compute(*pool, lease, std::vector<float>(kShape.head_dim, stamp(owner, 31))) ==
              alone(owner));
    }
}

TEST_CASE("a lease keeps its table while the owner's grows") {
    NullSink events;
    auto pool = make_pool(events, 40 * kPageTokens);
    REQUIRE(pool->reserve(kA, 40));
    pool->extend(kA, 1);
    Lease lease = pool->open(kA, 0, 1);
    const SequenceView view = lease.view(0, 0);
    const PageRef first = view.pages.front();
    pool->extend(kA, 40 * kPageTokens);
    CHECK(view.pages.size() == 1);
    CHECK(view.pages.front() == first);
    CHECK(pool->table(kA).size() == 40);
}

// ---- against a naive model

struct Life {
    bool split = false;
    std::uint32_t prefill_pages = 12, decode_pages = 0, own_pages_max = 4;
};

void random_life(const Life& life, std::uint32_t seed, int steps) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
    Recording noted;
    auto pool = life.split ? make_pool(noted, life.decode_pages * kPageTokens, {},
                                       life.prefill_pages * kPageTokens)
                           : make_pool(noted, life.prefill_pages * kPageTokens);
    noted.events.clear();
    NaivePool naive(*pool);
    PageRules rules;
    std::uint64_t last_request = 0;
    std::uint64_t adopts = 0, transfers = 0, most_generations = 0;

    const auto reserve = [&](Owner owner, std::uint32_t pages, std::size_t side) {
        const Status reserved = pool->reserve(owner, pages, PoolSide(side));
        REQUIRE(reserved.has_value() == (pages <= naive.allocatable(side)));
        if (reserved) {
            naive.reserve(owner, pages, side);
        }
        return reserved.has_value();
    };
    const auto let_go = [&](Owner owner, FreeReason reason) {
        pool->release(owner, reason);
        naive.let_go(owner, reason, false);
    };
    const auto published = [&](const auto& wanted) {
        std::vector<std::uint32_t> pages;
        for (std::uint32_t page = 0; page < naive.pages.size(); ++page) {
            if (naive.pages[page].published && wanted(page)) {
                pages.push_back(page);
            }
        }
        return pages;
    };
    // Reserves for a request that has nothing, and lets it adopt what there is.
    const auto begin = [&](Owner owner) {
        const std::uint32_t own = 1 + below(life.own_pages_max);
        const std::uint32_t adopted = below(4);
        if (!reserve(owner, own, 0)) {
            return;
        }
        if (life.split && !reserve(owner, adopted + own + below(2), 1)) {
            return let_go(owner, FreeReason::cancelled);
        }
        for (std::uint32_t i = 0; i < adopted; ++i) {
            const auto pages = published([&](std::uint32_t page) {
                const auto& table = naive.of(owner).table[0];
                return naive.pages[page].owner.tenant == owner.tenant &&
                       std::find(table.begin(), table.end(), page) == table.end();
            });
            if (!pages.empty()) {
                const std::uint32_t page = pages[below(pages.size())];
                const PrefixDigest digest{random(), random()};
                pool->adopt(owner, {page, naive.pages[page].generation}, digest);
                naive.adopt(owner, page, digest);
                ++adopts;
            }
        }
    };

    for (int step = 0; step < steps; ++step) {
        const std::uint32_t choice = below(100);
        std::vector<Owner> live;
        for (const auto& [id, request] : naive.requests) {
            live.push_back(request.owner);
        }
        const Owner owner = live.empty() ? Owner{} : live[below(live.size())];
        NaivePool::Request* request = live.empty() ? nullptr : &naive.of(owner);
        const bool moving = request != nullptr && request->side == 0 && request->received > 0;
        if (choice < 12) {
            ++last_request;
            begin({TenantId{static_cast<std::uint32_t>(last_request % 2 + 1)},
                   RequestId{last_request}});
        } else if (choice < 20 && request != nullptr) {
            if (request->reserved[0] + request->reserved[1] + request->rows == 0) {
                begin(owner);  // it had been preempted
            }
        } else if (choice < 52 && request != nullptr && !moving) {
            const std::size_t side = request->side;
            const auto pages =
                static_cast<std::uint32_t>(request->reserved[side] + request->table[side].size());
            const std::uint32_t count =
                std::min(pages * kPageTokens - request->rows, 1 + below(below(3) == 0 ? 40 : 4));
            if (count > 0) {
                const std::uint32_t first = request->rows;
                naive.write(owner, count);
                REQUIRE(write(*pool, owner, first, count));
            }
        } else if (choice < 62 && request != nullptr) {
            for (std::uint32_t index = 0; index < request->table[0].size(); ++index) {
                const NaivePool::Page& page = naive.pages[request->table[0][index]];
                if (page.owner == owner && page.rows.size() == kPageTokens && !page.published &&
                    !page.quarantined && below(2) == 0) {
                    const PrefixDigest digest{random(), random()};
                    pool->publish(owner, index, CacheScope::tenant, digest);
                    naive.publish(owner, index, CacheScope::tenant, digest);
                }
            }
        } else if (choice < 70) {
            const auto pages = published([](std::uint32_t) { return true; });
            if (pages.size() > 3 || (!pages.empty() && below(5) == 0)) {
                const std::uint32_t page = pages[below(pages.size())];
                const bool quarantine = naive.quarantined() < 2 && below(100) == 0;
                pool->evict(page, quarantine);
                naive.evict(page, quarantine);
            }
        } else if (choice < 80 && request != nullptr) {
            if (naive.quarantined() < 2 && below(100) == 0) {
                pool->quarantine(owner, FreeReason::violation);
                naive.let_go(owner, FreeReason::violation, true);
            } else {
                let_go(owner, below(3) == 0 ? FreeReason::preempted : FreeReason::finished);
            }
        } else if (choice < 88 && request != nullptr) {
            const bool room = request->side == 0 && request->rows > 0 &&
                              request->table[1].size() + request->reserved[1] >=
                                  (request->rows + kPageTokens - 1) / kPageTokens;
            if (life.split && room) {
                const std::uint32_t most = 1 + below(3);
                const PagePool::Moved moved = pool->transfer(owner, most);
                naive.transfer(owner, most);
                REQUIRE(moved.clean);
                REQUIRE(moved.rows == request->received);
                REQUIRE(moved.complete == (request->side == 1));
                ++transfers;
            }
        } else if (choice >= 88) {
            const std::uint32_t most = below(5);
            const std::size_t waiting = naive.draining.size();
            REQUIRE(pool->scrub_drained(most) == std::min<std::size_t>(most, waiting));
            naive.scrub_drained(most);
        }
        for (const Event& event : noted.events) {
            REQUIRE(rules.apply(event) == "");
        }
        REQUIRE(difference_of_events(noted, naive) == "");
        REQUIRE(difference(*pool, naive) == "");
    }
    for (const NaivePool::Page& page : naive.pages) {
        most_generations = std::max<std::uint64_t>(most_generations, page.generation);
    }
    CHECK(last_request > 100);
    CHECK(adopts > 3);
    CHECK(most_generations > 5);
    CHECK((transfers > 5) == life.split);
}

TEST_CASE("the pool does what a naive model does, at each of 67,000 random steps") {
    for (std::uint32_t seed = 1; seed <= 8; ++seed) {
        random_life({}, seed, 4000);
        random_life({.split = true, .prefill_pages = 9, .decode_pages = 12}, seed + 100, 4000);
    }
    // Long enough for full witness sums, tight enough for refusals.
    random_life({.prefill_pages = 40, .own_pages_max = 22}, 201, 1500);
    random_life({.split = true, .prefill_pages = 30, .decode_pages = 40, .own_pages_max = 20}, 202,
                1500);
}

}  // namespace
}  // namespace kvw
