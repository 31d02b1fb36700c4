// The hash model: its output depends on every row it reads, on nothing else, and its evidence is
// that of any model.
#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "kernels/sim/operations.h"
#include "src/base/witness_mix.h"
#include "src/model/model.h"
#include "tests/model/cache.h"

using namespace kvw;
using namespace kvw::test;

namespace {

struct Outcome {
    std::vector<float> logits;  // of the last position
    std::vector<std::uint64_t> layers;
    std::uint64_t witness = 0, rows_read = 0, rows_written = 0, faults = 0;
    bool nonfinite = false;
    bool same_bits(const Outcome& other) const {
        return logits.size() == other.logits.size() && layers == other.layers &&
               std::memcmp(logits.data(), other.logits.data(), logits.size() * sizeof(float)) == 0;
    }
};

std::vector<std::int32_t> random_tokens(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> tokens(count);
    for (std::int32_t& token : tokens) {
        token = static_cast<std::int32_t>(random() % 256);
    }
    return tokens;
}

struct Arrangement {
    std::uint32_t chunk = 1000, neighbours = 0, threads = 1;
    bool checked = false, poison = false;
};

// Runs `tokens` in chunks, other sequences beside it.
Outcome run(const std::vector<std::int32_t>& tokens, const Arrangement& how) {
    const std::unique_ptr<Model> model = Model::sim();
    ThreadPool threads(how.threads);
    const auto length = static_cast<std::uint32_t>(tokens.size());
    const auto forward = ForwardPass::create(*model, sim_kernels(), threads, 4096, 8, 1 << 20);
    REQUIRE(forward);
    const std::uint32_t pages = length / 16 + 1;
    const Cache cache(model->config().tile_shape(), (how.neighbours + 1) * pages);
    std::vector<Sequence> sequences;
    for (std::uint32_t i = 0; i <= how.neighbours; ++i) {
        sequences.emplace_back(cache, Owner{TenantId{1 + i % 2}, RequestId{1 + i}}, length,
                               [&](std::uint32_t p) { return p * (how.neighbours + 1) + i; });
    }
    Outcome outcome;
    outcome.layers.assign(model->config().layers, 0);
    StepOutput out;
    while (sequences[0].done() < length) {
        std::vector<SequenceView> views;
        std::vector<std::int32_t> batch;
        const std::uint32_t count = std::min(how.chunk, length - sequences[0].done());
        for (std::uint32_t i = 0; i <= how.neighbours; ++i) {
            const auto other = random_tokens(count, 50 + i + sequences[0].done());
            const auto at = static_cast<std::uint32_t>(batch.size());
            batch.insert(batch.end(), i == 0 ? tokens.begin() + sequences[0].done() : other.begin(),
                         i == 0 ? tokens.begin() + sequences[0].done() + count : other.end());
            views.push_back(sequences[i].next(count, at, count - 1));
        }
        if (how.poison) {
            (*forward)->poison();
        }
        (*forward)->run({.tokens = batch,
                         .sequences = views,
                         .memory = cache.memory(),
                         .checked = how.checked,
                         .step = 7},
                        out);
        REQUIRE(out.logits.size() == views.size());
        CHECK(out.logits[0].owner == Owner{TenantId{1}, RequestId{1}});
        CHECK(out.logits[0].step == 7);
        outcome.logits.assign(out.logits[0].logits.begin(), out.logits[0].logits.end());
        outcome.nonfinite |= out.logits[0].nonfinite;
        for (std::size_t layer = 0; layer < outcome.layers.size(); ++layer) {
            outcome.layers[layer] += out.layer_digests[layer];
        }
        outcome.witness += views[0].report->witness.load();
        outcome.rows_read += views[0].report->rows_read.load();
        outcome.rows_written += views[0].report->rows_written.load();
        for (const SequenceView& view : views) {
            outcome.faults += view.report->faults.load();
            view.report->clear();
        }
    }
    return outcome;
}

TEST_CASE("the hash model gives one result whatever the chunks, the company and the checks") {
    const auto tokens = random_tokens(75, 1);
    const Outcome expected = run(tokens, {});
    CHECK(expected.faults == 0);
    CHECK_FALSE(expected.nonfinite);
    for (const Arrangement& how :
         {Arrangement{.chunk = 1}, Arrangement{.chunk = 7}, Arrangement{.chunk = 16},
          Arrangement{.chunk = 33, .neighbours = 3}, Arrangement{.chunk = 5, .threads = 2},
          Arrangement{.chunk = 20, .checked = true}, Arrangement{.chunk = 20, .poison = true}}) {
        const Outcome outcome = run(tokens, how);
        CHECK(outcome.same_bits(expected));
        CHECK(outcome.rows_read == expected.rows_read);
        CHECK(outcome.rows_written == expected.rows_written);
        CHECK(outcome.faults == 0);
        if (how.neighbours == 0) {
            CHECK(outcome.witness == expected.witness);
        }
    }
}

TEST_CASE("every single token of the prompt changes the logits, and so does its place") {
    const auto tokens = random_tokens(40, 2);
    const Outcome expected = run(tokens, {});
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        auto changed = tokens;
        changed[i] ^= 1;
        CHECK_FALSE(run(changed, {}).same_bits(expected));
    }
    auto swapped = tokens;
    std::swap(swapped[3], swapped[20]);
    CHECK_FALSE(run(swapped, {}).same_bits(expected));
}

