// Attention over sixteen tokens (scores) or sixteen columns (values) at a time, for several query
// vectors at once: a tile is loaded and widened once for all query heads and rows of a block.
//
// A query vector is one query head of one row. Blocks of them walk the splits, in each split first
// all scores, then the softmax, then the values. NUMERICS.md "Attention" fixes every sum, so how
// vectors are grouped into blocks shows in no bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/tile_check.h"
#include "kernels/unrolled.h"
#include "kernels/wide/math.h"

namespace kvw::wide {

// Query vectors that share one pass over a tile's registers, and those that share one pass over the
// tiles: 24 vectors of 64 columns with their scores fit a 48 KiB first-level cache.
inline constexpr std::size_t kStrip = 6;
inline constexpr std::size_t kBlockVectors = 24;
inline constexpr std::size_t kStrips = kBlockVectors / kStrip;

// Runs body with the number of vectors in a strip, 1 to kStrip, as a constant.
template <class Body>
[[gnu::always_inline]] inline void with_width(std::size_t width, Body&& body) {
    switch (width) {
        case 1:
            return body(std::integral_constant<int, 1>{});
        case 2:
            return body(std::integral_constant<int, 2>{});
        case 3:
            return body(std::integral_constant<int, 3>{});
        case 4:
            return body(std::integral_constant<int, 4>{});
        case 5:
            return body(std::integral_constant<int, 5>{});
        default:
            return body(std::integral_constant<int, 6>{});
    }
}

// Sums Count of the four chains of a score, First, First + Step and so on, for each vector.
template <int First, int Step, class Lanes, int Width, int Count, class Element>
[[gnu::always_inline]] inline void sum_chains(typename Lanes::Floats (&chain)[Width][Count],
                                              const Element* keys, const float* q,
                                              std::size_t head_dim) {
    unrolled<Width>([&](auto v) __attribute__((always_inline)) {
        unrolled<Count>([&](auto c)
                            __attribute__((always_inline)) { chain[v][c] = Lanes::zero(); });
    });
    for (std::size_t d = First; d < head_dim; d += 4) {
        unrolled<Count>([&](auto c) __attribute__((always_inline)) {
            const std::size_t at = d + c * Step;
            const auto key = Lanes::load(keys + at * kPageTokens);
            unrolled<Width>([&](auto v) __attribute__((always_inline)) {
                chain[v][c] = Lanes::fma(Lanes::set(q[at * kStrip + v]), key, chain[v][c]);
            });
        });
    }
}

// pair[v * stride]: chain First plus chain First + 2.
template <int First, class Lanes, int Width, class Element>
[[gnu::always_inline]] inline void sum_pair(const Element* keys, const float* q,
                                            std::size_t head_dim, float* pair, std::size_t stride) {
    if constexpr (Lanes::chains_at_once(Width) == 2) {
        typename Lanes::Floats chain[Width][2];
        sum_chains<First, 2, Lanes>(chain, keys, q, head_dim);
        unrolled<Width>([&](auto v) __attribute__((always_inline)) {
            Lanes::store(pair + v * stride, Lanes::add(chain[v][0], chain[v][1]));
        });
    } else {
        typename Lanes::Floats chain[Width][1];
        sum_chains<First, 0, Lanes>(chain, keys, q, head_dim);
        unrolled<Width>([&](auto v) __attribute__((always_inline)) {
            Lanes::store(pair + v * stride, chain[v][0]);
        });
        sum_chains<First + 2, 0, Lanes>(chain, keys, q, head_dim);
        unrolled<Width>([&](auto v) __attribute__((always_inline)) {
            Lanes::store(pair + v * stride,
                         Lanes::add(Lanes::load(pair + v * stride), chain[v][0]));
        });
    }
}

// scores[v][16] of one tile for Width vectors. keys: [head_dim][16] halves or floats; q:
// [head_dim][kStrip]. The four chains meet as (0 + 2) + (1 + 3).
template <class Lanes, int Width, class Element>
void score_tile(const Element* keys, const float* q, std::size_t head_dim, float* scores) {
    if constexpr (Lanes::chains_at_once(Width) == 4) {
        typename Lanes::Floats chain[Width][4];
        sum_chains<0, 1, Lanes>(chain, keys, q, head_dim);
        unrolled<Width>([&](auto v) __attribute__((always_inline)) {
            Lanes::store(scores + v * kSplitTokens,
                         Lanes::add(Lanes::add(chain[v][0], chain[v][2]),
                                    Lanes::add(chain[v][1], chain[v][3])));
        });
    } else {
        float odd[Width][16];
        sum_pair<0, Lanes, Width>(keys, q, head_dim, scores, kSplitTokens);
        sum_pair<1, Lanes, Width>(keys, q, head_dim, odd[0], 16);
        unrolled<Width>([&](auto v) __attribute__((always_inline)) {
            float* at = scores + v * kSplitTokens;
            Lanes::store(at, Lanes::add(Lanes::load(at), Lanes::load(odd[v])));
        });
    }
}

// acc[v][columns] += p[v][token] values[token][columns], tokens in order.
template <class Lanes, int Width, int Columns, class Element>
[[gnu::always_inline]] inline void accumulate_columns(const Element* values, const float* p,
                                                      std::size_t head_dim, std::size_t tokens,
                                                      float* acc) {
    typename Lanes::Floats sum[Width][Columns];
    unrolled<Width>([&](auto v) __attribute__((always_inline)) {
        unrolled<Columns>([&](auto c) __attribute__((always_inline)) {
            sum[v][c] = Lanes::load(acc + v * head_dim + 16 * c);
        });
    });
    for (std::size_t token = 0; token < tokens; ++token) {
        unrolled<Columns>([&](auto c) __attribute__((always_inline)) {
            const auto value = Lanes::load(values + token * head_dim + 16 * c);
            unrolled<Width>([&](auto v) __attribute__((always_inline)) {
                sum[v][c] = Lanes::fma(Lanes::set(p[v * kSplitTokens + token]), value, sum[v][c]);
            });
        });
    }
    unrolled<Width>([&](auto v) __attribute__((always_inline)) {
        unrolled<Columns>([&](auto c) __attribute__((always_inline)) {
            Lanes::store(acc + v * head_dim + 16 * c, sum[v][c]);
        });
    });
}

template <class Lanes, int Width, class Element>
void accumulate_tile(const Element* values, const float* p, std::size_t head_dim,
                     std::size_t tokens, float* acc) {
    constexpr int kColumns = Lanes::columns_at_once(Width);
    std::size_t column = 0;
    for (; column + 16 * kColumns <= head_dim; column += 16 * kColumns) {
        accumulate_columns<Lanes, Width, kColumns>(values + column, p, head_dim, tokens,
                                                   acc + column);
    }
    for (; column < head_dim; column += 16) {
        accumulate_columns<Lanes, Width, 1>(values + column, p, head_dim, tokens, acc + column);
    }
}

// whole takes in the next split: NUMERICS.md "Attention". m, l: those of `whole`, updated.
template <class Lanes>
[[gnu::always_inline]] inline void merge(float& m, float& l, float* whole, float split_m,
                                         float split_l, const float* acc, std::size_t head_dim) {
    if (split_l == 0) {
        return;
    }
    if (l == 0) {
        m = split_m;
        l = split_l;
        for (std::size_t d = 0; d < head_dim; d += 16) {
            Lanes::store(whole + d, Lanes::load(acc + d));
        }
        return;
    }
    const float greatest = m > split_m ? m : split_m;
    const float before = detmath::exp(m - greatest);
    const float now = detmath::exp(split_m - greatest);
    l = detmath::fma(split_l, now, l * before);
    m = greatest;
    for (std::size_t d = 0; d < head_dim; d += 16) {
        const auto old = Lanes::mul(Lanes::load(whole + d), Lanes::set(before));
        Lanes::store(whole + d, Lanes::fma(Lanes::load(acc + d), Lanes::set(now), old));
    }
}

template <class Lanes>
[[gnu::always_inline]] inline void finish(float* out, float l, const float* whole,
                                          std::size_t head_dim) {
    for (std::size_t d = 0; d < head_dim; d += 16) {
        Lanes::store(out + d,
                     l == 0 ? Lanes::zero() : Lanes::div(Lanes::load(whole + d), Lanes::set(l)));
    }
}

template <class Lanes, class Access>
class AttentionBlock {
  public:
    AttentionBlock(const AttentionArgs& args, const AttentionItem& item)
        : args_(args),
          item_(item),
          sequence_(*item.sequence),
          pages_(sequence_.pages.data()),
          head_dim_(args.memory.shape.head_dim),
          group_(args.query_heads / args.memory.shape.heads),
          item_last_(sequence_.first + item.row_end - 1) {}

