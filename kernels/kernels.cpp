#include "kernels/kernels.h"

#include <cpuid.h>
#include <immintrin.h>

#include <array>
#include <cstring>

#include "kernels/avx2/matmul.h"
#include "kernels/avx2/operations.h"
#include "kernels/avx512/matmul.h"
#include "kernels/avx512/operations.h"
#include "kernels/detmath.h"
#include "kernels/ref/matmul.h"
#include "kernels/ref/operations.h"
#include "kernels/sim/operations.h"
#include "kernels/tile_check.h"
#include "src/base/check.h"

namespace kvw {

namespace {

constexpr Kernels kRef{
    .isa = "ref",
    .quantise = ref::quantise,
    .matmul = ref::matmul,
    .embed = ref::embed,
    .rms_norm = ref::rms_norm,
    .rope = ref::rope,
    .silu_mul = ref::silu_mul,
    .gelu_mul = ref::gelu_mul,
    .add = ref::add,
    .append = ref::append,
    .attend = ref::attend,
    .attend_merge = ref::attend_merge,
    .append_checked = ref::append_checked,
    .attend_checked = ref::attend_checked,
    .scrub = ref::scrub,
    .digest_logits = ref::digest_logits,
    .digest_row = ref::digest_row,
    .argmax = ref::argmax,
    .exp_shifted = ref::exp_shifted,
};

// What the hash model has no use for is that of ref, so that no entry is empty.
constexpr Kernels kSim = [] {
    Kernels kernels = kRef;
    kernels.isa = "sim";
    kernels.append = sim::append;
    kernels.attend = sim::attend;
    kernels.append_checked = sim::append_checked;
    kernels.attend_checked = sim::attend_checked;
    return kernels;
}();

// A scrub writes whole pages of memory: nothing is left for wider registers to win.
constexpr Kernels kAvx2{
    .isa = "avx2",
    .quantise = avx2::quantise,
    .matmul = avx2::matmul,
    .embed = avx2::embed,
    .rms_norm = avx2::rms_norm,
    .rope = avx2::rope,
    .silu_mul = avx2::silu_mul,
    .gelu_mul = avx2::gelu_mul,
    .add = avx2::add,
    .append = avx2::append,
    .attend = avx2::attend,
    .attend_merge = avx2::attend_merge,
    .append_checked = avx2::append_checked,
    .attend_checked = avx2::attend_checked,
    .scrub = ref::scrub,
    .digest_logits = avx2::digest_logits,
    .digest_row = avx2::digest_row,
    .argmax = avx2::argmax,
    .exp_shifted = avx2::exp_shifted,
};

constexpr Kernels kAvx512{
    .isa = "avx512",
    .quantise = avx512::quantise,
    .matmul = avx512::matmul,
    .embed = avx512::embed,
    .rms_norm = avx512::rms_norm,
    .rope = avx512::rope,
    .silu_mul = avx512::silu_mul,
    .gelu_mul = avx512::gelu_mul,
    .add = avx512::add,
    .append = avx512::append,
    .attend = avx512::attend,
    .attend_merge = avx512::attend_merge,
    .append_checked = avx512::append_checked,
    .attend_checked = avx512::attend_checked,
    .scrub = ref::scrub,
    .digest_logits = avx512::digest_logits,
    .digest_row = avx512::digest_row,
    .argmax = avx512::argmax,
    .exp_shifted = avx512::exp_shifted,
};

// clang 14 has no name for it. The operating system saves its registers if it does those of AVX2.
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// The compiler's own test asks the operating system too: registers it does not save are not there.
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Kernels* kernels_for(Isa isa) {
    switch (isa) {
        case Isa::ref:
            return &kRef;
        case Isa::avx2:
            return has_avx2() ? &kAvx2 : nullptr;
        case Isa::avx512:
            return has_avx512() ? &kAvx512 : nullptr;
    }
    return nullptr;
}

const Kernels* kernels_named(std::string_view name) {
    if (name == "auto") {
        return &best_kernels();
    }
    for (const Isa isa : {Isa::ref, Isa::avx2, Isa::avx512}) {
        const Kernels* kernels = kernels_for(isa);
        if (kernels != nullptr && name == kernels->isa) {
            return kernels;
        }
    }
    return nullptr;
}

const Kernels& sim_kernels() { return kSim; }

const Kernels& best_kernels() {
    for (const Isa isa : {Isa::avx512, Isa::avx2}) {
        if (const Kernels* kernels = kernels_for(isa)) {
            return *kernels;
        }
    }
    return kRef;
}

namespace {

// Of MXCSR: flush to zero, round to nearest when both bits are 0, subnormals are zero.
constexpr unsigned kFlushToZero = 0x8000, kRounding = 0x6000, kDenormalsAreZero = 0x0040;
constexpr unsigned kInexactModes = kFlushToZero | kRounding | kDenormalsAreZero;
constexpr unsigned kAllExceptionsMasked = 0x1f80;

}  // namespace

bool float_mode_is_exact() {
    const unsigned mode = _mm_getcsr();
    return (mode & kInexactModes) == 0 && (mode & kAllExceptionsMasked) == kAllExceptionsMasked;
}

void set_float_mode() { _mm_setcsr((_mm_getcsr() & ~kInexactModes) | kAllExceptionsMasked); }

std::uint32_t stamp_page(const KvMemory& memory, std::uint32_t page, Owner owner,
                         std::uint32_t generation, std::uint32_t* words_checked) {
    const TileShape& shape = memory.shape;
    constexpr std::uint64_t kPoisonWord = 0x0001000100010001ull * kPoisonHalf;
    const std::size_t keys_begin = sizeof(TileHeader);
    const std::size_t values_begin = keys_begin + shape.key_bytes();
    // The first and last words of keys and values: a fill that stopped short or never ran shows.
    const std::size_t places[] = {keys_begin, values_begin - sizeof(kPoisonWord), values_begin,
                                  shape.tile_bytes() - sizeof(kPoisonWord)};
    std::uint32_t wrong = 0;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
        for (std::uint32_t head = 0; head < shape.heads; ++head) {
            std::uint8_t* tile = memory.tile(page, layer, head);
            for (const std::size_t place : places) {
                std::uint64_t word = 0;
                std::memcpy(&word, tile + place, sizeof(word));
                wrong += word != kPoisonWord ? 1 : 0;
                *words_checked += 1;
            }
            TileHeader& header = *tile_header(tile);
            header.request = number(owner.request);
            header.tenant = number(owner.tenant);
            header.generation = generation;
            header.page = page;
            header.layer = static_cast<std::uint16_t>(layer);
            header.head = static_cast<std::uint16_t>(head);
            header.rows_written = 0;
            header.state = TileState::owned;
        }
    }
    return wrong;
}

void fold_row(RowDigest& running, const RowDigest& row, std::uint64_t position) {
    running.a += mix64(row.a + position * 0x9e3779b97f4a7c15ull);
    running.b += mix64(row.b + position * 0xd1342543de82ef95ull);
}

void fold_row(std::uint64_t& running, std::uint64_t row, std::uint64_t position) {
    running += mix64(row + position * 0x9e3779b97f4a7c15ull);
}

namespace {

using Frequencies = std::array<double, kHeadDimMax / 2>;

[[gnu::always_inline]] inline void fill_rope_table(std::uint32_t first, std::uint32_t positions,
                                                   std::size_t half, const Frequencies& frequencies,
                                                   double scale, float* cos_out, float* sin_out) {
    for (std::uint32_t p = 0; p < positions; ++p) {
        const double position = static_cast<double>(first + p) / scale;
        for (std::size_t i = 0; i < half; ++i) {
            const detmath::SinCos angle = detmath::sin_cos(position * frequencies[i]);
            *cos_out++ = static_cast<float>(angle.cos);
            *sin_out++ = static_cast<float>(angle.sin);
        }
    }
}

// The same bits in a tenth of the time.
[[gnu::target("fma")]] void fill_rope_table_fma(std::uint32_t first, std::uint32_t positions,
                                                std::size_t half, const Frequencies& frequencies,
                                                double scale, float* cos_out, float* sin_out) {
    fill_rope_table(first, positions, half, frequencies, scale, cos_out, sin_out);
}

}  // namespace

void rope_table(std::uint32_t first, std::uint32_t positions, std::uint32_t head_dim, double base,
                double scale, float* cos_out, float* sin_out) {
    const std::size_t half = head_dim / 2;
    Frequencies frequencies;
    check(half <= frequencies.size(), "head_dim is at most kHeadDimMax");
    for (std::size_t i = 0; i < half; ++i) {
        frequencies[i] = detmath::pow(base, -2.0 * static_cast<double>(i) / head_dim);
    }
    if (__builtin_cpu_supports("fma")) {
        fill_rope_table_fma(first, positions, half, frequencies, scale, cos_out, sin_out);
    } else {
        fill_rope_table(first, positions, half, frequencies, scale, cos_out, sin_out);
    }
}

}  // namespace kvw
