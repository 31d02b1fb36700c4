#include <array>
#include <cmath>
#include <limits>

#include "kernels/detmath.h"
#include "kernels/half.h"
#include "kernels/ref/operations.h"
#include "kernels/ref/sums.h"
#include "kernels/tile_check.h"
#include "src/base/check.h"

namespace kvw::ref {

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Softmax and weighted sum over a set of tokens, before the division: m is the greatest score, l
// the sum of exp(score - m), acc the values weighted with them. l == 0: no token was used.
struct Partial {
    float m = kNothing;
    float l = 0;
    std::array<float, kHeadDimMax> acc;
};

// NUMERICS.md "Attention": `whole` takes in the next split.
void merge(Partial& whole, float m, float l, const float* acc, std::size_t head_dim) {
    if (l == 0) {
        return;
    }
    if (whole.l == 0) {
        whole.m = m;
        whole.l = l;
        for (std::size_t d = 0; d < head_dim; ++d) {
            whole.acc[d] = acc[d];
        }
        return;
    }
    const float greatest = whole.m > m ? whole.m : m;
    const float before = detmath::exp(whole.m - greatest);
    const float now = detmath::exp(m - greatest);
    whole.l = detmath::fma(l, now, whole.l * before);
    for (std::size_t d = 0; d < head_dim; ++d) {
        whole.acc[d] = detmath::fma(acc[d], now, whole.acc[d] * before);
    }
    whole.m = greatest;
}

void finish(float* out, const Partial& whole, std::size_t head_dim) {
    for (std::size_t d = 0; d < head_dim; ++d) {
        out[d] = whole.l == 0 ? 0.0f : whole.acc[d] / whole.l;
    }
}

// One item: its tiles, checked once, then its rows one by one.
template <class Access>
class Walk {
  public:
    Walk(const AttentionArgs& args, const AttentionItem& item)
        : args_(args),
          item_(item),
          sequence_(*item.sequence),
          head_dim_(args.memory.shape.head_dim),
          group_(args.query_heads / args.memory.shape.heads) {}

    void load_headers() const {
        const std::uint32_t last = sequence_.first + item_.row_end - 1;
        const TileRange tiles = tiles_of(last, item_.split);
        std::uint64_t witness = 0;
        std::uint64_t rows_read = 0;
        for (std::uint32_t index = tiles.begin; index < tiles.end; ++index) {
            const PageRef& entry = sequence_.pages[index];
            if (entry.page >= args_.memory.pages) {
                report(index, TileHeader{}, false, 0);
                continue;
            }
            const std::uint8_t* tile = tile_at(index);
            const TileHeader loaded = header_of(tile);
            std::uint64_t visible = 0;
            for (std::uint32_t row = item_.row_begin; row < item_.row_end; ++row) {
                visible += visible_rows(sequence_.first + row, index);
            }
            witness += witness_of_row(loaded, AccessKind::read) * visible;
            rows_read += visible;
            if (!usable(index)) {
                report(index, loaded, false, 0);
                continue;
            }
            bool found = false;
            const std::uint64_t writer = Access::foreign_writer(
                args_.memory, tile, visible_rows(last, index), sequence_, entry, &found);
            if (found) {
                report(index, loaded, true, writer);
            }
        }
        sequence_.report->witness.fetch_add(witness, std::memory_order_relaxed);
        sequence_.report->rows_read.fetch_add(rows_read, std::memory_order_relaxed);
    }

    void attend_rows() const {
        for (std::uint32_t row = item_.row_begin; row < item_.row_end; ++row) {
            for (std::uint32_t head = item_.kv_head * group_; head < (item_.kv_head + 1) * group_;
                 ++head) {
                attend_row(row, head);
            }
        }
    }

  private:
    const std::uint8_t* tile_at(std::uint32_t index) const {
        return args_.memory.tile(sequence_.pages[index].page, args_.layer, item_.kv_head);
    }
    static const TileHeader& header_of(const std::uint8_t* tile) {
        return *reinterpret_cast<const TileHeader*>(tile);
    }

    // May this tile's rows be used? If not, they count as masked for every row of the item.
    bool usable(std::uint32_t index) const {
        const PageRef& entry = sequence_.pages[index];
        if (entry.page >= args_.memory.pages) {
            return false;
        }
        const TileHeader& header = header_of(tile_at(index));
        const std::uint32_t needed = visible_rows(sequence_.first + item_.row_end - 1, index);
        return !sequence_.check_headers ||
               (header_matches(header, sequence_.reader, entry, args_.layer, item_.kv_head) &&
                header.rows_written >= needed);
    }

    void report(std::uint32_t index, const TileHeader& loaded, bool from_shadow,
                std::uint64_t writer) const {
        sequence_.report->report({.access = AccessKind::read,
                                  .layer = args_.layer,
                                  .head = item_.kv_head,
                                  .table_index = index,
                                  .page = sequence_.pages[index].page,
                                  .rows = visible_rows(sequence_.first + item_.row_end - 1, index),
                                  .loaded = loaded,
                                  .shadow_writer = writer,
                                  .from_shadow = from_shadow});
    }

