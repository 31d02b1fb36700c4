// The hash model: a byte-token model of two layers whose output depends on every row it reads, and
// on nothing else. It costs next to nothing, so that scheduler, pool, recorder and prover can be
// driven through millions of requests.
//
//     h          = mix(token)
//     per layer  row = mix(h, position, layer) into the cache; h = mix(h, sum over rows [0, p])
//     logit[v]   = mix(h, v) as a number in [-8, 8)
//
// It predicts nothing. Its rows, headers, witness and digests are those of any model.
#pragma once

#include <memory>
#include <vector>

#include "src/model/model.h"

namespace kvw {

ModelConfig sim_config();

class SimPass {
  public:
    SimPass(const Kernels& kernels, std::uint32_t batch_rows, std::uint32_t logits_rows,
            std::uint32_t context);
    void run(const StepInput& input, StepOutput& out);
    void poison();

  private:
    const Kernels& kernels_;
    ModelConfig config_;
    std::uint32_t batch_rows_, logits_rows_, context_;
    std::vector<std::uint64_t> hidden_;   // [batch rows]
    std::vector<std::uint8_t> poisoned_;  // [batch rows]
    std::vector<float> rows_, attended_;  // [batch rows][head_dim]: bytes, see kernels/sim
    std::vector<float> logits_;           // [logits rows][vocab]
};

}  // namespace kvw
