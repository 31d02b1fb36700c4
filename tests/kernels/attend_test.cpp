#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "kernels/half.h"
#include "tests/kernels/kv_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

// Keys and values of `positions` tokens and the queries of all of them, before anything is stored.
struct Tokens {
    std::uint32_t positions, group;
    TileShape shape;
    std::vector<float> k, v, q;

    Tokens(TileShape tile_shape, std::uint32_t query_group, std::uint32_t count)
        : positions(count),
          group(query_group),
          shape(tile_shape),
          k(sample(std::size_t{count} * shape.heads * shape.head_dim, 1, 3.0f)),
          v(sample(std::size_t{count} * shape.heads * shape.head_dim, 2, 3.0f)),
          q(sample(std::size_t{count} * query_floats(), 3, 6.0f)) {}

    std::size_t query_floats() const { return std::size_t{shape.heads} * group * shape.head_dim; }
};

// How the rows of one step are cut into items: rows per item, splits together or apart.
struct Cut {
    std::uint32_t rows = 0xffffffff;
    bool by_split = false;
    bool checked = false;
};

// Attention of positions [first, first + count) over what is in `world`, for every layer.
std::vector<float> attend(const Kernels& kernels, KvWorld& world, const SequenceView& sequence,
                          const Tokens& tokens, Cut cut = {}) {
    const std::size_t row_floats = tokens.query_floats();
    std::vector<float> out;
    std::vector<float> layer_out(sequence.count * row_floats);
    const std::uint32_t splits = (sequence.first + sequence.count - 1) / kSplitTokens + 1;
    std::vector<float> partials;
    if (cut.by_split) {
        partials.assign(sequence.count * tokens.shape.heads * tokens.group * splits *
                            (tokens.shape.head_dim + 2),
                        std::numeric_limits<float>::quiet_NaN());
    }
    for (std::uint32_t layer = 0; layer < tokens.shape.layers; ++layer) {
        std::fill(layer_out.begin(), layer_out.end(), std::numeric_limits<float>::quiet_NaN());
        const AttentionArgs args{.memory = world.memory,
                                 .layer = layer,
                                 .query_heads = tokens.shape.heads * tokens.group,
                                 .q = tokens.q.data() + sequence.first * row_floats,
                                 .out = layer_out.data(),
                                 .partials = partials.empty() ? nullptr : partials.data(),
                                 .splits_max = splits};
        const auto operation = cut.checked ? kernels.attend_checked : kernels.attend;
        for (std::uint32_t head = 0; head < tokens.shape.heads; ++head) {
            for (std::uint32_t row = 0; row < sequence.count;) {
                const std::uint32_t end = row + std::min(cut.rows, sequence.count - row);
                if (cut.by_split) {
                    for (std::uint32_t split = splits; split-- > 0;) {  // in no particular order
                        operation(args, {&sequence, head, row, end, split});
                    }
                } else {
                    operation(args, {&sequence, head, row, end});
                }
                row = end;
            }
        }
        for (std::uint32_t row = 0; cut.by_split && row < sequence.count; ++row) {
            const std::uint32_t middle = args.query_heads / 2;
            kernels.attend_merge(args, sequence, row, 0, middle);
            kernels.attend_merge(args, sequence, row, middle, args.query_heads);
        }
        out.insert(out.end(), layer_out.begin(), layer_out.end());
    }
    return out;
}

