// KV memory and page tables for forward passes, without a pool: pages are stamped by hand.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "src/base/ids.h"

namespace kvw::test {

class Cache {
  public:
    Cache(const TileShape& shape, std::uint32_t pages)
        : bytes_(shape.page_bytes() * pages + 64), writers_(shape.tiles_per_page() * pages * 16) {
        const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
        memory_.base = bytes_.data() + (64 - address % 64) % 64;
        memory_.shape = shape;
        memory_.pages = pages;
        memory_.writers = writers_.data();
        for (std::uint32_t page = 0; page < pages; ++page) {
            std::uint32_t mismatches = 0;
            kernels_for(Isa::ref)->scrub(memory_, page, Owner{}, 0, &mismatches);
        }
    }
    const KvMemory& memory() const { return memory_; }

  private:
    std::vector<std::uint8_t> bytes_;
    std::vector<std::uint64_t> writers_;
    KvMemory memory_;
};

// One request: its pages, what it has computed so far, and the evidence of its last step.
class Sequence {
  public:
    // `page_of(i)` is the page of positions [16 i, 16 i + 16).
    template <class PageOf>
    Sequence(const Cache& cache, Owner owner, std::uint32_t positions, const PageOf& page_of)
        : owner_(owner), report_(std::make_unique<SequenceReport>()) {
        for (std::uint32_t i = 0; i < (positions + kPageTokens - 1) / kPageTokens; ++i) {
            const PageRef ref{page_of(i), i + 1};
            std::uint32_t words = 0;
            stamp_page(cache.memory(), ref.page, owner, ref.generation, &words);
            pages_.push_back(ref);
        }
    }
    // The next `count` tokens; `logits_from` as in SequenceView.
    SequenceView next(std::uint32_t count, std::uint32_t batch_row, std::uint32_t logits_from) {
        const SequenceView view{owner_,    pages_,      done_,         count,
                                batch_row, logits_from, report_.get(), true};
        done_ += count;
        return view;
    }
    std::uint32_t done() const { return done_; }
    const SequenceReport& report() const { return *report_; }

  private:
    Owner owner_;
    std::vector<PageRef> pages_;
    std::uint32_t done_ = 0;
    std::unique_ptr<SequenceReport> report_;
};

}  // namespace kvw::test
