// The operations of the hash model: the sum is that of every visible row, and all evidence is what
// the reference leaves over the same headers.
#include <doctest/doctest.h>

#include <random>
#include <utility>

#include "kernels/sim/operations.h"
#include "tests/kernels/kv_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

constexpr TileShape kShape{2, 2, 16};
constexpr std::uint32_t kQueryHeads = 4;
constexpr Owner kNeighbour{kReader.tenant, RequestId{77}};
constexpr Owner kForeign{TenantId{8}, RequestId{78}};

// k of `positions` rows, and the word that each row and head of it becomes.
struct HashRows {
    std::vector<float> k;
    std::vector<std::uint64_t> words;

    HashRows(const TileShape& shape, std::uint32_t positions, std::uint32_t seed)
        : k(std::size_t{positions} * shape.heads * shape.head_dim) {
        for (std::size_t i = 0; i < std::size_t{positions} * shape.heads; ++i) {
            const std::uint64_t hash = mix64((std::uint64_t{seed} << 32) + i + 1);
            std::memcpy(&k[i * shape.head_dim], &hash, sizeof hash);
            words.push_back(hash | sim::kStored);
        }
    }
};

std::vector<sim::Attended> attend(const KvMemory& memory, const SequenceView& sequence,
                                  std::uint32_t layer = 0, std::uint32_t kv_head = 0,
                                  bool checked = false) {
    const std::size_t row_floats = std::size_t{kQueryHeads} * memory.shape.head_dim;
    const std::size_t rows = sequence.batch_row + sequence.count;
    std::vector<float> q(rows * row_floats), out(rows * row_floats);
    const AttentionArgs args{.memory = memory,
                             .layer = layer,
                             .query_heads = kQueryHeads,
                             .q = q.data(),
                             .out = out.data()};
    const AttentionItem item{.sequence = &sequence, .kv_head = kv_head, .row_end = sequence.count};
    (checked ? sim_kernels().attend_checked : sim_kernels().attend)(args, item);
    const std::uint32_t group = kQueryHeads / memory.shape.heads;
    std::vector<sim::Attended> attended(sequence.count);
    for (std::uint32_t i = 0; i < sequence.count; ++i) {
        for (std::uint32_t head = 0; head < kQueryHeads; ++head) {
            sim::Attended found{};
            std::memcpy(&found,
                        &out[(sequence.batch_row + i) * row_floats + head * memory.shape.head_dim],
                        sizeof found);
            if (head / group != kv_head) {
                CHECK(found.sum == 0);  // another KV head's, not touched
            } else if (head % group == 0) {
                attended[i] = found;
            } else {
                CHECK(found.sum == attended[i].sum);
            }
        }
    }
    return attended;
}

sim::Attended attend_last(KvWorld& world, std::uint32_t position, bool check_headers = true,
                          bool checked = false) {
    SequenceView view = world.view(position, 1);
    view.check_headers = check_headers;
    return attend(world.memory, view, 0, 0, checked)[0];
}

// Rewrites whose rows a page holds, in every tile: what a wrong page table would lead to.
void give_to(KvWorld& world, std::uint32_t table_index, Owner owner) {
    for (std::uint32_t layer = 0; layer < world.shape.layers; ++layer) {
        for (std::uint32_t head = 0; head < world.shape.heads; ++head) {
            TileHeader& header = world.header(table_index, layer, head);
            header.tenant = number(owner.tenant);
            header.request = number(owner.request);
        }
    }
}

// Everything that a step leaves for pool, ledger and prover.
std::string evidence(const SequenceReport& report) {
    std::string text = "witness " + std::to_string(report.witness) + " read " +
                       std::to_string(report.rows_read) + " written " +
                       std::to_string(report.rows_written) + " faults " +
                       std::to_string(report.faults);
    for (const TileFault& fault : report.first_faults) {
        const TileHeader& loaded = fault.loaded;
        for (const std::uint64_t field :
             {std::uint64_t(fault.access), std::uint64_t{fault.layer}, std::uint64_t{fault.head},
              std::uint64_t{fault.table_index}, std::uint64_t{fault.page},
              std::uint64_t{fault.rows}, loaded.request, std::uint64_t{loaded.tenant},
              std::uint64_t{loaded.generation}, std::uint64_t{loaded.page},
              std::uint64_t{loaded.layer}, std::uint64_t{loaded.head},
              std::uint64_t{loaded.rows_written}, std::uint64_t(loaded.state), fault.shadow_writer,
              std::uint64_t{fault.from_shadow}}) {
            text += ' ';
            text += std::to_string(field);
        }
    }
    return text;
}

