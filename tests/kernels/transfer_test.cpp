#include "kernels/transfer.h"

#include <doctest/doctest.h>

#include <functional>

#include "tests/kernels/kv_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

const Owner kWriter{kReader.tenant, RequestId{40}};  // another request of the reader's tenant

// Page 0 of the world holds `rows` rows; page 1 is empty and the reader's own.
struct TwoPages : KvWorld {
    explicit TwoPages(TileShape tile_shape, std::uint32_t rows = kPageTokens)
        : KvWorld(tile_shape, 32) {
        const std::vector<float> k = sample(rows * row_floats(), 1, 9.0f);
        const std::vector<float> v = sample(rows * row_floats(), 2, 9.0f);
        append(ref(), k, v, 0, rows);
        report.clear();
    }
    PageMove move(std::uint32_t row_begin, std::uint32_t row_end) {
        return {.reader = kReader,
                .source = pages[0],
                .destination = pages[1],
                .table_index = 5,
                .row_begin = row_begin,
                .row_end = row_end,
                .report = &report};
    }
    // The page becomes one that kWriter wrote.
    void give_away() {
        for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
            for (std::uint32_t head = 0; head < shape.heads; ++head) {
                header(0, layer, head).request = number(kWriter.request);
                std::fill_n(shadow(0, layer, head), kPageTokens, number(kWriter.request));
            }
        }
        pages[0].grantor = kWriter.request;
    }
    std::uint64_t* shadow(std::uint32_t index, std::uint32_t layer, std::uint32_t head) {
        return memory.writers + memory.tile_index(pages[index].page, layer, head) * kPageTokens;
    }
    std::uint16_t key(std::uint32_t index, std::uint32_t layer, std::uint32_t head, std::uint32_t d,
                      std::uint32_t row) const {
        return tile_keys(memory.tile(pages[index].page, layer, head))[d * kPageTokens + row];
    }
    std::uint16_t value(std::uint32_t index, std::uint32_t layer, std::uint32_t head,
                        std::uint32_t d, std::uint32_t row) const {
        return tile_values(memory.tile(pages[index].page, layer, head),
                           shape)[row * shape.head_dim + d];
    }
    // Rows [0, rows) of both pages are equal, and what comes behind them in page 1 is poison.
    bool arrived(std::uint32_t rows) const {
        for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
            for (std::uint32_t head = 0; head < shape.heads; ++head) {
                for (std::uint32_t row = 0; row < kPageTokens; ++row) {
                    for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
                        const bool moved = row < rows;
                        if (key(1, layer, head, d, row) !=
                                (moved ? key(0, layer, head, d, row) : kPoisonHalf) ||
                            value(1, layer, head, d, row) !=
                                (moved ? value(0, layer, head, d, row) : kPoisonHalf)) {
                            return false;
                        }
                    }
                }
            }
        }
        return true;
    }
};

std::uint64_t predicted(Owner owner, const PageRef& entry, std::uint32_t layer, std::uint32_t head,
                        AccessKind kind) {
    return page_mix(number(owner.tenant), number(owner.request), entry.generation, entry.page) *
           access_factor(layer, head, kind);
}

using Transfer = void (*)(const KvMemory&, const PageMove&);
constexpr Transfer kVariants[] = {transfer_page, transfer_page_checked};

}  // namespace