TEST_CASE("witness and counters are what the ledger would predict") {
    const std::uint32_t length = 37;
    const Outcome outcome = run(random_tokens(length, 3), {.chunk = 5});
    const ModelConfig& config = Model::sim()->config();
    std::uint64_t witness = 0;
    for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
        for (std::uint32_t position = 0; position < length; ++position) {
            for (std::uint32_t row = 0; row <= position; ++row) {
                witness += page_mix(1, 1, row / 16 + 1, row / 16) *
                           access_factor(layer, 0, AccessKind::read);
            }
            witness += page_mix(1, 1, position / 16 + 1, position / 16) *
                       access_factor(layer, 0, AccessKind::write);
        }
    }
    CHECK(outcome.witness == witness);
    CHECK(outcome.rows_read == config.layers * length * (length + 1) / 2);
    CHECK(outcome.rows_written == config.layers * length);
}

// ---- the tiles themselves

struct Tiles {
    Tiles() : cache(Model::sim()->config().tile_shape(), 4) {}
    void stamp(Owner owner) {
        std::uint32_t words = 0;
        stamp_page(cache.memory(), 0, owner, 1, &words);
    }
    // Rows of `owner` in `page`.
    void fill(Owner owner, std::uint32_t page, std::uint32_t rows, std::uint64_t seed) {
        const std::vector<PageRef> table{{page, 1}};
        SequenceReport report;
        std::vector<float> v(std::size_t{rows} * 16);
        for (std::uint32_t i = 0; i < rows; ++i) {
            const std::uint64_t hash = mix64(seed + i);
            std::memcpy(&v[std::size_t{i} * 16], &hash, sizeof hash);
        }
        sim_kernels().append(cache.memory(),
                             {.reader = owner, .pages = table, .count = rows, .report = &report}, 0,
                             0, v.data(), v.data());
        REQUIRE(report.faults == 0);
    }
    sim::Attended attend(Owner reader, PageRef entry, std::uint32_t rows, SequenceReport& report,
                         bool check_headers = true) {
        const std::vector<PageRef> table{entry};
        std::vector<float> q(16), out(16);
        const SequenceView view{.reader = reader,
                                .pages = table,
                                .first = rows - 1,
                                .count = 1,
                                .report = &report,
                                .check_headers = check_headers};
        sim_kernels().attend({.memory = cache.memory(),
                              .layer = 0,
                              .query_heads = 1,
                              .q = q.data(),
                              .out = out.data()},
                             {.sequence = &view, .row_end = 1});
        sim::Attended attended{};
        std::memcpy(&attended, out.data(), sizeof attended);
        return attended;
    }
    Cache cache;
};

constexpr Owner kMine{TenantId{1}, RequestId{1}};
constexpr Owner kSameTenant{TenantId{1}, RequestId{2}};
constexpr Owner kForeign{TenantId{2}, RequestId{3}};

TEST_CASE("a foreign tile is flagged and its rows are not used; with the check off they are") {
    for (const Owner writer : {kSameTenant, kForeign}) {
        Tiles tiles;
        tiles.stamp(writer);
        tiles.fill(writer, 0, 5, 100);
        SequenceReport report;
        CHECK(tiles.attend(kMine, {0, 1}, 5, report).sum == 0);
        CHECK(report.faults == 1);
        REQUIRE(report.first_faults.size() == 1);
        CHECK(report.first_faults[0].loaded.request == number(writer.request));
        SequenceReport unchecked;
        CHECK(tiles.attend(kMine, {0, 1}, 5, unchecked, false).sum != 0);
        CHECK(unchecked.faults == 0);
    }
}

TEST_CASE("a grant opens a tile of the same tenant, and gives the sum its writer would get") {
    Tiles tiles;
    tiles.stamp(kSameTenant);
    tiles.fill(kSameTenant, 0, 16, 7);
    SequenceReport own, granted, foreign;
    const std::uint64_t sum = tiles.attend(kSameTenant, {0, 1}, 16, own).sum;
    const PageRef entry{0, 1, kSameTenant.request};
    CHECK(tiles.attend(kMine, entry, 16, granted).sum == sum);
    CHECK(granted.faults == 0);
    CHECK(tiles.attend(kForeign, entry, 16, foreign).sum == 0);
    CHECK(foreign.faults == 1);
}

TEST_CASE("rows that nobody wrote are seen as poison where nothing stops their reading") {
    Tiles tiles;
    tiles.stamp(kMine);
    tiles.fill(kMine, 0, 4, 9);
    SequenceReport report;
    CHECK(tiles.attend(kMine, {0, 1}, 4, report).poisoned == 0);
    CHECK(tiles.attend(kMine, {0, 1}, 5, report, false).poisoned == 1);
    CHECK(tiles.attend(kMine, {0, 1}, 5, report).poisoned == 0);
    CHECK(report.faults == 1);
}

}  // namespace
