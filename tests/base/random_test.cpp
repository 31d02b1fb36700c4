#include "src/base/random.h"

#include <doctest/doctest.h>

#include <set>

#include "src/base/witness_mix.h"

using namespace kvw;

using Words = std::array<std::uint32_t, 4>;

TEST_CASE("Philox4x32-10 gives the known answers of Random123") {
    CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) ==
          Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    const std::uint32_t ones = 0xffffffff;
    CHECK(philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
          Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
          Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a draw depends on seed, position and draw number, each in full") {
    std::set<double> draws;
    for (const std::uint64_t a : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32}) {
        for (const std::uint64_t b : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32}) {
            for (const std::uint64_t c :
                 {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32}) {
                draws.insert(uniform_draw(a, b, c));
            }
        }
    }
    CHECK(draws.size() == 27);
    CHECK(uniform_draw(5, 6, 7) == uniform_draw(5, 6, 7));
    CHECK(uniform_draw(0, 0, 0) == (0x6627e8d5 >> 8) * 0x1p-24);
}

TEST_CASE("draws fill [0, 1) evenly") {
    std::array<int, 16> bins{};
    for (std::uint64_t position = 0; position < 16000; ++position) {
        const double u = uniform_draw(42, position, 0);
        REQUIRE(u >= 0);
        REQUIRE(u < 1);
        ++bins[static_cast<std::size_t>(u * 16)];
    }
    double chi_square = 0;
    for (const int count : bins) {
        chi_square += (count - 1000.0) * (count - 1000.0) / 1000.0;
    }
    CHECK(chi_square < 37.7);  // 15 degrees of freedom: exceeded once in 1,000 seeds
}

TEST_CASE("entropy differs from call to call") { CHECK(entropy64() != entropy64()); }

TEST_CASE("mix64 is SplitMix64's finaliser, and a page's mix depends on every field") {
    CHECK(mix64(0) == 0);
    CHECK(mix64(0x9e3779b97f4a7c15ull) == 0xe220a8397b1dcdafull);  // first output for seed 0
    const std::set<std::uint64_t> mixes = {page_mix(1, 1, 1, 1), page_mix(2, 1, 1, 1),
                                           page_mix(1, 2, 1, 1), page_mix(1, 1, 2, 1),
                                           page_mix(1, 1, 1, 2)};
    CHECK(mixes.size() == 5);
    for (std::uint32_t layer = 0; layer < 40; ++layer) {
        CHECK(access_factor(layer, layer % 3, AccessKind::read) % 2 == 1);
    }
    CHECK(access_factor(0, 1, AccessKind::read) != access_factor(1, 0, AccessKind::read));
    CHECK(access_factor(0, 0, AccessKind::read) != access_factor(0, 0, AccessKind::write));
}
