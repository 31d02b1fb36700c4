#include "src/kv/page_pool.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "src/kv/fault_plan.h"

namespace kvw {
namespace {

constexpr TileShape kShape{.layers = 2, .heads = 1, .head_dim = 16};
constexpr Owner kA{TenantId{1}, RequestId{1}};
constexpr Owner kB{TenantId{2}, RequestId{2}};

std::unique_ptr<PagePool> make_pool(EventSink& sink, std::uint64_t rows,
                                    const FaultPlan& faults = {}) {
    auto pool = PagePool::create({.shape = kShape, .rows_max = rows, .shadow_writers = true},
                                 *kernels_for(Isa::ref), sink, &faults);
    REQUIRE(pool);
    return std::move(*pool);
}

// The value that a request stores for a position: exact in f16 and different from its neighbours'.
float stamp(Owner owner, std::uint32_t position) {
    return static_cast<float>(number(owner.request) % 32 * 64 + position % 64 + 1);
}

// What a forward pass does with a lease: stores a row per new token in every tile, then attends.
void compute(PagePool& pool, Lease& lease, const Kernels& kernels = *kernels_for(Isa::ref)) {
    const std::size_t width = kShape.heads * kShape.head_dim;
    std::vector<float> rows(lease.count() * width);
    for (std::uint32_t t = 0; t < lease.count(); ++t) {
        std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(t * width), width,
                    stamp(lease.owner(), lease.first() + t));
    }
    std::vector<float> out(rows.size());
    const SequenceView view = lease.view(0, lease.count());
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        kernels.append(pool.memory(), view, layer, 0, rows.data(), rows.data());
        const AttentionArgs args{.memory = pool.memory(),
                                 .layer = layer,
                                 .query_heads = kShape.heads,
                                 .q = rows.data(),
                                 .out = out.data()};
        kernels.attend(args, {.sequence = &view, .row_begin = 0, .row_end = lease.count()});
    }
}

bool write(PagePool& pool, Owner owner, std::uint32_t first, std::uint32_t count) {
    pool.extend(owner, first + count);
    Lease lease = pool.open(owner, first, count);
    compute(pool, lease);
    return pool.settle(std::move(lease));
}

float stored(const KvMemory& memory, std::uint32_t page, std::uint32_t layer, std::uint32_t row) {
    const std::uint16_t half = tile_keys(memory.tile(page, layer, 0))[5 * kPageTokens + row];
    const int exponent = (half >> 10) & 31;
    return std::ldexp(static_cast<float>((half & 0x3ff) | 0x400), exponent - 25);
}

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

int status_of_child(void (*body)()) {
    const pid_t child = fork();
    if (child == 0) {
        std::fclose(stderr);
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
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
            compute(*pool, lease, *kernels);
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

// ---- against a naive model

// The pool as one would write it on a blackboard: lists of pages, and who wrote each row of each.
struct NaivePool {
    struct Page {
        std::uint32_t generation = 0;
        std::vector<float> rows;  // as written by the last owner; empty once scrubbed
        Owner owner;              // nobody when it may be allocated
    };
    struct Request {
        std::uint32_t reserved = 0, written = 0;
        std::vector<std::uint32_t> pages;
        std::uint64_t witness = 0;
    };
    std::vector<Page> pages;
    std::deque<std::uint32_t> free, draining;  // free: in the order in which they are handed out
    std::uint32_t virgin_next = 0, reserved = 0, quarantined = 0;
    std::map<std::uint64_t, Request> requests;
    std::uint64_t rows_read = 0, rows_written = 0, scrubs = 0;

    std::uint32_t allocatable() const {
        return static_cast<std::uint32_t>(pages.size()) - virgin_next +
               static_cast<std::uint32_t>(free.size()) - reserved;
    }
    void write(Owner owner, std::uint32_t count) {
        Request& request = requests[number(owner.request)];
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint32_t position = request.written++;
            if (position / kPageTokens == request.pages.size()) {
                allocate(owner, request);
            }
            pages[request.pages.back()].rows.push_back(stamp(owner, position));
            for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
                request.witness +=
                    mix(owner, request.pages.back()) * access_factor(layer, 0, AccessKind::write);
                ++rows_written;
                for (std::uint32_t seen = 0; seen <= position; ++seen) {
                    request.witness += mix(owner, request.pages[seen / kPageTokens]) *
                                       access_factor(layer, 0, AccessKind::read);
                    ++rows_read;
                }
            }
        }
    }
    void allocate(Owner owner, Request& request) {
        std::uint32_t page = virgin_next;
        if (free.empty()) {
            ++virgin_next;
            ++scrubs;
        } else {
            page = free.front();
            free.pop_front();
        }
        --reserved;
        --request.reserved;
        ++pages[page].generation;
        pages[page].owner = owner;
        request.pages.push_back(page);
    }
    void release(Owner owner, bool quarantine) {
        Request& request = requests[number(owner.request)];
        for (const std::uint32_t page : request.pages) {
            if (quarantine) {
                ++quarantined;
            } else {
                draining.push_back(page);
            }
        }
        reserved -= request.reserved;
        requests.erase(number(owner.request));
    }
    void scrub(std::uint32_t most) {
        for (; most > 0 && !draining.empty(); --most) {
            const std::uint32_t page = draining.front();
            draining.pop_front();
            pages[page].owner = {};
            pages[page].rows.clear();
            free.push_back(page);
            ++scrubs;
        }
    }
    std::uint64_t mix(Owner owner, std::uint32_t page) const {
        return page_mix(number(owner.tenant), number(owner.request), pages[page].generation, page);
    }
};

