#include <algorithm>

#include "kernels/ref/operations.h"
#include "kernels/tile_check.h"

namespace kvw::ref {

namespace {

bool is_virgin(const TileHeader& header) {
    return header.state == TileState::virgin && header.tenant == 0 && header.request == 0 &&
           header.generation == 0 && header.page == 0 && header.layer == 0 && header.head == 0 &&
           header.rows_written == 0;
}

// What a scrubbed tile says: nobody's, and every byte that is not the header's own is poison.
TileHeader freed_header(std::uint32_t page, std::uint32_t generation, std::uint32_t layer,
                        std::uint32_t head) {
    TileHeader header;
    header.generation = generation;
    header.page = page;
    header.layer = static_cast<std::uint16_t>(layer);
    header.head = static_cast<std::uint16_t>(head);
    header.state = TileState::freed;
    for (std::size_t i = 0; i < sizeof(header.padding); ++i) {
        header.padding[i] = static_cast<std::uint8_t>(kPoisonHalf >> (i % 2 * 8));
    }
    return header;
}

}  // namespace

std::uint64_t scrub(const KvMemory& memory, std::uint32_t page, Owner owner,
                    std::uint32_t generation, std::uint32_t* mismatches) {
    const TileShape& shape = memory.shape;
    std::uint64_t witness = 0;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
        for (std::uint32_t head = 0; head < shape.heads; ++head) {
            std::uint8_t* tile = memory.tile(page, layer, head);
            const TileHeader loaded = *tile_header(tile);
            const PageRef meant{.page = page, .generation = generation};
            const bool expected = owner == Owner{}
                                      ? is_virgin(loaded)
                                      : header_matches(loaded, owner, meant, layer, head);
            *mismatches += expected ? 0 : 1;
            witness += witness_of_row(loaded, AccessKind::scrub) * kPageTokens;

            *tile_header(tile) = freed_header(page, loaded.generation, layer, head);
            std::fill_n(tile_keys(tile), shape.key_bytes() / 2, kPoisonHalf);
            std::fill_n(tile_values(tile, shape), shape.key_bytes() / 2, kPoisonHalf);
            if (memory.writers != nullptr) {
                std::fill_n(memory.writers + memory.tile_index(page, layer, head) * kPageTokens,
                            kPageTokens, 0);
            }
        }
    }
    return witness;
}

}  // namespace kvw::ref
