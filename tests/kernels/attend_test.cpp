// Attention, rows and scrub over tiles: the same bytes on every instruction set and in every
// grouping, against plain doubles, with every lie a header can tell.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/weight_samples.h"
#include "tests/model/cache.h"

using namespace kvw;
using kvw::test::Cache;

namespace {

const Owner kReader{TenantId{3}, RequestId{7}};
const Owner kStranger{TenantId{4}, RequestId{9}};

struct Shape {
    std::uint32_t head_dim = 64, kv_heads = 2, group = 3;
    std::uint32_t query_heads() const { return kv_heads * group; }
};

std::vector<float> random_floats(std::size_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& value : values) {
        value = static_cast<float>(static_cast<int>(random() % 4001) - 2000) / 700.0f;
    }
    return values;
}

// One request of `length` positions, its rows appended by `kernels`, in pages that `order`
// shuffles.
struct Story {
    Shape shape;
    std::uint32_t length;
    Cache cache;
    std::vector<PageRef> pages;
    std::vector<float> q, k, v;
    SequenceReport writes, reads;

    Story(const Kernels& kernels, const Shape& s, std::uint32_t tokens, std::uint32_t order = 0)
        : shape(s), length(tokens), cache(TileShape{1, s.kv_heads, s.head_dim}, tokens / 16 + 3) {
        std::vector<std::uint32_t> numbers(tokens / 16 + 3);
        for (std::uint32_t i = 0; i < numbers.size(); ++i) {
            numbers[i] = i;
        }
        if (order > 0) {
            std::shuffle(numbers.begin(), numbers.end(), std::mt19937(order));
        }
        for (std::uint32_t i = 0; i < (tokens + 15) / 16; ++i) {
            pages.push_back({.page = numbers[i], .generation = 5 + i});
            std::uint32_t words = 0;
            CHECK(stamp_page(cache.memory(), numbers[i], kReader, 5 + i, &words) == 0);
            CHECK(words > 0);
        }
        const std::size_t kv = std::size_t{s.kv_heads} * s.head_dim;
        q = random_floats(std::size_t{tokens} * s.query_heads() * s.head_dim, 1);
        k = random_floats(tokens * kv, 2);
        v = random_floats(tokens * kv, 3);
        SequenceView view = all(&writes);
        for (std::uint32_t head = 0; head < s.kv_heads; ++head) {
            kernels.append_checked(cache.memory(), view, 0, head, k.data(), v.data());
        }
    }
    SequenceView all(SequenceReport* report) {
        return {.reader = kReader, .pages = pages, .first = 0, .count = length, .report = report};
    }
    AttentionArgs args(std::vector<float>& out) {
        out.assign(q.size(), -1.0f);
        return {.memory = cache.memory(),
                .layer = 0,
                .query_heads = shape.query_heads(),
                .q = q.data(),
                .out = out.data()};
    }
    // All rows in items of `rows_per_item` query rows.
    std::vector<float> attend(const Kernels& kernels, std::uint32_t rows_per_item,
                              bool checked = false) {
        std::vector<float> out;
        const AttentionArgs a = args(out);
        reads.clear();
        const SequenceView view = all(&reads);
        for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
            for (std::uint32_t row = 0; row < length; row += rows_per_item) {
                const AttentionItem item{&view, head, row, std::min(length, row + rows_per_item)};
                checked ? kernels.attend_checked(a, item) : kernels.attend(a, item);
            }
        }
        return out;
    }
    TileHeader& header(std::uint32_t entry, std::uint32_t head) {
        return *tile_header(cache.memory().tile(pages[entry].page, 0, head));
    }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The formula, in double, over keys and values as given.
double largest_error(const Story& story, const std::vector<float>& out) {
    const Shape& s = story.shape;
    const std::size_t kv = std::size_t{s.kv_heads} * s.head_dim,
                      width = std::size_t{s.query_heads()} * s.head_dim;
    double worst = 0;
    for (std::uint32_t row = 0; row < story.length; row += 1 + story.length / 40) {
        for (std::uint32_t head = 0; head < s.query_heads(); ++head) {
            const float* query = &story.q[row * width + std::size_t{head} * s.head_dim];
            const std::size_t at = std::size_t{head / s.group} * s.head_dim;
            std::vector<double> weights, sums(s.head_dim);
            double total = 0;
            double most = -1e30;
            for (std::uint32_t t = 0; t <= row; ++t) {
                double score = 0;
                for (std::uint32_t d = 0; d < s.head_dim; ++d) {
                    score += double(query[d]) * story.k[t * kv + at + d];
                }
                weights.push_back(score / std::sqrt(double(s.head_dim)));
                most = std::max(most, weights.back());
            }
            for (std::uint32_t t = 0; t <= row; ++t) {
                const double weight = std::exp(weights[t] - most);
                total += weight;
                for (std::uint32_t d = 0; d < s.head_dim; ++d) {
                    sums[d] += weight * story.v[t * kv + at + d];
                }
            }
            for (std::uint32_t d = 0; d < s.head_dim; ++d) {
                worst = std::max(worst,
                                 std::fabs(sums[d] / total -
                                           out[row * width + std::size_t{head} * s.head_dim + d]));
            }
        }
    }
    return worst;
}

