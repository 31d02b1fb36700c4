#include "src/kv/page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "kernels/transfer.h"
#include "src/base/check.h"
#include "src/base/text.h"
#include "src/kv/fault_plan.h"

namespace kvw {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Zeroed memory that costs nothing until it is touched, aligned for huge pages, kept out of core
// dumps.
class Mapping {
  public:
    Mapping() = default;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        if (base_ != nullptr) {
            munmap(base_, length_);
        }
    }

    bool map(std::size_t bytes) {
        if (__builtin_add_overflow(bytes, kHugePage, &length_)) {
            return false;
        }
        void* base = mmap(nullptr, length_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) {
            return false;
        }
        base_ = base;
        const auto address = reinterpret_cast<std::uintptr_t>(base);
        aligned_ = static_cast<std::uint8_t*>(base) + (kHugePage - address % kHugePage) % kHugePage;
        // Advice only: where it is not taken the pool is slower, or larger in a dump, but right.
        madvise(aligned_, bytes, MADV_HUGEPAGE);
        madvise(base_, length_, MADV_DONTDUMP);
        return true;
    }
    std::uint8_t* aligned() const { return aligned_; }

  private:
    void* base_ = nullptr;
    std::size_t length_ = 0;
    std::uint8_t* aligned_ = nullptr;
};

const char* kind_of(const TileFault& fault, Owner reader) {
    if (fault.access == AccessKind::write) {
        return "late_write";
    }
    if (fault.from_shadow) {
        return fault.shadow_writer == 0 ? "unwritten_row" : "foreign_row";
    }
    const TileHeader& loaded = fault.loaded;
    if (loaded.state == TileState::freed) {
        return "freed_page";
    }
    if (loaded.state == TileState::virgin) {
        return "unwritten_row";
    }
    if (loaded.tenant != number(reader.tenant) || loaded.request != number(reader.request)) {
        return "foreign_row";
    }
    return loaded.page == fault.page && loaded.rows_written < fault.rows ? "unwritten_row"
                                                                         : "stale_row";
}

std::uint64_t pages_for(std::uint64_t rows) {
    return rows / kPageTokens + (rows % kPageTokens != 0 ? 1 : 0);
}

// Entries are only ever added, so what a lease was given stays as it is: leases share the memory.
class PageTable {
  public:
    std::span<const PageRef> entries() const { return {entries_.get(), size_}; }
    std::size_t size() const { return size_; }
    std::shared_ptr<const PageRef[]> share() const { return entries_; }
    void push(const PageRef& entry) {
        if (size_ == capacity_) {
            capacity_ = std::max<std::size_t>(8, 2 * capacity_);
            auto larger = std::make_shared<PageRef[]>(capacity_);
            std::copy_n(entries_.get(), size_, larger.get());
            entries_ = std::move(larger);
        }
        entries_[size_++] = entry;
    }

  private:
    std::shared_ptr<PageRef[]> entries_;
    std::size_t size_ = 0, capacity_ = 0;
};

constexpr std::array kSides{PoolSide::prefill, PoolSide::decode};

}  // namespace

SequenceView Lease::view(std::uint32_t batch_row, std::uint32_t logits_from) {
    check(!used_, "a lease is used once");
    used_ = true;
    return {.reader = owner_,
            .pages = {table_.get(), table_size_},
            .first = first_,
            .count = count_,
            .batch_row = batch_row,
            .logits_from = logits_from,
            .report = report_.get(),
            .check_headers = check_headers_};
}

struct PagePool::State {
    struct Page {
        Owner owner;  // who wrote it: the last one it was allocated for
        std::uint32_t generation = 0;
        std::uint32_t holders = 0;     // tables it stands in
        std::uint8_t rows_leased = 0;  // once its writer let go: rows it was ever allowed to write
        bool in_use = false;           // from alloc to drain or quarantine
        bool published = false;
        bool quarantined = false;  // never handed out again
        bool changed = false;      // is in holder_changes
    };
    struct Side {
        std::uint32_t first_page = 0, pages = 0;
        std::uint64_t rows_max = 0;
        std::uint32_t virgin_next = 0;       // this and later ones of the side were never used
        std::deque<std::uint32_t> scrubbed;  // first scrubbed, first handed out
        std::uint32_t reserved = 0;          // over all holders

