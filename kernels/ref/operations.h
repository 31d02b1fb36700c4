// The operations as they are written to be read: fallback and judge. kernels/kernels.h is their
// contract, kernels/NUMERICS.md their arithmetic.
#pragma once

#include "kernels/kernels.h"

namespace kvw::ref {

void rms_norm(float* out, const float* x, const float* weight, std::size_t cols, float epsilon,
              std::size_t row_begin, std::size_t row_end);
void rope(float* x, std::size_t heads, std::size_t head_dim, const float* cos, const float* sin,
          bool interleaved);
void silu_mul(float* out, const float* gate, const float* up, std::size_t count);
void gelu_mul(float* out, const float* gate, const float* up, std::size_t count);
void add(float* x, const float* y, std::size_t count);
void append(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
            std::uint32_t kv_head, const float* k, const float* v);
void append_checked(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                    std::uint32_t kv_head, const float* k, const float* v);
void attend(const AttentionArgs& args, const AttentionItem& item);
void attend_checked(const AttentionArgs& args, const AttentionItem& item);
void attend_merge(const AttentionArgs& args, const SequenceView& sequence, std::uint32_t row,
                  std::uint32_t head_begin, std::uint32_t head_end);
std::uint64_t scrub(const KvMemory& memory, std::uint32_t page, Owner owner,
                    std::uint32_t generation, std::uint32_t* mismatches);
RowDigest digest_logits(const float* logits, std::size_t count, std::size_t first_index,
                        bool* nonfinite);
std::uint64_t digest_row(const float* x, std::size_t cols);
std::size_t argmax(const float* x, std::size_t count);
void exp_shifted(float* out, const float* x, std::size_t count, float shift);

}  // namespace kvw::ref
