// Paged attention of a decode step: one query row per sequence, the bits of ref::attend.
//
//   attend_splits  one block per (split, KV head, sequence), for the query heads that share the KV
//                  head: checks the headers of the split's tiles, then scores, softmax and weighted
//                  sum of the rows that may be used -> partials, witness, counters, faults
//   attend_merge   one block per (query head, sequence), next in the same stream: partials in split
//                  order -> out; the sequence's first fault
//
// The contract is that of Kernels::attend and attend_merge for the one row of each sequence: same
// arguments, tiles, partials, order of operations (NUMERICS.md "Attention"), same judgement of a
// header (tile_check.h), made on the header that was loaded, before any of the tile's rows is used.
// A tile that does not match is masked and reported. All pointers are device memory; q, partials
// and what they hold are aligned to their types. The caller has checked what check_attention
// checks.
#pragma once

#include "kernels/cuda/math.h"
#include "kernels/tile_check.h"

namespace kvw::cuda {

// One request's query row.
struct DecodeSequence {
    Owner reader;                    // from the admission record
    const PageRef* pages = nullptr;  // covers positions [0, position]
    std::uint32_t position = 0;
    std::uint32_t batch_row = 0;  // row of q and out
    bool check_headers = true;    // false only under a fault plan
};

struct FirstFault {
    bool found = false;
    TileFault fault;
};

// What SequenceReport holds, as a device can add it up. Zeroed by the caller once per step;
// launches for several layers add to it.
struct DecodeReport {
    unsigned long long witness = 0;
    unsigned long long rows_read = 0;
    unsigned faults = 0;
    FirstFault first;  // the least by (layer, head, table_index)
};

struct DecodeArgs {
    AttentionArgs attention;  // partials may not be null
    const DecodeSequence* sequences = nullptr;
    DecodeReport* reports = nullptr;  // [sequences]
    // [sequences][KV heads][splits_max], scratch between the two kernels; need not be cleared.
    FirstFault* found = nullptr;
};

inline constexpr unsigned kAttendThreads = kSplitTokens;  // one per token of a split
inline constexpr unsigned kAttendBlocks = 3;  // that share a multiprocessor: no register spills
inline constexpr unsigned kAttendWarps = kAttendThreads / kWarpLanes;
inline constexpr unsigned kMergeThreads = 128;
inline constexpr unsigned kSplitTiles = kSplitTokens / kPageTokens;

// Dynamic shared memory of attend_splits: scaled queries [group][head_dim], then the scores, later
// weights, of the split's tokens [group][kSplitTokens]. group = query heads per KV head. More than
// 48 KiB have to be asked for at launch.
constexpr std::size_t attend_shared_bytes(std::uint32_t group, std::uint32_t head_dim) {
    return std::size_t{group} * (head_dim + kSplitTokens) * sizeof(float);
}

// What a block may use of its split.
struct SplitTiles {
    std::uint32_t page[kSplitTiles];
    std::uint32_t rows[kSplitTiles];  // 0: masked, or after the query row

