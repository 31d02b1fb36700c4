#include "src/model/sim.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/sim/operations.h"
#include "src/base/check.h"
#include "src/base/witness_mix.h"

namespace kvw {

namespace {

// Bytes, then <|endoftext|>, <|im_start|>, <|im_end|> (Tokenizer::of_bytes).
constexpr std::uint32_t kVocab = 259;
constexpr std::uint32_t kTurnBegin = 257;  // never likely: an answer does not begin another turn

constexpr std::uint64_t kTokenSalt = 0x243f6a8885a308d3;  // digits of pi
constexpr std::uint64_t kRowSalt = 0x13198a2e03707344;
constexpr std::uint64_t kSumSalt = 0xa4093822299f31d0;
constexpr std::uint64_t kLogitSalt = 0x082efa98ec4e6c89;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return mix64(a ^ mix64(b)); }

// 24 bits as a multiple of 2^-20 in [-8, 8): exact in f32.
float logit_of(std::uint64_t hash) {
    return (static_cast<float>(hash >> 40) - 8388608.0f) * (1.0f / 1048576.0f);
}

}  // namespace

ModelConfig sim_config() {
    ModelConfig config;
    config.architecture = "sim";
    config.name = "sim";
    config.layers = 2;
    config.width = 16;
    config.heads = 1;
    config.kv_heads = 1;
    config.head_dim = 16;
    config.ff = 0;
    config.vocab = kVocab;
    config.context = 1u << 20;
    config.tied_output = true;
    return config;
}

SimPass::SimPass(const Kernels& kernels, std::uint32_t batch_rows, std::uint32_t logits_rows,
                 std::uint32_t context)
    : kernels_(kernels),
      config_(sim_config()),
      batch_rows_(batch_rows),
      logits_rows_(logits_rows),
      context_(context),
      hidden_(batch_rows),
      poisoned_(batch_rows),
      rows_(std::size_t{batch_rows} * config_.head_dim),
      attended_(std::size_t{batch_rows} * config_.head_dim),
      logits_(std::size_t{logits_rows} * kVocab) {}

void SimPass::run(const StepInput& input, StepOutput& out) {
    check(input.tokens.size() <= batch_rows_, "a step has at most batch_rows tokens");
    check(input.memory.shape.layers == config_.layers &&
              input.memory.shape.heads == config_.kv_heads &&
              input.memory.shape.head_dim == config_.head_dim,
          "the KV memory has the shape of the model");
    check(!input.checked || input.memory.writers != nullptr,
          "checked execution has a shadow table");
    std::size_t batch_row = 0;
    for (const SequenceView& sequence : input.sequences) {
        check(sequence.batch_row == batch_row && sequence.count >= 1 && sequence.report != nullptr,
              "sequences lie one after the other in the batch");
        check(sequence.first <= context_ && sequence.count <= context_ - sequence.first,
              "a sequence ends within the context");
        batch_row += sequence.count;
    }
    check(batch_row == input.tokens.size(), "every token belongs to a sequence");

    for (std::size_t row = 0; row < batch_row; ++row) {
        const std::int32_t token = input.tokens[row];
        check(token >= 0 && static_cast<std::uint32_t>(token) < kVocab,
              "every token is in the vocabulary");
        hidden_[row] = mix(kTokenSalt, static_cast<std::uint64_t>(token));
        poisoned_[row] = 0;
    }
    const auto append = input.checked ? kernels_.append_checked : kernels_.append;
    const auto attend = input.checked ? kernels_.attend_checked : kernels_.attend;
    out.layer_digests.assign(input.sequences.size() * config_.layers, 0);
    const std::size_t stride = config_.head_dim;
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
        for (std::size_t s = 0; s < input.sequences.size(); ++s) {
            const SequenceView& sequence = input.sequences[s];
            for (std::uint32_t i = 0; i < sequence.count; ++i) {
                const std::size_t row = sequence.batch_row + i;
                const std::uint64_t place = std::uint64_t{layer} << 32 | (sequence.first + i);
                const std::uint64_t hash = mix(hidden_[row] ^ kRowSalt, place);
                std::memcpy(&rows_[row * stride], &hash, sizeof hash);
            }
            append(input.memory, sequence, layer, 0, rows_.data(), rows_.data());
            attend(
                {.memory = input.memory,
                 .layer = layer,
                 .query_heads = config_.heads,
                 .q = rows_.data(),
                 .out = attended_.data()},
                {.sequence = &sequence, .kv_head = 0, .row_begin = 0, .row_end = sequence.count});
            std::uint64_t& digest = out.layer_digests[s * config_.layers + layer];
            for (std::uint32_t i = 0; i < sequence.count; ++i) {
                const std::size_t row = sequence.batch_row + i;
                sim::Attended attended{};
                std::memcpy(&attended, &attended_[row * stride], sizeof attended);
                hidden_[row] = mix(hidden_[row], attended.sum ^ kSumSalt);
                poisoned_[row] |= attended.poisoned != 0 ? 1 : 0;
                fold_row(digest, hidden_[row], sequence.first + i);
            }
        }
    }

    out.logits.clear();
    for (std::uint32_t s = 0; s < input.sequences.size(); ++s) {
        const SequenceView& sequence = input.sequences[s];
        for (std::uint32_t i = sequence.logits_from; i < sequence.count; ++i) {
            check(out.logits.size() < logits_rows_,
                  "a step has at most logits_rows rows with logits");
            const std::size_t row = sequence.batch_row + i;
            float* logits = &logits_[out.logits.size() * kVocab];
            for (std::uint32_t v = 0; v < kVocab; ++v) {
                logits[v] = logit_of(mix(hidden_[row], kLogitSalt + v));
            }
            logits[kTurnBegin] = -8.0f;
            if (poisoned_[row] != 0) {
                std::fill_n(logits, kVocab, std::numeric_limits<float>::quiet_NaN());
            }
            LogitsRow made{.sequence = s,
                           .position = sequence.first + i,
                           .logits = {logits, kVocab},
                           .owner = sequence.reader,
                           .step = input.step};
            made.digest = kernels_.digest_logits(logits, kVocab, 0, &made.nonfinite);
            out.logits.push_back(made);
        }
    }
}

void SimPass::poison() {
    std::fill(hidden_.begin(), hidden_.end(), 0xbadbadbadbadbadb);
    std::fill(poisoned_.begin(), poisoned_.end(), 1);
    for (auto* scratch : {&rows_, &attended_, &logits_}) {
        std::fill(scratch->begin(), scratch->end(), std::numeric_limits<float>::quiet_NaN());
    }
}

}  // namespace kvw
