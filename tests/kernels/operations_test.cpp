// The operations on plain rows: every variant against ref byte for byte, ref against doubles.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/threads.h"
#include "tests/kernels/weight_samples.h"

using namespace kvw;

namespace {

std::vector<float> spread(std::size_t count, std::uint32_t seed, float limit) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& value : values) {
        value = static_cast<float>(static_cast<std::int32_t>(random())) / 2147483648.0f * limit;
    }
    return values;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr std::size_t kLengths[] = {1,  2,  3,   5,   7,   15,  16,   17,   31,  63,
                                    64, 65, 127, 129, 576, 896, 1000, 1536, 2049};

}  // namespace

TEST_CASE("rms_norm is the same bytes everywhere and the formula") {
    for (const std::size_t cols : kLengths) {
        CAPTURE(cols);
        const std::vector<float> x = spread(cols * 3, 1, 4), weight = spread(cols, 2, 2);
        std::vector<float> expected(x.size());
        kernels_for(Isa::ref)->rms_norm(expected.data(), x.data(), weight.data(), cols, 1e-5f, 0,
                                        3);
        for (std::size_t row = 0; row < 3; ++row) {
            double sum = 0;
            for (std::size_t c = 0; c < cols; ++c) {
                sum += double(x[row * cols + c]) * x[row * cols + c];
            }
            for (std::size_t c = 0; c < cols; ++c) {
                const double exact =
                    x[row * cols + c] / std::sqrt(sum / double(cols) + 1e-5) * weight[c];
                CHECK(expected[row * cols + c] == doctest::Approx(exact).epsilon(1e-5));
            }
        }
        for (const Kernels* kernels : available_kernels()) {
            CAPTURE(kernels->isa);
            std::vector<float> out = x;  // in place, row by row
            kernels->rms_norm(out.data(), out.data(), weight.data(), cols, 1e-5f, 1, 3);
            kernels->rms_norm(out.data(), out.data(), weight.data(), cols, 1e-5f, 0, 1);
            CHECK(same(out, expected));
        }
    }
}

TEST_CASE("silu_mul, add, exp and argmax are the same bytes everywhere") {
    for (const std::size_t count : kLengths) {
        CAPTURE(count);
        std::vector<float> a = spread(count, 3, 90), b = spread(count, 4, 5);
        a[count / 2] = 0.0f;
        a[0] = -120.0f;
        const Kernels& ref = *kernels_for(Isa::ref);
        std::vector<float> silu(count), sum = a, exps(count);
        ref.silu_mul(silu.data(), a.data(), b.data(), count);
        ref.add(sum.data(), b.data(), count);
        ref.exp_shifted(exps.data(), a.data(), count, 20.5f);
        std::vector<float> ties = b;
        ties[count / 3] = ties[count - 1] = 9.0f;
        for (std::size_t i = 0; i < count; ++i) {
            const double exact = a[i] / (1 + std::exp(-double(a[i]))) * b[i];
            CHECK(silu[i] == doctest::Approx(exact).epsilon(1e-5).scale(1e-30));
            CHECK(sum[i] == a[i] + b[i]);
        }
        for (const Kernels* kernels : available_kernels()) {
            CAPTURE(kernels->isa);
            std::vector<float> out = a, added = a, powers(count);
            kernels->silu_mul(out.data(), out.data(), b.data(), count);
            kernels->add(added.data(), b.data(), count);
            kernels->exp_shifted(powers.data(), a.data(), count, 20.5f);
            CHECK(same(out, silu));
            CHECK(same(added, sum));
            CHECK(same(powers, exps));
            CHECK(kernels->argmax(ties.data(), count) == count / 3);
            CHECK(kernels->argmax(b.data(), count) == ref.argmax(b.data(), count));
        }
    }
}

TEST_CASE("exp is within one unit in the last place, exact at zero, and monotonic at its ends") {
    const Kernels& ref = *kernels_for(Isa::ref);
    double worst = 0;
    for (std::uint32_t step = 0; step < 400000; ++step) {
        const float x = -86.9f + static_cast<float>(step) * 0.00043f;
        float y = 0;
        ref.exp_shifted(&y, &x, 1, 0.0f);
        const double exact = std::exp(double(x));
        const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
        worst = std::max(worst, std::fabs(y - exact) / unit);
    }
    CHECK(worst < 1.0);
    const float ends[] = {0.0f, -87.5f, -1e30f, 100.0f};
    float out[4];
    ref.exp_shifted(out, ends, 4, 0.0f);
    CHECK(out[0] == 1.0f);
    CHECK(out[1] == 0.0f);
    CHECK(out[2] == 0.0f);
    CHECK(std::isinf(out[3]));
}

TEST_CASE("rope tables are those of libm to seven digits, far out too") {
    for (const double base : {10000.0, 100000.0, 1000000.0}) {
        for (const std::uint32_t position : {0u, 1u, 17u, 4095u, 8191u, 131071u}) {
            std::vector<float> cosines(32), sines(32);
            rope_table(position, 1, 64, base, 1.0, cosines.data(), sines.data());
            for (int i = 0; i < 32; ++i) {
                const double angle = position * std::pow(base, -2.0 * i / 64);
                CHECK(cosines[i] == doctest::Approx(std::cos(angle)).epsilon(1e-7).scale(1));
                CHECK(sines[i] == doctest::Approx(std::sin(angle)).epsilon(1e-7).scale(1));
            }
        }
    }
}

