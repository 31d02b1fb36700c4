// Folds events into the state of pages and requests, and says what must not have happened.
//
// The same code runs live beside the engine and offline in verify. It reads evidence (alloc, scrub,
// rows, loaded headers, witness sums, digests) and draws its own conclusions; it never reads
// `violation`.
//
// A request reads and writes through its table: the pages its alloc events gave it, behind those it
// adopted. As long as nothing happened to any of them, rows [0, end) are its own (or its grant's)
// whenever end is what it has written, so a read of any length is a few comparisons. What breaks an
// entry (free, a second alloc, a scrub, a foreign write, an alloc without a scrub) marks it in
// every table it stands in; only marked entries are looked at row by row. Cost: O(1) amortised per
// event plus O(pages touched). Memory: proportional to pages used, tenants, sessions and open
// requests. Copyable: controls try changes on a copy.
//
// Who may read what another request wrote. A page belongs to the request that it was allocated for
// until nobody holds it: no table, and not the prefix tree. `share` puts a page into the tree:
// full, written by the sharer, no wider than the scope it was submitted with. `adopt` is a grant
// when the page stands in the tree, of this generation, at the same place in the table, the reader
// is of the same tenant (scope session: and of the same session), and the share is no wider than
// the reader's own scope. Then the rows count as the reader's, and its witness is formed from the
// writer's header. An adopt that is not a grant is named at once (foreign_row across tenants,
// freed_page, else undeclared_share), and its rows again when they are read. A grant whose digest
// is another one (a key collision) is a consumed_mismatch: the rows may be read, and are not those
// of the reader's tokens.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "traces/event.h"
#include "traces/sink.h"

namespace kvw {

enum class ViolationKind : std::uint8_t {
    foreign_row,
    stale_row,
    unwritten_row,
    freed_page,
    double_owner,
    undeclared_share,
    missing_scrub,
    late_write,
    unrecorded_read,
    witness_mismatch,
    consumed_mismatch,
    emitted_not_sampled,
    wrong_text_section,
    lost_page,
    unfinished_request,
    event_gap,
    bit_divergence,
    solo_divergence,
};
const char* name_of(ViolationKind kind);

enum class ProofLayer : std::uint8_t { ledger, kernel, ends, execution, solo };
const char* name_of(ProofLayer layer);

inline constexpr std::size_t kViolationsKept = 1000;         // further ones are counted, not kept
inline constexpr std::uint64_t kNoPage = ~std::uint64_t{0};  // a violation that is not about a page

// What a hostile trace may make the ledger hold; more is an event_gap.
inline constexpr std::uint64_t kLedgerPagesMax = 1u << 22;         // 67 million rows
inline constexpr std::uint64_t kLedgerOpenRequestsMax = 1u << 18;  // submitted and not finished
inline constexpr std::uint64_t kLedgerTenantsMax = 1u << 20;
inline constexpr std::uint64_t kLedgerSessionsMax = 1u << 24;
inline constexpr std::uint64_t kLedgerIrregularPagesMax = 1u
                                                          << 16;  // each has a violation before it

struct Violation {
    std::uint64_t event = 0;  // the number of the event at which it shows: the moment
    ViolationKind kind{};
    ProofLayer layer{};
    Owner reader;                 // who read (or wrote, or was answered)
    std::optional<Owner> writer;  // whose rows; none when never written or not about rows
    std::uint64_t page = kNoPage, generation = 0;
    std::uint64_t row_begin = 0, row_end = 0;  // rows within the page
    std::uint64_t emitted_after = 0;           // tokens of the reader sampled after this moment
    std::string detail;                        // for people; ids and numbers only
};

struct LedgerCounts {
    std::uint64_t events = 0, requests = 0, tenants = 0, pages = 0;  // pages: allocations
    std::uint64_t reads = 0;                                         // rows events
    std::uint64_t rows_covered = 0;  // row reads per layer and head, as the kernels count them
    std::uint64_t rows_written = 0;
    std::uint64_t scrubs = 0, witnesses = 0, samples = 0, steps = 0, rejects = 0, loaded = 0;
    std::uint64_t shares = 0;  // adopts: uses of a share, not offers
    std::uint64_t evictions = 0, preemptions = 0, transfers = 0, slots = 0;
    std::uint64_t sources = 0, ends = 0;  // sourced comparisons; rendered/emitted pairs
};

struct TenantFacts {
    std::string name;
    std::uint64_t requests = 0, reads = 0, violations = 0;
};

// One entry of a request's table, as its alloc or adopt event said.
struct TableEntry {
    std::uint64_t before = 0;  // sum of page_mix over the entries before this one
    std::uint64_t mix = 0;     // page_mix(tenant, request, generation, page) of who wrote it
    std::uint32_t page = 0;
    std::uint32_t generation = 0;
};

struct LedgerOptions {
    bool strict = false;  // to adopt what another request wrote is an undeclared_share
    bool slots = true;    // each sample needs a slot; false for traces of version 1.0
};

class Ledger {
  public:
    explicit Ledger(const LedgerOptions& options = {}) : options_(options) {}

