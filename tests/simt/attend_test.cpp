// CUDA decode attention on the emulated machine, against ref: bits, witness, counters and faults.
#include "kernels/cuda/attend.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

namespace {

constexpr std::uint64_t kSchedules = 8;
constexpr std::uint32_t kGeneration = 5;

const Kernels& ref() { return *kernels_for(Isa::ref); }

// A decode step of several requests, of different tenants, in one pool: request i + 1 of tenant
// i + 10 has lengths[i] rows, the last of which is its query's. Pages are scattered.
struct Step {
    TileShape shape;
    std::uint32_t group;
    std::vector<std::uint32_t> lengths;
    std::unique_ptr<std::uint8_t[], void (*)(void*)> bytes{nullptr, std::free};
    KvMemory memory;
    std::vector<std::vector<PageRef>> pages;
    std::vector<Owner> readers;
    std::vector<char> check_headers;
    std::vector<float> q;  // [sequence][query heads * head_dim]

    Step(TileShape tile_shape, std::uint32_t query_group, std::vector<std::uint32_t> rows)
        : shape(tile_shape), group(query_group), lengths(std::move(rows)) {
        std::uint32_t needed = 0;
        for (const std::uint32_t length : lengths) {
            needed += (length + kPageTokens - 1) / kPageTokens;
        }
        memory.shape = shape;
        memory.pages = needed + 3;
        bytes.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, pool_bytes())));
        memory.base = bytes.get();
        std::memset(memory.base, 0, pool_bytes());
        std::vector<std::uint32_t> free_pages(memory.pages);
        for (std::uint32_t page = 0; page < memory.pages; ++page) {
            std::uint32_t mismatches = 0;
            ref().scrub(memory, page, Owner{}, 0, &mismatches);
            free_pages[page] = page;
        }
        std::sort(free_pages.begin(), free_pages.end(),
                  [](std::uint32_t a, std::uint32_t b) { return mix64(a + 1) < mix64(b + 1); });
        for (std::uint32_t i = 0; i < lengths.size(); ++i) {
            readers.push_back({TenantId{i + 10}, RequestId{i + 1}});
            check_headers.push_back(1);
            pages.emplace_back();
            for (std::uint32_t row = 0; row < lengths[i]; row += kPageTokens) {
                std::uint32_t words = 0;
                const PageRef entry{free_pages.back(), kGeneration + row};
                free_pages.pop_back();
                stamp_page(memory, entry.page, readers[i], entry.generation, &words);
                pages[i].push_back(entry);
            }
            const std::size_t floats = std::size_t{lengths[i]} * shape.heads * shape.head_dim;
            const std::vector<float> k = sample(floats, 10 * i + 1, 3.0f);
            const std::vector<float> v = sample(floats, 10 * i + 2, 3.0f);
            SequenceReport report;
            const SequenceView view{
                .reader = readers[i], .pages = pages[i], .count = lengths[i], .report = &report};
            for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
                for (std::uint32_t head = 0; head < shape.heads; ++head) {
                    ref().append(memory, view, layer, head, k.data(), v.data());
                }
            }
            REQUIRE(report.faults == 0);
        }
        q = sample(lengths.size() * query_floats(), 3, 6.0f);
    }

    std::size_t pool_bytes() const { return shape.page_bytes() * memory.pages; }
    std::size_t query_floats() const { return std::size_t{shape.heads} * group * shape.head_dim; }
    TileHeader& header(std::uint32_t sequence, std::uint32_t index, std::uint32_t layer,
                       std::uint32_t head) {
        return *tile_header(memory.tile(pages[sequence][index].page, layer, head));
    }
};

struct Fault {
    std::uint32_t layer, head, table_index, page, rows;
    TileHeader loaded;

    explicit Fault(const TileFault& fault)
        : layer(fault.layer),
          head(fault.head),
          table_index(fault.table_index),
          page(fault.page),
          rows(fault.rows),
          loaded(fault.loaded) {
        CHECK(fault.access == AccessKind::read);
        CHECK_FALSE(fault.from_shadow);
        CHECK(fault.shadow_writer == 0);
    }
    bool operator==(const Fault& other) const {
        return layer == other.layer && head == other.head && table_index == other.table_index &&
               page == other.page && rows == other.rows &&
               std::memcmp(&loaded, &other.loaded, sizeof loaded) == 0;
    }
};

