#include "src/kv/page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

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

std::uint32_t pages_for(std::uint64_t rows) {
    return static_cast<std::uint32_t>((rows + kPageTokens - 1) / kPageTokens);
}

}  // namespace

SequenceView Lease::view(std::uint32_t batch_row, std::uint32_t logits_from) {
    check(!used_, "a lease is used once");
    used_ = true;
    return {.reader = owner_,
            .pages = *table_,
            .first = first_,
            .count = count_,
            .batch_row = batch_row,
            .logits_from = logits_from,
            .report = report_.get(),
            .check_headers = check_headers_};
}

struct PagePool::State {
    struct Page {
        Owner owner;  // the last one
        std::uint32_t generation = 0;
    };
    // One request's side of the pool.
    struct Holder {
        Owner owner;
        std::uint32_t reserved = 0;  // pages it may still take
        std::vector<PageRef> table;
        std::uint64_t table_version = 0;
        std::uint32_t rows_written = 0;
        std::uint64_t witness = 0;
        std::optional<PageFinding> finding;
    };

    PoolOptions options;
    const Kernels& kernels;
    EventSink& sink;
    const FaultPlan faults;
    Mapping tiles;
    Mapping writers;
    KvMemory memory{};
    std::vector<Page> pages;
    std::uint32_t virgin_next = 0;       // pages from here on were never used
    std::deque<std::uint32_t> scrubbed;  // first scrubbed, first handed out
    std::deque<std::uint32_t> drained;   // waiting to be scrubbed
    std::uint32_t reserved = 0;          // over all holders
    std::unordered_map<std::uint64_t, Holder> holders;
    // Checked execution: the shadow table names requests, and a finding names tenants too.
    std::unordered_map<std::uint64_t, TenantId> tenants;
    Counters counters;
    std::uint64_t step = 0;
    std::uint64_t injected = 0;

    Holder& holder(Owner owner) {
        const auto found = holders.find(number(owner.request));
        check(found != holders.end() && found->second.owner == owner,
              "only an owner with a reservation uses the pool");
        return found->second;
    }
    std::uint32_t allocatable() const {
        const auto unused = static_cast<std::uint32_t>(pages.size()) - virgin_next;
        return unused + static_cast<std::uint32_t>(scrubbed.size()) - reserved;
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
    // What a scrub would have seen: the fault is that nothing is overwritten.
    std::uint64_t scrub_witness_of(std::uint32_t page) const {
        std::uint64_t witness = 0;
        for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
            for (std::uint32_t head = 0; head < options.shape.heads; ++head) {
                const TileHeader& header = *tile_header(memory.tile(page, layer, head));
                witness += page_mix(header.tenant, header.request, header.generation, header.page) *
                           access_factor(header.layer, header.head, AccessKind::scrub) *
                           kPageTokens;
            }
        }
        return witness;
    }

    // Scrubbed pages before virgin ones: a pool that is mostly idle touches little memory.
    std::uint32_t take_page() {
        if (!scrubbed.empty()) {
            const std::uint32_t page = scrubbed.front();
            scrubbed.pop_front();
            return page;
        }
        check(virgin_next < pages.size(), "a reservation is backed by pages");
        const std::uint32_t page = virgin_next++;
        check(scrub(page), "a page that was never used belongs to nobody");
        return page;
    }

    void allocate(Holder& holder) {
        check(holder.reserved > 0, "a request stays within its reservation");
        const std::uint32_t number_of_page = take_page();
        --holder.reserved;
        --reserved;
        Page& page = pages[number_of_page];
        ++page.generation;
        std::uint32_t words = 0;
        const std::uint32_t wrong =
            stamp_page(memory, number_of_page, holder.owner, page.generation, &words);
        sink.note(Event::of(events::PoisonCheck{number_of_page, words, wrong}));
        sink.note(Event::of(events::Alloc{number(holder.owner.request), 0, holder.table.size(),
                                          number_of_page, page.generation}));
        if (wrong != 0) {
            conclude(holder, {.kind = "missing_scrub",
                              .page = number_of_page,
                              .generation = page.generation,
                              .row_begin = 0,
                              .row_end = kPageTokens,
                              .writer = page.owner});
        }
        page.owner = holder.owner;
        holder.table.push_back({number_of_page, page.generation, false});
        ++holder.table_version;
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

    void let_go(Owner owner, FreeReason reason, bool quarantined) {
        Holder& leaving = holder(owner);
        for (const PageRef& entry : leaving.table) {
            sink.note(Event::of(events::Free{number(owner.request), entry.page,
                                             static_cast<std::uint64_t>(reason)}));
        }
        // The forward pass has returned, so nobody writes to these pages any more.
        for (const PageRef& entry : leaving.table) {
            if (quarantined) {
                sink.note(Event::of(events::Quarantine{entry.page}));
            } else {
                sink.note(Event::of(events::Drain{entry.page}));
                drained.push_back(entry.page);
            }
        }
        reserved -= leaving.reserved;
        holders.erase(number(owner.request));
    }
};

PagePool::PagePool(std::unique_ptr<State> state) : state_(std::move(state)) {}
PagePool::~PagePool() = default;

Result<std::unique_ptr<PagePool>> PagePool::create(const PoolOptions& options,
                                                   const Kernels& kernels, EventSink& sink,
                                                   const FaultPlan* faults) {
    const std::uint64_t pages =
        options.rows_max / kPageTokens + (options.rows_max % kPageTokens != 0 ? 1 : 0);
    std::size_t bytes = 0;
    const bool countable = pages <= std::numeric_limits<std::uint32_t>::max() &&
                           !__builtin_mul_overflow(pages, options.shape.page_bytes(), &bytes);
    std::unique_ptr<State> state(new State{.options = options,
                                           .kernels = kernels,
                                           .sink = sink,
                                           .faults = faults != nullptr ? *faults : FaultPlan{}});
    if (!countable || !state->tiles.map(bytes)) {
        return Error{ErrorCode::out_of_memory,
                     "a pool of " + std::to_string(options.rows_max) + " rows needs " +
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
                         "the writer table of a pool of " + std::to_string(options.rows_max) +
                             " rows needs " + human_bytes(entries * sizeof(std::uint64_t)) +
                             " of memory"};
        }
        state->memory.writers = reinterpret_cast<std::uint64_t*>(state->writers.aligned());
    }
    sink.note(Event::of(events::Pool{0, 0, 0, pages, options.rows_max}));
    return std::unique_ptr<PagePool>(new PagePool(std::move(state)));
}

