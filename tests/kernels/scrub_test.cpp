#include <doctest/doctest.h>

#include "tests/kernels/kv_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

const TileShape kShape{2, 3, 32};

struct WrittenWorld : KvWorld {
    WrittenWorld() : KvWorld(kShape, 32) {
        const std::vector<float> rows = sample(32 * row_floats(), 1);
        append(best_kernels(), rows, rows, 0, 32);
    }
};

}  // namespace

TEST_CASE("a scrub leaves nothing but poison and a header that names nobody") {
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(kShape, 32);
        const std::vector<float> rows = sample(32 * world.row_floats(), 1);
        world.append(*kernels, rows, rows, 0, 32);
        const std::uint32_t page = world.pages[0].page;
        const std::uint32_t other = world.pages[1].page;
        const auto bytes_of = [&](std::uint32_t number) {
            const std::uint8_t* begin = world.memory.tile(number, 0, 0);
            return std::vector<std::uint8_t>(begin, begin + kShape.page_bytes());
        };
        const std::vector<std::uint8_t> other_before = bytes_of(other);
        std::uint32_t mismatches = 0;
        const std::uint64_t witness =
            kernels->scrub(world.memory, page, kReader, kGeneration, &mismatches);

        CHECK(mismatches == 0);
        std::uint64_t predicted = 0;
        for (std::uint32_t layer = 0; layer < 2; ++layer) {
            for (std::uint32_t head = 0; head < 3; ++head) {
                predicted += 16 * access_factor(layer, head, AccessKind::scrub) *
                             page_mix(3, 41, kGeneration, page);
                const TileHeader& header = world.header(0, layer, head);
                CHECK(header.state == TileState::freed);
                CHECK(header.tenant == 0);
                CHECK(header.request == 0);
                CHECK(header.rows_written == 0);
                CHECK(header.generation == kGeneration);
                CHECK(header.page == page);
                CHECK(header.layer == layer);
                CHECK(header.head == head);
                std::uint8_t* tile = world.memory.tile(page, layer, head);
                const std::size_t named = offsetof(TileHeader, padding);
                for (std::size_t i = named; i < kShape.tile_bytes(); i += 2) {
                    REQUIRE(tile[i] == (kPoisonHalf & 0xff));
                    REQUIRE(tile[i + 1] == kPoisonHalf >> 8);
                }
                for (std::uint32_t row = 0; row < kPageTokens; ++row) {
                    const std::size_t index = world.memory.tile_index(page, layer, head);
                    REQUIRE(world.writers[index * kPageTokens + row] == 0);
                }
            }
        }
        CHECK(witness == predicted);
        CHECK(bytes_of(other) == other_before);
    }
}

TEST_CASE("a scrub counts every tile that is not the owner's, and scrubs it all the same") {
    const auto mismatches_with = [](Owner owner, std::uint32_t generation, auto&& change) {
        KvWorld world(kShape, 32);
        change(world);
        std::uint32_t mismatches = 100;  // counted on
        best_kernels().scrub(world.memory, world.pages[0].page, owner, generation, &mismatches);
        CHECK(world.header(0, 1, 2).state == TileState::freed);
        return mismatches - 100;
    };
    const auto nothing = [](KvWorld&) {};
    CHECK(mismatches_with(kReader, kGeneration, nothing) == 0);
    CHECK(mismatches_with({TenantId{4}, RequestId{41}}, kGeneration, nothing) == 6);
    CHECK(mismatches_with({TenantId{3}, RequestId{40}}, kGeneration, nothing) == 6);
    CHECK(mismatches_with(kReader, kGeneration + 1, nothing) == 6);
    CHECK(mismatches_with(Owner{}, 0, nothing) == 6);
    CHECK(mismatches_with(kReader, kGeneration, [](KvWorld& w) { w.header(0, 1, 2).layer = 0; }) ==
          1);
    CHECK(mismatches_with(kReader, kGeneration,
                          [](KvWorld& w) { w.header(0, 0, 0).state = TileState::freed; }) == 1);
}

TEST_CASE("a virgin page is scrubbed for nobody, with the witness of empty headers") {
    KvWorld world(kShape, 32);
    std::vector<bool> stamped(world.memory.pages, false);
    for (const PageRef& entry : world.pages) {
        stamped[entry.page] = true;
    }
    const auto page = static_cast<std::uint32_t>(std::find(stamped.begin(), stamped.end(), false) -
                                                 stamped.begin());
    std::uint32_t mismatches = 0;
    const std::uint64_t witness = best_kernels().scrub(world.memory, page, Owner{}, 0, &mismatches);
    CHECK(mismatches == 0);
    CHECK(witness == 6 * 16 * page_mix(0, 0, 0, 0) * access_factor(0, 0, AccessKind::scrub));
    // Once scrubbed it is no longer virgin.
    best_kernels().scrub(world.memory, page, Owner{}, 0, &mismatches);
    CHECK(mismatches == 6);
}

TEST_CASE("stamping looks for poison in each tile and names the new owner in every header") {
    WrittenWorld world;
    const std::uint32_t page = world.pages[0].page;
    std::uint32_t mismatches = 0, checked = 0;
    best_kernels().scrub(world.memory, page, kReader, kGeneration, &mismatches);
    const Owner next{TenantId{5}, RequestId{99}};
    CHECK(stamp_page(world.memory, page, next, kGeneration + 1, &checked) == 0);
    CHECK(checked == 4 * 6);
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
        for (std::uint32_t head = 0; head < 3; ++head) {
            const TileHeader& header = world.header(0, layer, head);
            CHECK(header.state == TileState::owned);
            CHECK(header.tenant == 5);
            CHECK(header.request == 99);
            CHECK(header.generation == kGeneration + 1);
            CHECK(header.page == page);
            CHECK(header.layer == layer);
            CHECK(header.head == head);
            CHECK(header.rows_written == 0);
        }
    }
    stamp_page(world.memory, page, next, kGeneration + 2, &checked);
    CHECK(checked == 8 * 6);  // counted on
}

TEST_CASE("a page that was not scrubbed is seen when it is stamped") {
    WrittenWorld world;
    std::uint32_t checked = 0;
    CHECK(stamp_page(world.memory, world.pages[0].page, kReader, kGeneration + 1, &checked) ==
          4 * 6);

    // Nor is one whose scrub stopped before the last tile's values.
    std::uint32_t mismatches = 0;
    best_kernels().scrub(world.memory, world.pages[1].page, kReader, kGeneration + 1, &mismatches);
    std::uint8_t* tile = world.memory.tile(world.pages[1].page, 1, 2);
    tile_values(tile, kShape)[kPageTokens * kShape.head_dim - 1] = 0x3c00;
    CHECK(stamp_page(world.memory, world.pages[1].page, kReader, kGeneration + 2, &checked) == 1);
}
