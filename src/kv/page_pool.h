// The pages of the KV cache, and who may touch each of them.
//
// Every change of owner goes through this class and is an event; that is why the record is
// complete. A page's life: [virgin: scrub] → alloc (generation + 1) → rows … → free(reason) → drain
// → scrub → allocatable. Nothing on the free list holds anybody's rows.
//
// A page is held by the tables it stands in and, once published, by the prefix tree. Its owner is
// the request that wrote it, for as long as anybody holds it; it drains when nobody does.
//
// Roles. `unified`: one side, prefill. `split`: two sides in one numbering, prefill first. A
// request computes its prompt in pages of the prefill side; its rows are then moved into pages of
// the decode side, which it had reserved before, and from the last one on its table is the decode
// side's.
//
// Not thread-safe: the step loop is the only caller.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/kernels.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "traces/sink.h"

namespace kvw {

struct PoolOptions {
    TileShape shape;
    std::uint64_t rows_max = 0;  // the limit, in rows; pages = ceil(rows_max / kPageTokens). split:
                                 // of the decode side
    std::uint64_t prefill_rows = 0;  // split: the limit of the prefill side; 0 = unified
    bool shadow_writers = false;     // checked execution
};

// Faults that tests plant at the pool's seams; empty in every run (FaultPlan, src/kv/fault_plan.h).
struct FaultPlan;

// unified has only the first.
enum class PoolSide : std::uint8_t { prefill = 0, decode = 1 };
using PrefixDigest = std::array<std::uint64_t, 2>;  // keyed, as share and adopt record it

// What the pool saw that must not be: whose rows, where. `kind` is a violation kind of CLI.md.
struct PageFinding {
    const char* kind = "";
    std::uint32_t page = 0, generation = 0;    // as loaded
    std::uint32_t row_begin = 0, row_end = 0;  // within the page
    Owner writer;                              // nobody: never written, or freed
};

// What one request may do in one step: an immutable page table, usable once. It is both what
// attention walks and the source of the `rows` event. Moving it out is the only way to use it.
class Lease {
  public:
    Lease(Lease&&) noexcept = default;
    Lease& operator=(Lease&&) noexcept = default;
    // The kernels' view; `report` stays with the lease. Calls check(): only once.
    SequenceView view(std::uint32_t batch_row, std::uint32_t logits_from);
    Owner owner() const { return owner_; }
    std::uint32_t first() const { return first_; }
    std::uint32_t count() const { return count_; }
    SequenceReport& report() { return *report_; }

  private:
    friend class PagePool;
    Lease() = default;
    Owner owner_;
    std::uint32_t first_ = 0, count_ = 0;
    bool used_ = false, check_headers_ = true;
    // Memory of the owner's table, which only ever grows behind what a lease covers.
    std::shared_ptr<const PageRef[]> table_;
    std::size_t table_size_ = 0;
    std::unique_ptr<SequenceReport> report_;
};

class PagePool {
  public:
    // Maps memory for the pool (huge pages where there are any; touched only when used; not in core
    // dumps). Notes `pool`. Fails: out_of_memory, with the bytes wanted.
    static Result<std::unique_ptr<PagePool>> create(const PoolOptions& options,
                                                    const Kernels& kernels, EventSink& sink,
                                                    const FaultPlan* faults = nullptr);
    ~PagePool();

    bool split() const;
    std::uint64_t rows_max(PoolSide side = PoolSide::prefill) const;
    std::uint32_t pages_total(PoolSide side = PoolSide::prefill) const;
    // Virgin or scrubbed, not reserved by someone.
    std::uint32_t pages_allocatable(PoolSide side = PoolSide::prefill) const;
    std::uint32_t pages_draining() const;  // of both sides

    // Sets `pages` of a side aside for `owner`, so that later allocations cannot fail. Adds to what
    // it has. Notes `reserve`. Fails: out_of_pages, with how many could be had. Touches no page.
    Status reserve(Owner owner, std::uint32_t pages, PoolSide side = PoolSide::prefill);
    // Pages the owner may still take from a side.
    std::uint32_t reserved(Owner owner, PoolSide side = PoolSide::prefill) const;
    // Makes the owner's table cover positions [0, rows), from its reservation. Notes scrub
    // (virgin), poison_check, alloc for each new page.
    void extend(Owner owner, std::uint32_t rows);