    void attend_row(std::uint32_t row, std::uint32_t head) const {
        const std::size_t at = (std::size_t{sequence_.batch_row} + row) * args_.query_heads + head;
        const std::uint32_t position = sequence_.first + row;
        const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
        std::array<float, kHeadDimMax> q;
        for (std::size_t d = 0; d < head_dim_; ++d) {
            q[d] = args_.q[at * head_dim_ + d] * scale;
        }
        if (item_.split != kAllSplits) {
            if (position >= item_.split * kSplitTokens) {
                const Partial part = one_split(q.data(), position, item_.split);
                float* to =
                    args_.partials + (at * args_.splits_max + item_.split) * (head_dim_ + 2);
                to[0] = part.m;
                to[1] = part.l;
                for (std::size_t d = 0; d < head_dim_; ++d) {
                    to[2 + d] = part.acc[d];
                }
            }
            return;
        }
        Partial whole;
        for (std::uint32_t split = 0; split <= position / kSplitTokens; ++split) {
            const Partial part = one_split(q.data(), position, split);
            merge(whole, part.m, part.l, part.acc.data(), head_dim_);
        }
        finish(args_.out + at * head_dim_, whole, head_dim_);
    }

    float score(const float* q, const std::uint16_t* keys, std::uint32_t token) const {
        std::array<float, 4> chain{};
        for (std::size_t d = 0; d < head_dim_; ++d) {
            chain[d % 4] =
                detmath::fma(q[d], float_from_half(keys[d * kPageTokens + token]), chain[d % 4]);
        }
        return (chain[0] + chain[2]) + (chain[1] + chain[3]);
    }

    Partial one_split(const float* q, std::uint32_t position, std::uint32_t split) const {
        Partial part;
        part.acc.fill(0.0f);
        std::array<float, kSplitTokens> scores;
        std::array<bool, kSplitTokens> used{};
        const TileRange tiles = tiles_of(position, split);
        const std::uint32_t first_token = split * kSplitTokens;
        for (std::uint32_t index = tiles.begin; index < tiles.end; ++index) {
            if (!usable(index)) {
                continue;
            }
            const auto* keys =
                reinterpret_cast<const std::uint16_t*>(tile_at(index) + sizeof(TileHeader));
            for (std::uint32_t token = 0; token < visible_rows(position, index); ++token) {
                const std::uint32_t i = index * kPageTokens + token - first_token;
                scores[i] = score(q, keys, token);
                used[i] = true;
                part.m = part.m > scores[i] ? part.m : scores[i];
            }
        }
        std::array<float, kSumLanes> lanes{};
        for (std::uint32_t i = 0; i < kSplitTokens; ++i) {
            if (!used[i]) {
                continue;
            }
            const float p = detmath::exp(scores[i] - part.m);
            lanes[i % kSumLanes] = lanes[i % kSumLanes] + p;
            const std::uint32_t index = (first_token + i) / kPageTokens;
            const auto* values = reinterpret_cast<const std::uint16_t*>(
                tile_at(index) + sizeof(TileHeader) + args_.memory.shape.key_bytes());
            for (std::size_t d = 0; d < head_dim_; ++d) {
                const float v = float_from_half(values[i % kPageTokens * head_dim_ + d]);
                part.acc[d] = detmath::fma(p, v, part.acc[d]);
            }
        }
        part.l = halving_tree(lanes);
        return part;
    }

    const AttentionArgs& args_;
    const AttentionItem& item_;
    const SequenceView& sequence_;
    std::size_t head_dim_;
    std::uint32_t group_;
};

template <class Access>
void attend_item(const AttentionArgs& args, const AttentionItem& item) {
    check_attention<Access>(args, item);
    const Walk<Access> walk(args, item);
    walk.load_headers();
    walk.attend_rows();
}

}  // namespace

void attend(const AttentionArgs& args, const AttentionItem& item) {
    attend_item<PlainAccess>(args, item);
}

void attend_checked(const AttentionArgs& args, const AttentionItem& item) {
    attend_item<CheckedAccess>(args, item);
}

void attend_merge(const AttentionArgs& args, const SequenceView& sequence, std::uint32_t row,
                  std::uint32_t head_begin, std::uint32_t head_end) {
    const std::size_t head_dim = args.memory.shape.head_dim;
    const std::uint32_t position = sequence.first + row;
    for (std::uint32_t head = head_begin; head < head_end; ++head) {
        const std::size_t at = (std::size_t{sequence.batch_row} + row) * args.query_heads + head;
        Partial whole;
        for (std::uint32_t split = 0; split <= position / kSplitTokens; ++split) {
            const float* part = args.partials + (at * args.splits_max + split) * (head_dim + 2);
            merge(whole, part[0], part[1], part + 2, head_dim);
        }
        finish(args.out + at * head_dim, whole, head_dim);
    }
}

}  // namespace kvw::ref
