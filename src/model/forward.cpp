#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "src/base/check.h"
#include "src/gguf/length.h"
#include "src/model/arena.h"
#include "src/model/attention_plan.h"
#include "src/model/model.h"
#include "src/model/sim.h"
#include "src/model/weights.h"

namespace kvw {

namespace {

// Rows that pass through a matmul and what follows it together, so that what lies between stays in
// the second-level cache. A multiple of the kernels' tile of 12.
constexpr std::size_t kBlockRows = 48;
// With this many rows for every worker each takes rows of its own through all weights and waits for
// nobody but in attention; with fewer all workers share all rows and divide the weights.
constexpr std::size_t kRowsPerWorker = 8;
// Up to this many rows each worker prepares all of them for itself: cheaper than a barrier.
constexpr std::size_t kFewRows = 4;
// Most rows of a step for which attention may be divided by splits: their partials have a place.
constexpr std::uint32_t kPartialRows = 16;
// Panels of the vocabulary matmul whose logits are digested while they are still in the cache.
constexpr std::size_t kDigestPanels = 128;
// RoPE rows are computed when a position first comes near, this many at a time.
constexpr std::uint32_t kRopeRows = 512;

struct Rows {
    std::size_t begin = 0, end = 0;
    std::size_t count() const { return end - begin; }
};

// Activations on their way into a matmul: floats for float weights, codes for quantised ones.
struct Activations {
    float* floats = nullptr;
    std::int8_t* q = nullptr;
    float* scale = nullptr;
    std::int32_t* half_sum = nullptr;

    // Where row `row` of a dense [rows][cols] begins.
    QuantisedRows quantised(std::size_t row, std::size_t cols) const {
        return {q + row * cols, scale + row * (cols / 32), half_sum + row * (cols / 16), cols};
    }
    ActivationRows rows(std::size_t first, std::size_t count, std::size_t cols) const {
        return {floats + first * cols, quantised(first, cols), count, cols};
    }
    // Columns [begin, end) of one row, as a row of its own.
    QuantisedRows columns(std::size_t row, std::size_t cols, std::size_t begin,
                          std::size_t end) const {
        QuantisedRows whole = quantised(row, cols);
        return {whole.q + begin, whole.scale + begin / 32, whole.half_sum + begin / 16,
                end - begin};
    }
};

// Which of the two a set of matrices reads.
struct Wants {
    bool floats = false, codes = false;
};
template <class... Matrices>
Wants wants(const Matrices&... matrices) {
    Wants all;
    for (const PackedMatrix* matrix : {&matrices...}) {
        (is_quantised(matrix->type) ? all.codes : all.floats) = true;
    }
    return all;
}

// Carves arrays out of an arena; without one it only counts.
class Carver {
  public:
    explicit Carver(std::uint8_t* base) : base_(base) {}
    template <class T>
    T* take(Length count) {
        const std::uint64_t offset = used_.within(kMax).value_or(0);
        used_ = (used_ + count * sizeof(T)).rounded_up(64);
        return base_ != nullptr ? reinterpret_cast<T*>(base_ + offset) : nullptr;
    }
    std::optional<std::uint64_t> used() const { return used_.within(kMax); }

  private:
    static constexpr std::uint64_t kMax = std::uint64_t{1} << 46;
    std::uint8_t* base_;
    Length used_ = 0;
};

Activations take_activations(Carver& carver, std::size_t rows, std::size_t cols) {
    const Length size = Length(rows) * cols;
    Activations a;
    a.floats = carver.take<float>(size);
    a.q = carver.take<std::int8_t>(size);
    a.scale = carver.take<float>(Length(rows) * (cols / 32 + 1));
    a.half_sum = carver.take<std::int32_t>(Length(rows) * (cols / 16 + 1));
    return a;
}

// What one worker needs for itself.
struct WorkerScratch {
    Activations in, ff;
    float* gate = nullptr;         // [kBlockRows][ff]
    float* up = nullptr;           // [kBlockRows][ff]
    float* product = nullptr;      // [kBlockRows][width]
    float* attended = nullptr;     // [kFewRows][query width], merged for itself
    RowDigest* digests = nullptr;  // [logits rows]
    bool* nonfinite = nullptr;     // [logits rows]
};

// A row of the batch: whose it is, and where.
struct BatchRow {
    std::uint32_t sequence = 0, position = 0;
};

}  // namespace

struct ForwardPass::State {
    const ModelConfig& config;
    const Model::Weights& weights;
    const Kernels& kernels;
    ThreadPool& threads;
    std::uint32_t batch_rows, logits_rows, context, splits_max;
    std::size_t query_width, kv_width, shared_rows, logits_stride;

