#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "src/model/model.h"
#include "tests/model/cache.h"
#include "tests/model/tiny_model.h"

using namespace kvw;
using namespace kvw::test;

namespace {

constexpr std::uint32_t kContext = 640;

std::vector<std::int32_t> random_tokens(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> tokens(count);
    for (std::int32_t& token : tokens) {
        token = static_cast<std::int32_t>(random() % 259);
    }
    return tokens;
}

Isa fastest() {
    return kernels_for(Isa::avx512) != nullptr ? Isa::avx512
           : kernels_for(Isa::avx2) != nullptr ? Isa::avx2
                                               : Isa::ref;
}

// How a run is arranged. None of it may show in a result.
struct Arrangement {
    Isa isa = Isa::ref;
    unsigned threads = 1;
    std::uint32_t chunk = 10000;   // most new tokens in a step
    std::uint32_t neighbours = 0;  // other sequences in every step
    std::uint32_t page_seed = 0;   // 0: pages in order
    bool poison = false;           // before every step
    bool checked = false;
    std::optional<std::uint32_t> split_at;  // the first chunk ends here
};

// What a run leaves of its sequence, position by position.
struct Outcome {
    std::vector<float> logits;
    std::vector<RowDigest> digests;
    std::vector<std::uint64_t> layers;  // sums over all positions
    std::uint64_t witness = 0, rows_read = 0, rows_written = 0;
    friend bool operator==(const Outcome& a, const Outcome& b) {
        return a.logits.size() == b.logits.size() &&
               std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)) ==
                   0 &&
               a.digests == b.digests && a.layers == b.layers && a.rows_read == b.rows_read &&
               a.rows_written == b.rows_written;
    }
};

std::unique_ptr<Model> load(const TinyModel& tiny, ThreadPool& threads) {
    const std::vector<std::uint8_t> file = tiny.file();
    const Result<Gguf> gguf = Gguf::parse(file, "tiny.gguf");
    REQUIRE(gguf.has_value());
    Result<std::unique_ptr<Model>> model = Model::load(*gguf, threads);
    if (!model) {
        FAIL(model.error().message);
    }
    return *std::move(model);
}

Outcome run(const TinyModel& tiny, const std::vector<std::int32_t>& tokens,
            const Arrangement& how) {
    ThreadPool threads(how.threads);
    const std::unique_ptr<Model> model = load(tiny, threads);
    const auto length = static_cast<std::uint32_t>(tokens.size());
    const std::uint32_t batch = (how.neighbours + 1) * length, pages_each = length / 16 + 1;
    const auto forward =
        ForwardPass::create(*model, *kernels_for(how.isa), threads, batch, batch, kContext);
    REQUIRE(forward.has_value());

    std::vector<std::uint32_t> numbers((how.neighbours + 1) * pages_each);
    std::iota(numbers.begin(), numbers.end(), 0u);
    if (how.page_seed != 0) {
        std::shuffle(numbers.begin(), numbers.end(), std::mt19937(how.page_seed));
    }
    const Cache cache(model->config().tile_shape(), static_cast<std::uint32_t>(numbers.size()));
    // The sequence that is looked at lies in the middle of the batch.
    const std::uint32_t subject = how.neighbours / 2;
    std::vector<Sequence> sequences;
    std::vector<std::vector<std::int32_t>> texts;
    for (std::uint32_t i = 0; i <= how.neighbours; ++i) {
        const Owner owner{TenantId{1 + i % 2}, RequestId{1 + i}};
        sequences.emplace_back(cache, owner, length,
                               [&](std::uint32_t p) { return numbers[i * pages_each + p]; });
        texts.push_back(i == subject ? tokens : random_tokens(length, 100 + i));
    }

    Outcome outcome;
    outcome.layers.assign(tiny.shape().layers, 0);
    StepOutput out;
    for (std::uint32_t step = 0; sequences[subject].done() < length; ++step) {
        std::vector<SequenceView> views;
        std::vector<std::int32_t> batch_tokens;
        std::size_t subject_at = 0;
        for (std::uint32_t i = 0; i <= how.neighbours; ++i) {
            const std::uint32_t done = sequences[i].done();
            // Neighbours move on at a pace of their own.
            std::uint32_t most = i == subject ? how.chunk : 1 + (step * 5 + i * 7) % 23;
            if (i == subject && done == 0 && how.split_at) {
                most = *how.split_at;
            }
            const std::uint32_t count = std::min(length - done, most);
            if (count == 0) {
                continue;
            }
            if (i == subject) {
                subject_at = views.size();
            }
            const auto first = texts[i].begin() + done;
            views.push_back(sequences[i].next(count,
                                              static_cast<std::uint32_t>(batch_tokens.size()),
                                              i == subject ? 0 : count / 2));
            batch_tokens.insert(batch_tokens.end(), first, first + count);
        }
        if (how.poison) {
            (*forward)->poison();
        }
        (*forward)->run({batch_tokens, views, cache.memory(), how.checked}, out);
        for (const LogitsRow& row : out.logits) {
            CHECK_FALSE(row.nonfinite);
            if (row.sequence == subject_at) {
                REQUIRE(row.position == outcome.digests.size());
                outcome.logits.insert(outcome.logits.end(), row.logits.begin(), row.logits.end());
                outcome.digests.push_back(row.digest);
            }
        }
        for (std::uint32_t layer = 0; layer < tiny.shape().layers; ++layer) {
            outcome.layers[layer] += out.layer_digests[subject_at * tiny.shape().layers + layer];
        }
    }
    for (const Sequence& sequence : sequences) {
        CHECK(sequence.report().faults == 0);
    }
    const SequenceReport& report = sequences[subject].report();
    outcome.witness = report.witness;
    outcome.rows_read = report.rows_read;
    outcome.rows_written = report.rows_written;
    return outcome;
}