    // Vectors [begin, end) of the item, counted as row * group + query head.
    void attend(std::size_t begin, std::size_t end) {
        begin_ = begin;
        count_ = end - begin;
        reports_ = end == (std::size_t{item_.row_end} - item_.row_begin) * group_;
        load_queries();
        const std::uint32_t last = position_[count_ - 1];
        std::uint32_t split = item_.split == kAllSplits ? 0 : item_.split;
        const std::uint32_t split_last =
            item_.split == kAllSplits ? last / kSplitTokens : item_.split;
        for (; split <= split_last; ++split) {
            attend_split(split, tiles_of(last, split));
        }
        if (item_.split == kAllSplits) {
            for (std::size_t v = 0; v < count_; ++v) {
                finish<Lanes>(args_.out + at_[v] * head_dim_, l_[v], whole_ + v * head_dim_,
                              head_dim_);
            }
        }
    }

    void add_to_report() const {
        sequence_.report->witness.fetch_add(witness_, std::memory_order_relaxed);
        sequence_.report->rows_read.fetch_add(rows_read_, std::memory_order_relaxed);
    }

  private:
    void load_queries() {
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(head_dim_));
        for (std::size_t v = 0; v < count_; ++v) {
            const std::size_t row = item_.row_begin + (begin_ + v) / group_;
            const std::size_t head = item_.kv_head * group_ + (begin_ + v) % group_;
            position_[v] = sequence_.first + static_cast<std::uint32_t>(row);
            at_[v] = (sequence_.batch_row + row) * args_.query_heads + head;
            l_[v] = 0;
            const float* q = args_.q + at_[v] * head_dim_;
            float* to = q_ + v / kStrip * kStrip * head_dim_ + v % kStrip;
            for (std::size_t d = 0; d < head_dim_; ++d) {
                to[d * kStrip] = q[d] * scale;
            }
        }
    }