    __device__ bool may_use(unsigned token) const {
        return token % kPageTokens < rows[token / kPageTokens];
    }
};

__device__ inline FirstFault& found_by(const DecodeArgs& args, std::uint32_t sequence,
                                       std::uint32_t head, std::uint32_t split) {
    const AttentionArgs& attention = args.attention;
    return args.found[(std::size_t{sequence} * attention.memory.shape.heads + head) *
                          attention.splits_max +
                      split];
}

// The block's first warp, a lane per tile: loads each header once and says what of it may be used.
__device__ inline void check_tiles(const DecodeArgs& args, SplitTiles& tiles) {
    const KvMemory& memory = args.attention.memory;
    const std::uint32_t split = blockIdx.x, head = blockIdx.y;
    const DecodeSequence& sequence = args.sequences[blockIdx.z];
    DecodeReport& report = args.reports[blockIdx.z];
    const unsigned lane = threadIdx.x;
    const std::uint32_t index = split * kSplitTiles + lane;
    const std::uint32_t rows = lane < kSplitTiles ? visible_rows(sequence.position, index) : 0;

    PageRef entry;
    TileHeader loaded;
    bool faulty = false;
    unsigned long long witness = 0, rows_read = 0;
    if (rows != 0) {
        entry = sequence.pages[index];
        faulty = entry.page >= memory.pages;
        if (!faulty) {
            // Not __ldg: what memory holds now, not what a read-only cache may remember.
            loaded = *reinterpret_cast<const TileHeader*>(
                memory.tile(entry.page, args.attention.layer, head));
            witness = witness_of_row(loaded, AccessKind::read) * rows;
            rows_read = rows;
            faulty = sequence.check_headers &&
                     !(header_matches(loaded, sequence.reader, entry, args.attention.layer, head) &&
                       loaded.rows_written >= rows);
        }
    }
    if (lane < kSplitTiles) {
        tiles.page[lane] = entry.page;
        tiles.rows[lane] = faulty ? 0 : rows;
    }
    const unsigned faulty_lanes = __ballot_sync(kWholeWarp, faulty);
    witness = warp_sum(witness);
    rows_read = warp_sum(rows_read);
    if (lane == 0) {
        atomicAdd(&report.witness, witness);
        atomicAdd(&report.rows_read, rows_read);
        atomicAdd(&report.faults, static_cast<unsigned>(__popc(faulty_lanes)));
    }
    FirstFault& found = found_by(args, blockIdx.z, head, split);
    const unsigned first = faulty_lanes == 0 ? 0 : static_cast<unsigned>(__ffs(faulty_lanes)) - 1;
    if (lane == first) {
        found.found = faulty;
        found.fault.access = AccessKind::read;
        found.fault.layer = args.attention.layer;
        found.fault.head = head;
        found.fault.table_index = index;
        found.fault.page = entry.page;
        found.fault.rows = rows;
        found.fault.loaded = loaded;
        found.fault.shadow_writer = 0;
        found.fault.from_shadow = false;
    }
}

// The score of one token; `key` is its column of the tile's K.
__device__ inline float score(const float* query, const std::uint16_t* key,
                              std::uint32_t head_dim) {
    float chain[4] = {0, 0, 0, 0};
    for (std::uint32_t d = 0; d < head_dim; d += 4) {
        for (std::uint32_t i = 0; i < 4; ++i) {
            chain[i] =
                __fmaf_rn(query[d + i], from_half(__ldg(key + (d + i) * kPageTokens)), chain[i]);
        }
    }
    return __fadd_rn(__fadd_rn(chain[0], chain[2]), __fadd_rn(chain[1], chain[3]));
}

// One warp, one query head: turns the scores of the split into weights, in place. Lane i holds the
// tokens i, i + 32, ...: those of the sum's lanes i and i + 32, so only the tree crosses lanes.
struct Softmax {
    float m, l;  // of lane 0
};
__device__ inline Softmax weigh(float* scores, const SplitTiles& tiles) {
    const unsigned lane = threadIdx.x % kWarpLanes;
    float greatest = -infinity();
    for (unsigned token = lane; token < kSplitTokens; token += kWarpLanes) {
        if (tiles.may_use(token)) {
            greatest = greatest > scores[token] ? greatest : scores[token];
        }
    }
    greatest = warp_greatest(greatest);
    float low = 0, high = 0;
    for (unsigned token = lane; token < kSplitTokens; token += kWarpLanes) {
        if (tiles.may_use(token)) {
            const float weight = exp(__fsub_rn(scores[token], greatest));
            scores[token] = weight;
            float& sum = token / kWarpLanes % 2 == 0 ? low : high;
            sum = __fadd_rn(sum, weight);
        }
    }
    return {greatest, warp_sum(__fadd_rn(low, high))};
}

// grid (splits_max, KV heads, sequences), kAttendThreads threads, attend_shared_bytes().
__global__ void __launch_bounds__(kAttendThreads, kAttendBlocks) attend_splits(DecodeArgs args) {
    const AttentionArgs& attention = args.attention;
    const KvMemory& memory = attention.memory;
    const std::uint32_t split = blockIdx.x, kv_head = blockIdx.y;
    const DecodeSequence& sequence = args.sequences[blockIdx.z];
    if (split > sequence.position / kSplitTokens) {
        return;  // the whole block: this sequence is shorter
    }
    const std::uint32_t head_dim = memory.shape.head_dim;
    const std::uint32_t group = attention.query_heads / memory.shape.heads;
    const std::size_t first_head =
        std::size_t{sequence.batch_row} * attention.query_heads + kv_head * group;
    SplitTiles& tiles = shared_block<SplitTiles>();
    float* const queries = dynamic_shared();            // [group][head_dim]
    float* const weights = queries + group * head_dim;  // [group][kSplitTokens]

    if (threadIdx.x < kWarpLanes) {
        check_tiles(args, tiles);
    }
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__uint2float_rn(head_dim)));
    for (std::uint32_t i = threadIdx.x; i < group * head_dim; i += kAttendThreads) {
        queries[i] = __fmul_rn(attention.q[first_head * head_dim + i], scale);
    }
    __syncthreads();

    const unsigned token = threadIdx.x;
    if (tiles.may_use(token)) {
        const std::uint8_t* tile =
            memory.tile(tiles.page[token / kPageTokens], attention.layer, kv_head);
        const auto* keys = reinterpret_cast<const std::uint16_t*>(tile + sizeof(TileHeader));
        for (std::uint32_t h = 0; h < group; ++h) {
            weights[h * kSplitTokens + token] =
                score(queries + h * head_dim, keys + token % kPageTokens, head_dim);
        }
    }
    __syncthreads();

    float* const partials = attention.partials;
    const std::size_t stride = std::size_t{attention.splits_max} * (head_dim + 2);  // of a head
    const std::size_t begin = first_head * stride + split * (head_dim + 2);
    for (std::uint32_t h = threadIdx.x / kWarpLanes; h < group; h += kAttendWarps) {
        const Softmax softmax = weigh(weights + h * kSplitTokens, tiles);
        if (threadIdx.x % kWarpLanes == 0) {
            partials[begin + h * stride] = softmax.m;
            partials[begin + h * stride + 1] = softmax.l;
        }
    }
    __syncthreads();

    for (std::uint32_t i = threadIdx.x; i < group * head_dim; i += kAttendThreads) {
        const std::uint32_t h = i / head_dim, d = i % head_dim;
        float acc = 0;
        for (std::uint32_t t = 0; t < kSplitTiles; ++t) {
            const std::uint8_t* tile = memory.tile(tiles.page[t], attention.layer, kv_head);
            const auto* values = reinterpret_cast<const std::uint16_t*>(tile + sizeof(TileHeader) +
                                                                        memory.shape.key_bytes());
            const float* weight = weights + h * kSplitTokens + t * kPageTokens;
            for (std::uint32_t row = 0; row < tiles.rows[t]; ++row) {
                acc = __fmaf_rn(weight[row], from_half(__ldg(values + row * head_dim + d)), acc);
            }
        }
        partials[begin + h * stride + 2 + d] = acc;
    }
}

