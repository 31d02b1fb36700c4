// A model as configuration and packed weights, and one forward pass over it.
//
// Knows tokens, positions and leases' views of the KV memory; knows no tenant's name, no event, no
// file of traces. Architecture `llama` (arXiv 2302.13971; grouped-query attention arXiv
// 2305.13245); others are refused by name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/threads.h"
#include "src/base/result.h"
#include "src/base/sha256.h"
#include "src/gguf/gguf.h"

namespace kvw {

class SimPass;

struct ModelConfig {
    std::string architecture;  // "llama"
    std::string name;          // general.name, may be empty
    std::uint32_t layers = 0;
    std::uint32_t width = 0;  // embedding length
    std::uint32_t heads = 0;  // query heads
    std::uint32_t kv_heads = 0;
    std::uint32_t head_dim = 0;
    std::uint32_t ff = 0;  // feed-forward length
    std::uint32_t vocab = 0;
    std::uint32_t context = 0;  // positions the model was trained for
    double rope_base = 10000.0;
    double rope_scale = 1.0;  // linear position divisor
    bool rope_interleaved = true;
    float norm_epsilon = 1e-5f;
    bool tied_output = false;

    TileShape tile_shape() const { return {layers, kv_heads, head_dim}; }
    std::size_t kv_bytes_per_token() const { return tile_shape().page_bytes() / kPageTokens; }
};

// Reads and checks the configuration alone (model info): every shape and type of the tensors it
// needs. Fails: bad_model, naming key or tensor, and what is supported.
Result<ModelConfig> read_model_config(const Gguf& gguf);

// What stands for the SHA-256 of the hash model's file: that of its name and version.
Digest256 sim_sha256();

class Model {
  public:
    using Progress = std::function<void(double fraction)>;
    // Repacks all weights into one arena, on all threads. Reads `gguf` only while loading.
    // Fails: bad_model, out_of_memory.
    static Result<std::unique_ptr<Model>> load(const Gguf& gguf, ThreadPool& threads,
                                               const Progress& progress = {});
    // The built-in hash model (sim.h): no file, no weights, runs on sim_kernels() alone.
    static std::unique_ptr<Model> sim();
    ~Model();
    bool is_sim() const { return sim_; }
    const ModelConfig& config() const { return config_; }
    std::size_t weight_bytes() const;            // of the arena
    std::size_t weight_bytes_per_token() const;  // read by one decode step

  private:
    friend class ForwardPass;
    struct Weights;
    Model();
    ModelConfig config_;
    bool sim_ = false;
    std::unique_ptr<Weights> weights_;
};

// One logits row that a step was asked for. The memory belongs to the ForwardPass, until the next
// run().
struct LogitsRow {
    std::uint32_t sequence = 0;     // index into StepInput::sequences
    std::uint32_t position = 0;     // of the token whose successor it scores
    std::span<const float> logits;  // [vocab]
    RowDigest digest;               // of this row
    bool nonfinite = false;
    // The stamp of its slot: whose view it was computed for, in which step. Whoever uses the row
    // looks at it first.
    Owner owner;
    std::uint64_t step = 0;
};

struct StepInput {
    std::span<const std::int32_t> tokens;     // [batch rows], sequence after sequence
    std::span<const SequenceView> sequences;  // views of leases, each used once
    KvMemory memory;
    bool checked = false;    // every tile load through the writer-checking accessor
    std::uint64_t step = 0;  // stamped on what it computes
};

struct StepOutput {
    std::vector<LogitsRow> logits;             // in order of sequences, then positions
    std::vector<std::uint64_t> layer_digests;  // [sequence][layer]: this step's rows,
                                               // folded by position
};

// The scratch of a forward pass and the plan of its phases. Same bits whatever shares the step.
class ForwardPass {
  public:
    // batch_rows: most tokens in one step; logits_rows: most rows with logits in one step;
    // context: most positions of a sequence.
    // Fails: out_of_memory.
    static Result<std::unique_ptr<ForwardPass>> create(const Model& model, const Kernels& kernels,
                                                       ThreadPool& threads,
                                                       std::uint32_t batch_rows,
                                                       std::uint32_t logits_rows,
                                                       std::uint32_t context);
    ~ForwardPass();
    // Stores the K/V rows of the new tokens, attends, and leaves logits and digests in `out`.
    // Evidence (witness, counters, faults) is in each sequence's report; the caller looks before it
    // samples.
    void run(const StepInput& input, StepOutput& out);
    // Fills all scratch with NaN, so that nothing of an earlier step can be used (solo, tests).
    void poison();

  private:
    struct State;
    explicit ForwardPass(std::unique_ptr<State> state);
    explicit ForwardPass(std::unique_ptr<SimPass> sim);
    std::unique_ptr<State> state_;  // or
    std::unique_ptr<SimPass> sim_;
};

}  // namespace kvw
