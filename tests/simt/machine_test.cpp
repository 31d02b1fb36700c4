// The machine that runs CUDA source in the tests: what it does for kernels that are right, and what
// it says of those that are not.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/simt/cuda.h"

using namespace kvw;
using simt::Launch;
using simt::Machine;

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

std::string message_of(const Result<simt::Ran>& ran) {
    return ran ? "no error" : ran.error().message;
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

struct Row {
    float values[64];
};

// Reverses 64 numbers by way of shared memory.
__global__ void reverse(float* values) {
    Row& row = cuda::shared_block<Row>();
    float* const block = values + blockIdx.x * 64;
    row.values[threadIdx.x] = block[threadIdx.x];
    __syncthreads();
    block[threadIdx.x] = row.values[63 - threadIdx.x];
}

__global__ void barrier_for_half_a_block() {
    if (threadIdx.x < 32) {
        __syncthreads();
    }
    __syncthreads();
}

// Line numbers of this file that messages have to name.
int line_of_shuffle = 0, line_of_other_shuffle = 0;
__global__ void lanes_in_different_shuffles(int* out) {
    int value = 0;
    if (threadIdx.x == 7) {
        line_of_shuffle = __LINE__ + 1;
        value = __shfl_xor_sync(kAllLanes, 1, 16);
    } else {
        line_of_other_shuffle = __LINE__ + 1;
        value = __shfl_xor_sync(kAllLanes, 1, 16);
    }
    out[threadIdx.x] = value;
}

}  // namespace

TEST_CASE("each thread of each block runs once, with its own indices, in any schedule") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        std::vector<int> visits(3 * 2 * 2 * 5 * 4 * 3, 0);
        const auto body = [&] {
            CHECK(gridDim.z == 2);
            CHECK(blockDim.y == 4);
            const unsigned block = blockIdx.x + 3 * (blockIdx.y + 2 * blockIdx.z);
            const unsigned thread = threadIdx.x + 5 * (threadIdx.y + 4 * threadIdx.z);
            visits[block * 60 + thread] += 1;
        };
        REQUIRE(machine.run(
            {.kernel = "visit", .grid = {3, 2, 2}, .block = {5, 4, 3}, .seed = seed}, body));
        CHECK(std::all_of(visits.begin(), visits.end(), [](int count) { return count == 1; }));
    }
}

TEST_CASE("what is written before a barrier is read after it, in any schedule") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<float> values(7 * 64);
        std::iota(values.begin(), values.end(), 0.0f);
        const Result<simt::Ran> ran =
            machine.run({.kernel = "reverse", .grid = {7}, .block = {64}, .seed = seed},
                        [&] { reverse(values.data()); });
        REQUIRE(ran);
        CHECK(ran->barriers == 1);
        for (std::size_t i = 0; i < values.size(); ++i) {
            REQUIRE(values[i] == static_cast<float>(i / 64 * 64 + 63 - i % 64));
        }
    }
}

TEST_CASE("without its barrier a thread reads poison, in any schedule, in every block") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<float> values(7 * 64, 1.0f);
        REQUIRE(machine.run({.kernel = "reverse",
                             .grid = {7},
                             .block = {64},
                             .seed = seed,
                             .left_out = simt::LeftOut{.barrier = 0}},
                            [&] { reverse(values.data()); }));
        for (std::size_t block = 0; block < 7; ++block) {
            const float* begin = values.data() + block * 64;
            CHECK(std::count_if(begin, begin + 64, [](float v) { return std::isnan(v); }) == 32);
        }
    }
}

TEST_CASE(
    "shared memory that was not written reads as poison, whatever an earlier block left there") {
    Machine machine;
    std::array<std::uint32_t, 8> seen{};
    const auto body = [&] {
        Row& row = cuda::shared_block<Row>();
        float* dynamic = cuda::dynamic_shared();
        seen[blockIdx.x * 2] |= __float_as_uint(row.values[63]) ^ simt::kSharedPoison;
        seen[blockIdx.x * 2 + 1] |= __float_as_uint(dynamic[9]) ^ simt::kSharedPoison;
        row.values[63] = 1;
        dynamic[9] = 1;
    };
    REQUIRE(machine.run({.kernel = "peek", .grid = {4}, .block = {1}, .shared_bytes = 40}, body));
    CHECK(seen == std::array<std::uint32_t, 8>{});
    CHECK(std::isnan(__uint_as_float(simt::kSharedPoison)));
    CHECK(std::isnan(float_from_half(simt::kSharedPoison & 0xffff)));
    CHECK(std::isnan(float_from_half(simt::kSharedPoison >> 16)));
}

