#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <functional>

#include "kernels/half.h"
#include "tests/kernels/kv_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

// What append stores for each of 16 floats, one per column.
std::vector<std::uint16_t> stored_halves(const Kernels& kernels, const std::vector<float>& x) {
    std::vector<std::uint16_t> halves;
    for (std::size_t i = 0; i < x.size(); i += 4096) {
        KvWorld world({1, 1, 512}, 8);
        std::vector<float> rows(8 * 512, 0.0f);
        std::copy(x.begin() + i, x.begin() + std::min(x.size(), i + 4096), rows.begin());
        world.append(kernels, rows, rows, 0, 8);
        std::uint8_t* tile = world.memory.tile(world.pages[0].page, 0, 0);
        for (std::size_t j = 0; j < 4096 && i + j < x.size(); ++j) {
            const std::uint16_t key = tile_keys(tile)[j % 512 * kPageTokens + j / 512];
            REQUIRE(key == tile_values(tile, world.shape)[j]);
            halves.push_back(key);
        }
    }
    return halves;
}

std::uint64_t predicted_write(const PageRef& entry, std::uint32_t layer, std::uint32_t head) {
    return page_mix(number(kReader.tenant), number(kReader.request), entry.generation, entry.page) *
           access_factor(layer, head, AccessKind::write);
}

}  // namespace

TEST_CASE("every half survives being widened and stored again") {
    std::vector<float> x;
    for (std::uint32_t half = 0; half < 65536; ++half) {
        x.push_back(float_from_half(static_cast<std::uint16_t>(half)));
    }
    for (const Kernels* kernels : all_variants()) {
        CAPTURE(kernels->isa);
        const std::vector<std::uint16_t> stored = stored_halves(*kernels, x);
        for (std::uint32_t half = 0; half < 65536; ++half) {
            const bool is_nan = (half & 0x7fff) > 0x7c00;
            REQUIRE(stored[half] == (is_nan ? half | 0x200 : half));
        }
    }
}

TEST_CASE("between two halves the nearer one is stored, and the even one of equals") {
    std::vector<float> x;
    std::vector<std::uint16_t> expected;
    for (std::uint32_t half = 0; half < 0x7c00; ++half) {
        const float low = float_from_half(static_cast<std::uint16_t>(half));
        // Behind the largest half comes infinity, at the place where the next one would be.
        const float high =
            half == 0x7bff ? 65536.0f : float_from_half(static_cast<std::uint16_t>(half + 1));
        const float middle = (low + high) / 2;
        const auto next = static_cast<std::uint16_t>(half + 1);
        const auto even = static_cast<std::uint16_t>(half % 2 == 0 ? half : half + 1);
        for (const float sign : {1.0f, -1.0f}) {
            const std::uint16_t bit = sign < 0 ? 0x8000 : 0;
            x.insert(x.end(), {sign * std::nextafter(middle, 0.0f), sign * middle,
                               sign * std::nextafter(middle, INFINITY)});
            expected.push_back(static_cast<std::uint16_t>(half | bit));
            expected.push_back(even | bit);
            expected.push_back(next | bit);
        }
    }
    for (const Kernels* kernels : all_variants()) {
        CAPTURE(kernels->isa);
        CHECK(same_bytes(stored_halves(*kernels, x), expected));
    }
}

TEST_CASE("append leaves the same bytes on every instruction set, however it is cut into steps") {
    for (const std::uint32_t head_dim : {16u, 64u, 80u}) {
        const TileShape shape{2, 3, head_dim};
        const std::uint32_t positions = 53;
        const std::vector<float> k = sample(positions * shape.heads * head_dim, 1, 9.0f);
        const std::vector<float> v = sample(positions * shape.heads * head_dim, 2, 9.0f);
        KvWorld expected(shape, positions);
        expected.append(KvWorld::ref(), k, v, 0, positions);
        for (const Kernels* kernels : all_variants()) {
            for (const std::uint32_t step : {1u, 5u, 16u, 31u, 53u}) {
                CAPTURE(kernels->isa);
                CAPTURE(step);
                KvWorld world(shape, positions);
                for (std::uint32_t first = 0; first < positions; first += step) {
                    world.append(*kernels, k, v, first, std::min(step, positions - first),
                                 step % 2 == 0);
                }
                CHECK(world.contents() == expected.contents());
                CHECK(world.report.faults == 0);
                CHECK(world.report.witness == expected.report.witness);
                CHECK(world.report.rows_written ==
                      std::uint64_t{positions} * shape.tiles_per_page());
            }
        }
    }
}

TEST_CASE("the write witness is that of the rows stored, tile by tile") {
    const TileShape shape{2, 2, 16};
    KvWorld world(shape, 40);
    const std::vector<float> rows = sample(40 * world.row_floats(), 1);
    world.append(best_kernels(), rows, rows, 0, 37);
    std::uint64_t witness = 0;
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
        for (std::uint32_t head = 0; head < 2; ++head) {
            for (std::uint32_t position = 0; position < 37; ++position) {
                witness += predicted_write(world.pages[position / 16], layer, head);
            }
        }
    }
    CHECK(world.report.witness == witness);
    CHECK(world.header(2, 1, 1).rows_written == 5);
}