        std::uint32_t end() const { return first_page + pages; }
        std::uint32_t allocatable() const {
            return end() - virgin_next + static_cast<std::uint32_t>(scrubbed.size()) - reserved;
        }
    };
    // One request's part of a side.
    struct Part {
        std::uint32_t reserved = 0;  // pages it may still take
        PageTable table;
        std::uint32_t rows_leased = 0;  // positions [0, rows_leased) may have been written
    };
    struct Holder {
        Owner owner;
        std::array<Part, 2> parts;
        PoolSide active = PoolSide::prefill;  // whose table leases walk
        std::uint32_t adopted = 0;            // entries of the prefill table, its first ones
        std::uint32_t rows_held = 0;          // positions [0, rows_held) are written or adopted
        std::uint32_t rows_received = 0;      // of these, how many stand in the decode table
        std::uint64_t table_version = 0;
        std::uint64_t witness = 0;
        std::optional<PageFinding> finding;

        Part& part(PoolSide side) { return parts[static_cast<std::size_t>(side)]; }
        const Part& part(PoolSide side) const { return parts[static_cast<std::size_t>(side)]; }
        const PageTable& table() const { return part(active).table; }
        bool moving() const { return active == PoolSide::prefill && rows_received > 0; }
    };

    PoolOptions options;
    const Kernels& kernels;
    EventSink& sink;
    const FaultPlan faults;
    Mapping tiles;
    Mapping writers;
    KvMemory memory{};
    std::vector<Page> pages;
    std::array<Side, 2> sides;
    std::deque<std::uint32_t> drained;  // waiting to be scrubbed
    std::vector<std::uint32_t> holder_changes;
    std::unordered_map<std::uint64_t, Holder> holders;
    // Checked execution: the shadow table names requests, and a finding names tenants too.
    std::unordered_map<std::uint64_t, TenantId> tenants;
    Counters counters;
    std::uint64_t step = 0;
    std::uint64_t injected = 0;

    bool split() const { return options.prefill_rows != 0; }
    Side& side(PoolSide which) { return sides[static_cast<std::size_t>(which)]; }
    Side& side_of(std::uint32_t page) {
        return side(page < sides[0].end() ? PoolSide::prefill : PoolSide::decode);
    }
    Holder& holder(Owner owner) {
        const auto found = holders.find(number(owner.request));
        check(found != holders.end() && found->second.owner == owner,
              "only an owner with a reservation uses the pool");
        return found->second;
    }
    Page& published(std::uint32_t page) {
        check(page < pages.size() && pages[page].published, "the page is published");
        return pages[page];
    }