    Arena rope_arena;
    float *cos = nullptr, *sin = nullptr;  // [context][head_dim / 2]
    std::uint32_t rope_rows = 0;           // that are computed

    Arena arena;
    float *x = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *attended = nullptr;
    float* partials = nullptr;
    float* logits = nullptr;
    std::uint64_t* layer_rows = nullptr;  // digests, [layers][batch rows]
    Activations in, ff, logits_in;        // what workers share
    std::vector<WorkerScratch> workers;

    // Of the step under way.
    const StepInput* input = nullptr;
    AttentionPlan plan;
    std::vector<BatchRow> rows;
    std::vector<std::uint32_t> logits_of;  // batch rows
    bool by_rows = false;
    std::uint32_t rope_begin = 0, rope_end = 0;

    State(const Model& model, const Kernels& kernels_in, ThreadPool& threads_in,
          std::uint32_t batch_rows_in, std::uint32_t logits_rows_in, std::uint32_t context_in);
    void carve(Carver& carver);
    void begin_step(const StepInput& step);
    void end_step(StepOutput& out);

    const float* cos_at(std::uint32_t position) const {
        return cos + std::size_t{position} * (config.head_dim / 2);
    }
    const float* sin_at(std::uint32_t position) const {
        return sin + std::size_t{position} * (config.head_dim / 2);
    }

    class Worker;
};

// One thread's way through a step. Barriers are where rows or columns of others are needed;
// everything between two of them touches what this worker owns.
class ForwardPass::State::Worker {
  public:
    Worker(State& state, unsigned id)
        : s(state), c(state.config), kernels(state.kernels), own(state.workers[id]), id(id) {}

    void run() {
        embed();
        for (std::uint32_t layer = 0; layer < c.layers; ++layer) {
            const LayerWeights& w = s.weights.layers[layer];
            project(w);
            attend(layer);
            project_back(w);
            feed_forward(w);
            digest(layer);
        }
        barrier();
        score();
    }

  private:
    void barrier() { s.threads.barrier(id); }
    void barrier_unless_by_rows() {
        if (!s.by_rows) {
            barrier();
        }
    }
    Rows share(std::size_t count, std::size_t unit = 1) const {
        const auto [begin, end] = s.threads.share(count, id, unit);
        return {begin, end};
    }
    // The outputs of this worker, in units: all of them when it has rows of its own.
    Rows share_outputs(std::size_t count, std::size_t unit = 1) const {
        return s.by_rows ? Rows{0, count} : share(count, unit);
    }
    template <class Use>
    static void for_blocks(Rows rows, const Use& use) {
        for (std::size_t begin = rows.begin; begin < rows.end; begin += kBlockRows) {
            use(Rows{begin, std::min(begin + kBlockRows, rows.end)});
        }
    }

    // fill(to, at, rows) prepares batch rows as rows at.. of `to`; use(prepared, rows) reads them.
    template <class Fill, class Use>
    void with_prepared(std::size_t cols, const Fill& fill, const Use& use) {
        const Rows all{0, s.rows.size()};
        if (s.by_rows) {
            for_blocks(share(all.count()), [&](Rows rows) {
                fill(own.in, 0, rows);
                use(own.in.rows(0, rows.count(), cols), rows);
            });
        } else if (all.count() <= kFewRows) {
            fill(own.in, 0, all);
            use(own.in.rows(0, all.count(), cols), all);
        } else {
            const Rows mine = share(all.count());
            fill(s.in, mine.begin, mine);
            barrier();
            for_blocks(all,
                       [&](Rows rows) { use(s.in.rows(rows.begin, rows.count(), cols), rows); });
        }
    }

