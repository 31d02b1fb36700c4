// A persistent pool of threads for data-parallel phases: work is divided over outputs by a fixed
// rule, so which thread does what is the same in every run (and does not matter for the bits).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace kvw {

// Workers spin briefly between phases, then park on a futex. The caller is worker 0.
// Each worker sets and checks the floating point mode (set_float_mode).
class ThreadPool {
  public:
    // threads >= 1, counting the caller.
    explicit ThreadPool(unsigned threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    unsigned threads() const { return threads_; }

    // Runs task(worker) on every worker, 0 on the caller, and returns when all are done. Inside,
    // barrier(worker) waits for all workers: one run() per step, barriers between its phases.
    template <class Task>
    void run(const Task& task) {
        run_erased([](const void* t, unsigned worker) { (*static_cast<const Task*>(t))(worker); },
                   &task);
    }
    void barrier(unsigned worker);

    // The part [begin, end) of `count` items that `worker` does, in units of `unit`.
    std::pair<std::size_t, std::size_t> share(std::size_t count, unsigned worker,
                                              std::size_t unit = 1) const;

  private:
    using Erased = void (*)(const void*, unsigned);
    void run_erased(Erased call, const void* task);
    unsigned threads_;
    struct State;
    std::unique_ptr<State> state_;
};

// Processors this process may use: affinity mask and cgroup quota, at least 1.
unsigned usable_processors();

}  // namespace kvw