    // Returns false when the headers overwritten were not those of the page's last owner.
    bool scrub(std::uint32_t page) {
        std::uint32_t mismatches = 0;
        const std::uint64_t witness =
            kernels.scrub(memory, page, pages[page].owner, pages[page].generation, &mismatches);
        note_scrub(page, witness);
        return mismatches == 0;
    }
    void note_scrub(std::uint32_t page, std::uint64_t witness) {
        ++counters.scrubs;
        counters.scrub_witness += witness;
        sink.note(Event::of(events::Scrub{page, witness & 0xffffffff}));
    }
    template <class Look>
    void each_header(std::uint32_t page, Look look) const {
        for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
            for (std::uint32_t head = 0; head < options.shape.heads; ++head) {
                look(*tile_header(memory.tile(page, layer, head)));
            }
        }
    }
    // What a scrub would have seen: the fault is that nothing is overwritten.
    std::uint64_t scrub_witness_of(std::uint32_t page) const {
        std::uint64_t witness = 0;
        each_header(page, [&](const TileHeader& header) {
            witness += page_mix(header.tenant, header.request, header.generation, header.page) *
                       access_factor(header.layer, header.head, AccessKind::scrub) * kPageTokens;
        });
        return witness;
    }
    // Rows that no lease allowed: its last owner's headers, but written after the free.
    bool written_late(std::uint32_t page) const {
        bool late = false;
        each_header(page, [&](const TileHeader& header) {
            late |= header.rows_written > pages[page].rows_leased;
        });
        return late;
    }

    // Scrubbed pages before virgin ones: a pool that is mostly idle touches little memory.
    std::uint32_t take_page(Side& from) {
        if (!from.scrubbed.empty()) {
            const std::uint32_t page = from.scrubbed.front();
            from.scrubbed.pop_front();
            return page;
        }
        check(from.virgin_next < from.end(), "a reservation is backed by pages");
        const std::uint32_t page = from.virgin_next++;
        check(scrub(page), "a page that was never used belongs to nobody");
        return page;
    }

    void allocate(Holder& holder, PoolSide where) {
        Part& part = holder.part(where);
        check(part.reserved > 0, "a request stays within its reservation");
        const std::uint32_t number_of_page = take_page(side(where));
        --part.reserved;
        --side(where).reserved;
        Page& page = pages[number_of_page];
        const Owner before = page.owner;
        page = {.owner = holder.owner,
                .generation = page.generation + 1,
                .holders = 1,
                .in_use = true,
                .changed = page.changed};
        std::uint32_t words = 0;
        const std::uint32_t wrong =
            stamp_page(memory, number_of_page, holder.owner, page.generation, &words);
        sink.note(Event::of(events::PoisonCheck{number_of_page, words, wrong}));
        sink.note(Event::of(events::Alloc{number(holder.owner.request), 0, part.table.size(),
                                          number_of_page, page.generation}));
        if (wrong != 0) {
            conclude(holder, {.kind = "missing_scrub",
                              .page = number_of_page,
                              .generation = page.generation,
                              .row_begin = 0,
                              .row_end = kPageTokens,
                              .writer = before});
        }
        part.table.push({number_of_page, page.generation});
        ++holder.table_version;
    }
    void cover(Holder& holder, PoolSide where, std::uint64_t rows) {
        while (holder.part(where).table.size() < pages_for(rows)) {
            allocate(holder, where);
        }
    }

    void conclude(Holder& holder, const PageFinding& finding) {
        sink.note(Event::of(
            events::Violation{number(holder.owner.request), finding.page, finding.generation,
                              finding.row_begin, finding.row_end, number(finding.writer.tenant),
                              number(finding.writer.request)},
            finding.kind));
        if (!holder.finding) {
            holder.finding = finding;
        }
    }

    // Records a header (or a shadow entry) that was not the reader's, as it was loaded.
    void note_fault(Holder& holder, const TileFault& fault) {
        TileHeader loaded = fault.loaded;
        if (fault.from_shadow) {
            const auto writer = tenants.find(fault.shadow_writer);
            loaded.request = fault.shadow_writer;
            loaded.tenant = writer == tenants.end() ? 0 : number(writer->second);
        }
        sink.note(Event::of(events::Loaded{number(holder.owner.request), fault.page, fault.layer,
                                           fault.head, static_cast<std::uint64_t>(fault.access),
                                           fault.rows, loaded.tenant, loaded.request,
                                           loaded.generation, loaded.page, loaded.rows_written,
                                           static_cast<std::uint64_t>(loaded.state)}));
        const bool write = fault.access == AccessKind::write;
        conclude(holder, {.kind = kind_of(fault, holder.owner),
                          .page = fault.page,
                          .generation = loaded.generation,
                          .row_begin = write ? fault.rows : 0,
                          .row_end = write ? fault.rows + 1 : fault.rows,
                          .writer = {TenantId{loaded.tenant}, RequestId{loaded.request}}});
    }

    // What the kernels saw on a request's behalf.
    void take_in(Holder& holder, const SequenceReport& report) {
        holder.witness += report.witness.load();
        counters.rows_read += report.rows_read.load();
        counters.rows_written += report.rows_written.load();
        for (const TileFault& fault : report.first_faults) {
            note_fault(holder, fault);
        }
        sink.note(
            Event::of(events::Witness{number(holder.owner.request), holder.witness & 0xffffffff}));
    }

    void holders_changed(std::uint32_t page) {
        if (pages[page].published && !pages[page].changed) {
            pages[page].changed = true;
            holder_changes.push_back(page);
        }
    }
    // A page that nobody holds any more. The forward pass has returned, so nobody writes to it.
    void put_away(std::uint32_t number_of_page) {
        Page& page = pages[number_of_page];
        if (page.holders > 0 || page.published || !page.in_use) {
            return;
        }
        page.in_use = false;
        if (page.quarantined) {
            sink.note(Event::of(events::Quarantine{number_of_page}));
        } else {
            sink.note(Event::of(events::Drain{number_of_page}));
            drained.push_back(number_of_page);
        }
    }
    void evict(std::uint32_t number_of_page, bool quarantined) {
        Page& page = published(number_of_page);
        page.published = false;
        page.quarantined |= quarantined;
        sink.note(Event::of(events::Evict{number_of_page, page.generation}));
        put_away(number_of_page);
    }

    void note_frees(const Holder& holder, PoolSide where, FreeReason reason) {
        for (const PageRef& entry : holder.part(where).table.entries()) {
            sink.note(Event::of(events::Free{number(holder.owner.request), entry.page,
                                             static_cast<std::uint64_t>(reason)}));
        }
    }
    // The holder's part of a side is as if it had never been.
    void drop(Holder& holder, PoolSide where) {
        Part& part = holder.part(where);
        std::uint32_t begin = 0;  // first position of the entry
        for (const PageRef& entry : part.table.entries()) {
            Page& page = pages[entry.page];
            if (entry.grantor == RequestId{}) {
                page.rows_leased = static_cast<std::uint8_t>(
                    std::min(part.rows_leased > begin ? part.rows_leased - begin : 0, kPageTokens));
            }
            if (--page.holders == 0) {
                holders_changed(entry.page);
                put_away(entry.page);
            }
            begin += kPageTokens;
        }
        side(where).reserved -= part.reserved;
        part = {};
    }

    void let_go(Owner owner, FreeReason reason, bool quarantined) {
        Holder& leaving = holder(owner);
        for (const PoolSide where : kSides) {
            note_frees(leaving, where, reason);
        }
        // Also those that stand in other tables only, or in the prefix tree.
        for (std::uint32_t page = 0; quarantined && page < pages.size(); ++page) {
            if (pages[page].in_use && pages[page].owner == owner) {
                pages[page].quarantined = true;
                if (pages[page].published) {
                    evict(page, true);
                }
            }
        }
        for (const PoolSide where : kSides) {
            drop(leaving, where);
        }
        if (reason == FreeReason::preempted) {
            leaving.active = PoolSide::prefill;
            leaving.adopted = leaving.rows_held = leaving.rows_received = 0;
        } else {
            holders.erase(number(owner.request));
        }
    }
};