    // Rows [at, at + count) of `to` = the normalised x.
    void normalise(const Activations& to, std::size_t at, const float* x, std::size_t count,
                   const float* norm, Wants wanted) {
        float* const floats = to.floats + at * c.width;
        kernels.rms_norm(floats, x, norm, c.width, c.norm_epsilon, 0, count);
        if (wanted.codes) {
            kernels.quantise(to.quantised(at, c.width), floats, 0, count);
        }
    }
    auto normalise_with(const float* norm, Wants wanted) {
        return [this, norm, wanted](const Activations& to, std::size_t at, Rows rows) {
            normalise(to, at, s.x + rows.begin * c.width, rows.count(), norm, wanted);
        };
    }

    void embed() {
        if (s.rope_begin < s.rope_end) {
            const Rows mine = share(s.rope_end - s.rope_begin);
            const std::uint32_t first = s.rope_begin + static_cast<std::uint32_t>(mine.begin);
            const std::size_t at = std::size_t{first} * (c.head_dim / 2);
            rope_table(first, static_cast<std::uint32_t>(mine.count()), c.head_dim, c.rope_base,
                       c.rope_scale, s.cos + at, s.sin + at);
        }
        const Rows mine = share(s.rows.size());
        for (std::size_t r = mine.begin; r < mine.end; ++r) {
            kernels.embed(s.x + r * c.width, s.weights.embedding,
                          static_cast<std::uint32_t>(s.input->tokens[r]));
        }
        barrier();
    }

    // q, k and v of all rows, q and k rotated. Outputs are divided by heads, so that whoever has a
    // head has all its dimensions.
    void project(const LayerWeights& w) {
        const Rows heads = share_outputs(std::size_t{c.heads} + 2 * c.kv_heads);
        with_prepared(c.width, normalise_with(w.attention_norm, wants(w.q, w.k, w.v)),
                      [&](const ActivationRows& in, Rows rows) {
                          const std::size_t first_k = c.heads, first_v = first_k + c.kv_heads;
                          project_heads(s.q, w.q, heads, 0, c.heads, in, rows, true);
                          project_heads(s.k, w.k, heads, first_k, c.kv_heads, in, rows, true);
                          project_heads(s.v, w.v, heads, first_v, c.kv_heads, in, rows, false);
                      });
        barrier();
    }
    // Those of `heads` that lie in [first, first + count): the heads of this matrix.
    void project_heads(float* out, const PackedMatrix& w, Rows heads, std::size_t first,
                       std::size_t count, const ActivationRows& in, Rows rows, bool rotate) {
        const std::size_t begin = std::max(heads.begin, first),
                          end = std::min(heads.end, first + count);
        if (begin >= end) {
            return;
        }
        const std::size_t head = begin - first, panels = c.head_dim / 16;
        const std::size_t stride = count * c.head_dim;
        float* const to = out + rows.begin * stride;
        kernels.matmul(to, stride, w, in, head * panels, (end - first) * panels);
        for (std::size_t r = 0; rotate && r < rows.count(); ++r) {
            const std::uint32_t position = s.rows[rows.begin + r].position;
            kernels.rope(to + r * stride + head * c.head_dim, end - begin, c.head_dim,
                         s.cos_at(position), s.sin_at(position), c.rope_interleaved);
        }
    }

    AttentionArgs attention_args(std::uint32_t layer, float* out) const {
        return {s.input->memory, layer, c.heads, s.q, out, s.partials, s.splits_max};
    }