// What a step leaves behind.
struct Outcome {
    std::vector<float> out;  // [layer][sequence][query heads * head_dim]
    struct Sequence {
        std::uint64_t witness, rows_read, faults;
        std::vector<Fault> first;
        bool operator==(const Sequence&) const = default;
    };
    std::vector<Sequence> sequences;

    bool operator==(const Outcome& other) const {
        return same_bytes(out, other.out) && sequences == other.sequences;
    }
};

float quiet_nan() { return std::numeric_limits<float>::quiet_NaN(); }

Outcome by_ref(const Step& step) {
    Outcome outcome;
    std::deque<SequenceReport> reports(step.lengths.size());
    const std::size_t layer_floats = step.lengths.size() * step.query_floats();
    outcome.out.assign(step.shape.layers * layer_floats, quiet_nan());
    for (std::uint32_t layer = 0; layer < step.shape.layers; ++layer) {
        const AttentionArgs args{.memory = step.memory,
                                 .layer = layer,
                                 .query_heads = step.shape.heads * step.group,
                                 .q = step.q.data(),
                                 .out = outcome.out.data() + layer * layer_floats};
        for (std::uint32_t i = 0; i < step.lengths.size(); ++i) {
            const SequenceView view{.reader = step.readers[i],
                                    .pages = step.pages[i],
                                    .first = step.lengths[i] - 1,
                                    .count = 1,
                                    .batch_row = i,
                                    .report = &reports[i],
                                    .check_headers = step.check_headers[i] != 0};
            for (std::uint32_t head = 0; head < step.shape.heads; ++head) {
                ref().attend(args, {&view, head, 0, 1});
            }
        }
    }
    for (const SequenceReport& report : reports) {
        outcome.sequences.push_back({report.witness, report.rows_read, report.faults, {}});
        for (const TileFault& fault : report.first_faults) {
            outcome.sequences.back().first.emplace_back(fault);
        }
    }
    return outcome;
}

Result<Outcome> by_cuda(const Step& step, simt::Machine& machine, std::uint64_t seed,
                        std::optional<simt::LeftOut> left_out = std::nullopt,
                        unsigned* barriers = nullptr) {
    Outcome outcome;
    const auto sequences = static_cast<std::uint32_t>(step.lengths.size());
    const std::uint32_t query_heads = step.shape.heads * step.group;
    const std::uint32_t splits =
        (*std::max_element(step.lengths.begin(), step.lengths.end()) - 1) / kSplitTokens + 1;
    std::vector<cuda::DecodeSequence> views;
    for (std::uint32_t i = 0; i < sequences; ++i) {
        views.push_back({step.readers[i], step.pages[i].data(), step.lengths[i] - 1, i,
                         step.check_headers[i] != 0});
    }
    std::vector<cuda::DecodeReport> reports(sequences);
    std::vector<float> partials(
        std::size_t{sequences} * query_heads * splits * (step.shape.head_dim + 2), quiet_nan());
    std::vector<cuda::FirstFault> found(std::size_t{sequences} * step.shape.heads * splits);
    for (cuda::FirstFault& scratch : found) {
        scratch.found = true;  // what lies in it before is of no account
        scratch.fault.page = 12345;
    }
    const std::size_t layer_floats = sequences * step.query_floats();
    outcome.out.assign(step.shape.layers * layer_floats, quiet_nan());
    for (std::uint32_t layer = step.shape.layers; layer-- > 0;) {  // the least fault comes last
        const cuda::DecodeArgs args{.attention = {.memory = step.memory,
                                                  .layer = layer,
                                                  .query_heads = query_heads,
                                                  .q = step.q.data(),
                                                  .out = outcome.out.data() + layer * layer_floats,
                                                  .partials = partials.data(),
                                                  .splits_max = splits},
                                    .sequences = views.data(),
                                    .reports = reports.data(),
                                    .found = found.data()};
        const Result<simt::Ran> ran =
            machine.run({.kernel = "attend_splits",
                         .grid = {splits, step.shape.heads, sequences},
                         .block = {cuda::kAttendThreads},
                         .shared_bytes = cuda::attend_shared_bytes(step.group, step.shape.head_dim),
                         .seed = seed,
                         .readable = {{step.memory.base, step.pool_bytes()}},
                         .left_out = left_out},
                        [&] { cuda::attend_splits(args); });
        if (!ran) {
            return ran.error();
        }
        if (barriers != nullptr) {
            *barriers = ran->barriers;
        }
        const Result<simt::Ran> merged = machine.run({.kernel = "attend_merge",
                                                      .grid = {query_heads, sequences},
                                                      .block = {cuda::kMergeThreads},
                                                      .seed = seed},
                                                     [&] { cuda::attend_merge(args); });
        if (!merged) {
            return merged.error();
        }
    }
    for (const cuda::DecodeReport& report : reports) {
        outcome.sequences.push_back({report.witness, report.rows_read, report.faults, {}});
        if (report.first.found) {
            outcome.sequences.back().first.emplace_back(report.first.fault);
        }
    }
    return outcome;
}

