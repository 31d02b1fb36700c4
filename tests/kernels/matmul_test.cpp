#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <limits>

#include "tests/kernels/weight_samples.h"

using namespace kvw;

namespace {

constexpr float kUntouched = -12345.0f;

// out [count][rows + gap]: the gap shows writes beyond the matrix's rows.
std::vector<float> multiply(const Kernels& kernels, const PackedMatrix& w, Activations& x,
                            std::size_t first, std::size_t count, std::size_t stride) {
    std::vector<float> out(count * stride, kUntouched);
    kernels.matmul(out.data(), stride, w, x.view(first, count), 0, w.panels());
    return out;
}

bool same_bits(const float* a, const float* b, std::size_t count) {
    return std::memcmp(a, b, count * sizeof(float)) == 0;
}

// A copy of some bytes that ends where memory ends: one byte further is a crash.
template <class T>
class AtTheEdge {
  public:
    explicit AtTheEdge(std::span<const T> values) {
        constexpr std::size_t page = 4096;
        used_ = (values.size_bytes() + page - 1) / page * page;
        void* memory =
            mmap(nullptr, used_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        base_ = static_cast<std::uint8_t*>(memory);
        REQUIRE(mprotect(base_ + used_, page, PROT_NONE) == 0);
        data_ = reinterpret_cast<T*>(base_ + used_ - values.size_bytes());
        std::copy(values.begin(), values.end(), data_);
    }
    ~AtTheEdge() { munmap(base_, used_ + 4096); }
    AtTheEdge(const AtTheEdge&) = delete;
    AtTheEdge& operator=(const AtTheEdge&) = delete;
    T* data() const { return data_; }

  private:
    std::uint8_t* base_ = nullptr;
    std::size_t used_ = 0;
    T* data_ = nullptr;
};

struct Shape {
    std::uint32_t rows, cols;
};
constexpr Shape kShapes[] = {{17, 32},  {5, 96},    {48, 256}, {17, 512}, {16, 576},
                             {33, 896}, {17, 1536}, {5, 2048}, {17, 4352}};

}  // namespace

TEST_CASE("every instruction set multiplies to the same bits as ref, for any number of tokens") {
    constexpr std::size_t tokens_max = 64;
    for (WeightType type : kAllWeightTypes) {
        for (Shape shape : kShapes) {
            if (shape.cols % block_columns(type) != 0) {
                continue;
            }
            CAPTURE(name_of(type));
            CAPTURE(shape.rows);
            CAPTURE(shape.cols);
            const PackedSample w =
                random_matrix(type, shape.rows, shape.cols, shape.cols + shape.rows);
            Activations x = random_activations(tokens_max, shape.cols, shape.cols);
            x.quantise(*kernels_for(Isa::ref));
            const std::size_t stride = shape.rows + 3;
            const std::vector<float> expected =
                multiply(*kernels_for(Isa::ref), w.matrix, x, 0, tokens_max, stride);
            for (std::size_t t = 0; t < tokens_max; ++t) {
                REQUIRE(std::all_of(&expected[t * stride], &expected[t * stride + shape.rows],
                                    [](float v) { return std::isfinite(v); }));
            }
            for (const Kernels* kernels : available_kernels()) {
                if (kernels == kernels_for(Isa::ref)) {
                    continue;  // its token-count independence has a case of its own
                }
                CAPTURE(kernels->isa);
                for (std::size_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 31, 64}) {
                    CAPTURE(tokens);
                    // Not always the first tokens, so that each meets tiles of several widths.
                    const std::size_t first = tokens * 5 % (tokens_max - tokens + 1);
                    const std::vector<float> out =
                        multiply(*kernels, w.matrix, x, first, tokens, stride);
                    REQUIRE(same_bits(out.data(), &expected[first * stride], tokens * stride));
                }
            }
        }
    }
}