// Attention by its definition, in double, over keys and values as halves; one layer.
std::vector<float> naive(
    const Tokens& tokens, std::uint32_t first, std::uint32_t count,
    const std::function<bool(std::uint32_t head, std::uint32_t position)>& masked) {
    const std::size_t head_dim = tokens.shape.head_dim;
    const auto half = [](float x) {
        return static_cast<double>(float_from_half([&] {
            KvWorld one({1, 1, 16}, 1);
            std::vector<float> row(16, x);
            one.append(KvWorld::ref(), row, row, 0, 1);
            return tile_values(one.memory.tile(one.pages[0].page, 0, 0), one.shape)[0];
        }()));
    };
    std::vector<double> k(tokens.k.size()), v(tokens.v.size());
    for (std::size_t i = 0; i < k.size(); ++i) {
        k[i] = half(tokens.k[i]);
        v[i] = half(tokens.v[i]);
    }
    std::vector<float> out;
    for (std::uint32_t row = 0; row < count; ++row) {
        for (std::uint32_t head = 0; head < tokens.shape.heads * tokens.group; ++head) {
            const float* q =
                tokens.q.data() + (first + row) * tokens.query_floats() + head * head_dim;
            std::vector<double> sum(head_dim, 0.0);
            double weights = 0;
            for (std::uint32_t token = 0; token <= first + row; ++token) {
                if (masked(head / tokens.group, token)) {
                    continue;
                }
                const std::size_t at =
                    (std::size_t{token} * tokens.shape.heads + head / tokens.group) * head_dim;
                double score = 0;
                for (std::size_t d = 0; d < head_dim; ++d) {
                    score += q[d] * k[at + d];
                }
                const double weight = std::exp(score / std::sqrt(double(head_dim)));
                weights += weight;
                for (std::size_t d = 0; d < head_dim; ++d) {
                    sum[d] += weight * v[at + d];
                }
            }
            for (const double value : sum) {
                out.push_back(weights == 0 ? 0.0f : static_cast<float>(value / weights));
            }
        }
    }
    return out;
}

double worst_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(double{a[i]} - b[i]);
        worst = difference <= worst ? worst : difference;  // NaN is kept
    }
    return worst;
}

// The read witness that the ledger would predict from the page table alone.
std::uint64_t predicted_witness(const KvWorld& world, std::uint32_t first, std::uint32_t count) {
    std::uint64_t witness = 0;
    for (std::uint32_t position = first; position < first + count; ++position) {
        for (std::uint32_t token = 0; token <= position; ++token) {
            const PageRef& entry = world.pages[token / kPageTokens];
            for (std::uint32_t layer = 0; layer < world.shape.layers; ++layer) {
                for (std::uint32_t head = 0; head < world.shape.heads; ++head) {
                    witness += page_mix(number(kReader.tenant), number(kReader.request),
                                        entry.generation, entry.page) *
                               access_factor(layer, head, AccessKind::read);
                }
            }
        }
    }
    return witness;
}

std::uint64_t predicted_rows(const KvWorld& world, std::uint64_t first, std::uint64_t count) {
    return (count * first + count * (count + 1) / 2) * world.shape.tiles_per_page();
}

}  // namespace

TEST_CASE("attention returns the same bytes on every instruction set: one row, any context") {
    for (const std::uint32_t head_dim : {16u, 32u, 64u, 80u, 128u, 256u}) {
        const TileShape shape{1, head_dim <= 64 ? 2u : 1u, head_dim};
        for (const std::uint32_t group : {1u, 3u, 4u, 7u}) {
            const Tokens tokens(shape, group, 700);
            KvWorld world(shape, 700);
            world.append(best_kernels(), tokens.k, tokens.v, 0, 700);
            for (const std::uint32_t context :
                 {1u, 2u, 15u, 16u, 17u, 63u, 65u, 255u, 256u, 257u, 300u, 513u, 700u}) {
                const SequenceView sequence = world.view(context - 1, 1);
                const std::vector<float> expected = attend(KvWorld::ref(), world, sequence, tokens);
                for (const Kernels* kernels : wide_variants()) {
                    CAPTURE(kernels->isa);
                    CAPTURE(head_dim);
                    CAPTURE(group);
                    CAPTURE(context);
                    CHECK(same_bytes(attend(*kernels, world, sequence, tokens), expected));
                    CHECK(same_bytes(attend(*kernels, world, sequence, tokens, {.by_split = true}),
                                     expected));
                }
            }
            CHECK(world.report.faults == 0);
        }
    }
}