// One of the things that can be wrong with what a page table leads to.
void damage(KvWorld& world, std::uint32_t kind, std::uint32_t index, std::uint32_t layer,
            std::uint32_t head) {
    TileHeader& header = world.header(index, layer, head);
    switch (kind) {
        case 0:
            header.tenant += 1;
            break;
        case 1:
            header.request += 1;
            break;
        case 2:
            header.generation += 1;
            break;
        case 3:
            header.page += 1;
            break;
        case 4:
            header.layer ^= 1;
            break;
        case 5:
            header.head ^= 1;
            break;
        case 6:
            header.rows_written -= header.rows_written != 0 ? 1 : 0;
            break;
        case 7:
            header.state = TileState::freed;
            break;
        case 8:
            world.pages[index].page = world.memory.pages + 3;
            break;
        case 9:
            world.writers[world.memory.tile_index(world.pages[index].page, layer, head) *
                          kPageTokens] = 999;
            break;
        case 10:  // a share, as declared
            give_to(world, index, kNeighbour);
            world.pages[index].grantor = kNeighbour.request;
            break;
        case 11:  // a share of another tenant's rows
            give_to(world, index, kForeign);
            world.pages[index].grantor = kForeign.request;
            break;
        default:
            break;
    }
}

}  // namespace

TEST_CASE("sim: witness, counters and faults are those of ref, whatever is wrong with a tile") {
    std::mt19937 random(5);
    const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    for (std::uint32_t round = 0; round < 600; ++round) {
        CAPTURE(round);
        const std::uint32_t positions = 1 + below(90), seed = below(1000);
        const HashRows rows(kShape, positions, seed);
        KvWorld expected(kShape, positions, seed), found(kShape, positions, seed);
        const std::uint32_t first = below(positions), count = positions - first;
        for (KvWorld* world : {&expected, &found}) {
            const Kernels& kernels = world == &found ? sim_kernels() : KvWorld::ref();
            if (first > 0) {
                world->append(kernels, rows.k, rows.k, 0, first);
            }
            world->append(kernels, rows.k, rows.k, first, count);
        }
        REQUIRE(evidence(found.report) == evidence(expected.report));
        REQUIRE(found.report.faults == 0);
        REQUIRE(found.writers == expected.writers);

        const std::uint32_t kind = below(13), index = below((positions + 15) / 16);
        const std::uint32_t layer = below(2), head = below(2);
        const bool check_headers = below(4) != 0, checked = below(2) == 0;
        CAPTURE(kind);
        for (KvWorld* world : {&expected, &found}) {
            const Kernels& kernels = world == &found ? sim_kernels() : KvWorld::ref();
            damage(*world, kind, index, layer, head);
            world->report.clear();
            SequenceView view = world->view(first, count);
            view.check_headers = check_headers;
            std::vector<float> q(std::size_t{count} * kQueryHeads * 16), out(q.size());
            for (std::uint32_t l = 0; l < 2; ++l) {
                const AttentionArgs args{.memory = world->memory,
                                         .layer = l,
                                         .query_heads = kQueryHeads,
                                         .q = q.data(),
                                         .out = out.data()};
                const std::uint32_t middle = count / 2;
                for (std::uint32_t h = 0; h < 2; ++h) {
                    const auto attend = checked ? kernels.attend_checked : kernels.attend;
                    if (middle > 0) {
                        attend(args, {&view, h, 0, middle});
                    }
                    attend(args, {&view, h, middle, count});
                }
            }
        }
        CHECK(evidence(found.report) == evidence(expected.report));
    }
}

