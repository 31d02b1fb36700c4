// What happens to pages and requests, one fixed-width record per event.
//
// Numbered events are deterministic facts: the same run has the same events in the same order on
// every thread count, instruction set and device. Their number is their position in that order,
// from 1. Notes (clock, host, …) are facts about one execution; they are not numbered and enter no
// digest. Every field is a std::uint64_t; the schema (schema.h) names it, says how it is stored and
// whether it belongs to digest.ledger. FORMAT.md describes events as bytes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "src/base/ids.h"

namespace kvw {

enum class EventKind : std::uint8_t {
    // run
    run = 1,
    model = 2,
    pool = 3,
    config = 4,
    tenant = 5,
    // requests
    submit = 10,
    sampling = 11,
    reject = 12,
    queue = 13,
    admit = 14,
    cancel = 15,
    finish = 16,
    preempt = 17,
    resume = 18,
    // pages
    reserve = 20,
    alloc = 21,
    poison_check = 22,
    free = 23,
    drain = 24,
    scrub = 25,
    quarantine = 26,
    share = 27,
    adopt = 28,
    evict = 29,
    // steps
    step = 30,
    rows = 31,
    sourced = 32,
    witness = 33,
    witness_sum = 34,
    loaded = 35,
    layer = 36,
    sample = 37,
    rendered = 38,
    emitted = 39,
    transfer = 40,
    slot = 41,
    // control
    fault = 50,
    violation = 51,
    gap = 52,
    run_end = 53,
    // notes: not numbered
    note_clock = 64,
    note_host = 65,
};

// Why a request was refused; limits in the order in which they are named.
enum class RejectReason : std::uint8_t {
    exceed_context_size = 1,
    prefill_pool = 2,
    decode_pool = 3,
    out_of_pages = 4,
    tenant_quota = 5,
    queue_full = 6,
    malformed = 7,  // a line of a batch that no prompt could be read from; no limit was met
};
// How a request ended. Terminal: never overwritten.
enum class FinishReason : std::uint8_t {
    stop = 1,
    length = 2,
    cancelled = 3,
    deadline = 4,
    error = 5,
    violation = 6,
};
// Why an owner let go of a page.
enum class FreeReason : std::uint8_t {
    finished = 1,
    cancelled = 2,
    preempted = 3,
    violation = 4,
    error = 5,
    transferred = 6,  // split: its rows stand in the decode pool now
};
// Who may be given a prefix that a request computed (submit, share). Ordered: wider is larger.
enum class CacheScope : std::uint8_t { request = 0, session = 1, tenant = 2 };
// When per-layer digests and running sums are recorded.
enum class Checkpoint : std::uint8_t { first_sample = 1, interval = 2, finish = 3 };

const char* name_of(RejectReason reason);
const char* name_of(FinishReason reason);  // "stop", "length", …
const char* name_of(FreeReason reason);
const char* name_of(CacheScope scope);  // "request", "session", "tenant"

// One struct per kind. All fields are u64 in schema order, so that a kind is also an array.
namespace events {

struct Run {
    static constexpr auto kKind = EventKind::run;
    std::uint64_t numerics, page_tokens, check_headers;
};
// The model's identity and shape. bytes = its name. sha0..3: SHA-256 of the file, big-endian words.
struct Model {
    static constexpr auto kKind = EventKind::model;
    std::uint64_t sha0, sha1, sha2, sha3, layers, heads, head_dim, vocab, context, klass;
};
// pool: 0 unified or prefill, 1 decode.
struct Pool {
    static constexpr auto kKind = EventKind::pool;
    std::uint64_t pool, group, first_page, pages, rows_max;
};
// bytes = the engine's configuration as canonical JSON: what a re-execution is built from.
struct Config {
    static constexpr auto kKind = EventKind::config;
    std::uint64_t version;
};
// bytes = the tenant's name. Precedes the first submit that uses the number.
struct Tenant {
    static constexpr auto kKind = EventKind::tenant;
    std::uint64_t tenant;
};

// input0/1: keyed digest of the prompt's bytes. session: numbered per trace over (tenant, session
// name) in order of first use, from 1; 0 = none. scope: CacheScope.
struct Submit {
    static constexpr auto kKind = EventKind::submit;
    std::uint64_t request, tenant, prompt_tokens, tokens_max, input0, input1, session, scope;
};
// Floats as their f32 bit patterns. seed_lo/hi: the 64-bit seed. flags: bit 0 ignore EOS. stops:
// how many stop strings.
struct Sampling {
    static constexpr auto kKind = EventKind::sampling;
    std::uint64_t request, seed, temperature, top_k, top_p, min_p, repeat, presence, frequency,
        penalty_last, flags, stops;
};
struct Reject {
    static constexpr auto kKind = EventKind::reject;
    std::uint64_t request, reason, n_prompt, n_max, limit;
};
struct Queue {
    static constexpr auto kKind = EventKind::queue;
    std::uint64_t request;
};
// admitted0/1: keyed digest over (position, id) of all prompt tokens. rows: prompt + tokens_max.
struct Admit {
    static constexpr auto kKind = EventKind::admit;
    std::uint64_t request, rows, admitted0, admitted1;
};
struct Cancel {
    static constexpr auto kKind = EventKind::cancel;
    std::uint64_t request, reason;
};
// logits0/1: keyed running logits digest; witness: full running sum; bytes_out: delivered UTF-8
// bytes; cached_tokens: rows it adopted.
struct Finish {
    static constexpr auto kKind = EventKind::finish;
    std::uint64_t request, reason, prompt_tokens, completion_tokens, bytes_out, logits0, logits1,
        witness, cached_tokens;
};
// The request lost its pages (their free events follow, reason preempted) and waits again. What it
// has to compute anew is prompt and sampled tokens, `positions` of them; digest0/1: keyed digest
// over (position, id), which its next `sourced` must equal.
struct Preempt {
    static constexpr auto kKind = EventKind::preempt;
    std::uint64_t request, positions, digest0, digest1;
};
// A preempted request runs again, as `admit` for the first time; it adopts nothing.
struct Resume {
    static constexpr auto kKind = EventKind::resume;
    std::uint64_t request;
};

struct Reserve {
    static constexpr auto kKind = EventKind::reserve;
    std::uint64_t request, pool, pages;
};
// The page becomes entry `index` of the request's table of `group`; generation grew by one.
struct Alloc {
    static constexpr auto kKind = EventKind::alloc;
    std::uint64_t request, group, index, page, generation;
};
// Poison words re-read at allocation: evidence that a recorded scrub was done.
struct PoisonCheck {
    static constexpr auto kKind = EventKind::poison_check;
    std::uint64_t page, words, wrong;
};
struct Free {
    static constexpr auto kKind = EventKind::free;
    std::uint64_t request, page, reason;
};
struct Drain {
    static constexpr auto kKind = EventKind::drain;
    std::uint64_t page;
};
// witness: low 32 bits of the sum over the headers that were overwritten.
struct Scrub {
    static constexpr auto kKind = EventKind::scrub;
    std::uint64_t page, witness;
};
struct Quarantine {
    static constexpr auto kKind = EventKind::quarantine;
    std::uint64_t page;
};

// Entry `index` of the request's table, full and written by it, may be read by others of its scope;
// the prefix tree holds the page from here on. digest0/1: keyed digest over (position, id) of
// positions [0, 16 (index + 1)).
struct Share {
    static constexpr auto kKind = EventKind::share;
    std::uint64_t request, index, page, generation, scope, digest0, digest1;
};
// A shared page becomes entry `index` of the request's table, read-only; its 16 rows count as
// written. digest0/1: of the request's own ids over the same positions.
struct Adopt {
    static constexpr auto kKind = EventKind::adopt;
    std::uint64_t request, index, page, generation, digest0, digest1;
};
// The prefix tree lets go of a page. It drains when no request has it in its table either.
struct Evict {
    static constexpr auto kKind = EventKind::evict;
    std::uint64_t page, generation;
};

struct Step {
    static constexpr auto kKind = EventKind::step;
    std::uint64_t step, sequences;
};
// In this step the request writes rows [end - count, end) and attention reads rows [0, end) through
// the table as it stands (version = table changes so far), every layer and head of the group.
struct Rows {
    static constexpr auto kKind = EventKind::rows;
    std::uint64_t request, count, end, group, version;
};
// Keyed digest over (position, id) of everything the forward pass consumed for positions [0,
// positions).
struct Sourced {
    static constexpr auto kKind = EventKind::sourced;
    std::uint64_t request, positions, sourced0, sourced1;
};
// Low 32 bits of the running witness after this step.
struct Witness {
    static constexpr auto kKind = EventKind::witness;
    std::uint64_t request, sum;
};
// The full running sum, every kWitnessInterval positions and before finish.
struct WitnessSum {
    static constexpr auto kKind = EventKind::witness_sum;
    std::uint64_t request, positions, sum;
};
// Split roles: rows [end - count, end) of the request were copied from its prefill table to its
// decode table: the source read (access move), the destination written. `rows` events after the one
// where `end` reaches all that was written go through the decode table.
struct Transfer {
    static constexpr auto kKind = EventKind::transfer;
    std::uint64_t request, count, end, version;
};
// Evidence, where a step's result is consumed: the stamp that the slot of logits carried.
struct Slot {
    static constexpr auto kKind = EventKind::slot;
    std::uint64_t request, slot, stamped_request, stamped_step;
};
// A header that was not the one expected, as it was loaded. access: AccessKind; by_shadow: found by
// the shadow table.
struct Loaded {
    static constexpr auto kKind = EventKind::loaded;
    std::uint64_t request, page, layer, head, access, rows, tenant_loaded, request_loaded,
        generation_loaded, page_loaded, rows_loaded, state_loaded;
};
// Keyed digest of one layer's outputs so far (content).
struct Layer {
    static constexpr auto kKind = EventKind::layer;
    std::uint64_t request, checkpoint, layer, digest;
};
// One sampled token at `position` (its index in the sequence). logits: low 32 bits of the keyed
// chain. The id is text.
struct Sample {
    static constexpr auto kKind = EventKind::sample;
    std::uint64_t request, position, logits;
};
// Keyed digests of the answer's bytes: as the detokeniser made them, and as the caller's sink took
// them.
struct Rendered {
    static constexpr auto kKind = EventKind::rendered;
    std::uint64_t request, bytes_out, digest0, digest1;
};
struct Emitted {
    static constexpr auto kKind = EventKind::emitted;
    std::uint64_t request, bytes_out, digest0, digest1;
};

// bytes = the fault's name. An active fault plan: critical, may only lower PROVEN to UNPROVEN.
struct Fault {
    static constexpr auto kKind = EventKind::fault;
    std::uint64_t number;
};
// What the live ledger or a kernel concluded. The prover reads evidence, never this. bytes = kind.
struct Violation {
    static constexpr auto kKind = EventKind::violation;
    std::uint64_t request, page, generation, row_begin, row_end, writer_tenant, writer_request;
};
struct Gap {
    static constexpr auto kKind = EventKind::gap;
    std::uint64_t reason, events;
};
// Logical counters as the kernels counted them; the ledger must come to the same.
struct RunEnd {
    static constexpr auto kKind = EventKind::run_end;
    std::uint64_t requests, steps, rows_read, rows_written, scrubs, scrub_witness;
};

struct NoteClock {
    static constexpr auto kKind = EventKind::note_clock;
    std::uint64_t wall_ns, monotonic_ns;
};
// bytes = {"isa","threads","device","build"} as JSON.
struct NoteHost {
    static constexpr auto kKind = EventKind::note_host;
    std::uint64_t version;
};

}  // namespace events

inline constexpr std::size_t kEventFields = 12;
inline constexpr std::uint32_t kWitnessInterval = 256;  // positions between full witness sums

struct Event {
    EventKind kind{};
    std::array<std::uint64_t, kEventFields> fields{};
    std::string_view bytes{};  // borrowed: valid during the call, or until the next chunk is read

