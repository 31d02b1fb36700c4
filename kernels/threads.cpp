#include "kernels/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "src/base/check.h"

namespace kvw {

namespace {

// 50 to 100 microseconds: longer than the gap between two phases of a step, shorter than a time
// slice, so that a worker whose partner lost its core gives its own away.
constexpr int kSpins = 2000;

void wait_while(std::atomic<std::uint32_t>& word, std::uint32_t old) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (word.load(std::memory_order_acquire) != old) {
            return;
        }
        __builtin_ia32_pause();
    }
    while (word.load(std::memory_order_acquire) == old) {
        word.wait(old, std::memory_order_acquire);
    }
}

// Any library may have changed the mode of the process since the last phase.
void enter_float_mode() {
    if (!float_mode_is_exact()) {
        set_float_mode();
        check(float_mode_is_exact(), "a worker rounds to nearest and keeps subnormals");
    }
}

}  // namespace

struct ThreadPool::State {
    // Words that are waited on lie on lines of their own.
    alignas(64) std::atomic<std::uint32_t> round{0};  // grows by one per run
    alignas(64) std::atomic<std::uint32_t> unfinished{0};
    alignas(64) std::atomic<std::uint32_t> arrived{0};
    alignas(64) std::atomic<std::uint32_t> phase{0};  // grows by one per barrier
    // Written before `round` grows, read after.
    alignas(64) Erased call = nullptr;
    const void* task = nullptr;
    std::vector<std::thread> workers;

    void work(unsigned worker) {
        for (std::uint32_t seen = 0;; ++seen) {
            wait_while(round, seen);
            if (call == nullptr) {
                return;
            }
            enter_float_mode();
            call(task, worker);
            if (unfinished.fetch_sub(1) == 1) {
                unfinished.notify_all();
            }
        }
    }

    void start_round(Erased next_call, const void* next_task) {
        call = next_call;
        task = next_task;
        unfinished.store(static_cast<std::uint32_t>(workers.size()));
        round.fetch_add(1);  // a full barrier: notify_all must not look for sleepers before it
        round.notify_all();
    }
};

ThreadPool::ThreadPool(unsigned threads) : threads_(threads), state_(std::make_unique<State>()) {
    check(threads >= 1, "a pool has at least its caller");
    enter_float_mode();
    state_->workers.reserve(threads - 1);
    for (unsigned worker = 1; worker < threads; ++worker) {
        state_->workers.emplace_back([state = state_.get(), worker] { state->work(worker); });
    }
}

ThreadPool::~ThreadPool() {
    state_->start_round(nullptr, nullptr);
    for (std::thread& worker : state_->workers) {
        worker.join();
    }
}

void ThreadPool::run_erased(Erased call, const void* task) {
    enter_float_mode();
    if (threads_ > 1) {
        state_->start_round(call, task);
    }
    call(task, 0);
    for (std::uint32_t left = state_->unfinished.load(std::memory_order_acquire); left != 0;
         left = state_->unfinished.load(std::memory_order_acquire)) {
        wait_while(state_->unfinished, left);
    }
}

void ThreadPool::barrier(unsigned worker) {
    check(worker < threads_, "a barrier is for the pool's own workers");
    if (threads_ == 1) {
        return;
    }
    State& state = *state_;
    const std::uint32_t phase = state.phase.load(std::memory_order_relaxed);
    if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        state.arrived.store(0, std::memory_order_relaxed);
        state.phase.fetch_add(1);
        state.phase.notify_all();
    } else {
        wait_while(state.phase, phase);
    }
}

std::pair<std::size_t, std::size_t> ThreadPool::share(std::size_t count, unsigned worker,
                                                      std::size_t unit) const {
    const std::size_t units = (count + unit - 1) / unit;
    const std::size_t begin = units * worker / threads_ * unit;
    const std::size_t end = units * (worker + 1) / threads_ * unit;
    return {std::min(begin, count), std::min(end, count)};
}

namespace {

// Processors in the affinity mask; 0 when it cannot be read.
unsigned processors_by_affinity() {
    for (int capacity = 1024; capacity <= (1 << 20); capacity *= 2) {
        cpu_set_t* set = CPU_ALLOC(capacity);
        if (set == nullptr) {
            return 0;
        }
        const std::size_t size = CPU_ALLOC_SIZE(capacity);
        const int failed = sched_getaffinity(0, size, set);
        const int count = failed != 0 ? 0 : CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (failed == 0) {
            return static_cast<unsigned>(count);
        }  // else the mask is longer than that
    }
    return 0;
}

std::string first_line(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// Whole processors in a quota; `none` when there is no quota.
unsigned whole_processors(long long quota, long long period, unsigned none) {
    if (quota <= 0 || period <= 0) {
        return none;
    }
    return static_cast<unsigned>(std::clamp<long long>(quota / period, 1, none));
}

unsigned quota_v2(const std::filesystem::path& group, unsigned none) {
    const std::string line = first_line(group / "cpu.max");  // "max 100000" or "150000 100000"
    const std::size_t space = line.find(' ');
    if (space == std::string::npos || line.starts_with("max")) {
        return none;
    }
    return whole_processors(std::atoll(line.c_str()), std::atoll(line.c_str() + space), none);
}

unsigned quota_v1(const std::filesystem::path& group, unsigned none) {
    return whole_processors(std::atoll(first_line(group / "cpu.cfs_quota_us").c_str()),
                            std::atoll(first_line(group / "cpu.cfs_period_us").c_str()), none);
}

// The tightest quota of this process's group and the groups around it. In a container the path that
// the kernel names may not exist below the mount: then the mount itself is the group.
template <class Quota>
unsigned tightest_quota(const std::filesystem::path& mount, const std::string& name, unsigned none,
                        Quota quota) {
    unsigned least = quota(mount, none);
    std::filesystem::path group = mount;
    for (const std::filesystem::path& part : std::filesystem::path(name).relative_path()) {
        if (part == "..") {  // outside the namespace: not ours to see
            break;
        }
        group /= part;
        least = std::min(least, quota(group, none));
    }
    return least;
}

// In ":cpu,cpuacct:".
bool names_cpu(const std::string& controllers) {
    for (std::size_t at = controllers.find("cpu"); at != std::string::npos;
         at = controllers.find("cpu", at + 3)) {
        const char after = controllers[at + 3];
        if ((controllers[at - 1] == ':' || controllers[at - 1] == ',') &&
            (after == ':' || after == ',')) {
            return true;
        }
    }
    return false;
}

}  // namespace

unsigned usable_processors() {
    unsigned count = processors_by_affinity();
    if (count == 0) {
        count = std::max(1u, std::thread::hardware_concurrency());
    }
    std::ifstream groups("/proc/self/cgroup");  // rows of  number:controllers:path
    for (std::string line; std::getline(groups, line);) {
        const std::size_t first = line.find(':');
        const std::size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first, second - first) + ":";
        const std::string path = line.substr(second + 1);
        if (controllers == "::") {
            count = std::min(count, tightest_quota("/sys/fs/cgroup", path, count, quota_v2));
        } else if (names_cpu(controllers)) {
            count = std::min(count, tightest_quota("/sys/fs/cgroup/cpu", path, count, quota_v1));
        }
    }
    return count;
}

}  // namespace kvw