    // One event, in order. `event_number` counts numbered events from 1; ignored for notes.
    void apply(const Event& event, std::uint64_t event_number);
    // The trace is over: what was promised must have happened (unfinished requests, lost pages,
    // counters against run_end). `closed`: the record itself says that it ended cleanly; else only
    // what is certain is reported.
    void finish(bool closed);

    // At most kViolationsKept, in the order of their events. emitted_after grows while events come.
    const std::vector<Violation>& violations() const { return violations_; }
    std::uint64_t violations_total() const { return violations_total_; }
    std::uint64_t violations_of(ProofLayer layer) const;
    std::uint64_t violations_of(ProofLayer layer, ViolationKind kind) const;
    const LedgerCounts& counts() const { return counts_; }
    std::map<std::uint32_t, TenantFacts> tenants() const;
    bool fault_plan_active() const { return !faults_.empty(); }
    const std::vector<std::string>& faults() const { return faults_; }
    bool ran_to_end() const { return run_end_seen_; }
    bool gap_seen() const { return gap_seen_; }
    // False when the run says that its kernels did not check headers: then only the witness stands.
    bool headers_checked() const { return headers_checked_; }
    // False when the run's numbers are of a version or class that this reader does not know.
    bool numerics_known() const { return numerics_known_; }
    // Names one tenant number ("" when the trace never named it).
    std::string_view tenant_name(TenantId id) const;

    // What a control needs in order to make up a neighbour.
    std::uint64_t next_event() const { return next_event_; }
    std::uint64_t last_request() const { return last_request_; }
    std::uint32_t last_tenant() const;
    // True while the next sourced digest of this request is to be compared with the one it was
    // admitted, or preempted, with.
    bool source_expected(RequestId request) const;
    // Entry `index` of an open request whose table is whole; nothing otherwise.
    std::optional<TableEntry> table_entry(RequestId request, std::uint64_t index) const;

  private:
    // owned: from alloc until nobody holds it, whether or not its owner still does.
    enum class PageState : std::uint8_t { virgin, scrubbed, owned, freed, drained };
    enum class Phase : std::uint8_t { submitted, admitted, preempted, finished };
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};
    // In place of a seat: the reader let go of the page; it never was granted.
    static constexpr std::uint32_t kLeft = kNone, kNoGrant = kNone - 1;
    static constexpr std::uint64_t kNoStep = ~std::uint64_t{0};

    struct Page {
        std::uint64_t request = 0;  // the owner, or the last one; 0 = never had one
        std::uint32_t tenant = 0;
        std::uint32_t generation = 0;
        std::uint32_t slot = kNone;   // of the owner, while it stands in the owner's table
        std::uint32_t index = 0;      // in that table
        std::uint32_t share = kNone;  // in shares_, while tree or adopters hold it
        PageState state = PageState::virgin;
        std::uint8_t rows = 0;       // written, once its owner let go; until then the table says it
        bool irregular : 1 = false;  // who wrote each row is in writers_
        bool poison_checked : 1 = false;  // since the last alloc and scrub
        bool quarantined : 1 = false;
        bool taken_away : 1 = false;  // drained or scrubbed while somebody held it
        bool spoilt : 1 = false;      // mark_holders() marked its readers
    };
    // What others than a page's owner have of it.
    struct Share {
        std::uint64_t session = 0;  // 0: any of the tenant
        std::uint64_t digest0 = 0, digest1 = 0;
        std::uint32_t index = 0;  // in every table it stands in
        CacheScope scope{};
        bool in_tree = false;
        std::vector<std::uint32_t> readers;  // slots; where each stands is in Request::seats
    };
    // Who wrote a row, and in which generation of the page; request 0 = nobody.
    struct RowWriter {
        Owner owner;
        std::uint32_t generation = 0;
        friend bool operator==(const RowWriter&, const RowWriter&) = default;
    };
    using PageWriters = std::array<RowWriter, kPageTokens>;