    template <class T>
    static Event of(const T& typed, std::string_view bytes = {}) {
        using Fields = std::array<std::uint64_t, sizeof(T) / 8>;
        static_assert(sizeof(T) / 8 <= kEventFields);
        Event event{.kind = T::kKind, .bytes = bytes};
        const Fields fields = std::bit_cast<Fields>(typed);
        for (std::size_t i = 0; i < fields.size(); ++i) {
            event.fields[i] = fields[i];
        }
        return event;
    }
    // The typed form; the caller has looked at `kind`.
    template <class T>
    T as() const {
        std::array<std::uint64_t, sizeof(T) / 8> typed;
        for (std::size_t i = 0; i < typed.size(); ++i) {
            typed[i] = fields[i];
        }
        return std::bit_cast<T>(typed);
    }
    bool numbered() const { return static_cast<std::uint8_t>(kind) < 64; }
};

// Text and everything as revealing as text; goes to its tenant's own section.
enum class TextKind : std::uint8_t {
    key = 1,         // 32 bytes: the key of this tenant's keyed digests
    prompt = 2,      // the prompt's bytes as the caller gave them (rendered chat for a chat)
    prompt_ids = 3,  // i32 little-endian
    stop = 4,        // one stop string
    ids = 5,  // sampled ids, unsigned LEB128 each, in order; a request's pieces are one sequence,
              // and a reader may find them joined or cut elsewhere than they were given
};
const char* name_of(TextKind kind);

struct TextRecord {
    TenantId tenant{};
    RequestId request{};  // nobody for a key
    TextKind kind{};
    std::string_view bytes{};
};

}  // namespace kvw