    void attend(std::uint32_t layer) {
        const auto append = s.input->checked ? kernels.append_checked : kernels.append;
        const auto attend = s.input->checked ? kernels.attend_checked : kernels.attend;
        const auto store = [&](const SequenceView& sequence, std::uint32_t head) {
            append(s.input->memory, sequence, layer, head, s.k, s.v);
        };
        if (!s.plan.parts_append()) {
            const Rows mine = share(s.input->sequences.size() * c.kv_heads);
            for (std::size_t i = mine.begin; i < mine.end; ++i) {
                store(s.input->sequences[i / c.kv_heads],
                      static_cast<std::uint32_t>(i % c.kv_heads));
            }
            barrier();
        }
        const AttentionArgs args = attention_args(layer, s.attended);
        for (const AttentionPart& part : s.plan.parts_of(id)) {
            if (s.plan.parts_append() && part.appends) {
                store(*part.item.sequence, part.item.kv_head);
            }
            attend(args, part.item);
        }
        barrier();
    }

    // x += the output matrix times what attention gathered.
    void project_back(const LayerWeights& w) {
        const Wants wanted = wants(w.attention_out);
        with_prepared(
            s.query_width,
            [&](const Activations& to, std::size_t at, Rows rows) {
                gather_attended(to, at, rows, wanted);
            },
            [&](const ActivationRows& in, Rows rows) { add_product(w.attention_out, in, rows); });
        barrier_unless_by_rows();
    }
    void gather_attended(const Activations& to, std::size_t at, Rows rows, Wants wanted) {
        // With few rows every worker merges all of them: into memory of its own.
        const bool few = !s.by_rows && s.rows.size() <= kFewRows;
        float* const merged = few ? own.attended : s.attended;
        for (std::size_t r = rows.begin; r < rows.end; ++r) {
            const SequenceView& sequence = s.input->sequences[s.rows[r].sequence];
            const float* from = s.attended + r * s.query_width;
            if (s.plan.is_split(s.rows[r].sequence)) {
                const auto row = static_cast<std::uint32_t>(r - sequence.batch_row);
                kernels.attend_merge(attention_args(0, merged), sequence, row, 0, c.heads);
                from = merged + r * s.query_width;
            }
            const std::size_t place = at + r - rows.begin;
            if (wanted.codes) {
                kernels.quantise(to.quantised(place, s.query_width), from, 0, 1);
            }
            if (wanted.floats) {
                std::memcpy(to.floats + place * s.query_width, from, s.query_width * sizeof(float));
            }
        }
    }

    // x += w times the rows, in this worker's columns.
    void add_product(const PackedMatrix& w, const ActivationRows& in, Rows rows) {
        const Rows panels = share_outputs(w.panels());
        if (panels.count() == 0) {
            return;
        }
        kernels.matmul(own.product, c.width, w, in, panels.begin, panels.end);
        const std::size_t begin = panels.begin * 16;
        const std::size_t end = std::min<std::size_t>(panels.end * 16, c.width);
        for (std::size_t r = 0; r < rows.count(); ++r) {
            kernels.add(s.x + (rows.begin + r) * c.width + begin, own.product + r * c.width + begin,
                        end - begin);
        }
    }

    // x += down (silu(gate n) * (up n)), n the normalised x.
    void feed_forward(const LayerWeights& w) {
        with_prepared(c.width, normalise_with(w.ff_norm, wants(w.gate, w.up)),
                      [&](const ActivationRows& in, Rows rows) {
                          const Activations& to = s.by_rows ? own.ff : s.ff;
                          gate_and_up(w, in, rows, to, s.by_rows ? 0 : rows.begin);
                          if (s.by_rows) {
                              add_product(w.down, to.rows(0, rows.count(), c.ff), rows);
                          }
                      });
        if (!s.by_rows) {
            barrier();
            for_blocks({0, s.rows.size()}, [&](Rows rows) {
                add_product(w.down, s.ff.rows(rows.begin, rows.count(), c.ff), rows);
            });
            barrier();
        }
    }
    // Rows [at, at + count) of `to`, in this worker's columns.
    void gate_and_up(const LayerWeights& w, const ActivationRows& in, Rows rows,
                     const Activations& to, std::size_t at) {
        // Two panels are one block of codes.
        const Rows panels = share_outputs(w.gate.panels(), 2);
        if (panels.count() == 0) {
            return;
        }
        kernels.matmul(own.gate, c.ff, w.gate, in, panels.begin, panels.end);
        kernels.matmul(own.up, c.ff, w.up, in, panels.begin, panels.end);
        const Wants wanted = wants(w.down);
        const std::size_t begin = panels.begin * 16;
        const std::size_t end = std::min<std::size_t>(panels.end * 16, c.ff);
        for (std::size_t r = 0; r < rows.count(); ++r) {
            float* const gate = own.gate + r * c.ff + begin;
            float* const out = wanted.codes ? gate : to.floats + (at + r) * c.ff + begin;
            kernels.silu_mul(out, gate, own.up + r * c.ff + begin, end - begin);
            if (wanted.codes) {
                kernels.quantise(to.columns(at + r, c.ff, begin, end), gate, 0, 1);
            }
        }
    }

