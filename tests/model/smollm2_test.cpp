// A public model against what others computed from the same file: data/smollm2.*.json, with the
// logits of a float64 forward pass ("exact") and of llama.cpp ("peer").
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/model/model.h"
#include "tests/model/cache.h"

using namespace kvw;
using namespace kvw::test;
using nlohmann::json;

namespace {

using Tokens = std::vector<std::int32_t>;

json data(const std::string& name) {
    std::ifstream file(std::string(KVW_SOURCE_DIR "/tests/data/") + name);
    return json::parse(file);
}

// Empty when there is no model to test with.
std::string model_path() {
    const char* const named = std::getenv("KVW_MODEL");
    const std::string path =
        named != nullptr ? named : KVW_SOURCE_DIR "/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    if (!std::filesystem::exists(path)) {
        MESSAGE("not run: no ", path, " (set KVW_MODEL)");
        return {};
    }
    return path;
}

class SmolLm2 {
  public:
    explicit SmolLm2(const std::string& path) : threads_(usable_processors()) {
        const Result<Gguf> gguf = Gguf::open(path);
        REQUIRE(gguf.has_value());
        Result<std::unique_ptr<Model>> model = Model::load(*gguf, threads_);
        REQUIRE(model.has_value());
        model_ = *std::move(model);
        auto forward =
            ForwardPass::create(*model_, best_kernels(), threads_, kRows, kRows, kContext);
        REQUIRE(forward.has_value());
        forward_ = *std::move(forward);
    }

    // Calls use(position, logits) for every position from `from` on.
    template <class Use>
    void read(const Tokens& tokens, std::uint32_t from, const Use& use) {
        const auto length = static_cast<std::uint32_t>(tokens.size());
        const std::uint32_t pages = length / kPageTokens + 1;
        const Cache cache(model_->config().tile_shape(), pages);
        Sequence sequence(cache, {TenantId{1}, RequestId{1}}, length,
                          [](std::uint32_t page) { return page; });
        StepOutput out;
        while (sequence.done() < length) {
            const std::uint32_t done = sequence.done(), count = std::min(kRows, length - done);
            const std::uint32_t skipped = from > done ? std::min(from - done, count) : 0;
            const SequenceView view = sequence.next(count, 0, skipped);
            forward_->run(
                {std::span(tokens).subspan(done, count), {&view, 1}, cache.memory(), false}, out);
            for (const LogitsRow& row : out.logits) {
                REQUIRE_FALSE(row.nonfinite);
                use(row.position, row.logits);
            }
        }
        REQUIRE(sequence.report().faults == 0);
    }

  private:
    static constexpr std::uint32_t kRows = 64, kContext = 1024;
    ThreadPool threads_;
    std::unique_ptr<Model> model_;
    std::unique_ptr<ForwardPass> forward_;
};

std::int32_t top_token(std::span<const float> logits) {
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) -
                                     logits.begin());
}

double log_sum_exp(std::span<const float> logits) {
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float logit : logits) {
        sum += std::exp(logit - most);
    }
    return most + std::log(sum);
}

Tokens followed_by(Tokens prompt, const Tokens& ids) {
    prompt.insert(prompt.end(), ids.begin(), ids.end());
    return prompt;
}

std::size_t equal_prefix(const Tokens& a, const Tokens& b) {
    return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                                    a.begin());
}

// Squared and largest distances from what is exact.
struct Errors {
    double worst = 0, sum = 0;
    int count = 0;
    void add(double value, double exact) {
        worst = std::max(worst, std::fabs(value - exact));
        sum += (value - exact) * (value - exact);
        ++count;
    }
    double rms() const { return std::sqrt(sum / count); }
};

}  // namespace