PagePool::PagePool(std::unique_ptr<State> state) : state_(std::move(state)) {}
PagePool::~PagePool() = default;

Result<std::unique_ptr<PagePool>> PagePool::create(const PoolOptions& options,
                                                   const Kernels& kernels, EventSink& sink,
                                                   const FaultPlan* faults) {
    std::unique_ptr<State> state(new State{.options = options,
                                           .kernels = kernels,
                                           .sink = sink,
                                           .faults = faults != nullptr ? *faults : FaultPlan{}});
    const bool split = state->split();
    const std::uint64_t prefill = pages_for(split ? options.prefill_rows : options.rows_max);
    const std::uint64_t pages = prefill + (split ? pages_for(options.rows_max) : 0);
    const std::string rows = split ? std::to_string(options.prefill_rows) + " + " +
                                         std::to_string(options.rows_max) + " rows"
                                   : std::to_string(options.rows_max) + " rows";
    std::size_t bytes = 0;
    const bool countable = pages <= std::numeric_limits<std::uint32_t>::max() &&
                           !__builtin_mul_overflow(pages, options.shape.page_bytes(), &bytes);
    if (!countable || !state->tiles.map(bytes)) {
        return Error{ErrorCode::out_of_memory,
                     "a pool of " + rows + " needs " +
                         (countable ? human_bytes(bytes) : "more than 2^64 bytes") +
                         " of memory; choose fewer rows (--pool-rows)"};
    }
    state->pages.resize(pages);
    state->memory = {.base = state->tiles.aligned(),
                     .shape = options.shape,
                     .pages = static_cast<std::uint32_t>(pages)};
    if (options.shadow_writers) {
        const std::size_t entries = pages * options.shape.tiles_per_page() * kPageTokens;
        if (!state->writers.map(entries * sizeof(std::uint64_t))) {
            return Error{ErrorCode::out_of_memory,
                         "the writer table of a pool of " + rows + " needs " +
                             human_bytes(entries * sizeof(std::uint64_t)) + " of memory"};
        }
        state->memory.writers = reinterpret_cast<std::uint64_t*>(state->writers.aligned());
    }
    const auto first_decode = static_cast<std::uint32_t>(prefill);
    state->sides[0] = {.pages = first_decode,
                       .rows_max = split ? options.prefill_rows : options.rows_max};
    state->sides[1] = {.first_page = first_decode,
                       .pages = static_cast<std::uint32_t>(pages - prefill),
                       .rows_max = split ? options.rows_max : 0,
                       .virgin_next = first_decode};
    for (std::uint64_t pool = 0; pool < (split ? 2 : 1); ++pool) {
        const State::Side& side = state->sides[pool];
        sink.note(Event::of(events::Pool{pool, 0, side.first_page, side.pages, side.rows_max}));
    }
    return std::unique_ptr<PagePool>(new PagePool(std::move(state)));
}