    // Entry `index` of the owner's prefill table, full and written by the owner itself, may be
    // adopted from now on. The tree holds it until evict(). Notes `share`. check(): full, settled,
    // its own, not published.
    void publish(Owner owner, std::uint32_t index, CacheScope scope, PrefixDigest digest);
    // The published page becomes the next entry of the owner's prefill table, read-only; granted
    // unless the owner wrote it. check(): published, of the owner's tenant, and everything in the
    // table so far was adopted. The owner has a reservation (of 0 pages at least). Notes `adopt`.
    void adopt(Owner owner, PageRef page, PrefixDigest digest);
    // The tree lets go of a published page. Notes `evict`, and `drain` when nobody else holds it.
    // quarantined: it was written by someone who must not be trusted; it is never handed out again.
    void evict(std::uint32_t page, bool quarantined = false);
    // Tables it stands in, the tree not counted.
    std::uint32_t holders(std::uint32_t page) const;
    // Pages whose holders() came from or went to 0 while they were published, each once, since the
    // last call. For the prefix tree, which keeps count of what it can evict.
    std::vector<std::uint32_t> take_holder_changes();
    // Does a table of `reader` hold a page that `writer` wrote?
    bool reads_rows_of(Owner reader, RequestId writer) const;

    // split: moves up to `pages_max` pages' worth of the owner's rows from its prefill table to its
    // decode table, in runs, first rows first. Notes alloc (and what goes with it), `transfer`,
    // then loaded, violation, `witness` as settle() does. Once all rows are there it lets go of the
    // prefill pages (free, reason transferred) and of what was left of that reservation. After a
    // finding nothing moves any more, and the owner keeps both tables, for quarantine().
    struct Moved {
        std::uint32_t rows = 0;   // received so far
        std::uint32_t pages = 0;  // moved by this call
        bool complete = false;
        bool clean = true;  // as settle()
    };
    Moved transfer(Owner owner, std::uint32_t pages_max);

    // Says which step the next leases belong to. Only the seam of a fault plan asks.
    void begin_step(std::uint64_t step);
    // A lease to write rows [first, first + count) and read [0, first + count). Notes `rows`.
    // check(): the owner's table covers them, rows [0, first) are written (or adopted), and no
    // transfer is half done.
    Lease open(Owner owner, std::uint32_t first, std::uint32_t count);
    // After the forward pass: the rows are written, the running witness grows. Notes `loaded` and
    // `violation` for a fault, then `witness` (and `witness_sum` at intervals). True when nothing
    // foreign was loaded and every page of the owner was clean when it was allocated.
    bool settle(Lease lease);
    // What made settle() say no, first finding first; null when it did not. Until release().
    const PageFinding* finding(Owner owner) const;
    // The first written row of the owner's pages that holds the poison of an unwritten one.
    std::optional<PageFinding> find_poison(Owner owner) const;
    // The owner lets go of all its pages, on both sides, and of its reservation. Notes free(reason)
    // for each, then drain for each that nobody holds any more. Reason preempted: the owner stays
    // known with its running witness, and may reserve again; else it is gone.
    void release(Owner owner, FreeReason reason);
    // As release, but pages it wrote are never handed out again: free(reason) for each entry, evict
    // for those it published, quarantine for those it wrote (once nobody holds them), also where
    // they stand in other tables only. Where there is a tree, PrefixTree::unpublish() comes first.
    void quarantine(Owner owner, FreeReason reason);
    // Scrubs up to `pages_max` drained pages, first freed first. Notes scrub. Returns how many. A
    // page whose headers are not its last owner's, or count rows that no lease allowed, is
    // quarantined: somebody wrote there after the free.
    std::uint32_t scrub_drained(std::uint32_t pages_max);

    std::uint64_t running_witness(Owner owner) const;  // the full sum so far
    struct Counters {
        std::uint64_t rows_read = 0, rows_written = 0, scrubs = 0, scrub_witness = 0;
    };
    Counters counters() const;  // as the kernels counted
    KvMemory memory() const;
    std::span<const PageRef> table(Owner owner) const;  // the one that leases walk
    std::uint64_t rows_held(Owner owner) const;  // written or adopted, as the next lease sees them
    std::uint64_t faults_injected() const;       // how often the fault plan changed something

  private:
    struct State;
    explicit PagePool(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace kvw
