#include <bit>

#include "kernels/append_walk.h"
#include "kernels/ref/operations.h"

namespace kvw::ref {

namespace {

// Rounds half to even, overflows to infinity, keeps the sign and top bits of a NaN, as F16C does.
std::uint16_t half_from_float(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    std::uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return static_cast<std::uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    }
    if (magnitude >=
        0x477ff000) {  // 65520, halfway between the largest half and what would be next
        return static_cast<std::uint16_t>(sign | 0x7c00);
    }
    if (magnitude <
        0x38800000) {  // below 2^-14: subnormal, in steps of 2^-24, the last bit of 0.5f
        const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign |
                                          (std::bit_cast<std::uint32_t>(rounded) - 0x3f000000));
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000) >> 13));
}

template <class Access>
void append_rows(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                 std::uint32_t kv_head, const float* k, const float* v) {
    const TileShape& shape = memory.shape;
    append_walk<Access>(
        memory, sequence, layer, kv_head,
        [&](std::uint8_t* tile, std::uint32_t row, std::uint32_t rows, std::size_t source) {
            for (std::uint32_t r = row; r < row + rows; ++r) {
                for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
                    tile_keys(tile)[d * kPageTokens + r] = half_from_float(k[source + d]);
                    tile_values(tile, shape)[r * shape.head_dim + d] =
                        half_from_float(v[source + d]);
                }
                source += std::size_t{shape.heads} * shape.head_dim;  // the next row of the batch
            }
        });
}

}  // namespace

void append(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
            std::uint32_t kv_head, const float* k, const float* v) {
    append_rows<PlainAccess>(memory, sequence, layer, kv_head, k, v);
}

void append_checked(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                    std::uint32_t kv_head, const float* k, const float* v) {
    append_rows<CheckedAccess>(memory, sequence, layer, kv_head, k, v);
}

}  // namespace kvw::ref
