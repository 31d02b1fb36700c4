// The operations that read packed weights, and the one that prepares activations for them:
// kernels/kernels.h is their contract, kernels/NUMERICS.md their arithmetic.
#pragma once

#include "kernels/kernels.h"

namespace kvw::ref {

void quantise(const QuantisedRows& out, const float* x, std::size_t row_begin, std::size_t row_end);
void matmul(float* out, std::size_t out_stride, const PackedMatrix& w, const ActivationRows& x,
            std::size_t panel_begin, std::size_t panel_end);
void embed(float* out, const PackedMatrix& w, std::uint32_t row);

}  // namespace kvw::ref
