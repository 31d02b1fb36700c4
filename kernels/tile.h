// How keys and values lie in memory, and whose they are.
//
// A page holds kPageTokens token positions of one request, for every layer and KV head of its group.
// A tile is one (page, layer, head) of it, contiguous:
//
//     64 bytes   TileHeader: who wrote this, and how much of it
//     K          f16 [head_dim][kPageTokens]    a vector lane per token
//     V          f16 [kPageTokens][head_dim]
//
// Pages lie one after the other, tiles within a page as [layer][head]. The header travels with the
// data, so a wrong pointer, stride or layer also loads a wrong header: kernels check it before use.
// What is constexpr here is shared with device code (kernels/cuda).
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/ids.h"

namespace kvw {

// What `state` says. A virgin tile (never used since the pool was mapped) is all zero bytes.
enum class TileState : std::uint16_t { virgin = 0, freed = 1, owned = 2 };

struct alignas(64) TileHeader {
    std::uint64_t request = 0;
    std::uint32_t tenant = 0;
    std::uint32_t generation = 0;
    std::uint32_t page = 0;
    std::uint16_t layer = 0;
    std::uint16_t head = 0;
    std::uint16_t rows_written = 0;  // rows [0, rows_written) hold data; only the append kernel advances it
    TileState state = TileState::virgin;
    std::uint8_t padding[36] = {};
};
static_assert(sizeof(TileHeader) == 64);

// A scrubbed tile belongs to nobody: tenant and request 0, state freed, K, V and padding poisoned.
// The poison is a quiet f16 NaN with a payload no arithmetic produces.
inline constexpr std::uint16_t kPoisonHalf = 0x7ebd;

struct TileShape {
    std::uint32_t layers = 0;
    std::uint32_t heads = 0;     // KV heads
    std::uint32_t head_dim = 0;  // multiple of 16

    constexpr std::size_t key_bytes() const { return std::size_t{head_dim} * kPageTokens * 2; }
    constexpr std::size_t tile_bytes() const { return sizeof(TileHeader) + 2 * key_bytes(); }
    constexpr std::size_t page_bytes() const { return tile_bytes() * layers * heads; }
    constexpr std::size_t tiles_per_page() const { return std::size_t{layers} * heads; }
};

// The memory of one pool, as kernels see it: no owner policy, no events, no tenants' names.
// `writers` is the shadow table of checked execution, kept apart from headers and page tables: the
// request that wrote each row, [page][layer][head][kPageTokens], 0 = nobody. Null when not checking.
struct KvMemory {
    std::uint8_t* base = nullptr;
    TileShape shape;
    std::uint32_t pages = 0;
    std::uint64_t* writers = nullptr;

    constexpr std::size_t tile_index(std::uint32_t page, std::uint32_t layer,
                                     std::uint32_t head) const {
        return (std::size_t{page} * shape.layers + layer) * shape.heads + head;
    }
    constexpr std::uint8_t* tile(std::uint32_t page, std::uint32_t layer,
                                 std::uint32_t head) const {
        return base + tile_index(page, layer, head) * shape.tile_bytes();
    }
};

inline TileHeader* tile_header(std::uint8_t* tile) { return reinterpret_cast<TileHeader*>(tile); }
inline std::uint16_t* tile_keys(std::uint8_t* tile) {
    return reinterpret_cast<std::uint16_t*>(tile + sizeof(TileHeader));
}
inline std::uint16_t* tile_values(std::uint8_t* tile, const TileShape& shape) {
    return reinterpret_cast<std::uint16_t*>(tile + sizeof(TileHeader) + shape.key_bytes());
}

}  // namespace kvw