std::uint64_t rows_of(std::uint64_t n) { return n * (n + 1) / 2; }

}  // namespace

TEST_CASE("attention is the same bytes on every instruction set, close to the formula") {
    for (const Shape shape : {Shape{64, 3, 3}, Shape{16, 1, 1}, Shape{32, 2, 4}, Shape{80, 1, 7},
                              Shape{128, 2, 2}, Shape{256, 1, 4}}) {
        for (const std::uint32_t length : {1u, 2u, 15u, 16u, 17u, 33u, 255u, 256u, 257u, 530u}) {
            CAPTURE(shape.head_dim);
            CAPTURE(length);
            Story judge(*kernels_for(Isa::ref), shape, length);
            const std::vector<float> expected = judge.attend(*kernels_for(Isa::ref), length);
            CHECK(judge.reads.faults == 0);
            CHECK(largest_error(judge, expected) < 0.01);  // keys and values are stored as f16
            for (const Kernels* kernels : available_kernels()) {
                CAPTURE(kernels->isa);
                Story story(*kernels, shape, length, 77);
                CHECK(same(story.attend(*kernels, length), expected));
                CHECK(same(story.attend(*kernels, length, true), expected));
                CHECK(story.reads.faults == 0);
                CHECK(story.reads.rows_read == rows_of(length) * shape.kv_heads);
                CHECK(story.writes.rows_written == std::uint64_t{length} * shape.kv_heads);
            }
        }
    }
}

TEST_CASE("how query rows are grouped into items, or splits into partials, does not show") {
    const Shape shape{64, 2, 3};
    const std::uint32_t length = 600;
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story story(*kernels, shape, length);
        const std::vector<float> whole = story.attend(*kernels, length);
        const std::uint64_t witness = story.reads.witness;
        for (const std::uint32_t rows : {1u, 5u, 16u, 64u}) {
            CHECK(same(story.attend(*kernels, rows), whole));
            CHECK(story.reads.witness == witness);
        }
        // The last rows once more, split by split, merged afterwards.
        std::vector<float> out;
        AttentionArgs args = story.args(out);
        std::vector<float> partials(std::size_t{length} * shape.query_heads() * 3 *
                                    (shape.head_dim + 2));
        args.partials = partials.data();
        args.splits_max = 3;
        SequenceReport report;
        const SequenceView view = story.all(&report);
        for (std::uint32_t split = 0; split < 3; ++split) {
            for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
                kernels->attend(args, {&view, head, length - 3, length, split});
            }
        }
        const std::size_t width = std::size_t{shape.query_heads()} * shape.head_dim;
        for (std::uint32_t row = length - 3; row < length; ++row) {
            kernels->attend_merge(args, view, row, 0, shape.query_heads());
            CHECK(std::memcmp(&out[row * width], &whole[row * width], width * sizeof(float)) == 0);
        }
        CHECK(report.rows_read == (rows_of(length) - rows_of(length - 3)) * shape.kv_heads);
    }
}

TEST_CASE("the witness is what the ledger can predict, and follows the header that was loaded") {
    const Shape shape{16, 2, 2};
    const std::uint32_t length = 40;
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story story(*kernels, shape, length);
        story.attend(*kernels, 7);
        const auto predicted = [&](const Owner& owner, std::uint32_t entry) {
            std::uint64_t visible = 0;
            for (std::uint32_t p = entry * 16; p < length; ++p) {
                visible += std::min<std::uint32_t>(16, p - entry * 16 + 1);
            }
            std::uint64_t factors = 0;
            for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
                factors += access_factor(0, head, AccessKind::read);
            }
            return page_mix(number(owner.tenant), number(owner.request),
                            story.pages[entry].generation, story.pages[entry].page) *
                   factors * visible;
        };
        CHECK(story.reads.witness ==
              predicted(kReader, 0) + predicted(kReader, 1) + predicted(kReader, 2));

        // Another owner's header, with the check switched off: only the witness tells.
        for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
            story.header(1, head).tenant = number(kStranger.tenant);
            story.header(1, head).request = number(kStranger.request);
        }
        std::vector<float> out;
        const AttentionArgs args = story.args(out);
        SequenceReport report;
        SequenceView view = story.all(&report);
        view.check_headers = false;
        for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
            kernels->attend(args, {&view, head, 0, length});
        }
        CHECK(report.faults == 0);
        CHECK(report.witness ==
              predicted(kReader, 0) + predicted(kStranger, 1) + predicted(kReader, 2));
    }
}

