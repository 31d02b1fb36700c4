// The weights of a model as its forward pass reads them. Private to src/model.
#pragma once

#include <vector>

#include "kernels/weights.h"
#include "src/model/arena.h"
#include "src/model/model.h"

namespace kvw {

struct LayerWeights {
    const float* attention_norm = nullptr;  // [width]
    PackedMatrix q, k, v, attention_out;
    const float* ff_norm = nullptr;  // [width]
    PackedMatrix gate, up, down;
};

struct ModelWeights {
    Arena arena;
    PackedMatrix embedding;  // [vocab, width]
    std::vector<LayerWeights> layers;
    const float* final_norm = nullptr;  // [width]
    PackedMatrix output;                // [vocab, width]; the embedding itself when tied
};

struct Model::Weights : ModelWeights {};

}  // namespace kvw