TEST_CASE("append refuses a tile whose header is not the one meant, and leaves it untouched") {
    struct Case {
        const char* name;
        std::function<void(TileHeader&)> change;
    };
    const Case cases[] = {
        {"tenant", [](TileHeader& h) { h.tenant += 1; }},
        {"request", [](TileHeader& h) { h.request += 1; }},
        {"generation", [](TileHeader& h) { h.generation -= 1; }},
        {"page", [](TileHeader& h) { h.page += 1; }},
        {"layer", [](TileHeader& h) { h.layer += 1; }},
        {"head", [](TileHeader& h) { h.head += 1; }},
        {"freed", [](TileHeader& h) { h.state = TileState::freed; }},
        {"virgin", [](TileHeader& h) { h = TileHeader{}; }},
        {"a row already there", [](TileHeader& h) { h.rows_written = 1; }},
    };
    for (const Kernels* kernels : all_variants()) {
        for (const Case& c : cases) {
            CAPTURE(kernels->isa);
            CAPTURE(c.name);
            KvWorld world({1, 2, 16}, 32);
            c.change(world.header(1, 0, 1));
            const TileHeader changed = world.header(1, 0, 1);
            const std::vector<float> rows = sample(32 * world.row_floats(), 1);
            world.append(*kernels, rows, rows, 0, 20);

            REQUIRE(world.report.faults == 1);
            const TileFault& fault = world.report.first_faults[0];
            CHECK(fault.access == AccessKind::write);
            CHECK(fault.layer == 0);
            CHECK(fault.head == 1);
            CHECK(fault.table_index == 1);
            CHECK(fault.page == world.pages[1].page);
            CHECK(fault.rows == 0);
            CHECK(std::memcmp(&fault.loaded, &changed, sizeof(changed)) == 0);
            const std::uint8_t* tile = world.memory.tile(world.pages[1].page, 0, 1);
            CHECK(std::memcmp(tile, &changed, sizeof(changed)) == 0);
            for (std::size_t i = 0; i < 2 * 16 * kPageTokens; ++i) {
                REQUIRE(tile_keys(const_cast<std::uint8_t*>(tile))[i] == kPoisonHalf);
            }
            CHECK(world.report.rows_written == 20 + 16);  // 20 of head 0, 16 of head 1
            CHECK(world.report.witness == predicted_write(world.pages[0], 0, 0) * 16 +
                                              predicted_write(world.pages[1], 0, 0) * 4 +
                                              predicted_write(world.pages[0], 0, 1) * 16);
        }
    }
}

TEST_CASE("a row may not be written twice, nor one left out; a grant does not allow writing") {
    for (const Kernels* kernels : all_variants()) {
        KvWorld world({1, 1, 16}, 16);
        const std::vector<float> rows = sample(16 * world.row_floats(), 1);
        world.append(*kernels, rows, rows, 0, 4);
        const std::vector<std::uint8_t> before = world.contents();
        world.append(*kernels, rows, rows, 3, 1);
        world.append(*kernels, rows, rows, 5, 1);
        CHECK(world.report.faults == 2);
        CHECK(world.report.first_faults[0].rows == 3);
        world.header(0, 0, 0).request = 40;
        world.pages[0].grantor = RequestId{40};
        world.append(*kernels, rows, rows, 4, 1);
        CHECK(world.report.faults == 3);
        world.header(0, 0, 0).request = number(kReader.request);
        CHECK(world.contents() == before);
    }
}

TEST_CASE("a page number outside the pool is a fault, not an access") {
    for (const Kernels* kernels : all_variants()) {
        KvWorld world({1, 1, 16}, 16);
        const std::vector<float> rows = sample(16 * world.row_floats(), 1);
        world.pages[0].page = world.memory.pages;
        world.append(*kernels, rows, rows, 0, 1);
        CHECK(world.report.faults == 1);
        CHECK(world.report.first_faults[0].page == world.memory.pages);
        CHECK(world.report.witness == 0);
    }
}

TEST_CASE("only the checked append records who wrote each row") {
    for (const Kernels* kernels : all_variants()) {
        for (const bool checked : {false, true}) {
            KvWorld world({2, 2, 16}, 32);
            const std::vector<float> rows = sample(32 * world.row_floats(), 1);
            world.append(*kernels, rows, rows, 0, 18, checked);
            for (std::uint32_t page = 0; page < world.memory.pages; ++page) {
                for (std::size_t i = 0; i < 4 * kPageTokens; ++i) {
                    const bool written = page == world.pages[0].page ||
                                         (page == world.pages[1].page && i % kPageTokens < 2);
                    REQUIRE(world.writers[page * 4 * kPageTokens + i] ==
                            (checked && written ? number(kReader.request) : 0));
                }
            }
        }
    }
}