TEST_CASE("sim: an append that may not be is refused as ref refuses it") {
    for (std::uint32_t kind = 0; kind < 9; ++kind) {
        CAPTURE(kind);
        const HashRows rows(kShape, 40, kind);
        KvWorld expected(kShape, 40), found(kShape, 40);
        for (KvWorld* world : {&expected, &found}) {
            const Kernels& kernels = world == &found ? sim_kernels() : KvWorld::ref();
            world->append(kernels, rows.k, rows.k, 0, 20);
            damage(*world, kind, 1, 1, 0);
            world->append(kernels, rows.k, rows.k, 20, 20);
        }
        CHECK(found.report.faults != 0);
        CHECK(evidence(found.report) == evidence(expected.report));
    }
}

TEST_CASE("sim: each query row gets the sum of the rows it sees, however rows are divided") {
    const HashRows rows(kShape, 75, 1);
    for (const std::uint32_t chunk : {1u, 5u, 16u, 31u, 75u}) {
        CAPTURE(chunk);
        KvWorld world(kShape, 75);
        std::uint64_t sums[2] = {};
        for (std::uint32_t first = 0; first < 75; first += chunk) {
            const std::uint32_t count = std::min(chunk, 75 - first);
            world.append(sim_kernels(), rows.k, rows.k, first, count);
            const auto head0 = attend(world.memory, world.view(first, count), 1, 0);
            const auto head1 = attend(world.memory, world.view(first, count), 1, 1, true);
            for (std::uint32_t i = 0; i < count; ++i) {
                sums[0] += rows.words[(first + i) * 2];
                sums[1] += rows.words[(first + i) * 2 + 1];
                CHECK(head0[i].sum == sums[0]);
                CHECK(head1[i].sum == sums[1]);
                CHECK(head0[i].poisoned == 0);
            }
        }
        CHECK(world.report.faults == 0);
    }
}

TEST_CASE("sim: a changed bit of any visible row changes the sum, one of a later row does not") {
    const HashRows rows(kShape, 40, 2);
    KvWorld world(kShape, 40);
    world.append(sim_kernels(), rows.k, rows.k, 0, 40);
    const std::uint32_t last = 34;
    const std::uint64_t sum = attend_last(world, last).sum;
    for (std::uint32_t position = 0; position < 40; ++position) {
        CAPTURE(position);
        std::uint8_t* tile = world.memory.tile(world.pages[position / 16].page, 0, 0);
        for (std::uint32_t half = 0; half < sim::kHashHalves; ++half) {
            std::uint16_t& stored = tile_keys(tile)[half * kPageTokens + position % 16];
            stored ^= 0x20;
            CHECK((attend_last(world, last).sum != sum) == (position <= last));
            stored ^= 0x20;
        }
    }
    CHECK(attend_last(world, last).sum == sum);
}

TEST_CASE("sim: a foreign tile is flagged for its reader alone; with the check off it is summed") {
    const HashRows rows(kShape, 48, 3);
    for (const Owner writer : {kNeighbour, kForeign}) {
        KvWorld world(kShape, 48), other(kShape, 48);
        world.append(sim_kernels(), rows.k, rows.k, 0, 48);
        other.append(sim_kernels(), rows.k, rows.k, 0, 48);
        const std::uint64_t sum = attend_last(world, 47).sum;
        give_to(world, 1, writer);

        const std::uint64_t checked = attend_last(world, 47).sum;
        CHECK(attend_last(other, 47).sum == sum);

        CHECK(world.report.faults == 1);
        CHECK(other.report.faults == 0);
        REQUIRE(world.report.first_faults.size() == 1);
        const TileFault& fault = world.report.first_faults[0];
        CHECK(fault.table_index == 1);
        CHECK(fault.loaded.tenant == number(writer.tenant));
        CHECK(fault.loaded.request == number(writer.request));
        std::uint64_t foreign = 0;
        for (std::uint32_t position = 16; position < 32; ++position) {
            foreign += rows.words[position * 2];
        }
        CHECK(checked == sum - foreign);  // masked
        CHECK(attend_last(world, 47, false).sum == sum);
        CHECK(world.report.faults == 1);
    }
}