TEST_CASE("rows in one item, in many, by split and merged: the same bytes, witness and counter") {
    for (const std::uint32_t head_dim : {16u, 64u, 80u}) {
        for (const std::uint32_t group :
             head_dim == 16 ? std::vector{1u, 30u} : std::vector{3u, 5u}) {
            const TileShape shape{1, 1, head_dim};
            const std::uint32_t first = 231, count = 47;
            const Tokens tokens(shape, group, first + count);
            KvWorld world(shape, first + count);
            world.append(best_kernels(), tokens.k, tokens.v, 0, first + count);
            const SequenceView sequence = world.view(first, count);
            const std::vector<float> expected = attend(KvWorld::ref(), world, sequence, tokens);
            const std::uint64_t witness = predicted_witness(world, first, count);
            for (const Kernels* kernels : all_variants()) {
                for (const std::uint32_t rows : {1u, 2u, 7u, 16u, 47u}) {
                    for (const bool by_split : {false, true}) {
                        if (kernels == &KvWorld::ref() && head_dim * group > 16) {
                            continue;  // the judge is slow
                        }
                        CAPTURE(kernels->isa);
                        CAPTURE(head_dim);
                        CAPTURE(group);
                        CAPTURE(rows);
                        CAPTURE(by_split);
                        world.report.clear();
                        CHECK(same_bytes(
                            attend(*kernels, world, sequence, tokens, {rows, by_split}), expected));
                        CHECK(world.report.witness == witness);
                        CHECK(world.report.rows_read == predicted_rows(world, first, count));
                        CHECK(world.report.faults == 0);
                    }
                }
            }
        }
    }
}

TEST_CASE("chunked prefill, page numbers and batch neighbours do not show in the result") {
    const TileShape shape{1, 2, 64};
    const std::uint32_t positions = 290;
    const Tokens tokens(shape, 3, positions);
    KvWorld whole(shape, positions);
    whole.append(best_kernels(), tokens.k, tokens.v, 0, positions);
    const std::vector<float> expected =
        attend(best_kernels(), whole, whole.view(0, positions), tokens);
    for (const Kernels* kernels : wide_variants()) {
        for (const std::uint32_t chunk : {1u, 13u, 16u, 100u, 256u}) {
            CAPTURE(kernels->isa);
            CAPTURE(chunk);
            KvWorld world(shape, positions, chunk);  // other pages each time
            std::vector<float> out;
            for (std::uint32_t first = 0; first < positions; first += chunk) {
                const std::uint32_t count = std::min(chunk, positions - first);
                world.append(*kernels, tokens.k, tokens.v, first, count);
                const std::vector<float> rows =
                    attend(*kernels, world, world.view(first, count), tokens);
                out.insert(out.end(), rows.begin(), rows.end());
            }
            CHECK(same_bytes(out, expected));
            CHECK(world.report.faults == 0);
        }
    }

    // The same rows at another place of a batch whose other rows are NaN.
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::size_t before = 5 * tokens.query_floats();
    std::vector<float> q(before, nan), out(before + tokens.q.size(), nan);
    q.insert(q.end(), tokens.q.begin(), tokens.q.end());
    SequenceView sequence = whole.view(0, positions);
    sequence.batch_row = 5;
    for (const Kernels* kernels : wide_variants()) {
        for (std::uint32_t head = 0; head < 2; ++head) {
            kernels->attend(
                {.memory = whole.memory, .query_heads = 6, .q = q.data(), .out = out.data()},
                {&sequence, head, 0, positions});
        }
        CHECK(std::isnan(out[before - 1]));
        CHECK(same_bytes({out.begin() + before, out.end()}, expected));
    }
}

TEST_CASE("attention is the softmax-weighted mean of the visible values") {
    for (const std::uint32_t head_dim : {16u, 64u}) {
        const TileShape shape{1, 2, head_dim};
        const std::uint32_t first = 250, count = 20;
        const Tokens tokens(shape, 2, first + count);
        KvWorld world(shape, first + count);
        world.append(best_kernels(), tokens.k, tokens.v, 0, first + count);
        const std::vector<float> expected =
            naive(tokens, first, count, [](std::uint32_t, std::uint32_t) { return false; });
        for (const Kernels* kernels : all_variants()) {
            CHECK(worst_difference(attend(*kernels, world, world.view(first, count), tokens),
                                   expected) < 4e-6);
        }
    }
}