// How far the logits are from the reference, over its own size.
double relative_error(const TinyModel& tiny, const std::vector<std::int32_t>& tokens,
                      const Outcome& outcome) {
    const auto exact = reference_logits(tiny, tokens);
    double error = 0, size = 0;
    std::size_t i = 0;
    for (const std::vector<double>& row : exact) {
        for (const double logit : row) {
            error += (outcome.logits[i] - logit) * (outcome.logits[i] - logit);
            size += logit * logit;
            ++i;
        }
    }
    REQUIRE(i == outcome.logits.size());
    return std::sqrt(error / size);
}

TinyShape wide_shape() {
    TinyShape shape;
    shape.width = 96;
    shape.head_dim = 32;  // 4 heads of 32: wider together than the embedding
    shape.ff = 160;
    shape.tied = false;
    shape.rope_base = 100000.0;
    shape.rope_scale = 4.0;
    return shape;
}

}  // namespace

TEST_CASE("logits are those of the formulas, but for the rounding of codes and of halves") {
    const std::vector<std::int32_t> tokens = random_tokens(70, 1);
    for (const bool wide : {false, true}) {
        for (const WeightType type :
             {WeightType::f32, WeightType::f16, WeightType::q8_0, WeightType::q4_1}) {
            TinyShape shape = wide ? wide_shape() : TinyShape{};
            shape.type = type;
            shape.embedding_type = is_quantised(type) ? WeightType::q8_0 : type;
            const TinyModel tiny(shape);
            const double error = relative_error(tiny, tokens, run(tiny, tokens, {}));
            const std::string name = weight_type_name(static_cast<std::uint32_t>(type));
            CAPTURE(name);
            CAPTURE(wide);
            // Float weights leave the f16 of keys and values; codes add half a step of 127.
            CHECK(error < (is_quantised(type) ? 0.04 : 0.001));
            CHECK(error > 0);
        }
    }
}

TEST_CASE("attention over more than one split is that of the formulas") {
    TinyShape shape;
    shape.type = shape.embedding_type = WeightType::f32;
    const TinyModel tiny(shape);
    const std::vector<std::int32_t> tokens = random_tokens(530, 2);
    const Outcome whole = run(tiny, tokens, {.isa = fastest(), .threads = 2});
    CHECK(relative_error(tiny, tokens, whole) < 0.001);
}

TEST_CASE("float and quantised weights may be mixed in one layer") {
    TinyShape shape;
    shape.type = WeightType::f32;
    shape.embedding_type = WeightType::q8_0;
    const TinyModel tiny(shape);
    const std::vector<std::int32_t> tokens = random_tokens(40, 3);
    const Outcome one = run(tiny, tokens, {});
    CHECK(relative_error(tiny, tokens, one) < 0.04);
    CHECK(run(tiny, tokens, {.isa = Isa::ref, .threads = 3, .chunk = 5}) == one);
}

