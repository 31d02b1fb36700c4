#include "src/engine/sampler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "src/base/random.h"
#include "tests/engine/tiny_model.h"

namespace kvw {
namespace {

using test::kTinyEnd;
using test::TinyModel;

SamplingOptions plain() {  // softmax and nothing else
    return {.temperature = 1.0f, .top_k = 0, .top_p = 1.0f, .min_p = 0.0f};
}

Sampler sampler_for(const SamplingOptions& options, const Kernels& kernels = best_kernels()) {
    return Sampler(options, kernels, TinyModel::shared().tokenizer());
}

std::vector<float> random_logits(std::size_t count, std::uint32_t seed, float spread,
                                 bool with_ties = false) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> logits(count);
    for (float& logit : logits) {
        logit = normal(random);
        logit = with_ties ? std::round(logit) : logit;
    }
    return logits;
}

// The logits of one run of the model: all of them, in order of id.
std::vector<float> logits_of_a_run() {
    const TinyModel& tiny = TinyModel::shared();
    ThreadPool threads(1);
    NullSink sink;
    auto engine = Engine::create(tiny.model(), tiny.tokenizer(), best_kernels(), threads, {}, {},
                                 RunContext{.sink = &sink});
    REQUIRE(engine);
    GenerateRequest request;
    request.prompt_ids = {72, 101, 108, 108, 111};
    request.tokens_max = 1;
    request.top_logits = tiny.vocab();
    REQUIRE((*engine)->submit(request));
    const auto outputs = (*engine)->step();
    REQUIRE(outputs);
    std::vector<float> logits(tiny.vocab());
    REQUIRE(outputs->front().first_logits.size() == logits.size());
    for (const TopLogit& top : outputs->front().first_logits) {
        logits[static_cast<std::size_t>(top.id)] = top.logit;
    }
    return logits;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
    const double largest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> p(logits.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
        p[i] = std::exp((logits[i] - largest) / temperature);
    }
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& value : p) {
        value /= total;
    }
    return p;
}

// Pearson's statistic over tokens; those expected fewer than 5 times are counted together. Far
// inside the bound for a right sampler, far outside for one that is off by a few per cent.
void check_fits(const std::map<TokenId, int>& drawn, const std::vector<double>& p, int draws) {
    double statistic = 0, rest_expected = 0, rest_seen = 0;
    int bins = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
        const auto found = drawn.find(static_cast<TokenId>(i));
        const double seen = found == drawn.end() ? 0 : found->second;
        if (p[i] * draws < 5) {
            rest_expected += p[i] * draws;
            rest_seen += seen;
            continue;
        }
        statistic += (seen - p[i] * draws) * (seen - p[i] * draws) / (p[i] * draws);
        ++bins;
    }
    if (rest_expected >= 5) {
        statistic += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        ++bins;
    } else {
        CHECK(rest_seen <= rest_expected + 10);
    }
    const double freedom = bins - 1;
    CHECK(freedom >= 1);
    CHECK(statistic < freedom + 4 * std::sqrt(2 * freedom));
    CHECK(statistic > freedom - 4 * std::sqrt(2 * freedom));
}

TEST_CASE("10,000 draws over the whole vocabulary follow the softmax") {
    const std::vector<float> logits = logits_of_a_run();
    std::vector<float> tied = logits;
    for (float& logit : tied) {
        logit = std::round(logit);
    }
    for (const std::vector<float>& row : {logits, tied}) {
        for (const float temperature : {0.7f, 2.0f}) {
            for (const std::uint32_t top_k : {0u, static_cast<std::uint32_t>(row.size())}) {
                CAPTURE(temperature);
                CAPTURE(top_k);
                SamplingOptions options = plain();
                options.temperature = temperature;
                options.top_k = top_k;
                std::map<TokenId, int> drawn;
                if (top_k == 0) {  // by seed, at one position
                    for (int i = 0; i < 10000; ++i) {
                        options.seed = static_cast<std::uint64_t>(i);
                        ++drawn[sampler_for(options).sample(row, 17)];
                    }
                } else {  // by position, under one seed
                    Sampler sampler = sampler_for(options);
                    for (int i = 0; i < 10000; ++i) {
                        ++drawn[sampler.sample(row, static_cast<std::uint64_t>(i))];
                    }
                }
                check_fits(drawn, softmax(row, temperature), 10000);
            }
        }
    }
}

