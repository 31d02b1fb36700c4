// Who attends to what in one step: made once, walked by every layer. Private to src/model.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace kvw {

// One piece of attention and the worker that does it. `appends`: the worker first stores the new
// rows of the item's sequence and KV head, which nobody else reads before the next barrier.
struct AttentionPart {
    AttentionItem item;
    std::uint64_t cost = 0;  // query rows x rows visible to them
    unsigned worker = 0;
    bool appends = false;
};

// Divides query rows, KV heads and, where few query rows see many rows, splits. A result does not
// depend on the division, so it is free to follow the cost: the dearest part first, to whoever has
// least.
class AttentionPlan {
  public:
    // `sequences` must outlive the plan's use. Splits are used only with `may_split`.
    void make(std::span<const SequenceView> sequences, std::uint32_t kv_heads, unsigned workers,
              bool may_split);

    // In the order in which the worker does them.
    std::span<const AttentionPart> parts_of(unsigned worker) const;
    // The parts store the new rows themselves; else every row must be stored before the first part.
    bool parts_append() const { return parts_append_; }
    // The partials of this sequence's rows have to be merged.
    bool is_split(std::size_t sequence) const { return split_[sequence] != 0; }

  private:
    void add_parts(const SequenceView& sequence, std::uint32_t kv_heads, bool split);
    void build(std::span<const SequenceView> sequences, std::uint32_t kv_heads, bool split);
    std::uint64_t balance(unsigned workers);  // the largest load

    std::vector<AttentionPart> parts_;
    std::vector<std::size_t> first_part_;  // [workers + 1]
    std::vector<std::uint64_t> loads_;
    std::vector<std::uint8_t> split_;
    bool parts_append_ = false;
};

}  // namespace kvw
