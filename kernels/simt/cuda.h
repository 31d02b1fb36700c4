// The words of CUDA that our kernels are written in: CUDA's own under nvcc, kernels/simt elsewhere.
//
// Under the C++ compiler, a .cu file's kernels become ordinary functions that tests call through
// simt::Machine. Only what is below exists there, so that no kernel can use what no test can run.
// Floats: the .rn forms alone (kernels/NUMERICS.md), and plain + - * on integers.
// Shared memory has two forms that are the same source for both: shared_block<T>(), the one static
// object of its type in a kernel, and dynamic_shared(), whose size the launch says.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#include <cuda_fp16.h>

namespace kvw::cuda {

template <class T>
__device__ T& shared_block() {
    __shared__ T object;
    return object;
}

__device__ inline float* dynamic_shared() {
    extern __shared__ float dynamic_shared_floats[];
    return dynamic_shared_floats;
}

}  // namespace kvw::cuda

#else

#include <bit>
#include <cstring>

#include "kernels/half.h"
#include "kernels/simt/machine.h"

// The marks of CUDA source: the only macros of the tree, because they are not ours to name.
#define __global__ inline
#define __device__
#define __launch_bounds__(...)

// Of the thread that runs; set by the machine at every switch.
constinit inline thread_local kvw::simt::Index3 threadIdx, blockIdx;
constinit inline thread_local kvw::simt::Extent3 blockDim, gridDim;

namespace kvw::cuda {

template <class T>
T& shared_block() {
    static_assert(alignof(T) <= 16);
    static const char key = 0;
    return *static_cast<T*>(simt::shared_object(&key, sizeof(T)));
}

inline float* dynamic_shared() { return static_cast<float*>(simt::dynamic_shared_memory()); }

}  // namespace kvw::cuda

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    kvw::simt::barrier({"__syncthreads", file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
    kvw::simt::exchange(kvw::simt::Exchange::none, mask, 0, 0, {"__syncwarp", file, line});
}

namespace kvw::simt {

template <class T>
T exchanged(Exchange kind, unsigned mask, T value, unsigned operand, const Place& place) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = exchange(kind, mask, bits, operand, place);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace kvw::simt

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
    return kvw::simt::exchanged(kvw::simt::Exchange::from_lane, mask, value,
                                static_cast<unsigned>(lane), {"__shfl_sync", file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
    return kvw::simt::exchanged(kvw::simt::Exchange::from_xor, mask, value,
                                static_cast<unsigned>(lane_mask), {"__shfl_xor_sync", file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    return static_cast<unsigned>(kvw::simt::exchange(kvw::simt::Exchange::ballot, mask,
                                                     predicate != 0 ? 1 : 0, 0,
                                                     {"__ballot_sync", file, line}));
}

// Loads through the read-only path; checked against the memory that the launch was given.
template <class T>
T __ldg(const T* address, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    kvw::simt::check_read(address, sizeof(T), {"__ldg", file, line});
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
    kvw::simt::preempt();
    const unsigned before = *address;
    *address += value;
    return before;
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    kvw::simt::preempt();
    const unsigned long long before = *address;
    *address += value;
    return before;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
// The place of the lowest set bit, from 1; 0 when there is none.
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Four products of signed bytes, added to `sum`.
inline int __dp4a(int a, int b, int sum) {
    for (int byte = 0; byte < 32; byte += 8) {
        const int product = static_cast<std::int8_t>(static_cast<unsigned>(a) >> byte) *
                            static_cast<std::int8_t>(static_cast<unsigned>(b) >> byte);
        sum = static_cast<int>(static_cast<unsigned>(sum) + static_cast<unsigned>(product));
    }
    return sum;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }

struct __half {
    std::uint16_t bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float __half2float(__half value) { return kvw::float_from_half(value.bits); }

#endif