TEST_CASE(
    "SmolLM2 continues as the exact forward pass does, and its logits are as near as the peer's") {
    const std::string path = model_path();
    if (path.empty()) {
        return;
    }
    SmolLm2 model(path);
    const json cases = data("smollm2.greedy.json").at("cases");
    REQUIRE(cases.size() == 12);
    double with_exact = 0, with_peer = 0, peer_with_exact = 0;
    Errors ours, peers;
    for (const json& item : cases) {
        const auto name = item.at("name").get<std::string>();
        CAPTURE(name);
        const auto prompt = item.at("prompt_ids").get<Tokens>();
        const auto from = static_cast<std::uint32_t>(prompt.size() - 1);
        const auto ids = item.at("exact").at("ids").get<Tokens>();
        const auto peer_ids = item.at("peer").at("ids").get<Tokens>();
        const auto gaps = item.at("exact").at("gaps").get<std::vector<double>>();
        REQUIRE(gaps.size() == ids.size());

        // Fed with the exact continuation: our top token after each of its tokens.
        Tokens top;
        model.read(followed_by(prompt, {ids.begin(), ids.end() - 1}), from,
                   [&](std::uint32_t position, std::span<const float> logits) {
                       top.push_back(top_token(logits));
                       if (position != from) {
                           return;
                       }
                       // At the tokens that both exact and the peer have among their best five.
                       for (const json& exact : item.at("exact").at("top5")) {
                           const auto logit = exact[1].get<double>();
                           ours.add(logits[exact[0].get<std::size_t>()], logit);
                           for (const json& peer : item.at("peer").at("top5")) {
                               if (peer[0] == exact[0]) {
                                   peers.add(peer[1].get<double>(), logit);
                               }
                           }
                       }
                   });

        REQUIRE(top.size() == ids.size());
        for (std::size_t i = 0; i < ids.size(); ++i) {
            CAPTURE(i);
            CAPTURE(gaps[i]);
            if (gaps[i] >= 0.5) {
                CHECK(top[i] == ids[i]);
            }
        }
        // A greedy continuation of ours is the exact one as far as the top tokens are; beyond that
        // nothing is known, so this is how much of the peer's it shares at least.
        const std::size_t mine = equal_prefix(top, ids), theirs = equal_prefix(peer_ids, ids);
        with_exact += static_cast<double>(mine);
        with_peer += static_cast<double>(std::min(mine, theirs));
        peer_with_exact += static_cast<double>(theirs);
    }
    const auto count = static_cast<double>(cases.size());
    MESSAGE("mean equal prefix of 64 greedy tokens: ", with_exact / count, " with exact, at least ",
            with_peer / count, " with the peer (the peer with exact: ", peer_with_exact / count,
            ")");
    MESSAGE("error of the five best first logits, worst and rms: ", ours.worst, " ", ours.rms(),
            "; the peer's: ", peers.worst, " ", peers.rms());
    CHECK(ours.worst <= 1.25 * peers.worst);
    CHECK(ours.rms() <= 1.25 * peers.rms());
}

TEST_CASE("SmolLM2 finds text as likely as the exact forward pass does") {
    const std::string path = model_path();
    if (path.empty()) {
        return;
    }
    SmolLm2 model(path);
    const json cases = data("smollm2.nll.json").at("cases");
    REQUIRE(cases.size() == 2);
    for (const json& item : cases) {
        const auto name = item.at("name").get<std::string>();
        const auto ids = item.at("ids").get<Tokens>();
        const auto argmax = item.at("argmax_exact").get<Tokens>();
        const auto exact = item.at("mean_nll_exact").get<double>();
        const auto peer = item.at("mean_nll_peer").get<double>();
        double sum = 0;
        int different = 0;
        model.read(ids, 0, [&](std::uint32_t position, std::span<const float> logits) {
            different += top_token(logits) != argmax[position] ? 1 : 0;
            if (position + 1 < ids.size()) {
                sum += log_sum_exp(logits) - logits[static_cast<std::size_t>(ids[position + 1])];
            }
        });
        const double mean = sum / static_cast<double>(ids.size() - 1);
        CAPTURE(name);
        MESSAGE(name, ": mean NLL ", mean, ", exact ", exact, ", peer ", peer, "; ", different,
                " other top tokens of ", ids.size(), ", the peer ",
                item.at("argmax_differs").get<int>());
        CHECK(std::fabs(mean - exact) < 0.02);
    }
}
