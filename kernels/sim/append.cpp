#include <cstring>

#include "kernels/append_walk.h"
#include "kernels/sim/operations.h"

namespace kvw::sim {

namespace {

template <class Access>
void append_rows(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                 std::uint32_t kv_head, const float* k) {
    const TileShape& shape = memory.shape;
    append_walk<Access>(
        memory, sequence, layer, kv_head,
        [&](std::uint8_t* tile, std::uint32_t row, std::uint32_t rows, std::size_t source) {
            for (std::uint32_t r = row; r < row + rows; ++r) {
                std::uint64_t word = 0;
                std::memcpy(&word, k + source, sizeof word);
                word |= kStored;
                std::uint16_t* const values = tile_values(tile, shape) + r * shape.head_dim;
                for (std::uint32_t d = 0; d < shape.head_dim; d += kHashHalves) {
                    std::memcpy(values + d, &word, sizeof word);
                }
                for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
                    tile_keys(tile)[d * kPageTokens + r] =
                        static_cast<std::uint16_t>(word >> d % kHashHalves * 16);
                }
                source += std::size_t{shape.heads} * shape.head_dim;  // the next row of the batch
            }
        });
}

}  // namespace

void append(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
            std::uint32_t kv_head, const float* k, const float*) {
    append_rows<PlainAccess>(memory, sequence, layer, kv_head, k);
}

void append_checked(const KvMemory& memory, const SequenceView& sequence, std::uint32_t layer,
                    std::uint32_t kv_head, const float* k, const float*) {
    append_rows<CheckedAccess>(memory, sequence, layer, kv_head, k);
}

}  // namespace kvw::sim