// Runs the step in `schedules` schedules, each of which must leave what ref leaves; returns that.
Outcome check_equal(const Step& step, std::uint64_t schedules = kSchedules) {
    simt::Machine machine;
    const Outcome expected = by_ref(step);
    for (std::uint64_t seed = 0; seed < schedules; ++seed) {
        CAPTURE(seed);
        const Result<Outcome> outcome = by_cuda(step, machine, seed);
        REQUIRE_MESSAGE(outcome, (outcome ? "" : outcome.error().message));
        CHECK(same_bytes(outcome->out, expected.out));
        REQUIRE(outcome->sequences == expected.sequences);
    }
    return expected;
}

}  // namespace

TEST_CASE("exp equals detmath's, over the whole range it is used in and beyond") {
    for (std::uint32_t bits = 0; bits < 0xffff0000u; bits += 4099) {
        const float x = __uint_as_float(bits);
        if (x == x) {
            REQUIRE(__float_as_uint(cuda::exp(x)) == __float_as_uint(detmath::exp(x)));
        }
    }
}

TEST_CASE("decode attention equals ref byte for byte, with its witness, in eight schedules each") {
    struct Shape {
        std::uint32_t heads, head_dim, group;
    };
    for (const Shape shape :
         {Shape{2, 64, 1}, Shape{1, 64, 3}, Shape{1, 64, 4}, Shape{1, 80, 3}, Shape{1, 96, 1},
          Shape{1, 96, 4}, Shape{1, 128, 1}, Shape{1, 128, 3}}) {
        CAPTURE(shape.head_dim);
        CAPTURE(shape.group);
        const Step step({1, shape.heads, shape.head_dim}, shape.group,
                        {1, 15, 16, 17, 255, 256, 257, 700});
        for (const Outcome::Sequence& sequence : check_equal(step).sequences) {
            CHECK(sequence.faults == 0);
        }
    }
}

TEST_CASE("more query heads than a block has warps, and rows longer than a block") {
    check_equal(Step({1, 1, 48}, 11, {300, 20}), 3);
    check_equal(Step({1, 1, 512}, 1, {40}), 3);
}

TEST_CASE("layers add to one report, each with its own tiles") {
    const Step step({3, 2, 16}, 2, {40, 270});
    const Outcome outcome = check_equal(step);
    CHECK(outcome.sequences[0].rows_read == 3 * 2 * 40);
    CHECK(outcome.sequences[1].rows_read == 3 * 2 * 270);
}