TEST_CASE("lanes exchange what they brought, and a mask may name a part of a warp") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<double> sums(64);
        std::vector<unsigned> ballots(64);
        std::vector<std::uint64_t> lasts(64);
        const auto body = [&] {
            const unsigned lane = threadIdx.x % 32;
            double sum = lane;
            for (int distance = 16; distance >= 1; distance /= 2) {
                sum += __shfl_xor_sync(kAllLanes, sum, distance);
            }
            sums[threadIdx.x] = sum;
            // Each half of a warp meets at a place of its own.
            if (lane < 16) {
                ballots[threadIdx.x] = __ballot_sync(0x0000ffffu, lane % 2);
            } else {
                ballots[threadIdx.x] = __ballot_sync(0xffff0000u, lane % 4 == 0);
            }
            __syncwarp();
            lasts[threadIdx.x] = __shfl_sync(kAllLanes, std::uint64_t{threadIdx.x} << 40, 31);
        };
        REQUIRE(machine.run({.kernel = "exchange", .grid = {}, .block = {64}, .seed = seed}, body));
        for (unsigned thread = 0; thread < 64; ++thread) {
            CHECK(sums[thread] == 496);
            CHECK(ballots[thread] == (thread % 32 < 16 ? 0x0000aaaau : 0x11110000u));
            CHECK(lasts[thread] == std::uint64_t{thread / 32 * 32 + 31} << 40);
        }
    }
}

TEST_CASE("atomic additions of all threads arrive, in any schedule") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        unsigned long long sum = 0;
        unsigned count = 0;
        REQUIRE(machine.run({.kernel = "count", .grid = {9}, .block = {33}, .seed = seed}, [&] {
            atomicAdd(&sum, 1ull << 40);
            atomicAdd(&count, 1u);
        }));
        CHECK(sum == (9 * 33ull) << 40);
        CHECK(count == 9 * 33);
    }
}

TEST_CASE("a seed draws one schedule, another seed another") {
    Machine machine;
    const auto order = [&](std::uint64_t seed) {
        std::vector<unsigned> threads;
        REQUIRE(machine.run({.kernel = "order", .grid = {5}, .block = {40}, .seed = seed}, [&] {
            threads.push_back(blockIdx.x * 40 + threadIdx.x);
            __syncthreads();
            threads.push_back(blockIdx.x * 40 + threadIdx.x);
        }));
        return threads;
    };
    const std::vector<unsigned> forward = order(0), backward = order(1);
    for (unsigned i = 0; i < 40; ++i) {
        CHECK(forward[i] == i);
        CHECK(forward[40 + i] == i);
        CHECK(backward[i] == 199 - i);
    }
    CHECK(order(2) == order(2));
    CHECK(order(2) != order(3));
    CHECK(order(2) != forward);
}

TEST_CASE("a divergent barrier is reported with kernel, block, lines and threads") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        const Result<simt::Ran> ran = machine.run(
            {.kernel = "half", .grid = {2}, .block = {64}, .seed = seed}, barrier_for_half_a_block);
        REQUIRE_FALSE(ran);
        CHECK(ran.error().code == ErrorCode::invariant);
        const std::string text = message_of(ran);
        CAPTURE(text);
        CHECK(contains(text, "half, block ("));
        CHECK(contains(text, "divergent barrier"));
        CHECK(contains(text, "32 threads __syncthreads at machine_test.cpp:"));
        CHECK(contains(text, "(the first: 0)"));
        CHECK(contains(text, "(the first: 32)"));
    }
}

TEST_CASE("one thread that misses a barrier is reported, at the next one or when it returns") {
    Machine machine;
    std::vector<float> values(64, 1.0f);
    const Result<simt::Ran> ran =
        machine.run({.kernel = "reverse",
                     .grid = {},
                     .block = {64},
                     .left_out = simt::LeftOut{.barrier = 0, .thread = 5}},
                    [&] { reverse(values.data()); });
    REQUIRE_FALSE(ran);
    CHECK(contains(message_of(ran), "reverse, block (0, 0, 0): divergent barrier: 63 threads"));
    CHECK(contains(message_of(ran), "1 thread returned (the first: 5)"));
}

