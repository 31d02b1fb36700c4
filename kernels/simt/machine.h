// A machine that runs CUDA source on the processor, for tests: one fiber per CUDA thread.
//
// Kernels are compiled by the C++ compiler over kernels/simt/cuda.h, whose intrinsics end here. A
// fiber runs until it waits for others (__syncthreads, __syncwarp, shuffles, ballots) or comes to
// an atomic; who runs next, in which order blocks start and how many are under way together is
// drawn from a seed, so a schedule can be drawn again. What a GPU leaves undefined is an error
// here:
//   - threads of a block that wait at different barriers, or that returned while others wait;
//   - lanes of a warp that meet at different places, or read from a lane that is not there;
//   - __ldg outside the memory that the launch was given, or not aligned.
// The error (ErrorCode::invariant) names kernel, block, line and threads; the launch ends there and
// the machine can be used again. Shared memory is poisoned before each block: what was not written
// in that block reads as NaN (kSharedPoison). NUMERICS.md "CUDA" says what this can prove.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"

namespace kvw::simt {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kBlockThreadsMax = 1024;
// Each 32-bit word of shared memory before it is written: a NaN as f32, two as f16, and as an index
// far outside any buffer.
inline constexpr std::uint32_t kSharedPoison = 0x7fedfeed;

// Indices and extents, as CUDA's uint3 and dim3.
struct Index3 {
    unsigned x = 0, y = 0, z = 0;
};
struct Extent3 {
    unsigned x = 1, y = 1, z = 1;
    std::size_t count() const { return std::size_t{x} * y * z; }
};

// As if __syncthreads number `barrier` of each thread (from 0, in the order it comes to them) were
// not in the source, for all threads of each block or for one.
struct LeftOut {
    unsigned barrier = 0;
    std::optional<unsigned> thread;
};

struct Launch {
    std::string kernel;  // for reports
    Extent3 grid, block;
    std::size_t shared_bytes = 0;  // dynamic shared memory
    // 0: blocks and threads in order; 1: in reverse order; else drawn, up to four blocks at a time.
    std::uint64_t seed = 0;
    std::vector<std::span<const std::uint8_t>> readable = {};  // all that __ldg may read
    std::optional<LeftOut> left_out = std::nullopt;            // for tests of tests
};

struct Ran {
    unsigned barriers = 0;  // the most that one thread came to
};

// Not thread-safe; machines in several threads do not know each other.
class Machine {
  public:
    Machine();
    ~Machine();
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    // Calls `body` once per thread of the grid. What it leaves on its stack when the launch ends
    // with an error is not destroyed: kernels own nothing.
    Result<Ran> run(const Launch& launch, const std::function<void()>& body);

    struct State;

  private:
    std::unique_ptr<State> state_;
};

// What cuda.h is made of; to be called from inside a launch.

// Where in the source a thread stands. `file` is not copied.
struct Place {
    const char* what = "";  // the intrinsic
    const char* file = "";
    int line = 0;
};

enum class Exchange : std::uint8_t { none, from_lane, from_xor, ballot };

void barrier(const Place& place);
// Meets the lanes of `mask` and returns what `kind` says of the values they brought: that of lane
// `operand`, that of lane (own ^ operand), or the set of lanes with a value that is not 0.
std::uint64_t exchange(Exchange kind, std::uint32_t mask, std::uint64_t value, unsigned operand,
                       const Place& place);
// Lets other threads go first, or not.
void preempt();
// The static shared object of this block that `key` names; at most 16-byte aligned.
void* shared_object(const void* key, std::size_t bytes);
void* dynamic_shared_memory();
void check_read(const void* address, std::size_t bytes, const Place& place);

}  // namespace kvw::simt