TEST_CASE(
    "the rows of a page arrive as they were, however they are cut, and nothing else changes") {
    for (const std::uint32_t head_dim : {16u, 64u, 80u}) {
        for (const std::uint32_t rows : {1u, 5u, 15u, 16u}) {
            for (const std::uint32_t run : {1u, 3u, 16u}) {
                for (const Transfer transfer : kVariants) {
                    TwoPages world({2, 3, head_dim}, rows);
                    const std::vector<std::uint8_t> before = world.contents();
                    for (std::uint32_t begin = 0; begin < rows; begin += run) {
                        transfer(world.memory, world.move(begin, std::min(begin + run, rows)));
                    }
                    REQUIRE(world.report.faults == 0);
                    CHECK(world.arrived(rows));
                    CHECK(world.header(1, 1, 2).rows_written == rows);
                    CHECK(world.report.rows_read == rows * 6);
                    CHECK(world.report.rows_written == rows * 6);
                    const std::size_t page = world.shape.page_bytes();
                    for (std::uint32_t i = 0; i < world.memory.pages; ++i) {
                        if (i != world.pages[1].page) {
                            REQUIRE(std::memcmp(world.bytes.get() + i * page,
                                                before.data() + i * page, page) == 0);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("the witness of a move is that of the source read and the destination written") {
    for (const bool granted : {false, true}) {
        for (const Transfer transfer : kVariants) {
            TwoPages world({2, 2, 16}, 11);
            if (granted) {
                world.give_away();
            }
            transfer(world.memory, world.move(0, 11));
            std::uint64_t witness = 0;
            for (std::uint32_t layer = 0; layer < 2; ++layer) {
                for (std::uint32_t head = 0; head < 2; ++head) {
                    witness += predicted(granted ? kWriter : kReader, world.pages[0], layer, head,
                                         AccessKind::move) *
                               11;
                    witness +=
                        predicted(kReader, world.pages[1], layer, head, AccessKind::write) * 11;
                }
            }
            CHECK(world.report.faults == 0);
            CHECK(world.report.witness == witness);
        }
    }
}

TEST_CASE("a source whose header is not the one meant is reported, and its tile does not move") {
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
        {"a row too few", [](TileHeader& h) { h.rows_written = 9; }},
    };
    for (const Transfer transfer : kVariants) {
        for (const Case& c : cases) {
            CAPTURE(c.name);
            TwoPages world({1, 2, 16}, 12);
            c.change(world.header(0, 0, 1));
            const TileHeader changed = world.header(0, 0, 1);
            transfer(world.memory, world.move(0, 10));

            REQUIRE(world.report.faults == 1);
            const TileFault& fault = world.report.first_faults[0];
            CHECK(fault.access == AccessKind::move);
            CHECK(fault.head == 1);
            CHECK(fault.table_index == 5);
            CHECK(fault.page == world.pages[0].page);
            CHECK(fault.rows == 10);
            CHECK(std::memcmp(&fault.loaded, &changed, sizeof(changed)) == 0);
            CHECK(world.header(1, 0, 0).rows_written == 10);
            CHECK(world.header(1, 0, 1).rows_written == 0);
            CHECK(world.key(1, 0, 1, 3, 0) == kPoisonHalf);
            CHECK(world.report.rows_read == 20);  // it was looked at
            CHECK(world.report.rows_written == 10);
            CHECK(world.report.witness ==
                  predicted(kReader, world.pages[0], 0, 0, AccessKind::move) * 10 +
                      predicted(kReader, world.pages[1], 0, 0, AccessKind::write) * 10 +
                      page_mix(changed.tenant, changed.request, changed.generation, changed.page) *
                          access_factor(changed.layer, changed.head, AccessKind::move) * 10);
        }
    }
}

TEST_CASE("a grant lets rows of another request of the tenant move, not those of another tenant") {
    for (const Transfer transfer : kVariants) {
        TwoPages own({1, 1, 16});
        own.give_away();
        transfer(own.memory, own.move(0, 16));
        CHECK(own.report.faults == 0);
        CHECK(own.header(1, 0, 0).request == number(kReader.request));
        CHECK(own.arrived(16));

        TwoPages ungranted({1, 1, 16});
        ungranted.give_away();
        ungranted.pages[0].grantor = {};
        transfer(ungranted.memory, ungranted.move(0, 16));
        CHECK(ungranted.report.faults == 1);

        TwoPages foreign({1, 1, 16});
        foreign.give_away();
        foreign.header(0, 0, 0).tenant += 1;
        transfer(foreign.memory, foreign.move(0, 16));
        CHECK(foreign.report.faults == 1);
        CHECK(foreign.arrived(0));
    }
}

TEST_CASE("a late writer is refused: a destination that is not the reader's stays as it is") {
    struct Case {
        const char* name;
        std::function<void(TileHeader&)> change;
    };
    const Case cases[] = {
        {"tenant", [](TileHeader& h) { h.tenant += 1; }},
        {"request", [](TileHeader& h) { h.request += 1; }},
        {"generation", [](TileHeader& h) { h.generation += 1; }},
        {"page", [](TileHeader& h) { h.page += 1; }},
        {"layer", [](TileHeader& h) { h.layer += 1; }},
        {"head", [](TileHeader& h) { h.head += 1; }},
        {"freed", [](TileHeader& h) { h.state = TileState::freed; }},
        {"a row already there", [](TileHeader& h) { h.rows_written = 1; }},
    };
    for (const Transfer transfer : kVariants) {
        for (const Case& c : cases) {
            CAPTURE(c.name);
            TwoPages world({1, 2, 16});
            world.pages[1].grantor = RequestId{77};  // a grant is for reading
            c.change(world.header(1, 0, 0));
            const TileHeader changed = world.header(1, 0, 0);
            transfer(world.memory, world.move(0, 16));

            REQUIRE(world.report.faults == 1);
            const TileFault& fault = world.report.first_faults[0];
            CHECK(fault.access == AccessKind::write);
            CHECK(fault.head == 0);
            CHECK(fault.page == world.pages[1].page);
            CHECK(fault.rows == 0);
            CHECK(std::memcmp(&fault.loaded, &changed, sizeof(changed)) == 0);
            CHECK(std::memcmp(&world.header(1, 0, 0), &changed, sizeof(changed)) == 0);
            CHECK(world.key(1, 0, 0, 0, 0) == kPoisonHalf);
            CHECK(world.key(1, 0, 1, 0, 0) == world.key(0, 0, 1, 0, 0));
            CHECK(world.shadow(1, 0, 0)[0] == 0);
            CHECK(world.report.rows_read == 32);
            CHECK(world.report.rows_written == 16);
        }
    }
}

TEST_CASE("a page number outside the pool is a fault, not an access") {
    for (const Transfer transfer : kVariants) {
        TwoPages source({1, 1, 16});
        source.pages[0].page = source.memory.pages;
        transfer(source.memory, source.move(0, 16));
        REQUIRE(source.report.faults == 1);
        CHECK(source.report.first_faults[0].access == AccessKind::move);
        TwoPages destination({1, 1, 16});
        destination.pages[1].page = 0xffffffff;
        transfer(destination.memory, destination.move(0, 16));
        REQUIRE(destination.report.faults == 1);
        CHECK(destination.report.first_faults[0].access == AccessKind::write);
    }
}

TEST_CASE("without the check of headers the source moves and the witness follows its header") {
    TwoPages world({1, 1, 16});
    world.header(0, 0, 0).request = 99;
    PageMove move = world.move(0, 16);
    move.check_headers = false;
    transfer_page(world.memory, move);
    CHECK(world.report.faults == 0);
    CHECK(world.arrived(16));
    CHECK(world.report.witness ==
          predicted({kReader.tenant, RequestId{99}}, world.pages[0], 0, 0, AccessKind::move) * 16 +
              predicted(kReader, world.pages[1], 0, 0, AccessKind::write) * 16);
}

TEST_CASE("checked execution knows who wrote each row, whatever the header says") {
    TwoPages world({1, 1, 16});
    world.shadow(0, 0, 0)[9] = 77;
    PageMove move = world.move(0, 9);
    transfer_page_checked(world.memory, move);
    CHECK(world.report.faults == 0);  // the row is not among those that move
    for (std::uint32_t row = 0; row < kPageTokens; ++row) {
        CHECK(world.shadow(1, 0, 0)[row] == (row < 9 ? number(kReader.request) : 0));
    }
    move = world.move(9, 12);
    transfer_page_checked(world.memory, move);
    REQUIRE(world.report.faults == 1);
    CHECK(world.report.first_faults[0].from_shadow);
    CHECK(world.report.first_faults[0].shadow_writer == 77);
    CHECK(world.arrived(9));

    // A grant allows its grantor's rows, and neither nobody's nor anybody else's.
    TwoPages shared({1, 1, 16});
    shared.give_away();
    shared.shadow(0, 0, 0)[3] = 0;
    transfer_page_checked(shared.memory, shared.move(0, 16));
    REQUIRE(shared.report.faults == 1);
    CHECK(shared.report.first_faults[0].from_shadow);
    CHECK(shared.report.first_faults[0].shadow_writer == 0);
    shared.shadow(0, 0, 0)[3] = 5;
    transfer_page_checked(shared.memory, shared.move(0, 16));
    CHECK(shared.report.faults == 2);
    shared.shadow(0, 0, 0)[3] = number(kWriter.request);
    transfer_page_checked(shared.memory, shared.move(0, 16));
    CHECK(shared.report.faults == 2);
    CHECK(shared.shadow(1, 0, 0)[3] == number(kReader.request));
}