TEST_CASE("nothing behind the last visible row reaches a result, not even a NaN") {
    const TileShape shape{1, 1, 32};
    const Tokens tokens(shape, 3, 290);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const Kernels* kernels : all_variants()) {
        for (const std::uint32_t context : {1u, 5u, 16u, 250u, 257u, 290u}) {
            CAPTURE(kernels->isa);
            CAPTURE(context);
            // The rest of the last page is poison; the pages behind it are not even in the table.
            KvWorld short_world(shape, context);
            short_world.append(*kernels, tokens.k, tokens.v, 0, context);
            const std::uint32_t first = context > 9 ? context - 9 : 0;
            const std::vector<float> out =
                attend(*kernels, short_world, short_world.view(first, context - first), tokens);
            // The same rows with real, but later, rows of NaN behind them.
            KvWorld long_world(shape, 290);
            std::vector<float> k = tokens.k, v = tokens.v;
            std::fill(k.begin() + context * 32, k.end(), nan);
            std::fill(v.begin() + context * 32, v.end(), nan);
            long_world.append(*kernels, k, v, 0, 290);
            const std::vector<float> other =
                attend(*kernels, long_world, long_world.view(first, context - first), tokens);
            CHECK(same_bytes(out, other));
            for (const float value : out) {
                REQUIRE(std::isfinite(value));
            }
        }
    }
}

TEST_CASE("a NaN in a visible row does not vanish") {
    const TileShape shape{1, 1, 16};
    Tokens tokens(shape, 1, 300);
    tokens.k[37 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, 300);
        world.append(*kernels, tokens.k, tokens.v, 0, 300);
        for (const float value : attend(*kernels, world, world.view(299, 1), tokens)) {
            CHECK(std::isnan(value));
        }
        for (const float value : attend(*kernels, world, world.view(36, 1), tokens)) {
            CHECK(std::isfinite(value));
        }
    }
}

TEST_CASE("a header that differs in any field is reported as loaded, and its rows are masked") {
    struct Case {
        const char* name;
        std::function<void(TileHeader&)> change;
    };
    const Case cases[] = {
        {"tenant", [](TileHeader& h) { h.tenant = 8; }},
        {"request", [](TileHeader& h) { h.request = 40; }},
        {"generation", [](TileHeader& h) { h.generation -= 1; }},
        {"page", [](TileHeader& h) { h.page ^= 1; }},
        {"layer", [](TileHeader& h) { h.layer = 5; }},
        {"head", [](TileHeader& h) { h.head = 0; }},
        {"rows written", [](TileHeader& h) { h.rows_written = 15; }},
        {"freed", [](TileHeader& h) { h.state = TileState::freed; }},
        {"virgin", [](TileHeader& h) { h = TileHeader{}; }},
    };
    const TileShape shape{1, 2, 16};
    const std::uint32_t first = 260, count = 12;
    const Tokens tokens(shape, 3, first + count);
    const std::vector<float> expected =
        naive(tokens, first, count,
              [](std::uint32_t head, std::uint32_t p) { return head == 1 && p / 16 == 4; });
    for (const Kernels* kernels : all_variants()) {
        for (const Case& c : cases) {
            for (const bool by_split : {false, true}) {
                CAPTURE(kernels->isa);
                CAPTURE(c.name);
                KvWorld world(shape, first + count);
                world.append(*kernels, tokens.k, tokens.v, 0, first + count);
                c.change(world.header(4, 0, 1));
                const TileHeader changed = world.header(4, 0, 1);
                world.report.clear();
                const std::vector<float> out = attend(*kernels, world, world.view(first, count),
                                                      tokens, {.by_split = by_split});

                CHECK(worst_difference(out, expected) < 4e-6);
                REQUIRE(world.report.faults == 1);
                const TileFault& fault = world.report.first_faults[0];
                CHECK(fault.access == AccessKind::read);
                CHECK(fault.layer == 0);
                CHECK(fault.head == 1);
                CHECK(fault.table_index == 4);
                CHECK(fault.page == world.pages[4].page);
                CHECK(fault.rows == 16);
                CHECK(!fault.from_shadow);
                CHECK(std::memcmp(&fault.loaded, &changed, sizeof(changed)) == 0);

                // The witness is that of the header that was there, not of the one in the table.
                const std::uint64_t rows = std::uint64_t{16} * count;
                const std::uint64_t meant = page_mix(3, 41, kGeneration + 4, world.pages[4].page) *
                                            access_factor(0, 1, AccessKind::read) * rows;
                const std::uint64_t loaded =
                    page_mix(changed.tenant, changed.request, changed.generation, changed.page) *
                    access_factor(changed.layer, changed.head, AccessKind::read) * rows;
                CHECK(world.report.witness ==
                      predicted_witness(world, first, count) - meant + loaded);
            }
        }
    }
}