TEST_CASE("every instruction set, thread count and chunk size gives the same bits") {
    const std::vector<std::int32_t> tokens = random_tokens(67, 4);
    for (const bool wide : {false, true}) {
        const TinyModel tiny(wide ? wide_shape() : TinyShape{});
        const Outcome one = run(tiny, tokens, {});
        CHECK(one.rows_written != 0);
        for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
            if (kernels_for(isa) == nullptr) {
                continue;
            }
            for (const unsigned threads : {1u, 2u, 3u}) {
                for (const std::uint32_t chunk : {1u, 7u, 16u, 64u, 67u}) {
                    if (isa != fastest() && chunk != 7 && chunk != 67) {
                        continue;  // what the kernels do with shapes is their own tests' business
                    }
                    CAPTURE(kernels_for(isa)->isa);
                    CAPTURE(threads);
                    CAPTURE(chunk);
                    CHECK(run(tiny, tokens, {.isa = isa, .threads = threads, .chunk = chunk}) ==
                          one);
                }
            }
        }
    }
}

TEST_CASE("long sequences give the same bits whether or not attention is divided by splits") {
    const TinyModel tiny{TinyShape{}};
    const std::vector<std::int32_t> tokens = random_tokens(530, 5);
    const Outcome one = run(tiny, tokens, {.isa = fastest()});
    for (const unsigned threads : {2u, 3u}) {
        for (const std::uint32_t chunk : {1u, 4u}) {
            CAPTURE(threads);
            CAPTURE(chunk);
            // The first tokens at once, the rest a few at a time.
            CHECK(run(tiny, tokens,
                      {.isa = fastest(), .threads = threads, .chunk = chunk, .split_at = 505u}) ==
                  one);
        }
    }
}

TEST_CASE("a sequence gives the same bits alone and beside seven others") {
    const TinyModel tiny{TinyShape{}};
    const std::vector<std::int32_t> tokens = random_tokens(50, 6);
    const Outcome alone = run(tiny, tokens, {});
    for (const unsigned threads : {1u, 2u, 3u}) {
        for (const std::uint32_t chunk : {1u, 16u, 1000u}) {
            CAPTURE(threads);
            CAPTURE(chunk);
            CHECK(run(tiny, tokens,
                      {.isa = fastest(), .threads = threads, .chunk = chunk, .neighbours = 7}) ==
                  alone);
        }
    }
}

TEST_CASE("page numbers, poisoned scratch and checked execution change no bit") {
    const TinyModel tiny{TinyShape{}};
    const std::vector<std::int32_t> tokens = random_tokens(97, 7);
    const Outcome plain = run(tiny, tokens, {.isa = fastest(), .threads = 2, .chunk = 16});

    CHECK(run(tiny, tokens, {.isa = fastest(), .threads = 2, .chunk = 16, .page_seed = 9}) ==
          plain);
    for (const std::uint32_t chunk : {1u, 7u, 16u, 97u}) {
        const Outcome poisoned =
            run(tiny, tokens,
                {.isa = fastest(), .threads = 2, .chunk = chunk, .neighbours = 2, .poison = true});
        CHECK(poisoned == plain);
    }
    const Outcome checked =
        run(tiny, tokens, {.isa = fastest(), .threads = 2, .chunk = 16, .checked = true});
    CHECK(checked == plain);
    CHECK(checked.witness == plain.witness);
}

TEST_CASE("the witness does not depend on instruction set, threads or chunks") {
    const TinyModel tiny{TinyShape{}};
    const std::vector<std::int32_t> tokens = random_tokens(270, 8);
    const Outcome one = run(tiny, tokens, {});
    CHECK(one.witness != 0);
    // 2 layers of 2 KV heads: every row written once, position p reading p + 1 of them.
    CHECK(one.rows_written == 270 * 4);
    CHECK(one.rows_read == 270 * 271 / 2 * 4);
    CHECK(run(tiny, tokens, {.isa = fastest(), .threads = 3, .chunk = 64}).witness == one.witness);
    CHECK(
        run(tiny, tokens, {.isa = fastest(), .threads = 2, .chunk = 3, .split_at = 262u}).witness ==
        one.witness);
}

