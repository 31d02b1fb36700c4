#include <doctest/doctest.h>

#include <bit>
#include <limits>
#include <thread>

#include "src/base/witness_mix.h"
#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

namespace {

RowDigest digest(const Kernels& kernels, const std::vector<float>& x, std::size_t first_index = 0) {
    bool nonfinite = false;
    return kernels.digest_logits(x.data(), x.size(), first_index, &nonfinite);
}

}  // namespace

TEST_CASE("digests are the same on every instruction set, at any length and start") {
    const Kernels& ref = *kernels_for(Isa::ref);
    for (const std::size_t count :
         {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 576, 4095, 4096, 4097, 49152}) {
        const std::vector<float> x = sample(count, 1, 40.0f);
        for (const Kernels* kernels : wide_variants()) {
            CAPTURE(kernels->isa);
            CAPTURE(count);
            for (const std::size_t first : {0, 2, 30, 4080, 4094, 151000}) {
                CHECK(digest(*kernels, x, first) == digest(ref, x, first));
            }
            CHECK(kernels->digest_row(x.data(), count) == ref.digest_row(x.data(), count));
        }
    }
}

TEST_CASE("a digest is the keyed sum of products that NUMERICS.md describes") {
    const std::vector<float> x = {1.5f, -2.25f, 1e-30f};
    RowDigest expected;
    for (const std::size_t i : {0, 2}) {
        const std::uint32_t first = std::bit_cast<std::uint32_t>(x[i]);
        const std::uint32_t second = i + 1 < x.size() ? std::bit_cast<std::uint32_t>(x[i + 1]) : 0;
        const auto product = [&](std::uint64_t constant) {
            const auto key = [&](std::uint64_t index) {
                return static_cast<std::uint32_t>(mix64(index + constant));
            };
            return std::uint64_t{first + key(10 + i)} * std::uint32_t{second + key(11 + i)};
        };
        expected.a += product(0x9e3779b97f4a7c15ull);
        expected.b += product(0xc2b2ae3d27d4eb4full);
    }
    for (const Kernels* kernels : all_variants()) {
        CHECK(digest(*kernels, x, 10) == expected);
    }
}

TEST_CASE("a row may be digested in pieces, in any order") {
    const std::vector<float> x = sample(10001, 3, 20.0f);
    for (const Kernels* kernels : all_variants()) {
        const RowDigest whole = digest(*kernels, x);
        RowDigest sum;
        const std::pair<int, int> pieces[] = {{6000, 10001}, {0, 18}, {18, 4096}, {4096, 6000}};
        for (const auto& [begin, end] : pieces) {
            const RowDigest piece = digest(*kernels, {x.begin() + begin, x.begin() + end},
                                           static_cast<std::size_t>(begin));
            sum.a += piece.a;
            sum.b += piece.b;
        }
        CHECK(sum == whole);
    }
}

TEST_CASE("one bit, a swap and a move of values change the digest") {
    const std::vector<float> x = sample(64, 4);
    const RowDigest whole = digest(best_kernels(), x);
    for (std::size_t i = 0; i < x.size(); ++i) {
        for (int bit = 0; bit < 32; ++bit) {
            std::vector<float> changed = x;
            changed[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x[i]) ^ (1u << bit));
            const RowDigest other = digest(best_kernels(), changed);
            REQUIRE(other.a != whole.a);
            REQUIRE(other.b != whole.b);
        }
    }
    std::vector<float> swapped = x;
    std::swap(swapped[4], swapped[40]);
    CHECK(digest(best_kernels(), swapped) != whole);
    CHECK(digest(best_kernels(), x, 2) != whole);
}

TEST_CASE("NaN and infinity are flagged wherever they stand, the largest float is not") {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const Kernels* kernels : all_variants()) {
        for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
            for (std::size_t place = 0; place < 37; ++place) {
                std::vector<float> x(37, std::numeric_limits<float>::max());
                bool nonfinite = false;
                kernels->digest_logits(x.data(), x.size(), 0, &nonfinite);
                REQUIRE(!nonfinite);
                x[place] = bad;
                kernels->digest_logits(x.data(), x.size(), 0, &nonfinite);
                REQUIRE(nonfinite);
                kernels->digest_logits(x.data(), 0, 0, &nonfinite);
                REQUIRE(nonfinite);  // set, never cleared
            }
        }
    }
}

TEST_CASE("rows fold into a running digest in any order, but not at another position") {
    const RowDigest first{123, 456}, second{789, 1011};
    RowDigest one, other, moved;
    fold_row(one, first, 5);
    fold_row(one, second, 6);
    fold_row(other, second, 6);
    fold_row(other, first, 5);
    fold_row(moved, first, 6);
    fold_row(moved, second, 5);
    CHECK(one == other);
    CHECK(one != moved);

    std::uint64_t layer = 0, layer_moved = 0;
    fold_row(layer, 123, 5);
    fold_row(layer, 789, 6);
    fold_row(layer_moved, 123, 6);
    fold_row(layer_moved, 789, 5);
    CHECK(layer != layer_moved);
}

TEST_CASE("threads that need the same keys for the first time get the same ones") {
    const std::vector<float> x = sample(20000, 5);
    RowDigest seen[4];
    std::vector<std::thread> threads;
    for (RowDigest& one : seen) {
        threads.emplace_back([&] { one = digest(best_kernels(), x, 600000); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const RowDigest& one : seen) {
        CHECK(one == digest(*kernels_for(Isa::ref), x, 600000));
    }
}
