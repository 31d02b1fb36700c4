// The pages of the KV cache, and who may touch each of them.
//
// Every change of owner goes through this class and is an event; that is why the record is
// complete. A page's life: [virgin: scrub] → alloc (generation + 1) → rows … → free(reason) → drain
// → scrub → allocatable. Nothing on the free list holds anybody's rows. Not thread-safe: the step
// loop is the only caller.
#pragma once

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
    std::uint64_t rows_max = 0;   // the limit, in rows; pages = ceil(rows_max / kPageTokens)
    bool shadow_writers = false;  // checked execution
};

// Faults that tests plant at the pool's seams; empty in every run (FaultPlan, src/kv/fault_plan.h).
struct FaultPlan;

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
    std::unique_ptr<std::vector<PageRef>> table_;
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

    std::uint64_t rows_max() const;
    std::uint32_t pages_total() const;
    std::uint32_t pages_allocatable() const;  // virgin or scrubbed, not reserved by someone
    std::uint32_t pages_draining() const;

    // Sets `pages` aside for `owner`, so that later allocations cannot fail. Notes `reserve`.
    // Fails: out_of_pages, with how many could be had. Touches no page.
    Status reserve(Owner owner, std::uint32_t pages);
    // Makes the owner's table cover positions [0, rows), from its reservation. Notes scrub
    // (virgin), poison_check, alloc for each new page.
    void extend(Owner owner, std::uint32_t rows);
    // Says which step the next leases belong to. Only the seam of a fault plan asks.
    void begin_step(std::uint64_t step);
    // A lease to write rows [first, first + count) and read [0, first + count). Notes `rows`.
    // check(): the owner's table covers them and rows [0, first) are written.
    Lease open(Owner owner, std::uint32_t first, std::uint32_t count);
    // After the forward pass: the rows are written, the running witness grows. Notes `loaded` and
    // `violation` for a fault, then `witness` (and `witness_sum` at intervals). True when nothing
    // foreign was loaded and every page of the owner was clean when it was allocated.
    bool settle(Lease lease);
    // What made settle() say no, first finding first; null when it did not. Until release().
    const PageFinding* finding(Owner owner) const;
    // The first written row of the owner's pages that holds the poison of an unwritten one.
    std::optional<PageFinding> find_poison(Owner owner) const;
    // The owner lets go of all its pages and of its reservation. Notes free(reason), drain for
    // each.
    void release(Owner owner, FreeReason reason);
    // As release, but the pages are never handed out again. Notes free(reason), quarantine for
    // each.
    void quarantine(Owner owner, FreeReason reason);
    // Scrubs up to `pages_max` drained pages, first freed first. Notes scrub. Returns how many. A
    // page whose headers are not its last owner's is quarantined: somebody wrote there after the
    // free.
    std::uint32_t scrub_drained(std::uint32_t pages_max);

    std::uint64_t running_witness(Owner owner) const;  // the full sum so far
    struct Counters {
        std::uint64_t rows_read = 0, rows_written = 0, scrubs = 0, scrub_witness = 0;
    };
    Counters counters() const;  // as the kernels counted
    KvMemory memory() const;
    std::span<const PageRef> table(Owner owner) const;
    std::uint64_t faults_injected() const;  // how often the fault plan changed something

  private:
    struct State;
    explicit PagePool(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace kvw