TEST_CASE("every field of a header that does not match is reported, and its rows are masked") {
    const Shape shape{16, 1, 2};
    const std::uint32_t length = 40;
    using Lie = void (*)(TileHeader&);
    const Lie lies[] = {[](TileHeader& h) { h.tenant ^= 1; },
                        [](TileHeader& h) { h.request ^= 1; },
                        [](TileHeader& h) { h.generation += 1; },
                        [](TileHeader& h) { h.page ^= 1; },
                        [](TileHeader& h) { h.layer ^= 1; },
                        [](TileHeader& h) { h.head ^= 1; },
                        [](TileHeader& h) { h.rows_written = 3; },
                        [](TileHeader& h) { h.state = TileState::freed; }};
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story honest(*kernels, shape, length);
        const std::vector<float> clean = honest.attend(*kernels, length);
        std::size_t which = 0;
        for (const Lie lie : lies) {
            CAPTURE(which++);
            Story story(*kernels, shape, length);
            lie(story.header(1, 0));
            const std::vector<float> out = story.attend(*kernels, length);
            CHECK(story.reads.faults >= 1);
            REQUIRE(story.reads.first_faults.size() == 1);
            const TileFault& fault = story.reads.first_faults.front();
            CHECK(fault.access == AccessKind::read);
            CHECK(fault.table_index == 1);
            CHECK(fault.page == story.pages[1].page);
            CHECK(std::memcmp(&fault.loaded, &story.header(1, 0), sizeof(TileHeader)) == 0);
            // Rows 0..15 never see that tile; later ones do without it, and stay finite.
            const std::size_t width = std::size_t{shape.query_heads()} * shape.head_dim;
            CHECK(std::memcmp(out.data(), clean.data(), 16 * width * sizeof(float)) == 0);
            CHECK_FALSE(same(out, clean));
            CHECK(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
        }
        // A declared share excuses the request, never the tenant.
        Story shared(*kernels, shape, length);
        shared.header(1, 0).request ^= 1;
        shared.pages[1].granted = true;
        CHECK(same(shared.attend(*kernels, length), clean));
        CHECK(shared.reads.faults == 0);
        shared.header(1, 0).tenant ^= 1;
        shared.attend(*kernels, length);
        CHECK(shared.reads.faults >= 1);
    }
}

TEST_CASE("the checked accessor sees a foreign writer behind headers and tables that agree") {
    const Shape shape{32, 2, 2};
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story story(*kernels, shape, 50);
        const std::vector<float> clean = story.attend(*kernels, 50);
        const std::size_t tile = story.cache.memory().tile_index(story.pages[2].page, 0, 1);
        story.cache.memory().writers[tile * kPageTokens + 4] = number(kStranger.request);

        CHECK(same(story.attend(*kernels, 50, false), clean));
        CHECK(story.reads.faults == 0);
        story.attend(*kernels, 50, true);
        CHECK(story.reads.faults >= 1);
        REQUIRE(story.reads.first_faults.size() == 1);
        CHECK(story.reads.first_faults.front().from_shadow);
        CHECK(story.reads.first_faults.front().shadow_writer == number(kStranger.request));
        CHECK(story.reads.first_faults.front().head == 1);
        CHECK(story.reads.first_faults.front().table_index == 2);
    }
}

TEST_CASE("rows that were not written cannot reach a result") {
    const Shape shape{64, 1, 3};
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story story(*kernels, shape, 21);
        const std::vector<float> clean = story.attend(*kernels, 21);
        std::uint8_t* tile = story.cache.memory().tile(story.pages[1].page, 0, 0);
        for (const std::uint16_t bits :
             {kPoisonHalf, std::uint16_t{0x7c00}, std::uint16_t{0xfc00}, std::uint16_t{0x7bff}}) {
            for (std::uint32_t row = 5; row < kPageTokens; ++row) {
                for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
                    tile_keys(tile)[d * kPageTokens + row] = bits;
                    tile_values(tile, story.cache.memory().shape)[row * shape.head_dim + d] = bits;
                }
            }
            CHECK(same(story.attend(*kernels, 21), clean));
            CHECK(same(story.attend(*kernels, 4), clean));
        }
    }
}

