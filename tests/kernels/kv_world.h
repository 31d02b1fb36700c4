// A small pool of pages and one request in it, set up by hand: what src/kv does, without it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/every_isa.h"

namespace kvw::test {

inline constexpr Owner kReader{TenantId{3}, RequestId{41}};
inline constexpr std::uint32_t kGeneration = 7;  // of the first page; each next one has one more

struct KvWorld {
    TileShape shape;
    std::unique_ptr<std::uint8_t[], void (*)(void*)> bytes{nullptr, std::free};
    std::vector<std::uint64_t> writers;
    KvMemory memory;
    std::vector<PageRef> pages;
    SequenceReport report;

    // `positions` of kReader's rows fit; its pages are scattered as `seed` says among twice as
    // many.
    KvWorld(TileShape tile_shape, std::uint32_t positions, std::uint32_t seed = 1)
        : shape(tile_shape) {
        const std::uint32_t needed = (positions + kPageTokens - 1) / kPageTokens;
        memory.shape = shape;
        memory.pages = 2 * needed;
        const std::size_t size = shape.page_bytes() * memory.pages;
        bytes.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, size)));
        std::memset(bytes.get(), 0, size);
        writers.assign(shape.tiles_per_page() * memory.pages * kPageTokens, 0);
        memory.base = bytes.get();
        memory.writers = writers.data();
        std::vector<std::pair<std::uint32_t, std::uint32_t>> order;
        for (std::uint32_t page = 0; page < memory.pages; ++page) {
            order.emplace_back(philox4x32({page, 0, 0, 0}, {seed, 9})[0], page);
        }
        std::sort(order.begin(), order.end());
        std::uint32_t mismatches = 0, words = 0;
        for (std::uint32_t i = 0; i < needed; ++i) {
            const std::uint32_t page = order[i].second;
            ref().scrub(memory, page, Owner{}, 0, &mismatches);
            stamp_page(memory, page, kReader, kGeneration + i, &words);
            pages.push_back({.page = page, .generation = kGeneration + i});
        }
    }

    static const Kernels& ref() { return *kernels_for(Isa::ref); }

    SequenceView view(std::uint32_t first, std::uint32_t count) {
        return {.reader = kReader,
                .pages = pages,
                .first = first,
                .count = count,
                .batch_row = 0,
                .logits_from = 0,
                .report = &report};
    }

    // Appends rows [first, first + count) of k and v, which hold one row per position.
    void append(const Kernels& kernels, const std::vector<float>& k, const std::vector<float>& v,
                std::uint32_t first, std::uint32_t count, bool checked = true) {
        const SequenceView sequence = view(first, count);
        const std::size_t offset = std::size_t{first} * shape.heads * shape.head_dim;
        const auto operation = checked ? kernels.append_checked : kernels.append;
        for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
            for (std::uint32_t head = 0; head < shape.heads; ++head) {
                operation(memory, sequence, layer, head, k.data() + offset, v.data() + offset);
            }
        }
    }

    std::size_t row_floats() const { return std::size_t{shape.heads} * shape.head_dim; }
    std::vector<std::uint8_t> contents() const {
        return {bytes.get(), bytes.get() + shape.page_bytes() * memory.pages};
    }
    TileHeader& header(std::uint32_t table_index, std::uint32_t layer, std::uint32_t head) {
        return *tile_header(memory.tile(pages[table_index].page, layer, head));
    }
};

}  // namespace kvw::test
