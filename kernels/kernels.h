// The operation table: every operation of a forward pass, once per instruction set, chosen at
// start.
//
// NUMERICS.md says what each computes, to the bit; ref is written to be read and is the judge, avx2
// and avx512 return the same bytes (tests compare with memcmp). Operations are single-threaded over
// a range of outputs that the caller divides among threads; ranges never cut a reduction. Nothing
// here allocates, fails or knows a tenant's name. Rows are row-major f32 unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/sequence.h"
#include "kernels/tile.h"
#include "kernels/weights.h"

namespace kvw {

// The specification all variants implement (kernels/NUMERICS.md). A change of any bit changes it.
inline constexpr std::uint32_t kNumericsVersion = 1;

// Activations quantised for the integer dot: q [rows][cols] int8, scale [rows][cols/32],
// half_sum [rows][cols/16] = sum of each 16 codes. cols is a multiple of 32.
struct QuantisedRows {
    std::int8_t* q = nullptr;
    float* scale = nullptr;
    std::int32_t* half_sum = nullptr;
    std::size_t cols = 0;
};

// Activations for matmul: floats for float weights, quantised for block-quantised ones; the unused
// one may be null. `rows` = tokens.
struct ActivationRows {
    const float* floats = nullptr;  // [rows][cols]
    QuantisedRows quantised;
    std::size_t rows = 0;
    std::size_t cols = 0;
};

// A running 128-bit digest of logits rows, and 64-bit ones of layer outputs; NUMERICS.md "Digests".
struct RowDigest {
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    friend bool operator==(const RowDigest&, const RowDigest&) = default;
};

// Where attention works. Scores, softmax and sums per split of kSplitTokens absolute positions.
inline constexpr std::uint32_t kSplitTokens = 256;
inline constexpr std::uint32_t kAllSplits = 0xffffffff;

struct AttentionArgs {
    KvMemory memory;
    std::uint32_t layer = 0;
    std::uint32_t query_heads = 0;  // multiple of memory.shape.heads
    const float* q = nullptr;       // [batch rows][query_heads * head_dim], rotated, not scaled
    float* out = nullptr;           // [batch rows][query_heads * head_dim]
    // Partials for items that name one split: [batch row][query head][split < splits_max][head_dim
    // + 2] as m, l, acc. May be null when every item has kAllSplits.
    float* partials = nullptr;
    std::uint32_t splits_max = 0;
};

// Query rows [row_begin, row_end) (indices within the sequence's new tokens) of one KV head: all
// query heads that share it. `split` names one split, or kAllSplits: walk all in order and write
// `out`.
struct AttentionItem {
    const SequenceView* sequence = nullptr;
    std::uint32_t kv_head = 0;
    std::uint32_t row_begin = 0, row_end = 0;
    std::uint32_t split = kAllSplits;
};

struct Kernels {
    const char* isa = "";  // "ref", "avx2", "avx512", "sim"

    // out[r] = block-quantised x[r], r in [row_begin, row_end). x: [rows][cols].
    void (*quantise)(const QuantisedRows& out, const float* x, std::size_t row_begin,
                     std::size_t row_end);

    // out[t][r] = sum over c of W[r][c] x[t][c], for all x.rows tokens t and the rows r of panels
    // [panel_begin, panel_end). out: [x.rows][out_stride]; only r < W.rows is written.
    void (*matmul)(float* out, std::size_t out_stride, const PackedMatrix& w,
                   const ActivationRows& x, std::size_t panel_begin, std::size_t panel_end);

    // out[c] = W[row][c], c in [0, W.cols).
    void (*embed)(float* out, const PackedMatrix& w, std::uint32_t row);

    // out[r][c] = x[r][c] * (1 / sqrt(mean(x[r]^2) + epsilon)) * weight[c]; may be in place.
    void (*rms_norm)(float* out, const float* x, const float* weight, std::size_t cols,
                     float epsilon, std::size_t row_begin, std::size_t row_end);

    // Rotates `heads` heads of head_dim floats in place. cos, sin: [head_dim / 2] for this
    // position. interleaved: pairs (2i, 2i+1) as in GGUF llama; else (i, i + head_dim/2) as in
    // qwen2, gemma.
    void (*rope)(float* x, std::size_t heads, std::size_t head_dim, const float* cos,
                 const float* sin, bool interleaved);

