// One matrix times few rows of int8 activations: Kernels::matmul for block-quantised weights, with
// the bits of ref, on the panels that the CPU reads too (packing.h).
//
//   out[t][r] = sum over c of W[r][c] x[t][c]      one block per (panel of 16 rows, token t)
//
// A thread has one row and every eighth chunk of 256 columns: the four columns of its word meet
// four activations in a dp4a. Chunks are added in order by the row's first thread (NUMERICS.md
// "Matmul order"). All pointers are device memory, q aligned to 4 bytes.
#pragma once

#include "kernels/cuda/math.h"
#include "kernels/kernels.h"
#include "kernels/packing.h"

namespace kvw::cuda {

struct MatvecArgs {
    PackedMatrix w;
    QuantisedRows x;  // one row per token
    float* out = nullptr;
    std::size_t out_stride = 0;
};

inline constexpr unsigned kChunksAtOnce = 8;
inline constexpr unsigned kMatvecThreads = kPanelRows * kChunksAtOnce;
inline constexpr unsigned kMatvecBlocks = 8;  // that share a multiprocessor: no register spills

// Chunks of two passes: while one is added up, the next may be written.
struct ChunkSums {
    float sums[2][kChunksAtOnce][kPanelRows];
};

struct HalfDots {
    int columns_0_15, columns_16_31;
};

// The integer dots of one row and block: `codes` at the row's first word, q the block's
// activations.
template <WeightType type>
__device__ inline HalfDots block_dots(const std::uint8_t* codes, const std::int8_t* q,
                                      const std::int32_t* half_sum) {
    constexpr BlockLayout layout = block_layout(type);
    constexpr bool flipped = layout.code_max > 127;  // a signed byte with its top bit flipped
    constexpr unsigned line_words = 64 / sizeof(int);
    const int* words = reinterpret_cast<const int*>(codes);
    const int* x = reinterpret_cast<const int*>(q);
    HalfDots dots = {0, 0};
    for (unsigned i = 0; i < 4; ++i) {
        unsigned low = static_cast<unsigned>(__ldg(words + i * line_words));
        unsigned high = 0;
        if constexpr (layout.nibbles) {
            high = low >> 4 & 0x0f0f0f0fu;
            low = low & 0x0f0f0f0fu;
        } else {
            high = static_cast<unsigned>(__ldg(words + (i + 4) * line_words));
            low = flipped ? low ^ 0x80808080u : low;
            high = flipped ? high ^ 0x80808080u : high;
        }
        dots.columns_0_15 = __dp4a(static_cast<int>(low), __ldg(x + i), dots.columns_0_15);
        dots.columns_16_31 = __dp4a(static_cast<int>(high), __ldg(x + i + 4), dots.columns_16_31);
    }
    constexpr int offset = flipped ? 0 : layout.offset;  // flipping took it back already
    dots.columns_0_15 -= offset * __ldg(half_sum);
    dots.columns_16_31 -= offset * __ldg(half_sum + 1);
    return dots;
}

template <WeightType type>
__device__ inline float scale_at(const std::uint8_t* vector, unsigned row) {
    if constexpr (block_layout(type).half_scales) {
        return from_half(__ldg(reinterpret_cast<const std::uint16_t*>(vector) + row));
    } else {
        return __ldg(reinterpret_cast<const float*>(vector) + row);
    }
}

// One chunk of one row and token, blocks in order.
template <WeightType type>
__device__ inline float chunk_dot(const std::uint8_t* chunk, std::size_t blocks, unsigned row,
                                  const QuantisedRows& x, std::size_t x_block) {
    constexpr BlockLayout layout = block_layout(type);
    const std::uint8_t* codes =
        chunk + layout.chunk_scale_bytes(blocks) + row * sizeof(std::uint32_t);
    float acc = 0;
    for (std::size_t b = 0; b < blocks; ++b, ++x_block) {
        const std::uint8_t* scales = chunk + b * layout.scale_bytes();
        const std::int32_t* half_sum = x.half_sum + x_block * 2;
        const float scale = __ldg(x.scale + x_block);
        const HalfDots dots = block_dots<type>(codes + b * layout.code_bytes(),
                                               x.q + x_block * kBlockColumns, half_sum);
        const float first = __fmul_rn(scale_at<type>(scales, row), scale);
        if constexpr (layout.scales == 2) {
            const float second =
                __fmul_rn(scale_at<type>(scales + layout.vector_bytes(), row), scale);
            acc = __fmaf_rn(__int2float_rn(dots.columns_0_15), first, acc);
            acc = __fmaf_rn(__int2float_rn(dots.columns_16_31), second, acc);
        } else {
            acc = __fmaf_rn(__int2float_rn(dots.columns_0_15 + dots.columns_16_31), first, acc);
        }
        if constexpr (layout.has_minimum) {
            const float minimum =
                scale_at<type>(scales + layout.scales * layout.vector_bytes(), row);
            const int sum = __ldg(half_sum) + __ldg(half_sum + 1);
            acc = __fmaf_rn(minimum, __fmul_rn(__int2float_rn(sum), scale), acc);
        }
    }
    return acc;
}

// grid (panels, tokens), kMatvecThreads threads, no dynamic shared memory. type: that of args.w.
template <WeightType type>
__global__ void __launch_bounds__(kMatvecThreads, kMatvecBlocks) matvec(MatvecArgs args) {
    constexpr BlockLayout layout = block_layout(type);
    const unsigned row = threadIdx.x % kPanelRows, slot = threadIdx.x / kPanelRows;
    const std::size_t blocks = args.w.cols / kBlockColumns;
    const std::size_t chunks = (blocks + kChunkBlocks - 1) / kChunkBlocks;
    const std::size_t token = blockIdx.y;
    const std::uint8_t* panel = args.w.data + blockIdx.x * args.w.panel_bytes;
    ChunkSums& shared = shared_block<ChunkSums>();
    float total = 0;
    for (std::size_t first = 0; first < chunks; first += kChunksAtOnce) {
        auto& sums = shared.sums[first / kChunksAtOnce % 2];
        const std::size_t chunk = first + slot;
        if (chunk < chunks) {
            const std::size_t rest = blocks - chunk * kChunkBlocks;
            sums[slot][row] = chunk_dot<type>(panel + chunk * layout.chunk_bytes(kChunkBlocks),
                                              rest < kChunkBlocks ? rest : kChunkBlocks, row,
                                              args.x, token * blocks + chunk * kChunkBlocks);
        }
        __syncthreads();
        for (unsigned i = 0; slot == 0 && i < kChunksAtOnce && first + i < chunks; ++i) {
            total = __fadd_rn(total, sums[i][row]);
        }
    }
    const std::size_t out_row = std::size_t{blockIdx.x} * kPanelRows + row;
    if (slot == 0 && out_row < args.w.rows) {
        args.out[token * args.out_stride + out_row] = total;
    }
}

}  // namespace kvw::cuda