TEST_CASE("the same seed and position draw the same token, whatever was drawn before") {
    const std::vector<float> logits = random_logits(1000, 3, 2.0f);
    SamplingOptions options;
    options.temperature = 1.3f;
    options.seed = 0x123456789abcdefull;
    std::vector<TokenId> forward, backward(200);
    Sampler one = sampler_for(options);
    Sampler other = sampler_for(options);
    for (std::uint64_t position = 0; position < 200; ++position) {
        forward.push_back(one.sample(logits, position));
    }
    for (std::uint64_t position = 200; position-- > 0;) {
        backward[position] = other.sample(logits, position);
    }
    CHECK(forward == backward);
    CHECK(std::set<TokenId>(forward.begin(), forward.end()).size() > 5);
    options.seed ^= std::uint64_t{1} << 40;  // all 64 bits count
    Sampler changed = sampler_for(options);
    std::vector<TokenId> others;
    for (std::uint64_t position = 0; position < 200; ++position) {
        others.push_back(changed.sample(logits, position));
    }
    CHECK(others != forward);
}

TEST_CASE("every instruction set draws the same tokens") {
    const std::vector<float> logits = random_logits(5000, 4, 1.5f);
    for (const std::uint32_t top_k : {0u, 40u}) {
        SamplingOptions options{.temperature = 0.9f, .top_k = top_k, .seed = 9};
        std::vector<TokenId> expected;
        for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
            if (kernels_for(isa) == nullptr) {
                continue;
            }
            Sampler sampler = sampler_for(options, *kernels_for(isa));
            std::vector<TokenId> drawn;
            for (std::uint64_t position = 0; position < 300; ++position) {
                drawn.push_back(sampler.sample(logits, position));
            }
            expected = expected.empty() ? drawn : expected;
            CHECK(drawn == expected);
        }
    }
}

// The contract of sampler.h, written down once more without any haste.
TokenId naive_sample(const std::vector<float>& logits, const SamplingOptions& options,
                     std::uint64_t position) {
    std::vector<TokenId> ranking(logits.size());
    std::iota(ranking.begin(), ranking.end(), 0);
    std::stable_sort(ranking.begin(), ranking.end(), [&](TokenId a, TokenId b) {
        return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
    });
    if (options.temperature == 0) {
        return ranking.front();
    }
    if (options.top_k > 0 && options.top_k < ranking.size()) {
        ranking.resize(options.top_k);
    }
    std::vector<float> e(ranking.size());
    for (std::size_t i = 0; i < e.size(); ++i) {
        e[i] = (logits[static_cast<std::size_t>(ranking[i])] -
                logits[static_cast<std::size_t>(ranking[0])]) /
               options.temperature;
    }
    kernels_for(Isa::ref)->exp_shifted(e.data(), e.data(), e.size(), 0.0f);
    const double total = std::accumulate(e.begin(), e.end(), 0.0);
    std::size_t length = 0;
    double kept = 0;
    while (length == 0 ||
           (length < e.size() && e[length] >= options.min_p &&
            (options.top_p == 1.0f || kept < static_cast<double>(options.top_p) * total))) {
        kept += static_cast<double>(e[length++]);
    }
    const double aim = uniform_draw(options.seed, position, 0) * kept;
    double reached = 0;
    for (std::size_t i = 0; i < length; ++i) {
        reached += static_cast<double>(e[i]);
        if (reached > aim) {
            return ranking[i];
        }
    }
    return ranking[length - 1];
}

TEST_CASE("shortcuts change nothing: top-k, top-p, min-p and ties against a plain implementation") {
    std::mt19937 random(77);
    const auto one_of = [&](auto... values) {
        const std::common_type_t<decltype(values)...> all[] = {values...};
        return all[random() % std::size(all)];
    };
    for (int i = 0; i < 3000; ++i) {
        const std::size_t vocab = one_of(1u, 2u, 15u, 17u, 259u, 700u, 5000u);
        SamplingOptions options{.temperature = one_of(0.0f, 0.05f, 0.8f, 1.0f, 5.0f, 1e30f, 1e-30f),
                                .top_k = one_of(0u, 1u, 2u, 40u, 256u, 300u, 4999u),
                                .top_p = one_of(0.0f, 0.1f, 0.95f, 0.999f, 1.0f),
                                .min_p = one_of(0.0f, 0.0f, 0.05f, 1e-4f, 1.0f),
                                .seed = random()};
        const std::vector<float> logits =
            random_logits(vocab, random(), one_of(0.0f, 0.01f, 1.0f, 4.0f), random() % 2 == 0);
        CAPTURE(vocab);
        CAPTURE(options.temperature);
        CAPTURE(options.top_k);
        CAPTURE(options.top_p);
        CAPTURE(options.min_p);
        const std::uint64_t position = random() % 1000;
        REQUIRE(sampler_for(options).sample(logits, position) ==
                naive_sample(logits, options, position));
    }
}

