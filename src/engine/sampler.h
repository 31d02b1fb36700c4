// From logits to one token id. NUMERICS.md exp; order: penalties, temperature, top-k, top-p, min-p,
// draw.
//
// Tokens are ranked by (logit descending, id ascending); greedy takes the first. e = exp((logit -
// largest) / temperature) in f32, everything after that in double: top-p keeps the shortest prefix
// of the ranking with sum(e) >= top_p * total, min-p keeps e >= min_p, the draw u picks the first
// token whose cumulative sum exceeds u * (sum of what is kept). The draw is Philox with key = seed
// and counter = (position, 0): independent of company, resumable anywhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "src/base/result.h"
#include "src/text/tokenizer.h"

namespace kvw {

struct SamplingOptions {
    float temperature = 0.8f;     // 0 = greedy
    std::uint32_t top_k = 40;     // 0 = whole vocabulary
    float top_p = 0.95f;          // 1 = off
    float min_p = 0.05f;          // 0 = off
    float repeat_penalty = 1.0f;  // 1 = off; divides positive, multiplies negative logits
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    std::uint32_t penalty_last =
        64;  // tokens (prompt included) that the three penalties look back on
    std::uint64_t seed = 0;
    bool ignore_eos = false;         // end-of-generation tokens are never sampled
    std::vector<std::string> stops;  // stop strings; not part of the answer
};

// Fails: usage, naming the option, its value and its range (NaN and negative temperature included).
Status check_options(const SamplingOptions& options);

class Sampler {
  public:
    Sampler(const SamplingOptions& options, const Kernels& kernels, const Tokenizer& tokenizer);
    // The history that penalties look at: the prompt, then each accepted token.
    void accept(TokenId id);
    // The next token for the position it will have. Does not accept it. check(): there is a token
    // to take.
    TokenId sample(std::span<const float> logits, std::uint64_t position);

  private:
    struct Candidate {
        float logit;
        TokenId id;
    };
    bool penalises() const;
    // The logits with penalties applied and excluded tokens at -infinity.
    std::span<const float> adjust(std::span<const float> logits);
    // The `count` first of the ranking, in order, into ranked_. Fewer where tokens are excluded.
    void rank(std::span<const float> logits, std::size_t count);
    // e of ranked_[begin..], appended to weights_.
    void weigh(float largest, std::size_t begin);
    // The sum of e over the whole vocabulary.
    double total_weight(std::span<const float> logits, float largest);

    SamplingOptions options_;
    const Kernels* kernels_;
    std::vector<TokenId> excluded_;
    std::vector<TokenId>
        history_;  // at least the last penalty_last tokens, when there are penalties
    std::vector<float> work_, scaled_, weights_;
    std::vector<Candidate> ranked_;
};

}  // namespace kvw
