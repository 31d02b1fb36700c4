#include "src/model/attention_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

using namespace kvw;

namespace {

SequenceView view(std::uint32_t first, std::uint32_t count, std::uint32_t batch_row = 0) {
    SequenceView sequence;
    sequence.first = first;
    sequence.count = count;
    sequence.batch_row = batch_row;
    return sequence;
}

std::vector<std::uint64_t> loads(const AttentionPlan& plan, unsigned workers) {
    std::vector<std::uint64_t> all;
    for (unsigned worker = 0; worker < workers; ++worker) {
        std::uint64_t load = 0;
        for (const AttentionPart& part : plan.parts_of(worker)) {
            load += part.cost;
        }
        all.push_back(load);
    }
    return all;
}

}  // namespace

TEST_CASE("a plan covers every query row of every KV head once, in all splits or in each") {
    std::mt19937 random(1);
    AttentionPlan plan;
    for (int round = 0; round < 2000; ++round) {
        const unsigned workers = 1 + random() % 5;
        const std::uint32_t heads = 1 + random() % 4;
        const bool may_split = random() % 2 != 0;
        std::vector<SequenceView> sequences;
        for (std::uint32_t i = 0; i < 1 + random() % 5; ++i) {
            const std::uint32_t count = random() % 2 != 0 ? 1 + random() % 4 : 1 + random() % 150;
            sequences.push_back(view(random() % 1500, count));
        }

        plan.make(sequences, heads, workers, may_split);

        using Place = std::tuple<std::size_t, std::uint32_t, std::uint32_t>;  // sequence, head, row
        std::map<Place, std::vector<std::uint32_t>> splits;
        std::map<std::pair<std::size_t, std::uint32_t>, int> appends;
        for (unsigned worker = 0; worker < workers; ++worker) {
            for (const AttentionPart& part : plan.parts_of(worker)) {
                REQUIRE(part.worker == worker);
                const auto sequence =
                    static_cast<std::size_t>(part.item.sequence - sequences.data());
                for (std::uint32_t row = part.item.row_begin; row < part.item.row_end; ++row) {
                    splits[{sequence, part.item.kv_head, row}].push_back(part.item.split);
                }
                appends[{sequence, part.item.kv_head}] += part.appends ? 1 : 0;
            }
        }
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            REQUIRE((may_split || !plan.is_split(i)));
            for (std::uint32_t head = 0; head < heads; ++head) {
                REQUIRE(appends[{i, head}] == 1);
                for (std::uint32_t row = 0; row < sequences[i].count; ++row) {
                    std::vector<std::uint32_t>& found = splits[{i, head, row}];
                    std::sort(found.begin(), found.end());
                    std::vector<std::uint32_t> expected = {kAllSplits};
                    if (plan.is_split(i)) {
                        expected.clear();
                        for (std::uint32_t s = 0; s <= (sequences[i].first + row) / kSplitTokens;
                             ++s) {
                            expected.push_back(s);
                        }
                    }
                    REQUIRE(found == expected);
                }
                splits.erase({i, head, sequences[i].count});
            }
        }
    }
}

TEST_CASE("rows are stored by a part only when no other part of their KV head needs them") {
    AttentionPlan plan;
    const std::vector<SequenceView> decode = {view(40, 1), view(700, 1)};
    plan.make(decode, 3, 2, true);
    CHECK(plan.parts_append());

    const std::vector<SequenceView> prefill = {view(0, 100)};
    plan.make(prefill, 3, 2, true);
    CHECK_FALSE(plan.parts_append());
}

TEST_CASE("parts are dealt so that no worker has much more than its share") {
    AttentionPlan plan;
    const std::vector<SequenceView> prefill = {view(0, 512)};
    plan.make(prefill, 3, 2, false);
    const auto two = loads(plan, 2);
    CHECK(std::max(two[0], two[1]) < (two[0] + two[1]) / 2 * 1.02);

    // One row that sees 4,000: three KV heads for two workers, unless its splits are dealt.
    const std::vector<SequenceView> decode = {view(4000, 1)};
    plan.make(decode, 3, 2, false);
    CHECK_FALSE(plan.is_split(0));
    plan.make(decode, 3, 2, true);
    CHECK(plan.is_split(0));
    const auto halves = loads(plan, 2);
    CHECK(std::max(halves[0], halves[1]) < (halves[0] + halves[1]) / 2 * 1.05);
}