std::uint64_t PagePool::rows_max() const { return state_->options.rows_max; }
std::uint32_t PagePool::pages_total() const {
    return static_cast<std::uint32_t>(state_->pages.size());
}
std::uint32_t PagePool::pages_allocatable() const { return state_->allocatable(); }
std::uint32_t PagePool::pages_draining() const {
    return static_cast<std::uint32_t>(state_->drained.size());
}

Status PagePool::reserve(Owner owner, std::uint32_t pages) {
    State& state = *state_;
    check(owner != Owner{}, "nobody reserves nothing");
    if (pages > state.allocatable()) {
        return Error{ErrorCode::out_of_pages, std::to_string(pages) + " pages are wanted and " +
                                                  std::to_string(state.allocatable()) + " of " +
                                                  std::to_string(state.pages.size()) +
                                                  " can be had"};
    }
    State::Holder& holder = state.holders[number(owner.request)];
    check(holder.owner == Owner{} || holder.owner == owner, "a request belongs to one tenant");
    holder.owner = owner;
    holder.reserved += pages;
    state.reserved += pages;
    if (state.options.shadow_writers) {
        state.tenants[number(owner.request)] = owner.tenant;
    }
    state.sink.note(Event::of(events::Reserve{number(owner.request), 0, pages}));
    return {};
}

void PagePool::extend(Owner owner, std::uint32_t rows) {
    State::Holder& holder = state_->holder(owner);
    while (holder.table.size() < pages_for(rows)) {
        state_->allocate(holder);
    }
}

void PagePool::begin_step(std::uint64_t step) { state_->step = step; }

Lease PagePool::open(Owner owner, std::uint32_t first, std::uint32_t count) {
    State& state = *state_;
    const State::Holder& holder = state.holder(owner);
    check(count > 0, "a lease is for new rows");
    check(first == holder.rows_written, "rows are written one after the other, each once");
    check(holder.table.size() >= pages_for(std::uint64_t{first} + count),
          "the table covers what will be read");
    state.sink.note(Event::of(
        events::Rows{number(owner.request), count, first + count, 0, holder.table_version}));
    Lease lease;
    lease.owner_ = owner;
    lease.first_ = first;
    lease.count_ = count;
    lease.check_headers_ = !state.faults.disabled_checker;
    lease.table_ = std::make_unique<std::vector<PageRef>>(holder.table);
    lease.report_ = std::make_unique<SequenceReport>();
    if (const auto& stale = state.faults.stale_page_table;
        stale && stale->reader == number(owner.request) && state.step >= stale->at_step) {
        const auto victim = state.holders.find(stale->victim);
        if (victim != state.holders.end() && !victim->second.table.empty()) {
            lease.table_->front() = victim->second.table.front();
            ++state.injected;
        }
    }
    return lease;
}

bool PagePool::settle(Lease lease) {
    State& state = *state_;
    State::Holder& holder = state.holder(lease.owner_);
    check(lease.used_, "a lease is settled after its rows were computed");
    check(lease.first_ == holder.rows_written, "a lease is settled once");
    const SequenceReport& report = *lease.report_;
    const std::uint32_t before = holder.rows_written;
    holder.rows_written += lease.count_;
    holder.witness += report.witness.load();
    state.counters.rows_read += report.rows_read.load();
    state.counters.rows_written += report.rows_written.load();

    for (const TileFault& fault : report.first_faults) {
        state.note_fault(holder, fault);
    }
    const std::uint64_t request = number(lease.owner_.request);
    state.sink.note(Event::of(events::Witness{request, holder.witness & 0xffffffff}));
    if (before / kWitnessInterval != holder.rows_written / kWitnessInterval) {
        state.sink.note(
            Event::of(events::WitnessSum{request, holder.rows_written, holder.witness}));
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
    for (std::uint32_t position = 0; position < holder.rows_written; ++position) {
        const PageRef& entry = holder.table[position / kPageTokens];
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
            clean = state.scrub(page);
        }
        if (clean) {
            state.scrubbed.push_back(page);
        } else {
            state.sink.note(Event::of(events::Quarantine{page}));
        }
    }
    return done;
}

std::uint64_t PagePool::running_witness(Owner owner) const { return state_->holder(owner).witness; }
PagePool::Counters PagePool::counters() const { return state_->counters; }
KvMemory PagePool::memory() const { return state_->memory; }
std::span<const PageRef> PagePool::table(Owner owner) const { return state_->holder(owner).table; }
std::uint64_t PagePool::faults_injected() const { return state_->injected; }

}  // namespace kvw