bool PagePool::split() const { return state_->split(); }
std::uint64_t PagePool::rows_max(PoolSide side) const { return state_->side(side).rows_max; }
std::uint32_t PagePool::pages_total(PoolSide side) const { return state_->side(side).pages; }
std::uint32_t PagePool::pages_allocatable(PoolSide side) const {
    return state_->side(side).allocatable();
}
std::uint32_t PagePool::pages_draining() const {
    return static_cast<std::uint32_t>(state_->drained.size());
}

Status PagePool::reserve(Owner owner, std::uint32_t pages, PoolSide where) {
    State& state = *state_;
    State::Side& side = state.side(where);
    check(owner != Owner{}, "nobody reserves nothing");
    if (pages > side.allocatable()) {
        return Error{ErrorCode::out_of_pages,
                     std::to_string(pages) + " pages are wanted and " +
                         std::to_string(side.allocatable()) + " of " + std::to_string(side.pages) +
                         " can be had" +
                         (!state.split()               ? ""
                          : where == PoolSide::prefill ? " in the prefill pool"
                                                       : " in the decode pool")};
    }
    State::Holder& holder = state.holders[number(owner.request)];
    check(holder.owner == Owner{} || holder.owner == owner, "a request belongs to one tenant");
    holder.owner = owner;
    holder.part(where).reserved += pages;
    side.reserved += pages;
    if (state.options.shadow_writers) {
        state.tenants[number(owner.request)] = owner.tenant;
    }
    state.sink.note(Event::of(
        events::Reserve{number(owner.request), static_cast<std::uint64_t>(where), pages}));
    return {};
}

std::uint32_t PagePool::reserved(Owner owner, PoolSide side) const {
    return state_->holder(owner).part(side).reserved;
}

void PagePool::extend(Owner owner, std::uint32_t rows) {
    State::Holder& holder = state_->holder(owner);
    state_->cover(holder, holder.active, rows);
}

void PagePool::publish(Owner owner, std::uint32_t index, CacheScope scope, PrefixDigest digest) {
    State& state = *state_;
    const State::Holder& holder = state.holder(owner);
    const auto table = holder.part(PoolSide::prefill).table.entries();
    check(index < table.size() && holder.rows_held / kPageTokens > index,
          "a page is full when it is published");
    const PageRef& entry = table[index];
    State::Page& page = state.pages[entry.page];
    check(page.owner == owner, "who wrote a page publishes it");
    check(!page.published && !page.quarantined, "a page is published once");
    page.published = true;
    state.sink.note(
        Event::of(events::Share{number(owner.request), index, entry.page, entry.generation,
                                static_cast<std::uint64_t>(scope), digest[0], digest[1]}));
}

void PagePool::adopt(Owner owner, PageRef adopted, PrefixDigest digest) {
    State& state = *state_;
    State::Holder& holder = state.holder(owner);
    State::Page& page = state.published(adopted.page);
    check(page.generation == adopted.generation, "the page is the one that was published");
    check(page.owner.tenant == owner.tenant, "pages are shared within their tenant");
    PageTable& table = holder.part(PoolSide::prefill).table;
    check(holder.active == PoolSide::prefill && table.size() == holder.adopted &&
              holder.rows_received == 0,
          "what is adopted comes before everything else");
    state.sink.note(Event::of(events::Adopt{number(owner.request), table.size(), adopted.page,
                                            adopted.generation, digest[0], digest[1]}));
    table.push({adopted.page, adopted.generation, page.owner == owner ? RequestId{} : page.owner.request});
    ++holder.table_version;
    ++holder.adopted;
    holder.rows_held += kPageTokens;
    holder.part(PoolSide::prefill).rows_leased = holder.rows_held;
    if (++page.holders == 1) {
        state.holders_changed(adopted.page);
    }
}