Owner owner_of(std::uint64_t request) {
    return {TenantId{static_cast<std::uint32_t>(request % 5 + 1)}, RequestId{request}};
}

// Everything that can be asked of the pool, and every row of its memory.
void compare(const PagePool& pool, const NaivePool& naive) {
    REQUIRE(pool.pages_allocatable() == naive.allocatable());
    REQUIRE(pool.pages_draining() == naive.draining.size());
    REQUIRE(pool.counters().rows_read == naive.rows_read);
    REQUIRE(pool.counters().rows_written == naive.rows_written);
    REQUIRE(pool.counters().scrubs == naive.scrubs);
    for (const auto& [id, request] : naive.requests) {
        const auto table = pool.table(owner_of(id));
        REQUIRE(table.size() == request.pages.size());
        for (std::size_t i = 0; i < table.size(); ++i) {
            REQUIRE(table[i].page == request.pages[i]);
            REQUIRE(table[i].generation == naive.pages[table[i].page].generation);
        }
        REQUIRE(pool.running_witness(owner_of(id)) == request.witness);
    }
    const KvMemory memory = pool.memory();
    for (std::uint32_t page = 0; page < naive.virgin_next; ++page) {
        const NaivePool::Page& expected = naive.pages[page];
        for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
            const TileHeader& header = *tile_header(memory.tile(page, layer, 0));
            REQUIRE(header.request == number(expected.owner.request));
            REQUIRE(header.tenant == number(expected.owner.tenant));
            REQUIRE(header.generation == expected.generation);
            REQUIRE(header.rows_written == expected.rows.size());
            for (std::uint32_t row = 0; row < kPageTokens; ++row) {
                const std::uint64_t writer =
                    memory.writers[memory.tile_index(page, layer, 0) * kPageTokens + row];
                if (row < expected.rows.size()) {
                    REQUIRE(stored(memory, page, layer, row) == expected.rows[row]);
                    REQUIRE(writer == number(expected.owner.request));
                } else {
                    REQUIRE(tile_keys(memory.tile(page, layer, 0))[5 * kPageTokens + row] ==
                            kPoisonHalf);
                }
            }
        }
    }
}

void random_life(std::uint32_t seed, int steps) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    NullSink events;
    auto pool = make_pool(events, 12 * kPageTokens);
    NaivePool naive;
    naive.pages.resize(pool->pages_total());
    const Kernels& ref = *kernels_for(Isa::ref);
    Kernels checked = ref;  // that also tell the shadow table who writes
    checked.append = ref.append_checked;
    checked.attend = ref.attend_checked;
    std::uint64_t last_request = 0;
    for (int step = 0; step < steps; ++step) {
        const std::uint32_t choice = below(100);
        std::vector<std::uint64_t> live;
        for (const auto& [id, request] : naive.requests) {
            live.push_back(id);
        }
        if (choice < 15) {
            const Owner owner = owner_of(++last_request);
            const std::uint32_t pages = 1 + below(4);
            const Status reserved = pool->reserve(owner, pages);
            REQUIRE(reserved.has_value() == (pages <= naive.allocatable()));
            if (reserved) {
                naive.requests[number(owner.request)].reserved = pages;
                naive.reserved += pages;
            }
        } else if (choice < 75 && !live.empty()) {
            const std::uint64_t id = live[below(static_cast<std::uint32_t>(live.size()))];
            NaivePool::Request& request = naive.requests[id];
            const std::uint32_t room =
                (request.reserved + static_cast<std::uint32_t>(request.pages.size())) *
                    kPageTokens -
                request.written;
            const std::uint32_t count = std::min(room, 1 + below(below(3) == 0 ? 40 : 3));
            if (count > 0) {
                const std::uint32_t first = request.written;
                naive.write(owner_of(id), count);
                pool->extend(owner_of(id), first + count);
                Lease lease = pool->open(owner_of(id), first, count);
                compute(*pool, lease, checked);
                REQUIRE(pool->settle(std::move(lease)));
            }
        } else if (choice < 85 && !live.empty()) {
            const Owner owner = owner_of(live[below(static_cast<std::uint32_t>(live.size()))]);
            const bool quarantine = naive.quarantined < 3 && below(200) == 0;
            naive.release(owner, quarantine);
            if (quarantine) {
                pool->quarantine(owner, FreeReason::violation);
            } else {
                pool->release(owner, FreeReason::finished);
            }
        } else if (choice >= 85) {
            const std::uint32_t most = below(4);
            const std::size_t waiting = naive.draining.size();
            naive.scrub(most);
            REQUIRE(pool->scrub_drained(most) == std::min<std::size_t>(most, waiting));
        }
        compare(*pool, naive);
    }
    CHECK(last_request > 100);
}

TEST_CASE("the pool does what a naive model does, at each of 24,000 random steps") {
    for (std::uint32_t seed = 1; seed <= 8; ++seed) {
        random_life(seed, 3000);
    }
}

}  // namespace
}  // namespace kvw