TEST_CASE("sim: a grant opens the tiles of the request it names, and gives their writer's sum") {
    const HashRows rows(kShape, 20, 4);
    KvWorld world(kShape, 20);
    world.append(sim_kernels(), rows.k, rows.k, 0, 20);
    const std::uint64_t sum = attend_last(world, 19).sum;
    give_to(world, 0, kNeighbour);
    world.pages[0].grantor = kNeighbour.request;
    CHECK(attend_last(world, 19).sum == sum);
    CHECK(world.report.faults == 0);

    world.pages[0].grantor = RequestId{number(kNeighbour.request) + 1};
    CHECK(attend_last(world, 19).sum != sum);
    CHECK(world.report.faults == 1);

    give_to(world, 0, kForeign);
    world.pages[0].grantor = kForeign.request;
    CHECK(attend_last(world, 19).sum != sum);
    CHECK(world.report.faults == 2);
}

TEST_CASE("sim: a row that nobody wrote is known wherever nothing stops its reading") {
    const HashRows rows(kShape, 40, 5);
    for (std::uint32_t written = 0; written < 40; ++written) {
        CAPTURE(written);
        KvWorld world(kShape, 48);
        if (written > 0) {
            world.append(sim_kernels(), rows.k, rows.k, 0, written);
            CHECK(attend_last(world, written - 1, false).poisoned == 0);
        }
        CHECK(attend_last(world, written, false).poisoned == 1);
        CHECK(attend_last(world, 47, false).poisoned == 1);
        CHECK(attend_last(world, written).poisoned == 0);  // refused, so never read
        CHECK(world.report.faults == 1);
    }
}

TEST_CASE("sim: one half of poison is enough, and no hash looks like it") {
    KvWorld world(kShape, 32);
    HashRows rows(kShape, 32, 6);
    const std::uint64_t all_poison = 0x0001000100010001ull * kPoisonHalf;
    for (std::size_t i = 0; i < rows.k.size(); i += kShape.head_dim) {
        std::memcpy(&rows.k[i], &all_poison, sizeof all_poison);
    }
    world.append(sim_kernels(), rows.k, rows.k, 0, 32);
    CHECK(attend_last(world, 31).poisoned == 0);
    for (const std::uint16_t half : std::vector<std::uint16_t>(
             reinterpret_cast<std::uint16_t*>(world.memory.tile(world.pages[0].page, 0, 0) + 64),
             reinterpret_cast<std::uint16_t*>(world.memory.tile(world.pages[0].page, 0, 0) +
                                              kShape.tile_bytes()))) {
        CHECK(half != kPoisonHalf);
    }
    for (const std::uint32_t position : {0u, 7u, 15u, 16u, 31u}) {
        for (std::uint32_t half = 0; half < sim::kHashHalves; ++half) {
            std::uint8_t* tile = world.memory.tile(world.pages[position / 16].page, 0, 0);
            std::uint16_t& stored = tile_keys(tile)[half * kPageTokens + position % 16];
            const std::uint16_t before = std::exchange(stored, kPoisonHalf);
            CHECK(attend_last(world, 31).poisoned == 1);
            stored = before;
        }
    }
}

TEST_CASE("sim: checked execution masks rows whose writer the header does not show") {
    const HashRows rows(kShape, 32, 7);
    KvWorld world(kShape, 32);
    world.append(sim_kernels(), rows.k, rows.k, 0, 32);
    const std::uint64_t sum = attend_last(world, 31, true, true).sum;
    CHECK(world.report.faults == 0);
    world.writers[world.memory.tile_index(world.pages[0].page, 0, 0) * kPageTokens + 9] = 555;
    CHECK(attend_last(world, 31).sum == sum);  // only the shadow table knows
    CHECK(world.report.faults == 0);
    CHECK(attend_last(world, 31, true, true).sum != sum);
    REQUIRE(world.report.faults == 1);
    CHECK(world.report.first_faults[0].from_shadow);
    CHECK(world.report.first_faults[0].shadow_writer == 555);
}

TEST_CASE("sim: one chunk may hold a long prompt") {
    const TileShape shape{1, 1, 16};
    const std::uint32_t positions = 60'000;
    const HashRows rows(shape, positions, 8);
    KvWorld world(shape, positions);
    world.append(sim_kernels(), rows.k, rows.k, 0, positions);
    const auto attended = attend(world.memory, world.view(0, positions));
    std::uint64_t sum = 0;
    for (const std::uint64_t word : rows.words) {
        sum += word;
    }
    CHECK(attended.back().sum == sum);
    CHECK(world.report.rows_read == std::uint64_t{positions} * (positions + 1) / 2);
    CHECK(world.report.faults == 0);
}