    // Loads the header of every tile of the split, forms its witness and says which may be used.
    void load_headers(TileRange range) {
        // Rows whose first query head is in this block: each row is counted in one block.
        const std::size_t row_begin = (begin_ + group_ - 1) / group_;
        const std::size_t row_end = (begin_ + count_ + group_ - 1) / group_;
        usable_ = 0;
        for (std::uint32_t index = range.begin; index < range.end; ++index) {
            const PageRef entry = pages_[index];
            const std::uint32_t needed = visible_rows(item_last_, index);
            if (entry.page >= args_.memory.pages) {
                report(index, needed, TileHeader{}, false, 0);
                continue;
            }
            const std::uint8_t* tile = args_.memory.tile(entry.page, args_.layer, item_.kv_head);
            tiles_[index - range.begin] = tile;
            const TileHeader loaded = *reinterpret_cast<const TileHeader*>(tile);
            std::uint64_t visible = 0;
            for (std::size_t row = row_begin; row < row_end; ++row) {
                visible += visible_rows(
                    sequence_.first + item_.row_begin + static_cast<std::uint32_t>(row), index);
            }
            witness_ += witness_of_row(loaded, AccessKind::read) * visible;
            rows_read_ += visible;
            if (sequence_.check_headers &&
                !(header_matches(loaded, sequence_.reader, entry, args_.layer, item_.kv_head) &&
                  loaded.rows_written >= needed)) {
                report(index, needed, loaded, false, 0);
                continue;
            }
            usable_ |= 1u << (index - range.begin);
            bool found = false;
            const std::uint64_t writer =
                Access::foreign_writer(args_.memory, tile, needed, sequence_, entry, &found);
            if (found) {
                report(index, needed, loaded, true, writer);
            }
        }
    }