TEST_CASE("a foreign page is flagged for exactly its request, and named") {
    const Step clean({2, 2, 32}, 3, {100, 300, 700, 16});
    const Outcome before = by_ref(clean);
    Step step({2, 2, 32}, 3, {100, 300, 700, 16});
    // Request 3 gets a page of request 2 where its own entry 20 should be: the incident.
    step.pages[2][20] = step.pages[1][4];
    const Outcome outcome = check_equal(step);
    for (const std::uint32_t i : {0u, 1u, 3u}) {
        CHECK(outcome.sequences[i] == before.sequences[i]);
        CHECK(outcome.sequences[i].faults == 0);
        for (std::uint32_t layer = 0; layer < 2; ++layer) {
            const std::size_t at = (layer * 4 + i) * step.query_floats();
            CHECK(std::memcmp(&outcome.out[at], &before.out[at],
                              step.query_floats() * sizeof(float)) == 0);
        }
    }
    const Outcome::Sequence& third = outcome.sequences[2];
    CHECK(third.faults == 2 * 2);
    CHECK(third.witness != before.sequences[2].witness);
    CHECK(third.rows_read == before.sequences[2].rows_read);
    REQUIRE(third.first.size() == 1);
    CHECK(third.first[0].layer == 0);
    CHECK(third.first[0].head == 0);
    CHECK(third.first[0].table_index == 20);
    CHECK(third.first[0].loaded.tenant == number(step.readers[1].tenant));
    CHECK(third.first[0].loaded.request == number(step.readers[1].request));
    CHECK(third.first[0].loaded.generation == step.pages[1][4].generation);
}

TEST_CASE("of several faults the least by layer, head and table index is kept") {
    Step step({2, 2, 16}, 2, {700, 600});
    step.header(0, 41, 1, 0).tenant = 99;
    step.header(0, 3, 1, 1).tenant = 98;
    CHECK(check_equal(step).sequences[0].first[0].table_index == 41);
    step.header(0, 17, 0, 1).request = 97;
    step.header(0, 30, 0, 1).page = 96;
    step.header(0, 9, 1, 0).layer = 5;
    const Outcome outcome = check_equal(step);
    CHECK(outcome.sequences[0].faults == 5);
    CHECK(outcome.sequences[0].first[0].layer == 0);
    CHECK(outcome.sequences[0].first[0].head == 1);
    CHECK(outcome.sequences[0].first[0].table_index == 17);
    CHECK(outcome.sequences[1].faults == 0);
}

TEST_CASE(
    "each field of a header is compared: wrong in turn, it is a fault and its tile is masked") {
    struct Field {
        const char* name;
        std::function<void(TileHeader&)> spoil;
    };
    const Field fields[] = {
        {"request", [](TileHeader& h) { h.request += 1ull << 40; }},
        {"tenant", [](TileHeader& h) { h.tenant += 1; }},
        {"generation", [](TileHeader& h) { h.generation -= 1; }},
        {"page", [](TileHeader& h) { h.page ^= 1; }},
        {"layer", [](TileHeader& h) { h.layer += 1; }},
        {"head", [](TileHeader& h) { h.head += 1; }},
        {"rows_written", [](TileHeader& h) { h.rows_written -= 1; }},
        {"freed", [](TileHeader& h) { h.state = TileState::freed; }},
        {"virgin", [](TileHeader& h) { h = TileHeader{}; }},
    };
    const Outcome clean = by_ref(Step({1, 2, 16}, 2, {290, 41}));
    for (const Field& field : fields) {
        for (const std::uint32_t index : {0u, 15u, 18u}) {
            CAPTURE(field.name);
            CAPTURE(index);
            Step step({1, 2, 16}, 2, {290, 41});
            field.spoil(step.header(0, index, 0, 1));
            const Outcome outcome = check_equal(step, 3);
            CHECK(outcome.sequences[0].faults == 1);
            REQUIRE(outcome.sequences[0].first.size() == 1);
            CHECK(outcome.sequences[0].first[0].head == 1);
            CHECK(outcome.sequences[0].first[0].table_index == index);
            CHECK(outcome.sequences[1] == clean.sequences[1]);
            CHECK_FALSE(same_bytes(outcome.out, clean.out));
        }
    }
}

TEST_CASE("a row more than was written is a fault, a row less is not") {
    Step step({1, 1, 16}, 2, {41});
    step.header(0, 2, 0, 0).rows_written = 8;
    CHECK(check_equal(step, 3).sequences[0].faults == 1);
    step.header(0, 2, 0, 0).rows_written = 9;
    CHECK(check_equal(step, 3).sequences[0].faults == 0);
    step.header(0, 2, 0, 0).rows_written = 16;
    CHECK(check_equal(step, 3).sequences[0].faults == 0);
}