TEST_CASE("greedy takes the lowest id among equals, after penalties") {
    SamplingOptions options{.temperature = 0};
    const std::vector<float> logits{1.0f, 3.0f, 3.0f, -1.0f, 3.0f};
    CHECK(sampler_for(options).sample(logits, 0) == 1);

    options.repeat_penalty = 1.5f;
    Sampler sampler = sampler_for(options);
    sampler.accept(1);
    CHECK(sampler.sample(logits, 0) == 2);
    sampler.accept(2);
    sampler.accept(4);
    CHECK(sampler.sample(logits, 0) == 1);  // all three divided: equals again
}

TEST_CASE("penalties look back on the last tokens only, and do what they say") {
    const std::vector<float> logits{2.0f, 1.9f, -1.0f};
    SamplingOptions options{.temperature = 0, .frequency_penalty = 0.06f, .penalty_last = 2};
    Sampler frequency = sampler_for(options);
    frequency.accept(0);
    CHECK(frequency.sample(logits, 0) == 0);  // 1.94 against 1.9
    frequency.accept(0);
    CHECK(frequency.sample(logits, 0) == 1);  // 1.88 against 1.9
    frequency.accept(2);
    CHECK(frequency.sample(logits, 0) == 0);  // one of the two has left the window

    options = {.temperature = 0, .presence_penalty = 0.15f};
    Sampler presence = sampler_for(options);
    presence.accept(0);
    CHECK(presence.sample(logits, 0) == 1);

    options = {.temperature = 0, .repeat_penalty = 2.0f, .penalty_last = 0};
    Sampler off = sampler_for(options);
    off.accept(0);
    CHECK(off.sample(logits, 0) == 0);

    options = {.temperature = 0, .repeat_penalty = 2.0f};
    Sampler negative = sampler_for(options);  // multiplies, so that it always lowers
    negative.accept(0);
    CHECK(negative.sample(std::vector<float>{-1.0f, -1.5f}, 0) == 1);

    options = {.temperature = 0, .presence_penalty = 0.15f, .penalty_last = 3};
    Sampler lasting = sampler_for(options);  // the history does not grow without end, nor forget
    for (int i = 0; i < 1000; ++i) {
        lasting.accept(2);
    }
    lasting.accept(0);
    lasting.accept(2);
    CHECK(lasting.sample(logits, 0) == 1);
}

TEST_CASE("without end-of-generation tokens the rest follows its own softmax") {
    std::vector<float> logits = random_logits(TinyModel::shared().vocab(), 8, 1.0f);
    logits[kTinyEnd] = 9.0f;
    SamplingOptions options = plain();
    CHECK(sampler_for({.temperature = 0}).sample(logits, 0) == kTinyEnd);
    options.ignore_eos = true;
    Sampler sampler = sampler_for(options);
    std::map<TokenId, int> drawn;
    for (std::uint64_t position = 0; position < 10000; ++position) {
        ++drawn[sampler.sample(logits, position)];
    }
    CHECK_FALSE(drawn.contains(kTinyEnd));
    logits[kTinyEnd] = -std::numeric_limits<float>::infinity();
    check_fits(drawn, softmax(logits, 1.0), 10000);
}

TEST_CASE("options out of range are refused by name, value and range") {
    const auto message = [](const SamplingOptions& options) {
        const Status status = check_options(options);
        REQUIRE_FALSE(status);
        CHECK(status.error().code == ErrorCode::usage);
        return status.error().message;
    };
    CHECK(check_options({}));
    CHECK(check_options({.temperature = 0, .top_p = 1, .min_p = 1, .stops = {"x"}}));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float infinity = std::numeric_limits<float>::infinity();
    CHECK(message({.temperature = -0.5f}) ==
          "temperature is -0.500000; it must be 0 (greedy) or a finite number above");
    CHECK(message({.temperature = nan}).starts_with("temperature is nan"));
    CHECK(message({.temperature = infinity}).starts_with("temperature is inf"));
    CHECK(message({.top_p = 1.01f}) == "top-p is 1.010000; it must be from 0 to 1");
    CHECK(message({.top_p = nan}).starts_with("top-p is nan"));
    CHECK(message({.min_p = -0.01f}).starts_with("min-p is -0.01"));
    CHECK(message({.repeat_penalty = 0}).starts_with("repeat-penalty is 0"));
    CHECK(message({.presence_penalty = 2.5f}) ==
          "presence-penalty is 2.500000; it must be from -2 to 2");
    CHECK(message({.frequency_penalty = nan}).starts_with("frequency-penalty is nan"));
    CHECK(message({.stops = {"a", ""}}).starts_with("a stop string is empty"));
}

}  // namespace
}  // namespace kvw