    // All blocks of an item meet the same tiles; the last one, which needs the most rows, reports.
    void report(std::uint32_t index, std::uint32_t rows, const TileHeader& loaded, bool from_shadow,
                std::uint64_t writer) const {
        if (reports_) {
            sequence_.report->report({.access = AccessKind::read,
                                      .layer = args_.layer,
                                      .head = item_.kv_head,
                                      .table_index = index,
                                      .page = pages_[index].page,
                                      .rows = rows,
                                      .loaded = loaded,
                                      .shadow_writer = writer,
                                      .from_shadow = from_shadow});
        }
    }

    void attend_split(std::uint32_t split, TileRange range) {
        load_headers(range);
        const std::uint32_t first_token = split * kSplitTokens;
        for (std::size_t v = 0; v < count_; ++v) {
            const std::uint32_t seen =
                position_[v] < first_token ? 0 : position_[v] - first_token + 1;
            visible_[v] = seen < kSplitTokens ? seen : kSplitTokens;
            float* acc = acc_ + v * head_dim_;
            for (std::size_t d = 0; d < head_dim_; d += 16) {
                Lanes::store(acc + d, Lanes::zero());
            }
        }
        const std::uint32_t tiles = range.end - range.begin;
        for (std::uint32_t tile = 0; tile < tiles; ++tile) {
            if ((usable_ >> tile & 1) != 0) {
                prefetch(tile, tiles, sizeof(TileHeader));
                score(tile);
            }
        }
        for (std::size_t v = 0; v < count_; ++v) {
            soften(v);
        }
        for (std::uint32_t tile = 0; tile < tiles; ++tile) {
            if ((usable_ >> tile & 1) != 0) {
                prefetch(tile, tiles, sizeof(TileHeader) + args_.memory.shape.key_bytes());
                accumulate(tile);
            }
        }
        for (std::size_t v = 0; v < count_; ++v) {
            keep(v, split);
        }
    }

    bool is_narrow() const { return count_ <= kStrip; }

    // A single strip is soon done with a tile, and the next one lies a page away.
    void prefetch(std::uint32_t tile, std::uint32_t tiles, std::size_t offset) const {
        if (is_narrow() && tile + 1 < tiles && (usable_ >> (tile + 1) & 1) != 0) {
            const std::uint8_t* next = tiles_[tile + 1] + offset;
            for (std::size_t byte = 0; byte < args_.memory.shape.key_bytes(); byte += 64) {
                __builtin_prefetch(next + byte);
            }
        }
    }

    // The halves of a tile (keys or values) as floats: worth it when several strips read them.
    const float* widen(const std::uint16_t* halves) {
        for (std::size_t i = 0; i < kPageTokens * head_dim_; i += 16) {
            Lanes::store(widened_ + i, Lanes::load(halves + i));
        }
        return widened_;
    }

    template <class Body>
    void for_each_strip(Body body) {
        for (std::size_t v = 0; v < count_; v += kStrip) {
            body(v, count_ - v < kStrip ? count_ - v : kStrip);
        }
    }