TEST_CASE("a granted page serves another request of the same tenant, and no other tenant") {
    Step step({1, 2, 32}, 3, {200, 150, 150});
    step.readers[1].tenant = step.readers[0].tenant;
    for (std::uint32_t index = 0; index < step.pages[1].size(); ++index) {
        for (std::uint32_t head = 0; head < 2; ++head) {
            step.header(1, index, 0, head).tenant = number(step.readers[0].tenant);
        }
    }
    step.pages[1][2] = step.pages[0][2];  // without a grant
    CHECK(check_equal(step, 3).sequences[1].faults == 2);
    step.pages[1][2].grantor = step.readers[0].request;
    CHECK(check_equal(step).sequences[1].faults == 0);

    step.pages[2][2] = step.pages[0][2];
    step.pages[2][2].grantor = step.readers[0].request;  // a grant does not reach across tenants
    const Outcome outcome = check_equal(step, 3);
    CHECK(outcome.sequences[0].faults == 0);
    CHECK(outcome.sequences[1].faults == 0);
    CHECK(outcome.sequences[2].faults == 2);
}

TEST_CASE("with every tile foreign the output is zero; with the check off only the witness tells") {
    Step step({1, 1, 32}, 3, {300, 300});
    const Outcome clean = by_ref(step);
    step.readers[0].tenant = TenantId{77};
    const Outcome outcome = check_equal(step, 3);
    CHECK(outcome.sequences[0].faults == 19);
    CHECK(std::all_of(outcome.out.begin(),
                      outcome.out.begin() + static_cast<std::ptrdiff_t>(step.query_floats()),
                      [](float value) { return value == 0.0f; }));

    step.check_headers[0] = 0;
    step.header(0, 3, 0, 0).tenant = 9;
    const Outcome unchecked = check_equal(step, 3);
    CHECK(unchecked.sequences[0].faults == 0);
    CHECK(same_bytes(unchecked.out, clean.out));
    CHECK(unchecked.sequences[0].witness != clean.sequences[0].witness);
}

TEST_CASE("a table entry outside the pool is a fault and nothing is loaded for it") {
    for (const char check_headers : {1, 0}) {
        Step step({1, 1, 16}, 2, {40, 40});
        step.pages[0][1].page = step.memory.pages;
        step.check_headers[0] = check_headers;
        const Outcome outcome = check_equal(step, 3);
        CHECK(outcome.sequences[0].faults == 1);
        CHECK(outcome.sequences[0].rows_read == 24);
    }
}

TEST_CASE("attention without any one of its barriers is caught") {
    simt::Machine machine;
    const Step step({1, 1, 80}, 3, {300, 256});
    const Outcome expected = by_ref(step);
    unsigned barriers = 0;
    REQUIRE(by_cuda(step, machine, 0, std::nullopt, &barriers));
    REQUIRE(barriers == 3);
    for (unsigned barrier = 0; barrier < barriers; ++barrier) {
        CAPTURE(barrier);
        int caught = 0;
        for (std::uint64_t seed = 0; seed < kSchedules; ++seed) {
            const Result<Outcome> outcome =
                by_cuda(step, machine, seed, simt::LeftOut{.barrier = barrier});
            caught += !outcome || !(*outcome == expected) ? 1 : 0;
        }
        CHECK(caught >= 6);
        // And by one thread alone: the others wait for it.
        const Result<Outcome> outcome =
            by_cuda(step, machine, 0, simt::LeftOut{.barrier = barrier, .thread = 200});
        REQUIRE_FALSE(outcome);
        CHECK(outcome.error().code == ErrorCode::invariant);
        CHECK(outcome.error().message.starts_with("attend_splits, block ("));
        CHECK(outcome.error().message.find("divergent barrier") != std::string::npos);
        CHECK(outcome.error().message.find("attend.h:") != std::string::npos);
    }
}