    void digest(std::uint32_t layer) {
        const Rows mine = share(s.rows.size());
        for (std::size_t r = mine.begin; r < mine.end; ++r) {
            s.layer_rows[std::size_t{layer} * s.batch_rows + r] =
                kernels.digest_row(s.x + r * c.width, c.width);
        }
    }

    // Logits of the rows that want some, divided over the vocabulary, and their digests.
    void score() {
        const std::size_t count = s.logits_of.size();
        const PackedMatrix& w = s.weights.output;
        const Wants wanted = wants(w);
        const bool few = count <= kFewRows;
        const Rows mine = few ? Rows{0, count} : share(count);
        const Activations& to = few ? own.in : s.logits_in;
        for (std::size_t i = mine.begin; i < mine.end; ++i) {
            normalise(to, i, s.x + std::size_t{s.logits_of[i]} * c.width, 1, s.weights.final_norm,
                      wanted);
        }
        if (!few) {
            barrier();
        }
        std::fill_n(own.digests, count, RowDigest{});
        std::fill_n(own.nonfinite, count, false);
        const Rows panels = share(w.panels());
        for (std::size_t begin = panels.begin; count != 0 && begin < panels.end;
             begin += kDigestPanels) {
            const std::size_t end = std::min(begin + kDigestPanels, panels.end);
            kernels.matmul(s.logits, s.logits_stride, w, to.rows(0, count, c.width), begin, end);
            for (std::size_t i = 0; i < count; ++i) {
                digest_logits(i, begin * 16, std::min<std::size_t>(end * 16, c.vocab));
            }
        }
    }
    void digest_logits(std::size_t row, std::size_t begin, std::size_t end) {
        bool nonfinite = false;
        const RowDigest part = kernels.digest_logits(s.logits + row * s.logits_stride + begin,
                                                     end - begin, begin, &nonfinite);
        own.digests[row].a += part.a;
        own.digests[row].b += part.b;
        own.nonfinite[row] = own.nonfinite[row] || nonfinite;
    }