void PagePool::evict(std::uint32_t page, bool quarantined) { state_->evict(page, quarantined); }

std::uint32_t PagePool::holders(std::uint32_t page) const {
    check(page < state_->pages.size(), "the page is one of the pool's");
    return state_->pages[page].holders;
}

bool PagePool::reads_rows_of(Owner reader, RequestId writer) const {
    State& state = *state_;
    const State::Holder& holder = state.holder(reader);
    return std::any_of(holder.parts.begin(), holder.parts.end(), [&](const State::Part& part) {
        const std::span<const PageRef> table = part.table.entries();
        return std::any_of(table.begin(), table.end(), [&](const PageRef& entry) {
            return state.pages[entry.page].owner.request == writer;
        });
    });
}

std::vector<std::uint32_t> PagePool::take_holder_changes() {
    std::vector<std::uint32_t> taken = std::exchange(state_->holder_changes, {});
    for (const std::uint32_t page : taken) {
        state_->pages[page].changed = false;
    }
    return taken;
}

PagePool::Moved PagePool::transfer(Owner owner, std::uint32_t pages_max) {
    State& state = *state_;
    State::Holder& holder = state.holder(owner);
    check(state.split(), "rows move from one side to the other");
    check(holder.active == PoolSide::prefill && holder.rows_held > 0 && pages_max > 0,
          "there are rows to move, and they are moved once");
    if (holder.finding) {
        return {.rows = holder.rows_received, .clean = false};
    }
    const std::uint32_t first = holder.rows_received;
    const auto end = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(holder.rows_held, first + std::uint64_t{pages_max} * kPageTokens));
    state.cover(holder, PoolSide::decode, end);
    state.sink.note(
        Event::of(events::Transfer{number(owner.request), end - first, end, holder.table_version}));

    SequenceReport report;
    const auto source = holder.part(PoolSide::prefill).table.entries();
    const auto destination = holder.part(PoolSide::decode).table.entries();
    const auto move_rows = state.options.shadow_writers ? transfer_page_checked : transfer_page;
    for (std::uint32_t index = first / kPageTokens; index < pages_for(end); ++index) {
        move_rows(state.memory, {.reader = owner,
                                 .source = source[index],
                                 .destination = destination[index],
                                 .table_index = index,
                                 .row_begin = 0,
                                 .row_end = std::min(end - index * kPageTokens, kPageTokens),
                                 .check_headers = !state.faults.disabled_checker,
                                 .report = &report});
    }
    holder.rows_received = end;
    holder.part(PoolSide::decode).rows_leased = end;
    state.take_in(holder, report);
    // With a finding the request keeps all it touched, for quarantine().
    const bool clean = !holder.finding;
    const bool complete = clean && end == holder.rows_held;
    if (complete) {
        holder.active = PoolSide::decode;
        state.note_frees(holder, PoolSide::prefill, FreeReason::transferred);
        state.drop(holder, PoolSide::prefill);
    }
    return {.rows = end,
            .pages = static_cast<std::uint32_t>(pages_for(end)) - first / kPageTokens,
            .complete = complete,
            .clean = clean};
}

void PagePool::begin_step(std::uint64_t step) { state_->step = step; }

Lease PagePool::open(Owner owner, std::uint32_t first, std::uint32_t count) {
    State& state = *state_;
    State::Holder& holder = state.holder(owner);
    const std::uint64_t end = std::uint64_t{first} + count;
    check(count > 0, "a lease is for new rows");
    check(first == holder.rows_held, "rows are written one after the other, each once");
    check(holder.table().size() >= pages_for(end), "the table covers what will be read");
    check(!holder.moving(), "a table that is half moved is not read");
    holder.part(holder.active).rows_leased = static_cast<std::uint32_t>(end);
    state.sink.note(
        Event::of(events::Rows{number(owner.request), count, end, 0, holder.table_version}));
    Lease lease;
    lease.owner_ = owner;
    lease.first_ = first;
    lease.count_ = count;
    lease.check_headers_ = !state.faults.disabled_checker;
    lease.table_ = holder.table().share();
    lease.table_size_ = holder.table().size();
    lease.report_ = std::make_unique<SequenceReport>();
    if (const auto& stale = state.faults.stale_page_table;
        stale && stale->reader == number(owner.request) && state.step >= stale->at_step) {
        const auto victim = state.holders.find(stale->victim);
        if (victim != state.holders.end() && victim->second.table().size() > 0) {
            PageTable wrong;
            for (const PageRef& entry : holder.table().entries()) {
                wrong.push(wrong.size() == 0 ? victim->second.table().entries().front() : entry);
            }
            lease.table_ = wrong.share();
            ++state.injected;
        }
    }
    return lease;
}