    void score(std::uint32_t tile) {
        const auto* halves =
            reinterpret_cast<const std::uint16_t*>(tiles_[tile] + sizeof(TileHeader));
        if (is_narrow()) {
            score_from(halves, tile);
        } else {
            score_from(widen(halves), tile);
        }
    }

    template <class Element>
    void score_from(const Element* keys, std::uint32_t tile) {
        for_each_strip([&](std::size_t v, std::size_t width) {
            if (visible_[v + width - 1] <= tile * kPageTokens) {
                return;  // positions grow with v: nobody in this strip sees the tile
            }
            with_width(width, [&](auto constant) {
                score_tile<Lanes, constant()>(keys, q_ + v * head_dim_, head_dim_,
                                              scores_ + v * kSplitTokens + tile * kPageTokens);
            });
        });
    }

    // Scores of one vector become weights; what is masked becomes 0 and is not added up.
    void soften(std::size_t v) {
        float* scores = scores_ + v * kSplitTokens;
        const std::uint32_t visible = visible_[v];
        const auto nothing = Lanes::set(-std::numeric_limits<float>::infinity());
        auto most = nothing;
        std::uint32_t used = 0;
        for (std::uint32_t token = 0; token < visible; token += 16) {
            if ((usable_ >> (token / 16) & 1) != 0) {
                const auto s = Lanes::load(scores + token);
                most = Lanes::max(most,
                                  visible - token >= 16
                                      ? s
                                      : Lanes::select(Lanes::first(visible - token), s, nothing));
                ++used;
            }
        }
        split_m_[v] = Lanes::greatest(most);
        split_l_[v] = 0;
        if (used == 0) {
            return;
        }
        const auto greatest = Lanes::set(split_m_[v]);
        typename Lanes::Floats quarter[4] = {Lanes::zero(), Lanes::zero(), Lanes::zero(),
                                             Lanes::zero()};
        for (std::uint32_t token = 0; token < visible; token += 64) {
            unrolled<4>([&](auto i) __attribute__((always_inline)) {
                const std::uint32_t at = token + 16 * i;
                if (at < visible && (usable_ >> (at / 16) & 1) != 0) {
                    auto p = exp<Lanes>(Lanes::sub(Lanes::load(scores + at), greatest));
                    if (visible - at < 16) {
                        p = Lanes::select(Lanes::first(visible - at), p, Lanes::zero());
                    }
                    Lanes::store(scores + at, p);
                    quarter[i] = Lanes::add(quarter[i], p);
                }
            });
        }
        split_l_[v] = halving_tree<Lanes>(quarter);
    }

    void accumulate(std::uint32_t tile) {
        const auto* halves = reinterpret_cast<const std::uint16_t*>(
            tiles_[tile] + sizeof(TileHeader) + args_.memory.shape.key_bytes());
        if (is_narrow()) {
            accumulate_from(halves, tile);
        } else {
            accumulate_from(widen(halves), tile);
        }
    }

    std::size_t tokens_seen(std::size_t v, std::uint32_t tile) const {
        const std::uint32_t begin = tile * kPageTokens;
        const std::uint32_t seen = visible_[v] < begin ? 0 : visible_[v] - begin;
        return seen < kPageTokens ? seen : kPageTokens;
    }

    template <class Element>
    void accumulate_from(const Element* values, std::uint32_t tile) {
        for_each_strip([&](std::size_t v, std::size_t width) {
            const float* p = scores_ + v * kSplitTokens + tile * kPageTokens;
            float* acc = acc_ + v * head_dim_;
            const std::size_t tokens = tokens_seen(v, tile);
            if (tokens == tokens_seen(v + width - 1, tile)) {
                with_width(width, [&](auto constant) {
                    accumulate_tile<Lanes, constant()>(values, p, head_dim_, tokens, acc);
                });
                return;
            }
            // The end of causality runs through this strip: each vector stops at its own token,
            // because what lies behind may be poison, and 0 times that is not 0.
            for (std::size_t i = 0; i < width; ++i) {
                accumulate_tile<Lanes, 1>(values, p + i * kSplitTokens, head_dim_,
                                          tokens_seen(v + i, tile), acc + i * head_dim_);
            }
        });
    }

