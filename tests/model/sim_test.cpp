// The hash model: its output depends on every row it reads, on nothing else, and its evidence is
// that of any model.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>

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
    const ModelConfig config = Model::sim()->config();
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

// A cache and a pass over it, step by step.
struct World {
    explicit World(std::uint32_t pages) : cache(model->config().tile_shape(), pages) {}
    void run(std::span<const std::int32_t> tokens, std::span<const SequenceView> views) {
        (*forward)->run({.tokens = tokens, .sequences = views, .memory = cache.memory(), .step = 1},
                        out);
    }
    std::vector<float> logits(std::size_t row) const {
        return {out.logits[row].logits.begin(), out.logits[row].logits.end()};
    }
    std::unique_ptr<Model> model = Model::sim();
    ThreadPool threads{1};
    Result<std::unique_ptr<ForwardPass>> forward =
        ForwardPass::create(*model, sim_kernels(), threads, 8192, 8192, 1 << 20);
    Cache cache;
    StepOutput out;
};

constexpr Owner kMine{TenantId{1}, RequestId{1}};
constexpr Owner kSameTenant{TenantId{1}, RequestId{2}};
constexpr Owner kForeign{TenantId{2}, RequestId{3}};

TEST_CASE("one token in two places has two rows, and other logits") {
    World world(2);
    const std::vector<std::int32_t> tokens(20, 65);
    Sequence sequence(world.cache, kMine, 20, [](std::uint32_t p) { return p; });
    const SequenceView view = sequence.next(20, 0, 0);
    world.run(tokens, {&view, 1});
    REQUIRE(world.out.logits.size() == 20);
    for (std::size_t i = 0; i < 20; ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            CHECK(world.logits(i) != world.logits(j));
        }
    }
}

TEST_CASE("adopted rows give the bits of recomputed ones, and are left out of the layer digests") {
    const auto tokens = random_tokens(50, 4);
    const Outcome whole = run(tokens, {});
    World world(8);
    Sequence donor(world.cache, kSameTenant, 32, [](std::uint32_t p) { return p; });
    Sequence own(world.cache, kMine, 50, [](std::uint32_t p) { return 2 + p; });
    const SequenceView first = donor.next(32, 0, 32);
    world.run({tokens.data(), 32}, {&first, 1});
    const std::vector<std::uint64_t> prefix = world.out.layer_digests;
    SequenceView view = own.next(32, 0, 32);  // what is adopted is never computed
    std::vector<PageRef> table(view.pages.begin(), view.pages.end());
    table[0] = {0, 1, kSameTenant.request};
    table[1] = {1, 2, kSameTenant.request};
    view = own.next(18, 0, 17);
    view.pages = table;

    world.run({tokens.data() + 32, 18}, {&view, 1});

    CHECK(view.report->faults == 0);
    CHECK(std::memcmp(world.logits(0).data(), whole.logits.data(), whole.logits.size() * 4) == 0);
    for (std::size_t layer = 0; layer < prefix.size(); ++layer) {
        CHECK(prefix[layer] + world.out.layer_digests[layer] == whole.layers[layer]);
    }
}

TEST_CASE("a foreign page is flagged for the request that met it, and for no other") {
    for (const bool check_headers : {true, false}) {
        CAPTURE(check_headers);
        World world(8);
        const auto tokens = random_tokens(40, 5);
        std::vector<std::vector<float>> clean;
        for (const bool foreign : {false, true}) {
            Sequence mine(world.cache, kMine, 40, [](std::uint32_t p) { return p; });
            Sequence other(world.cache, kForeign, 40, [](std::uint32_t p) { return 3 + p; });
            std::vector<SequenceView> views = {mine.next(20, 0, 20), other.next(20, 20, 20)};
            std::vector<std::int32_t> batch(tokens.begin(), tokens.begin() + 20);
            batch.insert(batch.end(), tokens.begin() + 20, tokens.end());
            world.run(batch, views);
            views = {mine.next(1, 0, 0), other.next(1, 1, 0)};
            std::vector<PageRef> table(views[0].pages.begin(), views[0].pages.end());
            if (foreign) {
                table[0] = views[1].pages[0];
            }
            views[0].pages = table;
            views[0].check_headers = check_headers;
            world.run({tokens.data(), 2}, views);
            REQUIRE(world.out.logits.size() == 2);
            CHECK((views[0].report->faults != 0) == (foreign && check_headers));
            CHECK(views[1].report->faults == 0);
            CHECK(world.out.logits[0].owner == kMine);
            CHECK(world.out.logits[1].owner == kForeign);
            if (!foreign) {
                clean = {world.logits(0), world.logits(1)};
            } else {
                CHECK(world.logits(0) != clean[0]);
                CHECK(world.logits(1) == clean[1]);
            }
            for (std::uint32_t page = 0; page < 8; ++page) {  // for the next round
                std::uint32_t mismatches = 0;
                sim_kernels().scrub(world.cache.memory(), page, kMine, 0, &mismatches);
            }
        }
    }
}