bool PagePool::settle(Lease lease) {
    State& state = *state_;
    State::Holder& holder = state.holder(lease.owner_);
    check(lease.used_, "a lease is settled after its rows were computed");
    check(lease.first_ == holder.rows_held, "a lease is settled once");
    const std::uint32_t before = holder.rows_held;
    holder.rows_held += lease.count_;
    state.take_in(holder, *lease.report_);
    if (before / kWitnessInterval != holder.rows_held / kWitnessInterval) {
        state.sink.note(Event::of(
            events::WitnessSum{number(lease.owner_.request), holder.rows_held, holder.witness}));
    }
    return !holder.finding;
}

const PageFinding* PagePool::finding(Owner owner) const {
    const State::Holder& holder = state_->holder(owner);
    return holder.finding ? &*holder.finding : nullptr;
}

std::optional<PageFinding> PagePool::find_poison(Owner owner) const {
    const State& state = *state_;
    const State::Holder& holder = state_->holder(owner);
    const auto table = holder.table().entries();
    const TileShape& shape = state.options.shape;
    const auto poisoned = [&](std::uint32_t page, std::uint32_t row) {
        for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
            for (std::uint32_t head = 0; head < shape.heads; ++head) {
                std::uint8_t* tile = state.memory.tile(page, layer, head);
                for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
                    if (tile_keys(tile)[d * kPageTokens + row] == kPoisonHalf ||
                        tile_values(tile, shape)[row * shape.head_dim + d] == kPoisonHalf) {
                        return true;
                    }
                }
            }
        }
        return false;
    };
    for (std::uint32_t position = 0; position < holder.rows_held; ++position) {
        const PageRef& entry = table[position / kPageTokens];
        const std::uint32_t row = position % kPageTokens;
        if (poisoned(entry.page, row)) {
            return PageFinding{.kind = "unwritten_row",
                               .page = entry.page,
                               .generation = entry.generation,
                               .row_begin = row,
                               .row_end = row + 1};
        }
    }
    return std::nullopt;
}

void PagePool::release(Owner owner, FreeReason reason) { state_->let_go(owner, reason, false); }
void PagePool::quarantine(Owner owner, FreeReason reason) { state_->let_go(owner, reason, true); }

std::uint32_t PagePool::scrub_drained(std::uint32_t pages_max) {
    State& state = *state_;
    std::uint32_t done = 0;
    for (; done < pages_max && !state.drained.empty(); ++done) {
        const std::uint32_t page = state.drained.front();
        state.drained.pop_front();
        bool clean = true;
        if (state.faults.skip_scrub) {
            ++state.injected;
        } else if (state.faults.scrub_without_effect) {
            state.note_scrub(page, state.scrub_witness_of(page));
            ++state.injected;
        } else {
            const bool late = state.written_late(page);
            clean = state.scrub(page) && !late;
        }
        if (clean) {
            state.side_of(page).scrubbed.push_back(page);
        } else {
            state.sink.note(Event::of(events::Quarantine{page}));
        }
    }
    return done;
}

std::uint64_t PagePool::running_witness(Owner owner) const { return state_->holder(owner).witness; }
PagePool::Counters PagePool::counters() const { return state_->counters; }
KvMemory PagePool::memory() const { return state_->memory; }
std::span<const PageRef> PagePool::table(Owner owner) const {
    return state_->holder(owner).table().entries();
}
std::uint64_t PagePool::rows_held(Owner owner) const { return state_->holder(owner).rows_held; }
std::uint64_t PagePool::faults_injected() const { return state_->injected; }

}  // namespace kvw