// Takes the first fault of each split, in order of head and split, into the sequence's report.
__device__ inline void keep_first_fault(const DecodeArgs& args, std::uint32_t sequence) {
    FirstFault& kept = args.reports[sequence].first;
    const std::uint32_t splits = args.sequences[sequence].position / kSplitTokens + 1;
    for (std::uint32_t head = 0; head < args.attention.memory.shape.heads; ++head) {
        for (std::uint32_t split = 0; split < splits; ++split) {
            const FirstFault& found = found_by(args, sequence, head, split);
            if (!found.found) {
                continue;
            }
            const TileFault& a = found.fault;
            const TileFault& b = kept.fault;
            const bool first =
                a.layer != b.layer
                    ? a.layer < b.layer
                    : (a.head != b.head ? a.head < b.head : a.table_index < b.table_index);
            if (!kept.found || first) {
                kept = found;
            }
        }
    }
}

// grid (query heads, sequences), kMergeThreads threads, no dynamic shared memory.
__global__ void __launch_bounds__(kMergeThreads) attend_merge(DecodeArgs args) {
    const AttentionArgs& attention = args.attention;
    const std::uint32_t head_dim = attention.memory.shape.head_dim;
    const DecodeSequence& sequence = args.sequences[blockIdx.y];
    const std::uint32_t splits = sequence.position / kSplitTokens + 1;
    const std::size_t at = std::size_t{sequence.batch_row} * attention.query_heads + blockIdx.x;
    const float* const partials = attention.partials + at * attention.splits_max * (head_dim + 2);
    for (std::uint32_t d = threadIdx.x; d < head_dim; d += kMergeThreads) {
        float m = -infinity(), l = 0, acc = 0;
        for (std::uint32_t split = 0; split < splits; ++split) {
            const float* part = partials + std::size_t{split} * (head_dim + 2);
            if (part[1] == 0) {
                continue;
            }
            if (l == 0) {
                m = part[0];
                l = part[1];
                acc = part[2 + d];
                continue;
            }
            const float greatest = m > part[0] ? m : part[0];
            const float before = exp(__fsub_rn(m, greatest));
            const float now = exp(__fsub_rn(part[0], greatest));
            l = __fmaf_rn(part[1], now, __fmul_rn(l, before));
            acc = __fmaf_rn(part[2 + d], now, __fmul_rn(acc, before));
            m = greatest;
        }
        attention.out[at * head_dim + d] = l == 0 ? 0.0f : __fdiv_rn(acc, l);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        keep_first_fault(args, blockIdx.y);
    }
}

}  // namespace kvw::cuda