TEST_CASE("with every tile foreign the output is zero, and each tile is reported once") {
    const TileShape shape{1, 1, 32};
    const Tokens tokens(shape, 3, 300);
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, 300);
        world.append(*kernels, tokens.k, tokens.v, 0, 300);
        SequenceView sequence = world.view(280, 20);
        sequence.reader.tenant = TenantId{4};
        world.report.clear();
        for (const bool by_split : {false, true}) {
            for (const float value :
                 attend(*kernels, world, sequence, tokens, {.by_split = by_split})) {
                REQUIRE(value == 0.0f);
            }
        }
        CHECK(world.report.faults == 2 * 19);
        CHECK(world.report.first_faults[0].table_index == 0);
    }
}

TEST_CASE("unwritten rows are a fault of the tile they should be in") {
    const TileShape shape{1, 1, 16};
    const Tokens tokens(shape, 2, 64);
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, 64);
        world.append(*kernels, tokens.k, tokens.v, 0, 40);  // the step says 41
        world.report.clear();
        const std::vector<float> out = attend(*kernels, world, world.view(40, 1), tokens);
        REQUIRE(world.report.faults == 1);
        CHECK(world.report.first_faults[0].table_index == 2);
        CHECK(world.report.first_faults[0].rows == 9);
        CHECK(world.report.first_faults[0].loaded.rows_written == 8);
        CHECK(worst_difference(out, naive(tokens, 40, 1, [](std::uint32_t, std::uint32_t p) {
                                   return p >= 32;
                               })) < 4e-6);
    }
}

TEST_CASE("a tile that lacks rows for an item's last query row is masked for all its rows") {
    const TileShape shape{1, 1, 16};
    const Tokens tokens(shape, 3, 64);
    for (const Kernels* kernels : all_variants()) {
        CAPTURE(kernels->isa);
        KvWorld world(shape, 64);
        world.append(*kernels, tokens.k, tokens.v, 0, 40);
        world.report.clear();
        // Rows 20 to 39 could be served, rows 40 to 49 could not: one item, one answer.
        const std::vector<float> out = attend(*kernels, world, world.view(20, 30), tokens);
        CHECK(world.report.faults == 2);
        CHECK(world.report.first_faults[0].table_index == 2);
        CHECK(world.report.first_faults[0].rows == 16);
        CHECK(worst_difference(out, naive(tokens, 20, 30, [](std::uint32_t, std::uint32_t p) {
                                   return p >= 32;
                               })) < 4e-6);
    }
}

TEST_CASE("a grant lets a request read another's rows of the same tenant, and no more") {
    const TileShape shape{1, 1, 16};
    const Tokens tokens(shape, 2, 48);
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, 48);
        world.append(*kernels, tokens.k, tokens.v, 0, 48);
        world.header(0, 0, 0).request = 17;
        world.report.clear();
        attend(*kernels, world, world.view(47, 1), tokens);
        CHECK(world.report.faults == 1);

        world.report.clear();
        world.pages[0].grantor = RequestId{18};
        attend(*kernels, world, world.view(47, 1), tokens);
        CHECK(world.report.faults == 1);

        world.report.clear();
        world.pages[0].grantor = RequestId{17};
        attend(*kernels, world, world.view(47, 1), tokens);
        CHECK(world.report.faults == 0);

        world.header(0, 0, 0).tenant = 17;
        attend(*kernels, world, world.view(47, 1), tokens);
        CHECK(world.report.faults == 1);
    }
}

TEST_CASE("without header checks foreign rows are used, but the witness tells") {
    const TileShape shape{1, 1, 16};
    const Tokens tokens(shape, 2, 300);
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, 300);
        world.append(*kernels, tokens.k, tokens.v, 0, 300);
        const std::vector<float> expected = attend(*kernels, world, world.view(299, 1), tokens);
        world.header(3, 0, 0).tenant = 9;
        SequenceView sequence = world.view(299, 1);
        sequence.check_headers = false;
        world.report.clear();
        CHECK(same_bytes(attend(*kernels, world, sequence, tokens), expected));
        CHECK(world.report.faults == 0);
        CHECK(world.report.witness != predicted_witness(world, 299, 1));
        CHECK(world.report.rows_read == 300);
    }
}