    // out[i] = silu(gate[i]) * up[i]; may be in place on gate.
    void (*silu_mul)(float* out, const float* gate, const float* up, std::size_t count);
    // out[i] = gelu(gate[i]) * up[i], the tanh form; may be in place on gate.
    void (*gelu_mul)(float* out, const float* gate, const float* up, std::size_t count);
    // x[i] = x[i] + y[i]
    void (*add)(float* x, const float* y, std::size_t count);

    // Stores the new rows of `sequence` into tiles of (layer, kv_head), f32 -> f16 round half to
    // even, and advances rows_written. k, v: [batch rows][heads * head_dim], k rotated. A header
    // that is not the reader's, of another generation, or whose rows_written is not the row to
    // come, is reported and left untouched. Adds to witness and rows_written from the loaded
    // headers.
    void (*append)(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                   std::uint32_t kv_head, const float* k, const float* v);

    // Causal attention of one item. Checks each tile's header (tenant, request or grantor,
    // generation, page, layer, head, rows) before use; a tile that does not match is reported, its
    // rows count as masked. Adds to witness and rows_read from the loaded headers, checked or not.
    void (*attend)(const AttentionArgs& args, const AttentionItem& item);
    // Merges the partials of one query row (index within the sequence) in split order into `out`,
    // query heads [head_begin, head_end).
    void (*attend_merge)(const AttentionArgs& args, const SequenceView& sequence, std::uint32_t row,
                         std::uint32_t head_begin, std::uint32_t head_end);

    // The same two, with every tile load going through an accessor that also checks the writer of
    // each row it uses against memory.writers (append records there), kept apart from the headers.
    void (*append_checked)(const KvMemory& memory, const SequenceView& sequence,
                           std::uint32_t layer, std::uint32_t kv_head, const float* k,
                           const float* v);
    void (*attend_checked)(const AttentionArgs& args, const AttentionItem& item);

    // Overwrites every tile of a page: header freed, K, V and padding poison; clears its writers.
    // Checks that the headers loaded name `owner` and `generation` (or are virgin, when owner is
    // nobody); returns the scrub witness of the loaded headers. Adds tiles that do not to
    // *mismatches.
    std::uint64_t (*scrub)(const KvMemory& memory, std::uint32_t page, Owner owner,
                           std::uint32_t generation, std::uint32_t* mismatches);

    // Adds one row of logits to its digest; first_index: vocabulary index of logits[0] (even). NaN
    // or infinity sets *nonfinite. Rows may be added in pieces, in any order.
    RowDigest (*digest_logits)(const float* logits, std::size_t count, std::size_t first_index,
                               bool* nonfinite);
    // The 64-bit digest of one row of a layer's output.
    std::uint64_t (*digest_row)(const float* x, std::size_t cols);

    // The largest of count floats and its first index (ties: lowest). No NaN.
    std::size_t (*argmax)(const float* x, std::size_t count);
    // out[i] = exp(x[i] - shift), NUMERICS.md "exp".
    void (*exp_shifted)(float* out, const float* x, std::size_t count, float shift);
};

// Prepares a page for its new owner: every tile header = owner, generation, page, layer, head, no
// rows. Before that, re-reads a few poison words per tile; returns how many were not poison, and
// adds how many it looked at to *words_checked.
std::uint32_t stamp_page(const KvMemory& memory, std::uint32_t page, Owner owner,
                         std::uint32_t generation, std::uint32_t* words_checked);

// Folds one row's digest, keyed by position, into a request's running one. Sums commute.
void fold_row(RowDigest& running, const RowDigest& row, std::uint64_t position);
void fold_row(std::uint64_t& running, std::uint64_t row, std::uint64_t position);

enum class Isa : std::uint8_t { ref, avx2, avx512 };

// The table for one instruction set; null when this processor (or build) lacks it.
const Kernels* kernels_for(Isa isa);
// "auto", "ref", "avx2", "avx512"; null when unknown or not available.
const Kernels* kernels_named(std::string_view name);
const Kernels& best_kernels();
// The table of the hash model (kernels/sim), which no other model runs on.
const Kernels& sim_kernels();

// True when this thread rounds to nearest and flushes no subnormals (MXCSR); set_float_mode makes
// it so.
bool float_mode_is_exact();
void set_float_mode();

// cos and sin of position * base^(-2i / head_dim), i < head_dim/2, from our own double code
// (kernels/detmath.h): NUMERICS.md "RoPE". out: [positions][head_dim / 2] each. scale: position
// divisor (linear scaling), 1 = none.
void rope_table(std::uint32_t first, std::uint32_t positions, std::uint32_t head_dim, double base,
                double scale, float* cos_out, float* sin_out);

}  // namespace kvw
