// The CUDA matrix-vector product on the emulated machine, against ref, from the same packed bytes.
#include "kernels/cuda/matvec.h"

#include <doctest/doctest.h>

#include "tests/kernels/weight_samples.h"

using namespace kvw;

namespace {

constexpr float kUntouched = -12345.0f;
constexpr std::uint64_t kSchedules = 8;

struct Shape {
    std::uint32_t rows, cols;
};

template <class T>
std::span<const std::uint8_t> bytes_of(const T* values, std::size_t count) {
    return {reinterpret_cast<const std::uint8_t*>(values), count * sizeof(T)};
}

void (*matvec_of(WeightType type))(cuda::MatvecArgs) {
    switch (type) {
        case WeightType::q4_0:
            return cuda::matvec<WeightType::q4_0>;
        case WeightType::q4_1:
            return cuda::matvec<WeightType::q4_1>;
        case WeightType::q5_0:
            return cuda::matvec<WeightType::q5_0>;
        case WeightType::q5_1:
            return cuda::matvec<WeightType::q5_1>;
        case WeightType::q8_0:
            return cuda::matvec<WeightType::q8_0>;
        case WeightType::q4_k:
            return cuda::matvec<WeightType::q4_k>;
        case WeightType::q5_k:
            return cuda::matvec<WeightType::q5_k>;
        default:
            return cuda::matvec<WeightType::q6_k>;
    }
}

// A matrix and the tokens it meets.
struct Product {
    PackedSample w;
    Activations x;
    std::size_t stride;

    Product(WeightType type, Shape shape, std::size_t tokens)
        : w(random_matrix(type, shape.rows, shape.cols, shape.rows + shape.cols)),
          x(random_activations(tokens, shape.cols, shape.cols)),
          stride(shape.rows + 3) {  // the gap shows writes beyond the matrix's rows
        x.quantise(*kernels_for(Isa::ref));
    }

    std::vector<float> expected() {
        std::vector<float> out(x.rows * stride, kUntouched);
        kernels_for(Isa::ref)->matmul(out.data(), stride, w.matrix, x.view(0, x.rows), 0,
                                      w.matrix.panels());
        return out;
    }

    Result<std::vector<float>> on(simt::Machine& machine, std::uint64_t seed,
                                  std::optional<simt::LeftOut> left_out = std::nullopt,
                                  unsigned* barriers = nullptr) {
        std::vector<float> out(x.rows * stride, kUntouched);
        const cuda::MatvecArgs args{w.matrix, x.quantised(), out.data(), stride};
        const Result<simt::Ran> ran =
            machine.run({.kernel = "matvec",
                         .grid = {w.matrix.panels(), static_cast<unsigned>(x.rows)},
                         .block = {cuda::kMatvecThreads},
                         .seed = seed,
                         .readable = {{w.matrix.data, w.matrix.bytes()},
                                      bytes_of(x.q.data(), x.q.size()),
                                      bytes_of(x.scale.data(), x.scale.size()),
                                      bytes_of(x.half_sum.data(), x.half_sum.size())},
                         .left_out = left_out},
                        [&] { matvec_of(w.matrix.type)(args); });
        if (!ran) {
            return ran.error();
        }
        if (barriers != nullptr) {
            *barriers = ran->barriers;
        }
        return out;
    }
};

bool same_bytes(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_equal(WeightType type, Shape shape, std::size_t tokens) {
    CAPTURE(name_of(type));
    CAPTURE(shape.rows);
    CAPTURE(shape.cols);
    simt::Machine machine;
    Product product(type, shape, tokens);
    const std::vector<float> expected = product.expected();
    for (std::uint64_t seed = 0; seed < kSchedules; ++seed) {
        CAPTURE(seed);
        const Result<std::vector<float>> out = product.on(machine, seed);
        REQUIRE_MESSAGE(out, (out ? "" : out.error().message));
        REQUIRE(same_bytes(*out, expected));
    }
}

}  // namespace

TEST_CASE("Q8_0 and Q4_1 products equal ref's byte for byte, odd shapes, in eight schedules each") {
    constexpr Shape kShapes[] = {{1, 32},   {17, 32},  {5, 96},    {16, 256}, {33, 288},
                                 {48, 576}, {31, 896}, {20, 1536}, {7, 2048}, {18, 4352}};
    for (const WeightType type : {WeightType::q8_0, WeightType::q4_1}) {
        for (const Shape shape : kShapes) {
            check_equal(type, shape, 1 + shape.rows % 3);
        }
    }
}

TEST_CASE("the other block-quantised types come from the same source and are equal, too") {
    for (const WeightType type : {WeightType::q4_0, WeightType::q5_0, WeightType::q5_1}) {
        check_equal(type, {17, 32}, 2);
        check_equal(type, {21, 896}, 1);
    }
    for (const WeightType type : {WeightType::q4_k, WeightType::q5_k, WeightType::q6_k}) {
        check_equal(type, {17, 256}, 2);
        check_equal(type, {21, 2304}, 1);
    }
}

TEST_CASE("activations that are not finite reach every output of their token, and no other") {
    simt::Machine machine;
    Product product(WeightType::q8_0, {19, 576}, 2);
    product.x.floats[300] = std::numeric_limits<float>::infinity();
    product.x.quantise(*kernels_for(Isa::ref));
    const Result<std::vector<float>> out = product.on(machine, 3);
    REQUIRE(out);
    for (std::size_t row = 0; row < 19; ++row) {
        CHECK_FALSE(std::isfinite((*out)[row]));
        CHECK(std::isfinite((*out)[product.stride + row]));
    }
}

TEST_CASE("a product without any one of its barriers is caught") {
    simt::Machine machine;
    Product product(WeightType::q4_1, {18, 5120}, 2);  // 20 chunks: three passes
    const std::vector<float> expected = product.expected();
    unsigned barriers = 0;
    REQUIRE(product.on(machine, 0, std::nullopt, &barriers));
    REQUIRE(barriers == 3);
    for (unsigned barrier = 0; barrier < barriers; ++barrier) {
        CAPTURE(barrier);
        int caught = 0;
        for (std::uint64_t seed = 0; seed < kSchedules; ++seed) {
            const Result<std::vector<float>> out =
                product.on(machine, seed, simt::LeftOut{.barrier = barrier});
            caught += !out || !same_bytes(*out, expected) ? 1 : 0;
        }
        CHECK(caught >= 6);
        // And by one thread alone: the others wait for it.
        const Result<std::vector<float>> out =
            product.on(machine, 2, simt::LeftOut{.barrier = barrier, .thread = 77});
        REQUIRE_FALSE(out);
        CHECK(out.error().message.starts_with("matvec, block ("));
    }
}

TEST_CASE("a matrix that ends early is noticed at the load that needs the rest") {
    simt::Machine machine;
    Product product(WeightType::q8_0, {16, 320}, 1);
    product.w.matrix.cols = 352;  // one block more than there is
    const Result<std::vector<float>> out = product.on(machine, 0);
    REQUIRE_FALSE(out);
    CHECK(out.error().message.find("__ldg at matvec.h:") != std::string::npos);
}