TEST_CASE("poison that is read makes the row nonfinite, and no other") {
    World world(8);
    const auto tokens = random_tokens(42, 6);
    Sequence mine(world.cache, kMine, 40, [](std::uint32_t p) { return p; });
    Sequence other(world.cache, kForeign, 40, [](std::uint32_t p) { return 3 + p; });
    std::vector<SequenceView> views = {mine.next(20, 0, 20), other.next(20, 20, 20)};
    world.run({tokens.data(), 40}, views);
    std::uint16_t* const keys = tile_keys(world.cache.memory().tile(0, 1, 0));
    for (std::uint32_t d = 0; d < 16; ++d) {
        keys[d * kPageTokens + 5] = kPoisonHalf;  // one row of the second layer
    }
    views = {mine.next(1, 0, 0), other.next(1, 1, 0)};
    world.run({tokens.data() + 40, 2}, views);
    REQUIRE(world.out.logits.size() == 2);
    CHECK(world.out.logits[0].nonfinite);
    CHECK_FALSE(world.out.logits[1].nonfinite);
    CHECK(views[0].report->faults == 0);
}

TEST_CASE("a decode deep in a long prompt depends on its first row") {
    const std::uint32_t length = 20'000;
    std::vector<std::vector<float>> answers;
    for (const std::int32_t begin : {1, 2}) {
        World world(length / 16 + 1);
        std::vector<std::int32_t> tokens = random_tokens(length + 1, 7);
        tokens[0] = begin;
        Sequence sequence(world.cache, kMine, length + 1, [](std::uint32_t p) { return p; });
        for (std::uint32_t done = 0; done < length; done += 512) {
            const std::uint32_t count = std::min(512u, length - done);
            const SequenceView view = sequence.next(count, 0, count);
            world.run({tokens.data() + done, count}, {&view, 1});
        }
        const SequenceView view = sequence.next(1, 0, 0);
        world.run({tokens.data() + length, 1}, {&view, 1});
        answers.push_back(world.logits(0));
        CHECK(view.report->faults == 0);
    }
    CHECK(answers[0] != answers[1]);
}

TEST_CASE("logits spread over their range, every byte is picked, and an end now and then") {
    World world(512);
    const auto tokens = random_tokens(8192, 8);
    Sequence sequence(world.cache, kMine, 8192, [](std::uint32_t p) { return p; });
    const SequenceView view = sequence.next(8192, 0, 0);
    world.run(tokens, {&view, 1});
    const std::size_t vocab = world.model->config().vocab;
    std::vector<std::uint32_t> picked(vocab);
    float least = 0, most = 0;
    for (const LogitsRow& row : world.out.logits) {
        CHECK_FALSE(row.nonfinite);
        ++picked[sim_kernels().argmax(row.logits.data(), vocab)];
        const auto [low, high] = std::minmax_element(row.logits.begin(), row.logits.end());
        least = std::min(least, *low);
        most = std::max(most, *high);
    }
    CHECK(least >= -8.0f);
    CHECK(most < 8.0f);
    CHECK(most - least > 15.9f);
    for (std::size_t byte = 0; byte < 256; ++byte) {
        CHECK(picked[byte] > 0);
    }
    const std::uint32_t ends = picked[256] + picked[258];
    CHECK(ends > 8192 / 300);
    CHECK(ends < 8192 / 80);
    CHECK(picked[257] == 0);
}

}  // namespace