    struct Bytes {  // a rendered or emitted event
        bool seen = false;
        std::uint64_t count = 0, digest0 = 0, digest1 = 0;
    };
    // A request's pages on one side.
    struct Table {
        std::vector<TableEntry> entries;
        std::uint64_t length = 0;         // rows [0, length) were written, received or adopted
        bool irregular = false;           // rows events are looked at closely
        std::set<std::uint32_t> marked;   // entries to look at when they are read
        std::set<std::uint32_t> written;  // entries through which a late write was reported
        std::uint64_t capacity() const { return entries.size() * kPageTokens; }
    };
    struct Request {
        Owner owner;
        Phase phase = Phase::submitted;
        bool witness_due = false;    // rows without a witness yet
        bool witness_told = false;   // a witness_mismatch was reported; later sums say nothing new
        bool source_due = true;      // before the first sample, and the first after a preemption
        bool on_decode = false;      // rows events walk the decode table
        bool slot_ready = false;     // its slot was looked at, and no sample used it yet
        std::uint32_t slot_row = 0;  // which rows event of its step its last one was, from 0
        std::uint64_t rows_step = kNoStep, slot_step = kNoStep;  // of the last rows, the last slot
        std::uint64_t prompt_tokens = 0;
        std::uint64_t rows_max = 0;
        std::uint64_t samples = 0;
        std::uint64_t witness = 0;  // the running sum the kernels must have come to
        std::uint64_t version = 0;  // table changes
        Table table;                // the one rows events walk
        std::uint64_t pages_held = 0;
        std::uint64_t source0 = 0, source1 = 0;  // what sourced must say,
        std::uint64_t source_positions = 0;      // over so many positions
        std::uint64_t session = 0;
        std::uint64_t adopts = 0;
        CacheScope scope{};
        FinishReason finish_reason{};
        bool was_preempted = false;
        Bytes rendered, emitted;
        Table other;  // split: of the side that rows events do not walk; received: its length
        // Of the prefill table's first entries, which were adopted: the place among the readers of
        // the page, or kLeft, or kNoGrant.
        std::vector<std::uint32_t> seats;
        std::vector<std::uint32_t> violations;  // of which it is the reader
    };
    struct Pool {
        std::uint64_t first_page = 0, pages = 0;
    };
    struct Tally {
        std::uint64_t requests = 0, reads = 0, violations = 0;
    };
    struct Names {
        std::deque<std::string> by_number;           // [number - 1]
        std::unordered_set<std::string_view> known;  // into by_number
    };
    struct Found {  // a small direct-mapped cache before slots_of_
        std::uint64_t request = 0;
        std::uint32_t slot = kNone;
    };
    static constexpr std::size_t kFoundSize = 256;

    void on_run(const Event& event);
    void on_model(const Event& event);
    void on_pool(const Event& event);
    void on_tenant(const Event& event);
    void on_submit(const Event& event);
    void on_reject(const Event& event);
    void on_admit(const Event& event);
    void on_finish(const Event& event);
    void on_preempt(const Event& event);
    void on_resume(const Event& event);
    void on_reserve(const Event& event);
    void on_alloc(const Event& event);
    void on_poison_check(const Event& event);
    void on_free(const Event& event);
    void on_drain(const Event& event);
    void on_scrub(const Event& event);
    void on_quarantine(const Event& event);
    void on_share(const Event& event);
    void on_adopt(const Event& event);
    void on_evict(const Event& event);
    void on_transfer(const Event& event);
    void on_slot(const Event& event);
    void on_step(const Event& event);
    void on_rows(const Event& event);
    void on_sourced(const Event& event);
    void on_witness(const Event& event);
    void on_witness_sum(const Event& event);
    void on_loaded(const Event& event);
    void on_sample(const Event& event);
    void on_bytes(const Event& event, Bytes Request::*mine, Bytes Request::*other);
    void on_run_end(const Event& event);