TEST_CASE("append refuses tiles of others, other generations and rows out of order") {
    const Shape shape{16, 1, 1};
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story story(*kernels, shape, 20);
        const std::vector<float> row(16, 1.0f);
        const auto try_append = [&](std::uint32_t first) {
            SequenceReport report;
            const SequenceView view{.reader = kReader,
                                    .pages = story.pages,
                                    .first = first,
                                    .count = 1,
                                    .report = &report};
            kernels->append(story.cache.memory(), view, 0, 0, row.data(), row.data());
            return std::pair{report.faults.load(), report.rows_written.load()};
        };
        CHECK(try_append(22) ==
              std::pair<std::uint32_t, std::uint64_t>{1, 0});  // row 20 comes next
        CHECK(try_append(19) == std::pair<std::uint32_t, std::uint64_t>{1, 0});
        CHECK(try_append(20) == std::pair<std::uint32_t, std::uint64_t>{0, 1});
        story.header(1, 0).request = number(kStranger.request);
        CHECK(try_append(21) == std::pair<std::uint32_t, std::uint64_t>{1, 0});
        story.header(1, 0).request = number(kReader.request);
        story.header(1, 0).generation += 1;
        CHECK(try_append(21) == std::pair<std::uint32_t, std::uint64_t>{1, 0});
        CHECK(story.header(1, 0).rows_written == 5);
    }
}

TEST_CASE("append stores what f32 to f16 rounding gives, ties to even") {
    const std::uint32_t head_dim = 64;
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Cache cache(TileShape{1, 1, head_dim}, 1);
        std::uint32_t words = 0;
        stamp_page(cache.memory(), 0, kReader, 1, &words);
        const std::vector<PageRef> pages{{.page = 0, .generation = 1}};
        std::vector<float> k(head_dim), v(head_dim);
        const float cases[] = {1.0f,     1.00048828125f, 1.00146484375f, -2.5f, 65504.0f,   6.1e-5f,
                               5.96e-8f, 2.98e-8f,       0.0f,           -0.0f, 0.33325195f};
        const std::uint16_t bits[] = {0x3c00, 0x3c00, 0x3c02, 0xc100, 0x7bff, 0x03ff,
                                      0x0001, 0x0000, 0x0000, 0x8000, 0x3555};
        for (std::size_t i = 0; i < std::size(cases); ++i) {
            k[i] = v[i] = cases[i];
        }
        SequenceReport report;
        const SequenceView view{
            .reader = kReader, .pages = pages, .first = 0, .count = 1, .report = &report};
        kernels->append(cache.memory(), view, 0, 0, k.data(), v.data());
        std::uint8_t* tile = cache.memory().tile(0, 0, 0);
        for (std::size_t i = 0; i < std::size(cases); ++i) {
            CAPTURE(i);
            if (i != 5) {  // 6.1e-5 lies between subnormals; both neighbours are checked by the
                           // next line
                CHECK(tile_keys(tile)[i * kPageTokens] == bits[i]);
            }
            CHECK(tile_keys(tile)[i * kPageTokens] == tile_values(tile, cache.memory().shape)[i]);
        }
    }
}

TEST_CASE("scrub leaves poison, nobody's header and no writers, and says whose headers it loaded") {
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        Story story(*kernels, {32, 2, 1}, 16);
        const KvMemory& memory = story.cache.memory();
        const std::uint32_t page = story.pages[0].page, generation = story.pages[0].generation;
        std::uint32_t mismatches = 0;
        const std::uint64_t witness =
            kernels->scrub(memory, page, kReader, generation, &mismatches);
        CHECK(mismatches == 0);
        const std::uint64_t mix =
            page_mix(number(kReader.tenant), number(kReader.request), generation, page);
        CHECK(witness == mix * 16 *
                             (access_factor(0, 0, AccessKind::scrub) +
                              access_factor(0, 1, AccessKind::scrub)));
        for (std::uint32_t head = 0; head < 2; ++head) {
            std::uint8_t* tile = memory.tile(page, 0, head);
            CHECK(tile_header(tile)->state == TileState::freed);
            CHECK(tile_header(tile)->request == 0);
            CHECK(tile_header(tile)->tenant == 0);
            const std::uint16_t* halves = tile_keys(tile);
            CHECK(std::all_of(halves, halves + memory.shape.key_bytes(),
                              [](std::uint16_t h) { return h == kPoisonHalf; }));
            const std::uint64_t* writers =
                memory.writers + memory.tile_index(page, 0, head) * kPageTokens;
            CHECK(std::all_of(writers, writers + kPageTokens,
                              [](std::uint64_t w) { return w == 0; }));
        }
        std::uint32_t words = 0;
        CHECK(stamp_page(memory, page, kReader, generation + 1, &words) == 0);
        kernels->scrub(memory, page, kStranger, generation + 1, &mismatches);
        CHECK(mismatches == 2);  // one a tile: these were not the stranger's
    }
}

TEST_CASE("a page that was not scrubbed is noticed when it is stamped") {
    Story story(*kernels_for(Isa::ref), {16, 1, 1}, 16);
    std::uint32_t words = 0;
    CHECK(stamp_page(story.cache.memory(), story.pages[0].page, kStranger, 9, &words) > 0);
}