TEST_CASE("lanes in different shuffles are reported with both lines") {
    Machine machine;
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
        std::array<int, 32> out{};
        const std::string text = message_of(
            machine.run({.kernel = "two_shuffles", .grid = {}, .block = {32}, .seed = seed},
                        [&] { lanes_in_different_shuffles(out.data()); }));
        CAPTURE(text);
        CHECK(contains(text, "two_shuffles, block (0, 0, 0): lanes that do not meet"));
        CHECK(contains(text, "1 thread __shfl_xor_sync at machine_test.cpp:" +
                                 std::to_string(line_of_shuffle) + " for lanes 0xffffffff"));
        CHECK(contains(text, "31 threads __shfl_xor_sync at machine_test.cpp:" +
                                 std::to_string(line_of_other_shuffle)));
        CHECK(line_of_shuffle != line_of_other_shuffle);
    }
}

TEST_CASE("a warp that waits for a lane that waits for the block is a deadlock") {
    Machine machine;
    const std::string text =
        message_of(machine.run({.kernel = "crossed", .grid = {}, .block = {64}}, [] {
            if (threadIdx.x != 40) {
                __syncwarp();
            }
            __syncthreads();
        }));
    CAPTURE(text);
    CHECK(contains(text, "crossed, block (0, 0, 0): deadlock"));
    CHECK(contains(text, "31 threads __syncwarp at machine_test.cpp:"));
    CHECK(contains(text, "33 threads __syncthreads at machine_test.cpp:"));
}

TEST_CASE("a shuffle for or from lanes that are not there is reported") {
    Machine machine;
    const auto run = [&](unsigned threads, auto body) {
        return message_of(machine.run({.kernel = "lanes", .grid = {}, .block = {threads}}, body));
    };
    CHECK(contains(run(32, [] { __shfl_sync(0x0000ffffu, 1, 0); }), "which are not its own"));
    CHECK(contains(run(32, [] { __shfl_sync(kAllLanes, 1, 32); }), "reads lane 32"));
    CHECK(contains(run(16, [] { __shfl_xor_sync(0x0000ffffu, 1, 16); }), "reads lane 16"));
    CHECK(contains(run(16, [] { __syncwarp(); }), "16 threads __syncwarp"));
}

TEST_CASE("a load outside the memory of the launch, or not aligned, is reported and not done") {
    Machine machine;
    alignas(8) std::array<std::uint8_t, 16> bytes{};
    const auto load = [&](std::size_t offset, std::size_t length) {
        return message_of(machine.run(
            {.kernel = "load",
             .grid = {},
             .block = {1},
             .readable = {std::span(bytes).first(length)}},
            [&] {
                __ldg(reinterpret_cast<const int*>(reinterpret_cast<std::uintptr_t>(bytes.data()) +
                                                   offset));
            }));
    };
    CHECK(load(0, 4) == "no error");
    CHECK(load(12, 16) == "no error");
    CHECK(contains(load(12, 15), "outside the memory that the launch was given"));
    CHECK(contains(load(std::size_t{1} << 62, 16), "4 bytes outside the memory"));
    CHECK(contains(load(2, 16), "load, block (0, 0, 0): thread 0 does __ldg at machine_test.cpp:"));
    CHECK(contains(load(2, 16), "not a multiple"));
}

TEST_CASE("after a report the machine runs the next launch") {
    Machine machine;
    std::vector<float> values(64);
    for (int i = 0; i < 3; ++i) {
        CHECK_FALSE(machine.run({.kernel = "half", .grid = {3}, .block = {64}, .seed = 5},
                                barrier_for_half_a_block));
        std::iota(values.begin(), values.end(), 0.0f);
        REQUIRE(machine.run({.kernel = "reverse", .grid = {}, .block = {64}, .seed = 5},
                            [&] { reverse(values.data()); }));
        CHECK(values[0] == 63.0f);
    }
}

TEST_CASE("intrinsics are those of the CUDA manual where they could be mistaken") {
    CHECK(__dp4a(static_cast<int>(0x80808080u), static_cast<int>(0x80808080u), 1) == 65537);
    CHECK(__dp4a(static_cast<int>(0x80ff017fu), 0x7f020380, -5) ==
          -128 * 127 - 2 + 3 - 127 * 128 - 5);
    CHECK(__ffs(0) == 0);
    CHECK(__ffs(8) == 4);
    CHECK(__popc(0xf0f0u) == 8);
    // 1 + 2^-12 squared, less its rounded value: what is left shows one rounding, not two.
    const float x = 1.0f + 0x1p-12f;
    CHECK(__fmaf_rn(x, x, -__fmul_rn(x, x)) == 0x1p-24f);
}