    Request* find(std::uint64_t request);
    // The request that an event names, submitted and not finished; once admitted; admitted and not
    // preempted. Else an event_gap.
    Request* open(std::uint64_t request, const char* what);
    Request* begun(std::uint64_t request, const char* what);
    Request* running(std::uint64_t request, const char* what);
    void release(std::uint32_t slot);
    // One page less that it has; the end of a request that had finished.
    void let_go(std::uint32_t slot);
    std::uint32_t slot_of(const Request& request) const;
    // The page that an event names; an event_gap when no pool has it.
    Page* page_at(std::uint64_t page, const char* what);
    std::uint32_t number_of(const Page& page) const;
    bool on_decode_side(std::uint64_t page) const;
    Table& table_of(Request& request, bool decode);
    const Table& table_of(const Request& request, bool decode) const;
    std::uint32_t rows_in(const Page& page) const;
    static Owner owner_of(const Page& page);
    // Who wrote each row of an irregular page, which it becomes; null when there are too many
    // already.
    PageWriters* writers_of(Page& page);
    void forget_writers(Page& page);
    void mark(std::uint32_t slot, bool decode, std::uint32_t index);
    // What someone holds of it is not what it was.
    void mark_holders(Page& page);
    void take_from_holders(Page& page);
    void take_away(Page& page, const char* how);
    // Nobody but the owner has anything of it any more.
    void end_share(Page& page);
    void leave_share(Page& page, std::uint32_t reader);
    bool is_reader(const Page& page, const Request& request) const;
    // Does the request's entry still have the page, as its owner or as a reader?
    bool owns(const Request& request, const Page& page, std::uint32_t index) const;
    bool reads_by_grant(const Request& request, bool decode, std::uint32_t index) const;
    void check_free(const Request& request, const Page& page, std::uint64_t reason);
    // What speaks against the adopt, which is then reported.
    bool is_granted(const Request& request, const Page& page, const events::Adopt& adopt);
    void push_entry(Table& table, const Page& page);
    void close_step();
    void go_to_decode(Request& request);

    void write_closely(Request& request, bool decode, std::uint64_t start, std::uint64_t end);
    void read_closely(Request& request, bool decode, std::uint64_t begin, std::uint64_t end);
    // Looks at an entry that was marked; true when there is no need to look again.
    bool look_at(const Request& request, bool decode, std::uint32_t index, std::uint32_t rows_end);
    void report_rows(ViolationKind kind, const Request& request, std::optional<Owner> writer,
                     const Page& page, std::uint32_t begin, std::uint32_t end, const char* why);
    void count_rows(Request& request, std::uint64_t start, std::uint64_t end);
    void compare_witness(Request& request, std::uint64_t recorded, std::uint64_t mask);

    void report(Violation violation);
    void gap(Owner who, std::string detail, ProofLayer layer = ProofLayer::ledger);
    void ends(ViolationKind kind, const Request& request, std::string detail);

    // The model, as far as the witness depends on it.
    std::uint64_t tiles_ = 0;  // layers * heads; 0 until the model event
    std::uint64_t read_factor_ = 0, write_factor_ = 0, move_factor_ = 0, scrub_factor_ = 0,
                  virgin_witness_ = 0;

    LedgerOptions options_;
    std::array<Pool, 2> pools_;  // prefill (or the only one), decode
    std::vector<Page> pages_;    // grown by use
    std::unordered_map<std::uint32_t, PageWriters> writers_;
    std::vector<Share> shares_;
    std::vector<std::uint32_t> shares_free_;
    std::vector<Request> slots_;
    std::uint64_t entries_ = 0;  // in all tables
    std::vector<std::uint32_t> slots_free_;
    std::unordered_map<std::uint64_t, std::uint32_t> slots_of_;
    std::array<Found, kFoundSize> found_{};
    std::shared_ptr<Names> names_;                // shared by copies until one of them adds to it
    std::vector<Tally> tallies_;                  // by tenant number - 1
    std::vector<std::uint32_t> session_tenants_;  // by session number - 1

    std::uint64_t next_event_ = 1;
    std::uint64_t event_ = 0;  // the one being applied
    std::uint64_t last_request_ = 0;
    bool run_seen_ = false, headers_checked_ = true, numerics_known_ = true;
    bool step_open_ = false;
    std::uint64_t step_ = 0, step_sequences_ = 0, step_rows_ = 0;
    std::uint64_t scrub_witness_ = 0;
    bool scrub_mismatch_ = false;

    std::vector<Violation> violations_;
    std::uint64_t violations_total_ = 0;
    std::array<std::array<std::uint64_t, 18>, 5> violations_by_{};  // [layer][kind]
    LedgerCounts counts_;
    std::vector<std::string> faults_;
    bool run_end_seen_ = false;
    bool gap_seen_ = false;
};

// The live ledger: an EventSink that folds and fails its commit() (code violation) at the first
// violation.
class LiveLedger final : public EventSink {
  public:
    explicit LiveLedger(bool stop_on_violation) : stop_(stop_on_violation) {}
    void note(const Event& event) override;
    void text(const TextRecord&) override {}
    Status commit() override;
    const Ledger& ledger() const { return ledger_; }

  private:
    Ledger ledger_;
    std::uint64_t events_ = 0;
    bool stop_;
};

}  // namespace kvw