TEST_CASE("a token's result does not depend on how many tokens share the call") {
    for (const Kernels* kernels : available_kernels()) {
        for (WeightType type : kAllWeightTypes) {
            CAPTURE(kernels->isa);
            CAPTURE(name_of(type));
            const PackedSample w = random_matrix(type, 21, 768, 3);
            Activations x = random_activations(64, 768, 4);
            x.quantise(*kernels);
            const std::vector<float> together = multiply(*kernels, w.matrix, x, 0, 64, 21);
            for (std::size_t t = 0; t < 64; ++t) {
                const std::vector<float> alone = multiply(*kernels, w.matrix, x, t, 1, 21);
                REQUIRE(same_bits(alone.data(), &together[t * 21], 21));
            }
        }
    }
}

TEST_CASE("ranges of panels write their rows only, with the bits of the whole") {
    for (const Kernels* kernels : available_kernels()) {
        for (WeightType type : kAllWeightTypes) {
            CAPTURE(kernels->isa);
            CAPTURE(name_of(type));
            constexpr std::size_t rows = 16 * 6 + 9, tokens = 13;
            const PackedSample w = random_matrix(type, rows, 512, 5);
            Activations x = random_activations(tokens, 512, 6);
            x.quantise(*kernels);
            const std::vector<float> whole = multiply(*kernels, w.matrix, x, 0, tokens, rows);
            std::vector<float> pieces(tokens * rows, kUntouched);
            kernels->matmul(pieces.data(), rows, w.matrix, x.view(0, tokens), 5, 7);
            for (std::size_t t = 0; t < tokens; ++t) {
                REQUIRE(std::all_of(&pieces[t * rows], &pieces[t * rows + 80],
                                    [](float v) { return v == kUntouched; }));
            }
            kernels->matmul(pieces.data(), rows, w.matrix, x.view(0, tokens), 0, 1);
            kernels->matmul(pieces.data(), rows, w.matrix, x.view(0, tokens), 1, 5);
            CHECK(same_bits(pieces.data(), whole.data(), whole.size()));
        }
    }
}

TEST_CASE("ref multiplies what the weights and activations stand for") {
    const Kernels& ref = *kernels_for(Isa::ref);
    for (WeightType type : kAllWeightTypes) {
        CAPTURE(name_of(type));
        constexpr std::size_t rows = 19, cols = 768, tokens = 4;
        const PackedSample w = random_matrix(type, rows, cols, 8);
        Activations x = random_activations(tokens, cols, 9);
        x.quantise(ref);
        const std::vector<float> out = multiply(ref, w.matrix, x, 0, tokens, rows);
        for (std::size_t r = 0; r < rows; ++r) {
            const std::vector<float> weights = w.row(r);
            for (std::size_t t = 0; t < tokens; ++t) {
                double sum = 0, size = 0;
                for (std::size_t c = 0; c < cols; ++c) {
                    const std::size_t at = t * cols + c;
                    const double activation = is_quantised(type)
                                                  ? double{x.q[at] * 1.0} * double{x.scale[at / 32]}
                                                  : double{x.floats[at]};
                    sum += double{weights[c]} * activation;
                    size += std::fabs(double{weights[c]} * activation);
                }
                // Against the sum of magnitudes: minima may cancel, but each term is this accurate.
                REQUIRE(std::fabs(out[t * rows + r] - sum) <= 1e-5 * size);
            }
        }
    }
}

TEST_CASE("every pair of an 8-bit weight and an activation code multiplies exactly") {
    // Row w holds the weight w - 128 in every column, token a the code a - 127.
    constexpr std::uint32_t rows = 256, cols = 32, tokens = 255;
    std::vector<std::uint8_t> source(rows * 34);
    for (std::uint32_t r = 0; r < rows; ++r) {
        const std::uint16_t one = 0x3c00;
        std::memcpy(&source[r * 34], &one, 2);
        std::fill_n(&source[r * 34 + 2], 32, static_cast<std::uint8_t>(r - 128));
    }
    const PackedSample w = pack(WeightType::q8_0, rows, cols, source);
    Activations x(tokens, cols);
    for (std::uint32_t t = 0; t < tokens; ++t) {
        const int code = static_cast<int>(t) - 127;
        std::fill_n(&x.q[t * cols], cols, static_cast<std::int8_t>(code));
        x.scale[t] = 1.0f;
        x.half_sum[t * 2] = x.half_sum[t * 2 + 1] = 16 * code;
    }
    for (const Kernels* kernels : available_kernels()) {
        CAPTURE(kernels->isa);
        const std::vector<float> out = multiply(*kernels, w.matrix, x, 0, tokens, rows);
        for (int t = 0; t < static_cast<int>(tokens); ++t) {
            for (int r = 0; r < static_cast<int>(rows); ++r) {
                REQUIRE(out[static_cast<std::size_t>(t) * rows + r] ==
                        static_cast<float>(32 * (r - 128) * (t - 127)));
            }
        }
    }
}

