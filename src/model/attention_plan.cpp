#include "src/model/attention_plan.h"

#include <algorithm>
#include <tuple>

namespace kvw {

namespace {

// Query rows of one part, where there are many: enough to share the loads of a tile, few enough
// that the parts can be dealt evenly.
constexpr std::uint32_t kPartRows = 32;
// Sequences with more new rows than this are divided by rows, never by splits.
constexpr std::uint32_t kSplitRowsMax = 4;
// What a part costs beside its rows, in visible rows: a call, the headers, the softmax.
constexpr std::uint64_t kPartOverhead = 16;

std::uint32_t last_position(const SequenceView& s) { return s.first + s.count - 1; }

bool can_split(const SequenceView& s) {
    // All new rows in one split: the others hold old rows only, which need no waiting for.
    return s.count <= kSplitRowsMax && last_position(s) >= kSplitTokens &&
           s.first / kSplitTokens == last_position(s) / kSplitTokens;
}

// The sum over new rows [begin, end) of the rows each of them sees.
std::uint64_t visible(const SequenceView& s, std::uint32_t begin, std::uint32_t end) {
    const std::uint64_t rows = end - begin;
    return rows * (s.first + begin + 1) + rows * (rows - 1) / 2;
}

}  // namespace

void AttentionPlan::add_parts(const SequenceView& s, std::uint32_t kv_heads, bool split) {
    for (std::uint32_t head = 0; head < kv_heads; ++head) {
        const auto add = [&](std::uint32_t begin, std::uint32_t end, std::uint32_t which,
                             std::uint64_t cost, bool appends) {
            parts_.push_back({{&s, head, begin, end, which}, cost + kPartOverhead, 0, appends});
        };
        if (split) {
            const std::uint32_t last = last_position(s) / kSplitTokens;
            for (std::uint32_t i = 0; i < last; ++i) {
                add(0, s.count, i, std::uint64_t{s.count} * kSplitTokens, false);
            }
            const std::uint64_t before = std::uint64_t{s.count} * last * kSplitTokens;
            add(0, s.count, last, visible(s, 0, s.count) - before, true);
            continue;
        }
        for (std::uint32_t begin = 0; begin < s.count;) {
            // Ends at a multiple of the part's rows in positions, so that parts share no page.
            const std::uint32_t to_boundary = kPartRows - (s.first + begin) % kPartRows;
            const std::uint32_t end = std::min(begin + to_boundary, s.count);
            add(begin, end, kAllSplits, visible(s, begin, end), begin == 0);
            parts_append_ = parts_append_ && end - begin == s.count;
            begin = end;
        }
    }
}

void AttentionPlan::build(std::span<const SequenceView> sequences, std::uint32_t kv_heads,
                          bool split) {
    parts_.clear();
    parts_append_ = true;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
        split_[i] = split && can_split(sequences[i]) ? 1 : 0;
        add_parts(sequences[i], kv_heads, split_[i] != 0);
    }
}

std::uint64_t AttentionPlan::balance(unsigned workers) {
    const auto natural = [](const AttentionPart& p) {
        return std::tuple(p.item.sequence, p.item.kv_head, p.item.row_begin, p.item.split);
    };
    std::sort(parts_.begin(), parts_.end(), [&](const AttentionPart& a, const AttentionPart& b) {
        return a.cost != b.cost ? a.cost > b.cost : natural(a) < natural(b);
    });
    loads_.assign(workers, 0);
    for (AttentionPart& part : parts_) {
        const auto least = std::min_element(loads_.begin(), loads_.end());
        part.worker = static_cast<unsigned>(least - loads_.begin());
        *least += part.cost;
    }
    // Parts of one KV head follow each other: they walk the same tiles.
    std::sort(parts_.begin(), parts_.end(), [&](const AttentionPart& a, const AttentionPart& b) {
        return a.worker != b.worker ? a.worker < b.worker : natural(a) < natural(b);
    });
    first_part_.assign(workers + 1, parts_.size());
    for (std::size_t i = parts_.size(); i-- > 0;) {
        first_part_[parts_[i].worker] = i;
    }
    for (unsigned worker = workers; worker-- > 0;) {
        first_part_[worker] = std::min(first_part_[worker], first_part_[worker + 1]);
    }
    return *std::max_element(loads_.begin(), loads_.end());
}

void AttentionPlan::make(std::span<const SequenceView> sequences, std::uint32_t kv_heads,
                         unsigned workers, bool may_split) {
    split_.assign(sequences.size(), 0);
    build(sequences, kv_heads, false);
    const std::uint64_t load = balance(workers);
    if (!may_split || workers == 1 || std::none_of(sequences.begin(), sequences.end(), can_split)) {
        return;
    }
    build(sequences, kv_heads, true);
    if (balance(workers) >= load) {
        build(sequences, kv_heads, false);
        balance(workers);
    }
}

std::span<const AttentionPart> AttentionPlan::parts_of(unsigned worker) const {
    return std::span(parts_).subspan(first_part_[worker],
                                     first_part_[worker + 1] - first_part_[worker]);
}

}  // namespace kvw