TEST_CASE("a table entry outside the pool is a fault, checked or not") {
    const TileShape shape{1, 1, 16};
    const Tokens tokens(shape, 2, 40);
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, 40);
        world.append(*kernels, tokens.k, tokens.v, 0, 40);
        world.pages[1].page = world.memory.pages;
        for (const bool check_headers : {true, false}) {
            SequenceView sequence = world.view(39, 1);
            sequence.check_headers = check_headers;
            world.report.clear();
            const std::vector<float> out = attend(*kernels, world, sequence, tokens);
            CHECK(world.report.faults == 1);
            CHECK(worst_difference(out, naive(tokens, 39, 1, [](std::uint32_t, std::uint32_t p) {
                                       return p / 16 == 1;
                                   })) < 4e-6);
        }
    }
}

TEST_CASE("the checked variant returns the same bytes, witness and counters") {
    const TileShape shape{1, 2, 32};
    const std::uint32_t first = 231, count = 47;
    const Tokens tokens(shape, 3, first + count);
    for (const Kernels* kernels : all_variants()) {
        KvWorld world(shape, first + count);
        world.append(*kernels, tokens.k, tokens.v, 0, first + count);
        const SequenceView sequence = world.view(first, count);
        world.report.clear();
        const std::vector<float> plain = attend(*kernels, world, sequence, tokens);
        const std::uint64_t witness = world.report.witness;
        world.report.clear();
        CHECK(same_bytes(attend(*kernels, world, sequence, tokens, {.checked = true}), plain));
        CHECK(same_bytes(attend(*kernels, world, sequence, tokens, {5, true, true}), plain));
        CHECK(world.report.faults == 0);
        CHECK(world.report.witness == 2 * witness);
    }
}

TEST_CASE("the checked variant sees a foreign writer that headers hide") {
    const TileShape shape{2, 2, 16};
    const Tokens tokens(shape, 3, 300);
    for (const Kernels* kernels : all_variants()) {
        for (const std::uint64_t writer : {std::uint64_t{17}, std::uint64_t{0}}) {
            CAPTURE(kernels->isa);
            CAPTURE(writer);
            KvWorld world(shape, 300);
            world.append(*kernels, tokens.k, tokens.v, 0, 300);
            const std::size_t tile = world.memory.tile_index(world.pages[18].page, 1, 0);
            world.writers[tile * kPageTokens + 11] = writer;  // row 299
            world.report.clear();
            const std::vector<float> plain = attend(*kernels, world, world.view(290, 10), tokens);
            CHECK(world.report.faults == 0);
            CHECK(same_bytes(
                attend(*kernels, world, world.view(290, 10), tokens, {.checked = true}), plain));
            REQUIRE(world.report.faults == 1);
            const TileFault& fault = world.report.first_faults[0];
            CHECK(fault.from_shadow);
            CHECK(fault.shadow_writer == writer);
            CHECK(fault.layer == 1);
            CHECK(fault.head == 0);
            CHECK(fault.table_index == 18);
            CHECK(fault.rows == 12);
            CHECK(fault.loaded.request == number(kReader.request));

            // Rows that nobody in the item sees are nobody's business.
            world.report.clear();
            attend(*kernels, world, world.view(290, 9), tokens, {.checked = true});
            CHECK(world.report.faults == 0);

            // A grant allows the rows of one writer, whom the header names too, and nobody else's.
            world.pages[18].grantor = RequestId{17};
            for (std::uint32_t layer = 0; layer < 2; ++layer) {
                for (std::uint32_t head = 0; head < 2; ++head) {
                    world.header(18, layer, head).request = 17;
                    std::uint64_t* rows =
                        world.memory.writers +
                        world.memory.tile_index(world.pages[18].page, layer, head) * kPageTokens;
                    std::replace(rows, rows + kPageTokens, number(kReader.request),
                                 std::uint64_t{17});
                }
            }
            world.report.clear();
            attend(*kernels, world, world.view(290, 10), tokens, {.checked = true});
            CHECK(world.report.faults == (writer == 0 ? 1 : 0));
        }
    }
}
