// bench limits: what this machine can do at most, so that other figures have something to stand
// beside.
#include <fmt/format.h>
#include <immintrin.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "cli/bench_support.h"
#include "cli/commands.h"
#include "kernels/kernels.h"
#include "kernels/threads.h"

namespace kvw::cli {

namespace {

struct LimitFlags {
    std::optional<std::string> threads;
    std::uint32_t repetitions = 5;
};

constexpr std::size_t kReadBytes = std::size_t{256} << 20;  // far more than any cache
constexpr std::uint64_t kRounds = 4'000'000;
constexpr int kChains =
    12;  // independent accumulators: enough to hide the latency of a multiply-add

// Each returns what it computed, so that it cannot be left out.
using Work = std::uint64_t (*)();

template <class T>
std::uint64_t folded(const T& chains) {
    std::uint64_t words[sizeof(T) / 8], sum = 0;
    std::memcpy(words, &chains, sizeof words);
    for (const std::uint64_t word : words) {
        sum += word;
    }
    return sum;
}

__attribute__((target("avx512f,avx512vnni"))) std::uint64_t dots_avx512() {
    __m512i chains[kChains];
    std::memset(chains, 0, sizeof chains);
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
    for (std::uint64_t i = 0; i < kRounds; ++i) {
        for (__m512i& chain : chains) {
            chain = _mm512_dpbusd_epi32(chain, a, b);
        }
        asm volatile("" : "+v"(a), "+v"(b));
    }
    return folded(chains);
}

__attribute__((target("avx512f"))) std::uint64_t floats_avx512() {
    __m512 chains[kChains];
    std::memset(chains, 0, sizeof chains);
    __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
    for (std::uint64_t i = 0; i < kRounds; ++i) {
        for (__m512& chain : chains) {
            chain = _mm512_fmadd_ps(chain, a, b);
        }
        asm volatile("" : "+v"(a), "+v"(b));
    }
    return folded(chains);
}

__attribute__((target("avx2"))) std::uint64_t dots_avx2() {
    __m256i chains[kChains];
    std::memset(chains, 0, sizeof chains);
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2), ones = _mm256_set1_epi16(1);
    for (std::uint64_t i = 0; i < kRounds; ++i) {
        for (__m256i& chain : chains) {
            chain = _mm256_add_epi32(chain, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
            asm volatile("" : "+x"(a));  // else the product is computed once for all
        }
    }
    return folded(chains);
}

__attribute__((target("avx2,fma"))) std::uint64_t floats_avx2() {
    __m256 chains[kChains];
    std::memset(chains, 0, sizeof chains);
    __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
    for (std::uint64_t i = 0; i < kRounds; ++i) {
        for (__m256& chain : chains) {
            chain = _mm256_fmadd_ps(chain, a, b);
        }
        asm volatile("" : "+x"(a), "+x"(b));
    }
    return folded(chains);
}

struct Operations {
    Work dots, floats;
    double dot_operations, float_operations;  // per call: a multiply and an add count as two
};

// None where there are no vectors: only the bandwidth is measured then.
std::optional<Operations> operations() {
    const std::string_view isa = best_kernels().isa;
    const double per_round = static_cast<double>(kRounds) * kChains * 2;
    if (isa == "avx512") {
        return Operations{dots_avx512, floats_avx512, per_round * 64, per_round * 16};
    }
    if (isa == "avx2") {
        return Operations{dots_avx2, floats_avx2, per_round * 32, per_round * 8};
    }
    return std::nullopt;
}

// The shortest time in which all threads together did `work(thread)`, over the repetitions.
double best_seconds(unsigned threads, std::uint32_t repetitions,
                    const std::function<std::uint64_t(unsigned)>& work) {
    double best = std::numeric_limits<double>::max();
    std::atomic<std::uint64_t> kept{0};
    for (std::uint32_t i = 0; i < repetitions; ++i) {
        std::barrier begin(threads + 1), end(threads + 1);
        std::vector<std::thread> running;
        for (unsigned thread = 0; thread < threads; ++thread) {
            running.emplace_back([&, thread] {
                begin.arrive_and_wait();
                kept += work(thread);
                end.arrive_and_wait();
            });
        }
        begin.arrive_and_wait();
        const auto start = std::chrono::steady_clock::now();
        end.arrive_and_wait();
        best = std::min(best, seconds_since(start));
        for (std::thread& thread : running) {
            thread.join();
        }
    }
    return best;
}

std::uint64_t read_words(const std::uint64_t* words, std::size_t count) {
    std::uint64_t sums[8] = {};
    for (std::size_t i = 0; i + 8 <= count; i += 8) {
        for (std::size_t lane = 0; lane < 8; ++lane) {
            sums[lane] += words[i + lane];
        }
    }
    return folded(sums);
}

Json measure(unsigned threads, std::uint32_t repetitions,
             const std::vector<std::uint64_t>& memory) {
    const std::size_t part = memory.size() / threads;
    const double read = best_seconds(threads, repetitions, [&](unsigned thread) {
        return read_words(memory.data() + part * thread, part);
    });
    Json result{{"t", threads},
                {"read_gbps", rounded(static_cast<double>(part * threads * 8) / read / 1e9, 2)}};
    const std::optional<Operations> has = operations();
    const auto giga = [&](Work work, double count) {
        const double seconds = best_seconds(threads, repetitions, [&](unsigned) { return work(); });
        return rounded(count * threads / seconds / 1e9, 1);
    };
    result["int8_gops"] = has ? Json(giga(has->dots, has->dot_operations)) : Json(nullptr);
    result["f32_gflops"] = has ? Json(giga(has->floats, has->float_operations)) : Json(nullptr);
    return result;
}

Result<int> bench_limits(const LimitFlags& flags, Session& session) {
    std::vector<std::uint64_t> counts;
    if (flags.threads) {
        const Result<std::vector<std::uint64_t>> given = whole_numbers(*flags.threads, 1, 1024);
        if (!given) {
            return given.error();
        }
        counts = *given;
    } else {
        counts = {1};
        if (usable_processors() > 1) {
            counts.push_back(usable_processors());
        }
    }
    const std::vector<std::uint64_t> memory(kReadBytes / 8, 1);
    Progress progress(session);
    Json object = session.object();
    object["isa"] = best_kernels().isa;
    object["threads"] = Json::array();
    for (const std::uint64_t count : counts) {
        progress.show(fmt::format("{} threads", count));
        object["threads"].push_back(
            measure(static_cast<unsigned>(count), flags.repetitions, memory));
    }
    progress.clear();
    if (session.common.json) {
        session.out.object(object);
        return 0;
    }
    for (const Json& line : object["threads"]) {
        session.out.write(
            fmt::format("{:>3} threads: read {:>7} GB/s, int8 {:>8} Gop/s, f32 {:>7} Gflop/s\n",
                        line["t"].dump(), line["read_gbps"].dump(), line["int8_gops"].dump(),
                        line["f32_gflops"].dump()));
    }
    return 0;
}

}  // namespace

void add_bench_limits(Commands& commands) {
    const auto flags = std::make_shared<LimitFlags>();
    commands
        .add({"bench limits", "limits",
              "measure this machine: read bandwidth, int8 dots, f32 multiply-adds",
              "  kvwitness bench limits\n"
              "  kvwitness bench limits -t 1,2 --json"},
             [flags](Session& session) { return bench_limits(*flags, session); })
        .text("-t,--threads", "LIST", flags->threads, "Threads; default: 1 and all", false)
        .whole("-r,--repetitions", flags->repetitions, 1, 100, "Repetitions; the best counts");
}

}  // namespace kvw::cli
