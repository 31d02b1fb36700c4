#include "kernels/threads.h"

#include <doctest/doctest.h>
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels/kernels.h"

using namespace kvw;

TEST_CASE("every worker runs the task once, and run returns after the last") {
    for (unsigned threads = 1; threads <= 4; ++threads) {
        ThreadPool pool(threads);
        CHECK(pool.threads() == threads);
        std::vector<int> runs(threads, 0);  // each worker its own: the pool is what orders them
        for (int round = 0; round < 500; ++round) {
            pool.run([&](unsigned worker) { ++runs[worker]; });
            REQUIRE(std::accumulate(runs.begin(), runs.end(), 0) ==
                    static_cast<int>(threads) * (round + 1));
        }
    }
}

TEST_CASE("nobody passes a barrier before everybody has come to it") {
    for (unsigned threads = 1; threads <= 4; ++threads) {
        ThreadPool pool(threads);
        std::vector<int> reached(threads, 0);
        std::atomic<int> ahead{0};
        for (int round = 0; round < 3; ++round) {
            std::fill(reached.begin(), reached.end(), 0);
            pool.run([&](unsigned worker) {
                for (int phase = 1; phase <= 300; ++phase) {
                    reached[worker] = phase;
                    pool.barrier(worker);
                    for (const int other : reached) {
                        ahead += other != phase ? 1 : 0;
                    }
                    pool.barrier(worker);
                }
            });
        }
        CHECK(ahead == 0);
    }
}

TEST_CASE("a pool goes on after all its workers have gone to sleep, in a run and between runs") {
    ThreadPool pool(3);
    std::atomic<int> done{0};
    for (int round = 0; round < 3; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        pool.run([&](unsigned worker) {
            if (worker == 1) {
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
            }
            pool.barrier(worker);
            ++done;
        });
    }
    CHECK(done == 9);
}

TEST_CASE("pools may come and go without ever having run") {
    for (int i = 0; i < 20; ++i) {
        const ThreadPool pool(static_cast<unsigned>(1 + i % 4));
    }
    CHECK(true);
}

TEST_CASE("shares cover everything once, in whole units") {
    for (unsigned threads = 1; threads <= 4; ++threads) {
        const ThreadPool pool(threads);
        for (const std::size_t count : {0, 1, 3, 4, 16, 17, 100, 1537}) {
            for (const std::size_t unit : {1, 4, 16}) {
                std::size_t next = 0;
                for (unsigned worker = 0; worker < threads; ++worker) {
                    const auto [begin, end] = pool.share(count, worker, unit);
                    CHECK(begin == next);
                    CHECK(end >= begin);
                    CHECK((begin % unit == 0 || begin == count));
                    next = end;
                }
                CHECK(next == count);
            }
        }
    }
}

TEST_CASE("every worker computes in the exact float mode, also after a library has changed it") {
    ThreadPool pool(2);
    std::atomic<int> exact{0};
    pool.run([&](unsigned) { _mm_setcsr(_mm_getcsr() | 0x8040); });  // flush to zero, both ways
    pool.run([&](unsigned) { exact += float_mode_is_exact() ? 1 : 0; });
    CHECK(exact == 2);
}

TEST_CASE("a mode that flushes or rounds otherwise is not exact") {
    const unsigned before = _mm_getcsr();
    for (const unsigned bits : {0x8000u, 0x0040u, 0x2000u, 0x4000u, 0x6000u}) {
        set_float_mode();
        CHECK(float_mode_is_exact());
        _mm_setcsr(_mm_getcsr() | bits);
        CHECK(!float_mode_is_exact());
    }
    _mm_setcsr(before);
}

TEST_CASE("usable processors follow the affinity mask") {
    const unsigned usable = usable_processors();
    CHECK(usable >= 1);
    cpu_set_t before;
    REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &before)) {
            CPU_SET(cpu, &one);
            break;
        }
    }
    REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
    CHECK(usable_processors() == 1);
    REQUIRE(sched_setaffinity(0, sizeof(before), &before) == 0);
    CHECK(usable_processors() == usable);
}