    State& s;
    const ModelConfig& c;
    const Kernels& kernels;
    WorkerScratch& own;
    unsigned id;
};

ForwardPass::State::State(const Model& model, const Kernels& kernels_in, ThreadPool& threads_in,
                          std::uint32_t batch_rows_in, std::uint32_t logits_rows_in,
                          std::uint32_t context_in)
    : config(model.config_),
      weights(*model.weights_),
      kernels(kernels_in),
      threads(threads_in),
      batch_rows(batch_rows_in),
      logits_rows(logits_rows_in),
      context(context_in),
      splits_max((context_in - 1) / kSplitTokens + 1),
      query_width(std::size_t{config.heads} * config.head_dim),
      kv_width(std::size_t{config.kv_heads} * config.head_dim),
      shared_rows(std::min<std::size_t>(batch_rows, kRowsPerWorker * threads.threads())),
      logits_stride((std::size_t{config.vocab} + 15) / 16 * 16),
      workers(threads.threads()) {
    rows.reserve(batch_rows);
    logits_of.reserve(logits_rows);
}

void ForwardPass::State::carve(Carver& carver) {
    const std::size_t in_cols = std::max<std::size_t>(config.width, query_width);
    const Length batch = batch_rows;
    x = carver.take<float>(batch * config.width);
    q = carver.take<float>(batch * query_width);
    k = carver.take<float>(batch * kv_width);
    v = carver.take<float>(batch * kv_width);
    attended = carver.take<float>(batch * query_width);
    partials = carver.take<float>(Length(std::min(batch_rows, kPartialRows)) * config.heads *
                                  splits_max * (config.head_dim + 2));
    logits = carver.take<float>(Length(logits_rows) * logits_stride);
    layer_rows = carver.take<std::uint64_t>(batch * config.layers);
    in = take_activations(carver, shared_rows, in_cols);
    ff = take_activations(carver, shared_rows, config.ff);
    logits_in = take_activations(carver, logits_rows, config.width);
    const std::size_t block = std::min<std::size_t>(batch_rows, kBlockRows);
    for (WorkerScratch& worker : workers) {
        worker.in = take_activations(carver, std::max(block, kFewRows), in_cols);
        worker.ff = take_activations(carver, block, config.ff);
        worker.gate = carver.take<float>(Length(block) * config.ff);
        worker.up = carver.take<float>(Length(block) * config.ff);
        worker.product = carver.take<float>(Length(block) * config.width);
        worker.attended = carver.take<float>(Length(kFewRows) * query_width);
        worker.digests = carver.take<RowDigest>(logits_rows);
        worker.nonfinite = carver.take<bool>(logits_rows);
    }
}

// Checks that the step is one the caller may ask for, and plans it.
void ForwardPass::State::begin_step(const StepInput& step) {
    input = &step;
    check(step.memory.shape.layers == config.layers && step.memory.shape.heads == config.kv_heads &&
              step.memory.shape.head_dim == config.head_dim,
          "the KV memory has the shape of the model");
    check(!step.checked || step.memory.writers != nullptr, "checked execution has a shadow table");
    rows.clear();
    logits_of.clear();
    std::uint64_t positions = 0;
    for (std::uint32_t i = 0; i < step.sequences.size(); ++i) {
        const SequenceView& sequence = step.sequences[i];
        check(sequence.batch_row == rows.size() && sequence.count >= 1,
              "sequences lie one after the other in the batch");
        check(sequence.count <= batch_rows - rows.size(), "a step has at most batch_rows tokens");
        check(sequence.first <= context && sequence.count <= context - sequence.first,
              "a sequence ends within the context");
        check(sequence.pages.size() * kPageTokens >= std::size_t{sequence.first} + sequence.count,
              "the page table covers all positions");
        check(sequence.report != nullptr, "every sequence has a report");
        positions = std::max(positions, std::uint64_t{sequence.first} + sequence.count);
        for (std::uint32_t row = 0; row < sequence.count; ++row) {
            if (row >= sequence.logits_from) {
                logits_of.push_back(static_cast<std::uint32_t>(rows.size()));
            }
            rows.push_back({i, sequence.first + row});
        }
    }
    check(rows.size() == step.tokens.size(), "every token belongs to a sequence");
    check(logits_of.size() <= logits_rows, "a step has at most logits_rows rows with logits");
    for (const std::int32_t token : step.tokens) {
        check(token >= 0 && static_cast<std::uint32_t>(token) < config.vocab,
              "every token is in the vocabulary");
    }
    by_rows = threads.threads() == 1 || rows.size() >= kRowsPerWorker * threads.threads();
    plan.make(step.sequences, config.kv_heads, threads.threads(), rows.size() <= kPartialRows);
    rope_begin = rope_rows;
    rope_end = rope_rows;
    if (positions > rope_rows) {
        const std::uint64_t whole = (positions + kRopeRows - 1) / kRopeRows * kRopeRows;
        rope_end = static_cast<std::uint32_t>(std::min<std::uint64_t>(context, whole));
    }
}

void ForwardPass::State::end_step(StepOutput& out) {
    rope_rows = rope_end;
    out.logits.resize(logits_of.size());
    for (std::size_t i = 0; i < logits_of.size(); ++i) {
        const BatchRow& row = rows[logits_of[i]];
        out.logits[i] = {.sequence = row.sequence,
                         .position = row.position,
                         .logits = {logits + i * logits_stride, config.vocab},
                         .owner = input->sequences[row.sequence].reader,
                         .step = input->step};
        for (const WorkerScratch& worker : workers) {
            out.logits[i].digest.a += worker.digests[i].a;
            out.logits[i].digest.b += worker.digests[i].b;
            out.logits[i].nonfinite |= worker.nonfinite[i];
        }
    }
    out.layer_digests.assign(input->sequences.size() * config.layers, 0);
    for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
        for (std::size_t r = 0; r < rows.size(); ++r) {
            fold_row(out.layer_digests[std::size_t{rows[r].sequence} * config.layers + layer],
                     layer_rows[std::size_t{layer} * batch_rows + r], rows[r].position);
        }
    }
    input = nullptr;
}