TEST_CASE("the largest codes of every type do not saturate on the way") {
    constexpr std::uint32_t rows = 17, cols = 512;
    constexpr std::size_t tokens = 7;
    for (WeightType type : kAllWeightTypes) {
        if (!is_quantised(type)) {
            continue;
        }
        for (std::uint8_t fill : {0x00, 0x7f, 0x80, 0xff}) {
            CAPTURE(name_of(type));
            CAPTURE(fill);
            std::vector<std::uint8_t> source = random_weights(type, rows, cols, 1);
            const std::size_t unit = block_bytes(type);
            const std::size_t d = type == WeightType::q6_k ? 208 : 0;
            for (std::size_t at = 0; at < source.size(); at += unit) {
                std::fill_n(&source[at], unit, fill);
                const std::uint16_t scale = 0x2c00, minimum = 0xac00;
                if (type == WeightType::q4_1 || type == WeightType::q5_1 || unit == 144 ||
                    unit == 176) {
                    std::memcpy(&source[at + 2], &minimum, 2);
                }
                std::memcpy(&source[at + d], &scale, 2);
            }
            const PackedSample w = pack(type, rows, cols, source);
            Activations x(tokens, cols);
            for (std::size_t t = 0; t < tokens; ++t) {
                for (std::size_t c = 0; c < cols; ++c) {
                    // All +, all -, alternating by column, by pair, by line, by half, by block.
                    const std::size_t period[] = {cols, 0, 1, 2, 4, 16, 32};
                    const bool negative = t == 1 || (t > 1 && c / period[t] % 2 == 1);
                    x.floats[t * cols + c] = negative ? -3.0f : 3.0f;
                }
            }
            x.quantise(*kernels_for(Isa::ref));
            REQUIRE(x.q[0] == 127);
            REQUIRE(x.q[cols] == -127);
            const std::vector<float> expected =
                multiply(*kernels_for(Isa::ref), w.matrix, x, 0, tokens, rows);
            for (const Kernels* kernels : available_kernels()) {
                CAPTURE(kernels->isa);
                const std::vector<float> out = multiply(*kernels, w.matrix, x, 0, tokens, rows);
                CHECK(same_bits(out.data(), expected.data(), expected.size()));
            }
        }
    }
}

TEST_CASE("activations are quantised to the same bytes everywhere, range by range") {
    constexpr std::size_t rows = 40;
    for (std::size_t cols : {32u, 96u, 576u}) {
        Activations expected = random_activations(rows, cols, 77);
        // Ties of x * id go to even; a block may be exactly at the least magnitude, or just below
        // it.
        for (std::size_t c = 0; c < 32; ++c) {
            expected.floats[c] = static_cast<float>(c) + 0.5f;
            expected.floats[cols + c] = c == 5 ? -0x1p-100f : 0.0f;
            expected.floats[2 * cols + c] = c == 5 ? std::nextafter(0x1p-100f, 0.0f) : 0.0f;
            expected.floats[3 * cols + c] = c % 2 == 0 ? 3.4e38f : -1.0f;
            expected.floats[4 * cols + c] = -0.0f;
        }
        expected.floats[31] = 127.0f;
        expected.quantise(*kernels_for(Isa::ref));

        CHECK(expected.q[0] == 0);
        CHECK(expected.q[1] == 2);
        CHECK(expected.q[2] == 2);
        CHECK(expected.scale[0] == 1.0f);
        CHECK(expected.q[cols + 5] == -127);
        CHECK(expected.scale[cols / 32] == 0x1p-100f / 127.0f);
        CHECK(expected.q[2 * cols + 5] == 0);
        CHECK(expected.scale[2 * (cols / 32)] == 0.0f);
        for (std::size_t i = 0; i < expected.half_sum.size(); ++i) {
            int sum = 0;
            for (std::size_t c = 0; c < 16; ++c) {
                REQUIRE(expected.q[i * 16 + c] >= -127);
                sum += expected.q[i * 16 + c];
            }
            REQUIRE(expected.half_sum[i] == sum);
        }

        for (const Kernels* kernels : available_kernels()) {
            CAPTURE(kernels->isa);
            Activations x(rows, cols);
            x.floats = expected.floats;
            kernels->quantise(x.quantised(), x.floats.data(), 17, rows);
            CHECK(std::all_of(x.q.begin(), x.q.begin() + 17 * static_cast<std::ptrdiff_t>(cols),
                              [](std::int8_t q) { return q == 0; }));
            kernels->quantise(x.quantised(), x.floats.data(), 0, 17);
            CHECK(x.q == expected.q);
            CHECK(x.half_sum == expected.half_sum);
            CHECK(same_bits(x.scale.data(), expected.scale.data(), x.scale.size()));
        }
    }
}