TEST_CASE("rope rotates pairs, interleaved or by halves, the same everywhere") {
    for (const std::size_t head_dim : {16u, 64u, 80u, 128u}) {
        std::vector<float> cosines(head_dim / 2), sines(head_dim / 2);
        rope_table(1234, 1, std::uint32_t(head_dim), 10000.0, 1.0, cosines.data(), sines.data());
        const std::vector<float> x = spread(head_dim * 3, 9, 3);
        for (const bool interleaved : {true, false}) {
            std::vector<float> expected = x;
            kernels_for(Isa::ref)->rope(expected.data(), 3, head_dim, cosines.data(), sines.data(),
                                        interleaved);
            for (std::size_t head = 0; head < 3; ++head) {
                for (std::size_t i = 0; i < head_dim / 2; ++i) {
                    const std::size_t a = head * head_dim + (interleaved ? 2 * i : i),
                                      b = a + (interleaved ? 1 : head_dim / 2);
                    CHECK(expected[a] ==
                          doctest::Approx(double(x[a]) * cosines[i] - double(x[b]) * sines[i])
                              .epsilon(1e-5)
                              .scale(1));
                    CHECK(expected[b] ==
                          doctest::Approx(double(x[a]) * sines[i] + double(x[b]) * cosines[i])
                              .epsilon(1e-5)
                              .scale(1));
                }
            }
            for (const Kernels* kernels : available_kernels()) {
                std::vector<float> out = x;
                kernels->rope(out.data(), 3, head_dim, cosines.data(), sines.data(), interleaved);
                CHECK(same(out, expected));
            }
        }
    }
}

TEST_CASE(
    "digests are the same everywhere, add up from pieces, and see any change of place or bit") {
    const std::size_t count = 1003;
    std::vector<float> x = spread(count, 5, 20);
    const RowDigest whole = kernels_for(Isa::ref)->digest_logits(x.data(), count, 0, nullptr);
    const std::uint64_t row = kernels_for(Isa::ref)->digest_row(x.data(), count);
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        bool nonfinite = false;
        CHECK(kernels->digest_logits(x.data(), count, 0, &nonfinite) == whole);
        CHECK_FALSE(nonfinite);
        CHECK(kernels->digest_row(x.data(), count) == row);
        const RowDigest first = kernels->digest_logits(x.data(), 334, 0, &nonfinite);
        const RowDigest second =
            kernels->digest_logits(x.data() + 334, count - 334, 334, &nonfinite);
        CHECK(RowDigest{first.a + second.a, first.b + second.b} == whole);
        for (const std::size_t at : {std::size_t{0}, std::size_t{17}, count - 1}) {
            std::vector<float> changed = x;
            changed[at] = std::nextafter(changed[at], 1e9f);
            CHECK_FALSE(kernels->digest_logits(changed.data(), count, 0, &nonfinite) == whole);
            CHECK(kernels->digest_row(changed.data(), count) != row);
        }
        std::vector<float> swapped = x;
        std::swap(swapped[100], swapped[102]);
        CHECK_FALSE(kernels->digest_logits(swapped.data(), count, 0, &nonfinite) == whole);
        for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
            std::vector<float> broken = x;
            broken[count - 2] = bad;
            nonfinite = false;
            kernels->digest_logits(broken.data(), count, 0, &nonfinite);
            CHECK(nonfinite);
        }
    }
    RowDigest forward, backward;
    fold_row(forward, whole, 4);
    fold_row(forward, {1, 2}, 5);
    fold_row(backward, {1, 2}, 5);
    fold_row(backward, whole, 4);
    CHECK(forward == backward);
    RowDigest exchanged;
    fold_row(exchanged, whole, 5);
    fold_row(exchanged, {1, 2}, 4);
    CHECK_FALSE(exchanged == forward);
}

TEST_CASE("a pool of threads does every item once, phase after phase, in the exact float mode") {
    for (const unsigned count : {1u, 2u, 4u}) {
        ThreadPool pool(count);
        std::vector<int> items(1000);
        std::atomic<int> wrong = 0;
        for (int round = 0; round < 200; ++round) {
            pool.run([&](unsigned worker) {
                const auto [begin, end] = pool.share(items.size(), worker, 16);
                for (std::size_t i = begin; i < end; ++i) {
                    ++items[i];
                }
                pool.barrier(worker);
                for (std::size_t i = begin; i < end;
                     ++i) {  // another worker's part is finished too
                    wrong += items[items.size() - 1 - i] != items[0] ? 1 : 0;
                }
                wrong += float_mode_is_exact() ? 0 : 1;
                pool.barrier(worker);
            });
        }
        CHECK(wrong == 0);
        CHECK(std::all_of(items.begin(), items.end(), [](int n) { return n == 200; }));
    }
    CHECK(usable_processors() >= 1);
}

TEST_CASE("kernels are chosen by name, and unknown names by nobody") {
    CHECK(kernels_named("ref") == kernels_for(Isa::ref));
    CHECK(kernels_named("auto") == &best_kernels());
    CHECK(kernels_named("sse2") == nullptr);
    CHECK(std::string(best_kernels().isa) == available_kernels().back()->isa);
}