Result<std::unique_ptr<ForwardPass>> ForwardPass::create(const Model& model, const Kernels& kernels,
                                                         ThreadPool& threads,
                                                         std::uint32_t batch_rows,
                                                         std::uint32_t logits_rows,
                                                         std::uint32_t context) {
    check(batch_rows >= 1 && logits_rows >= 1 && context >= 1,
          "a forward pass has room for a token");
    check(model.is_sim() == (&kernels == &sim_kernels()),
          "the hash model and its operations go together");
    if (model.is_sim()) {
        return std::unique_ptr<ForwardPass>(
            new ForwardPass(std::make_unique<SimPass>(kernels, batch_rows, logits_rows, context)));
    }
    auto state = std::make_unique<State>(model, kernels, threads, batch_rows, logits_rows, context);
    const std::size_t half_head = state->config.head_dim / 2;
    Carver rope_sizes(nullptr);
    rope_sizes.take<float>(Length(context) * half_head);
    rope_sizes.take<float>(Length(context) * half_head);
    Carver sizes(nullptr);
    state->carve(sizes);
    if (!rope_sizes.used() || !sizes.used()) {
        return Error{ErrorCode::out_of_memory, "the scratch of a forward pass over " +
                                                   std::to_string(batch_rows) +
                                                   " rows needs more memory than can be addressed"};
    }
    Result<Arena> rope = Arena::create(*rope_sizes.used(), "the table of rotations");
    Result<Arena> arena = Arena::create(*sizes.used(), "the scratch of a forward pass");
    if (!rope || !arena) {
        return rope ? arena.error() : rope.error();
    }
    state->rope_arena = *std::move(rope);
    state->arena = *std::move(arena);
    Carver rotations(state->rope_arena.data());
    state->cos = rotations.take<float>(Length(context) * half_head);
    state->sin = rotations.take<float>(Length(context) * half_head);
    Carver carver(state->arena.data());
    state->carve(carver);
    return std::unique_ptr<ForwardPass>(new ForwardPass(std::move(state)));
}

ForwardPass::ForwardPass(std::unique_ptr<State> state) : state_(std::move(state)) {}
ForwardPass::ForwardPass(std::unique_ptr<SimPass> sim) : sim_(std::move(sim)) {}
ForwardPass::~ForwardPass() = default;

void ForwardPass::run(const StepInput& input, StepOutput& out) {
    if (sim_ != nullptr) {
        return sim_->run(input, out);
    }
    State& state = *state_;
    state.begin_step(input);
    state.threads.run([&](unsigned worker) { State::Worker(state, worker).run(); });
    state.end_step(out);
}

void ForwardPass::poison() {
    if (sim_ != nullptr) {
        return sim_->poison();
    }
    // As f32 a quiet NaN, as int8 the code 127 twice in four bytes.
    constexpr std::uint32_t kPoison = 0x7fc07f7f;
    std::uint8_t* const data = state_->arena.data();
    for (std::size_t i = 0; i < state_->arena.size(); i += sizeof kPoison) {
        std::memcpy(data + i, &kPoison, sizeof kPoison);
    }
}

}  // namespace kvw