TEST_CASE("a row with logits is the same whichever rows are asked for beside it") {
    const TinyModel tiny{TinyShape{}};
    const std::vector<std::int32_t> tokens = random_tokens(20, 9);
    ThreadPool threads(2);
    const std::unique_ptr<Model> model = load(tiny, threads);
    const auto forward = ForwardPass::create(*model, best_kernels(), threads, 20, 20, kContext);
    const auto rows_from = [&](std::uint32_t from) {
        const Cache cache(model->config().tile_shape(), 2);
        Sequence sequence(cache, {TenantId{1}, RequestId{1}}, 20,
                          [](std::uint32_t p) { return p; });
        const SequenceView view = sequence.next(20, 0, from);
        StepOutput out;
        (*forward)->run({tokens, {&view, 1}, cache.memory(), false}, out);
        std::vector<std::vector<float>> rows;
        for (const LogitsRow& row : out.logits) {
            CHECK(row.position == from + rows.size());
            CHECK(row.logits.size() == tiny.shape().vocab);
            rows.emplace_back(row.logits.begin(), row.logits.end());
        }
        return rows;
    };

    const auto all = rows_from(0);

    REQUIRE(all.size() == 20);
    for (const std::uint32_t from : {0u, 1u, 12u, 17u, 19u}) {
        CHECK(rows_from(from) == std::vector(all.begin() + from, all.end()));
    }
    CHECK(rows_from(20).empty());
}

TEST_CASE("logits that are not finite are flagged in their own row") {
    TinyShape shape;
    shape.tied = false;
    shape.type = shape.embedding_type = WeightType::f32;
    const TinyModel tiny(shape);
    std::vector<std::uint8_t> file = tiny.file();
    // The embedding of token 7 becomes infinite: its request is lost, its neighbour is not.
    const float first = static_cast<float>(tiny.at("token_embd.weight").row(7)[0]);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&first);
    const auto found = std::search(file.begin(), file.end(), bytes, bytes + 4);
    REQUIRE(found != file.end());
    const float infinity = INFINITY;
    std::memcpy(&*found, &infinity, 4);
    ThreadPool threads(2);
    const Result<Gguf> gguf = Gguf::parse(file, "tiny.gguf");
    const auto model = Model::load(*gguf, threads);
    const auto forward = ForwardPass::create(**model, best_kernels(), threads, 8, 8, kContext);
    const Cache cache((*model)->config().tile_shape(), 2);
    Sequence bad(cache, {TenantId{1}, RequestId{1}}, 3, [](std::uint32_t) { return 0u; });
    Sequence good(cache, {TenantId{2}, RequestId{2}}, 3, [](std::uint32_t) { return 1u; });
    const std::vector<std::int32_t> tokens = {5, 7, 9, 1, 2, 3};
    const std::vector<SequenceView> views = {bad.next(3, 0, 0), good.next(3, 3, 0)};
    StepOutput out;

    (*forward)->run({tokens, views, cache.memory(), false}, out);

    REQUIRE(out.logits.size() == 6);
    CHECK_FALSE(out.logits[0].nonfinite);
    CHECK(out.logits[1].nonfinite);
    CHECK(out.logits[2].nonfinite);
    for (std::size_t i = 3; i < 6; ++i) {
        CHECK_FALSE(out.logits[i].nonfinite);
    }
}

TEST_CASE("each row of logits carries the owner of its view, and the step") {
    const TinyModel tiny{TinyShape{}};
    const std::vector<std::int32_t> tokens = random_tokens(9, 11);
    ThreadPool threads(2);
    const std::unique_ptr<Model> model = load(tiny, threads);
    const auto forward = ForwardPass::create(*model, best_kernels(), threads, 9, 9, kContext);
    const Cache cache(model->config().tile_shape(), 3);
    std::vector<Sequence> sequences;
    std::vector<SequenceView> views;
    for (std::uint32_t i = 0; i < 3; ++i) {
        sequences.emplace_back(cache, Owner{TenantId{1 + i % 2}, RequestId{30 - i}}, 3,
                               [&](std::uint32_t) { return i; });
        views.push_back(sequences[i].next(3, 3 * i, 1));
    }
    StepOutput out;
    (*forward)->run({.tokens = tokens, .sequences = views, .memory = cache.memory(), .step = 41},
                    out);
    REQUIRE(out.logits.size() == 6);
    for (std::uint32_t i = 0; i < 6; ++i) {
        CHECK(out.logits[i].owner == views[i / 2].reader);
        CHECK(out.logits[i].step == 41);
    }
}