    void keep(std::size_t v, std::uint32_t split) {
        const float* acc = acc_ + v * head_dim_;
        if (item_.split == kAllSplits) {
            merge<Lanes>(m_[v], l_[v], whole_ + v * head_dim_, split_m_[v], split_l_[v], acc,
                         head_dim_);
        } else if (visible_[v] != 0) {
            float* to = args_.partials + (at_[v] * args_.splits_max + split) * (head_dim_ + 2);
            to[0] = split_m_[v];
            to[1] = split_l_[v];
            for (std::size_t d = 0; d < head_dim_; d += 16) {
                Lanes::store(to + 2 + d, Lanes::load(acc + d));
            }
        }
    }

    const AttentionArgs& args_;
    const AttentionItem& item_;
    const SequenceView& sequence_;
    const PageRef* pages_;
    const std::size_t head_dim_;
    const std::size_t group_;
    const std::uint32_t item_last_;  // position of the item's last row
    std::uint64_t witness_ = 0;
    std::uint64_t rows_read_ = 0;

    // Of the current block.
    std::size_t begin_ = 0, count_ = 0;
    bool reports_ = false;
    std::size_t at_[kBlockVectors];  // index of the vector in q and out
    std::uint32_t position_[kBlockVectors];
    float m_[kBlockVectors], l_[kBlockVectors];
    // Of the current split: tiles whose rows may be used, one bit each, and where they are.
    std::uint32_t usable_ = 0;
    const std::uint8_t* tiles_[kSplitTokens / kPageTokens];
    std::uint32_t visible_[kBlockVectors];
    float split_m_[kBlockVectors], split_l_[kBlockVectors];

    alignas(64) float q_[kBlockVectors * kHeadDimMax];  // [strip][head_dim][kStrip], scaled
    alignas(64) float scores_[kBlockVectors * kSplitTokens];
    alignas(64) float acc_[kBlockVectors * kHeadDimMax];
    alignas(64) float whole_[kBlockVectors * kHeadDimMax];
    alignas(64) float widened_[kPageTokens * kHeadDimMax];
};

template <class Lanes, class Access>
void attend(const AttentionArgs& args, const AttentionItem& item) {
    check_attention<Access>(args, item);
    AttentionBlock<Lanes, Access> block(args, item);
    const std::size_t group = args.query_heads / args.memory.shape.heads;
    const std::size_t vectors = (item.row_end - item.row_begin) * group;
    // Whole rows where they fit, so that few strips meet the end of causality.
    const std::size_t step = group <= kBlockVectors ? kBlockVectors / group * group : kBlockVectors;
    for (std::size_t begin = 0; begin < vectors; begin += step) {
        block.attend(begin, vectors - begin < step ? vectors : begin + step);
    }
    block.add_to_report();
}

template <class Lanes>
void attend_merge(const AttentionArgs& args, const SequenceView& sequence, std::uint32_t row,
                  std::uint32_t head_begin, std::uint32_t head_end) {
    const std::size_t head_dim = args.memory.shape.head_dim;
    const std::uint32_t position = sequence.first + row;
    for (std::uint32_t head = head_begin; head < head_end; ++head) {
        const std::size_t at = (std::size_t{sequence.batch_row} + row) * args.query_heads + head;
        float m = 0, l = 0;
        alignas(64) float whole[kHeadDimMax];
        for (std::uint32_t split = 0; split <= position / kSplitTokens; ++split) {
            const float* part = args.partials + (at * args.splits_max + split) * (head_dim + 2);
            merge<Lanes>(m, l, whole, part[0], part[1], part + 2, head_dim);
        }
        finish<Lanes>(args.out + at * head_dim, l, whole, head_dim);
    }
}

}  // namespace kvw::wide
