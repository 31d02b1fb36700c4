// The CUDA kernels as nvcc builds them. Everything is in the headers, which the tests compile too.
#include "kernels/cuda/attend.h"
#include "kernels/cuda/matvec.h"

namespace kvw::cuda {

template __global__ void matvec<WeightType::q4_0>(MatvecArgs);
template __global__ void matvec<WeightType::q4_1>(MatvecArgs);
template __global__ void matvec<WeightType::q5_0>(MatvecArgs);
template __global__ void matvec<WeightType::q5_1>(MatvecArgs);
template __global__ void matvec<WeightType::q8_0>(MatvecArgs);
template __global__ void matvec<WeightType::q4_k>(MatvecArgs);
template __global__ void matvec<WeightType::q5_k>(MatvecArgs);
template __global__ void matvec<WeightType::q6_k>(MatvecArgs);

}  // namespace kvw::cuda