TEST_CASE("nothing is read behind the weights, the activations or the result, nor written") {
    for (const Kernels* kernels : available_kernels()) {
        for (WeightType type : kAllWeightTypes) {
            for (std::uint32_t cols : {32u, 96u, 256u, 2304u}) {
                for (std::size_t tokens : {1, 3, 5, 11, 13}) {
                    if (cols % block_columns(type) != 0) {
                        continue;
                    }
                    constexpr std::uint32_t rows = 21;
                    const PackedSample sample = random_matrix(type, rows, cols, 14);
                    Activations x = random_activations(tokens, cols, 15);
                    x.quantise(*kernels_for(Isa::ref));
                    const std::vector<float> expected =
                        multiply(*kernels_for(Isa::ref), sample.matrix, x, 0, tokens, rows);

                    const AtTheEdge<std::uint8_t> weights(
                        {sample.matrix.data, sample.matrix.bytes()});
                    const AtTheEdge<float> floats(x.floats);
                    const AtTheEdge<std::int8_t> q(std::vector<std::int8_t>(x.q.size()));
                    const AtTheEdge<float> scale(std::vector<float>(x.scale.size()));
                    const AtTheEdge<std::int32_t> half_sum(
                        std::vector<std::int32_t>(x.half_sum.size()));
                    const AtTheEdge<float> out(std::vector<float>(expected.size()));
                    const AtTheEdge<float> embedded{std::vector<float>(cols)};
                    PackedMatrix w = sample.matrix;
                    w.data = weights.data();
                    const QuantisedRows quantised{q.data(), scale.data(), half_sum.data(), cols};

                    kernels->quantise(quantised, floats.data(), 0, tokens);
                    kernels->matmul(out.data(), rows, w, {floats.data(), quantised, tokens, cols},
                                    0, w.panels());
                    kernels->embed(embedded.data(), w, rows - 1);

                    CHECK(same_bits(out.data(), expected.data(), expected.size()));
                }
            }
        }
    }
}

TEST_CASE("a value that is not finite reaches every output it should and no other") {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    for (const Kernels* kernels : available_kernels()) {
        for (WeightType type : kAllWeightTypes) {
            for (float poison : {nan, -nan, infinity, -infinity}) {
                CAPTURE(kernels->isa);
                CAPTURE(name_of(type));
                constexpr std::size_t rows = 5, tokens = 4;
                const PackedSample w = random_matrix(type, rows, 512, 12);
                Activations x = random_activations(tokens, 512, 13);
                x.floats[2 * 512 + 300] = poison;
                x.quantise(*kernels);
                const std::vector<float> out = multiply(*kernels, w.matrix, x, 0, tokens, rows);
                for (std::size_t i = 0; i < out.size(); ++i) {
                    REQUIRE(std::isfinite(out[i]) == (i / rows != 2));
                }
            }
        }
    }
}
