#include "traces/schema.h"

#include <array>
#include <charconv>

#include "src/base/text.h"
#include "traces/columns.h"

namespace kvw {

namespace {

using enum FieldCode;

constexpr bool kContent = true;

constexpr FieldSchema kRun[] = {
    {"numerics", varint}, {"page_tokens", varint}, {"check_headers", varint}};
constexpr FieldSchema kModel[] = {{"sha0", fixed64},    {"sha1", fixed64},  {"sha2", fixed64},
                                  {"sha3", fixed64},    {"layers", varint}, {"heads", varint},
                                  {"head_dim", varint}, {"vocab", varint},  {"context", varint},
                                  {"class", varint}};
constexpr FieldSchema kPool[] = {{"pool", varint},
                                 {"group", varint},
                                 {"first_page", varint},
                                 {"pages", varint},
                                 {"rows_max", varint}};
constexpr FieldSchema kVersion[] = {{"version", varint}};
constexpr FieldSchema kTenant[] = {{"tenant", delta}};
constexpr FieldSchema kSubmit[] = {{"request", delta},
                                   {"tenant", delta},
                                   {"prompt_tokens", varint},
                                   {"tokens_max", varint},
                                   {"input0", fixed64, kContent},
                                   {"input1", fixed64, kContent},
                                   {.name = "session", .code = delta, .since = 1},
                                   {.name = "scope", .code = varint, .since = 1}};
constexpr FieldSchema kSampling[] = {
    {"request", delta},       {"seed", fixed64},     {"temperature", fixed32},
    {"top_k", varint},        {"top_p", fixed32},    {"min_p", fixed32},
    {"repeat", fixed32},      {"presence", fixed32}, {"frequency", fixed32},
    {"penalty_last", varint}, {"flags", varint},     {"stops", varint}};
constexpr FieldSchema kReject[] = {{"request", delta},
                                   {"reason", varint},
                                   {"n_prompt", varint},
                                   {"n_max", varint},
                                   {"limit", varint}};
constexpr FieldSchema kRequest[] = {{"request", delta}};
constexpr FieldSchema kAdmit[] = {{"request", delta},
                                  {"rows", varint},
                                  {"admitted0", fixed64, kContent},
                                  {"admitted1", fixed64, kContent}};
constexpr FieldSchema kCancel[] = {{"request", delta}, {"reason", varint}};
constexpr FieldSchema kFinish[] = {{"request", delta},
                                   {"reason", varint},
                                   {"prompt_tokens", varint},
                                   {"completion_tokens", varint},
                                   {"bytes_out", varint, kContent},
                                   {"logits0", fixed64, kContent},
                                   {"logits1", fixed64, kContent},
                                   {"witness", fixed64},
                                   {.name = "cached_tokens", .code = varint, .since = 1}};
constexpr FieldSchema kPreempt[] = {{"request", delta},
                                    {"positions", varint},
                                    {"digest0", fixed64, kContent},
                                    {"digest1", fixed64, kContent}};
constexpr FieldSchema kReserve[] = {{"request", delta}, {"pool", varint}, {"pages", varint}};
constexpr FieldSchema kAlloc[] = {{"request", delta},
                                  {"group", varint},
                                  {"index", delta},
                                  {"page", delta},
                                  {"generation", varint}};
constexpr FieldSchema kPoisonCheck[] = {{"page", delta}, {"words", varint}, {"wrong", varint}};
constexpr FieldSchema kFree[] = {{"request", delta}, {"page", delta}, {"reason", varint}};
constexpr FieldSchema kPage[] = {{"page", delta}};
constexpr FieldSchema kScrub[] = {{"page", delta}, {"witness", fixed32}};
constexpr FieldSchema kShare[] = {{"request", delta},
                                  {"index", delta},
                                  {"page", delta},
                                  {"generation", varint},
                                  {"scope", varint},
                                  {"digest0", fixed64, kContent},
                                  {"digest1", fixed64, kContent}};
constexpr FieldSchema kAdopt[] = {{"request", delta},
                                  {"index", delta},
                                  {"page", delta},
                                  {"generation", varint},
                                  {"digest0", fixed64, kContent},
                                  {"digest1", fixed64, kContent}};
constexpr FieldSchema kEvict[] = {{"page", delta}, {"generation", varint}};
constexpr FieldSchema kTransfer[] = {
    {"request", delta}, {"count", varint}, {"end", delta}, {"version", delta}};
constexpr FieldSchema kSlot[] = {
    {"request", delta}, {"slot", varint}, {"stamped_request", delta}, {"stamped_step", delta}};
constexpr FieldSchema kStep[] = {{"step", delta}, {"sequences", varint}};
constexpr FieldSchema kRows[] = {
    {"request", delta}, {"count", varint}, {"end", delta}, {"group", varint}, {"version", delta}};
constexpr FieldSchema kSourced[] = {{"request", delta},
                                    {"positions", varint},
                                    {"sourced0", fixed64, kContent},
                                    {"sourced1", fixed64, kContent}};
constexpr FieldSchema kWitness[] = {{"request", delta}, {"sum", fixed32}};
constexpr FieldSchema kWitnessSum[] = {{"request", delta}, {"positions", varint}, {"sum", fixed64}};
constexpr FieldSchema kLoaded[] = {{"request", delta},
                                   {"page", delta},
                                   {"layer", varint},
                                   {"head", varint},
                                   {"access", varint},
                                   {"rows", varint},
                                   {"tenant_loaded", varint},
                                   {"request_loaded", varint},
                                   {"generation_loaded", varint},
                                   {"page_loaded", varint},
                                   {"rows_loaded", varint},
                                   {"state_loaded", varint}};
constexpr FieldSchema kLayer[] = {
    {"request", delta}, {"checkpoint", varint}, {"layer", delta}, {"digest", fixed64, kContent}};
constexpr FieldSchema kSample[] = {
    {"request", delta}, {"position", delta}, {"logits", fixed32, kContent}};
constexpr FieldSchema kBytesOut[] = {{"request", delta},
                                     {"bytes_out", varint, kContent},
                                     {"digest0", fixed64, kContent},
                                     {"digest1", fixed64, kContent}};
constexpr FieldSchema kFault[] = {{"number", varint}};
constexpr FieldSchema kViolation[] = {{"request", delta},        {"page", delta},
                                      {"generation", varint},    {"row_begin", varint},
                                      {"row_end", varint},       {"writer_tenant", varint},
                                      {"writer_request", varint}};
constexpr FieldSchema kGap[] = {{"reason", varint}, {"events", varint}};
constexpr FieldSchema kRunEnd[] = {{"requests", varint},  {"steps", varint},
                                   {"rows_read", varint}, {"rows_written", varint},
                                   {"scrubs", varint},    {"scrub_witness", fixed64}};
constexpr FieldSchema kClock[] = {{"wall_ns", delta}, {"monotonic_ns", delta}};

constexpr bool kCritical = true;
constexpr bool kIgnorable = false;  // what happened is complete without it
constexpr bool kBytes = true;
constexpr bool kNoBytes = false;

constexpr KindSchema kSchema[] = {
    {EventKind::run, "run", kCritical, kNoBytes, kRun},
    {EventKind::model, "model", kCritical, kBytes, kModel},
    {EventKind::pool, "pool", kCritical, kNoBytes, kPool},
    {EventKind::config, "config", kCritical, kBytes, kVersion},
    {EventKind::tenant, "tenant", kCritical, kBytes, kTenant},
    {EventKind::submit, "submit", kCritical, kNoBytes, kSubmit},
    {EventKind::sampling, "sampling", kCritical, kNoBytes, kSampling},
    {EventKind::reject, "reject", kCritical, kNoBytes, kReject},
    {EventKind::queue, "queue", kIgnorable, kNoBytes, kRequest},
    {EventKind::admit, "admit", kCritical, kNoBytes, kAdmit},
    {EventKind::cancel, "cancel", kCritical, kNoBytes, kCancel},
    {EventKind::finish, "finish", kCritical, kNoBytes, kFinish},
    {EventKind::preempt, "preempt", kCritical, kNoBytes, kPreempt},
    {EventKind::resume, "resume", kCritical, kNoBytes, kRequest},
    {EventKind::reserve, "reserve", kCritical, kNoBytes, kReserve},
    {EventKind::alloc, "alloc", kCritical, kNoBytes, kAlloc},
    {EventKind::poison_check, "poison_check", kCritical, kNoBytes, kPoisonCheck},
    {EventKind::free, "free", kCritical, kNoBytes, kFree},
    {EventKind::drain, "drain", kCritical, kNoBytes, kPage},
    {EventKind::scrub, "scrub", kCritical, kNoBytes, kScrub},
    {EventKind::quarantine, "quarantine", kCritical, kNoBytes, kPage},
    {EventKind::share, "share", kCritical, kNoBytes, kShare},
    {EventKind::adopt, "adopt", kCritical, kNoBytes, kAdopt},
    {EventKind::evict, "evict", kCritical, kNoBytes, kEvict},
    {EventKind::step, "step", kCritical, kNoBytes, kStep},
    {EventKind::rows, "rows", kCritical, kNoBytes, kRows},
    {EventKind::sourced, "sourced", kCritical, kNoBytes, kSourced},
    {EventKind::witness, "witness", kCritical, kNoBytes, kWitness},
    {EventKind::witness_sum, "witness_sum", kCritical, kNoBytes, kWitnessSum},
    {EventKind::loaded, "loaded", kCritical, kNoBytes, kLoaded},
    {EventKind::layer, "layer", kIgnorable, kNoBytes, kLayer},
    {EventKind::sample, "sample", kCritical, kNoBytes, kSample},
    {EventKind::rendered, "rendered", kCritical, kNoBytes, kBytesOut},
    {EventKind::emitted, "emitted", kCritical, kNoBytes, kBytesOut},
    {EventKind::transfer, "transfer", kCritical, kNoBytes, kTransfer},
    {EventKind::slot, "slot", kCritical, kNoBytes, kSlot},
    {EventKind::fault, "fault", kCritical, kBytes, kFault},
    {EventKind::violation, "violation", kIgnorable, kBytes, kViolation},
    {EventKind::gap, "gap", kCritical, kNoBytes, kGap},
    {EventKind::run_end, "run_end", kCritical, kNoBytes, kRunEnd},
    {EventKind::note_clock, "clock", kIgnorable, kNoBytes, kClock},
    {EventKind::note_host, "host", kIgnorable, kBytes, kVersion},
};

constexpr std::array<std::int8_t, 128> places_by_code() {
    std::array<std::int8_t, 128> places{};
    places.fill(-1);
    for (std::size_t i = 0; i < std::size(kSchema); ++i) {
        places[static_cast<std::uint8_t>(kSchema[i].kind)] = static_cast<std::int8_t>(i);
    }
    return places;
}
constexpr auto kPlaces = places_by_code();

// The order of fields here and in the structs of event.h is one order.
template <class... T>
constexpr bool covers_structs() {
    return (
        (kSchema[kPlaces[static_cast<std::uint8_t>(T::kKind)]].fields.size() == sizeof(T) / 8) &&
        ...);
}
using namespace events;
static_assert(
    covers_structs<Run, Model, Pool, Config, Tenant, Submit, Sampling, Reject, Queue, Admit, Cancel,
                   Finish, Preempt, Resume, Reserve, Alloc, PoisonCheck, Free, Drain, Scrub,
                   Quarantine, Share, Adopt, Evict, Transfer, events::Slot, Step, Rows, Sourced,
                   Witness, WitnessSum, Loaded, Layer, Sample, Rendered, Emitted, Fault,
                   events::Violation, Gap, RunEnd, NoteClock, NoteHost>());

void append_number(std::string& out, std::uint64_t value, int base) {
    char digits[24];
    const auto end = std::to_chars(digits, digits + sizeof digits, value, base).ptr;
    out.append(digits, end);
}

void append_varint(std::string& out, std::uint64_t value) {
    std::uint8_t bytes[10];
    const std::uint8_t* end = traces::put_varint(bytes, value);
    out.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(end - bytes));
}

}  // namespace

std::span<const KindSchema> event_schema() { return kSchema; }

const KindSchema* schema_of(EventKind kind) {
    const auto code = static_cast<std::uint8_t>(kind);
    return code < kPlaces.size() && kPlaces[code] >= 0 ? &kSchema[kPlaces[code]] : nullptr;
}

const KindSchema* schema_named(std::string_view name) {
    for (const KindSchema& kind : kSchema) {
        if (kind.name == name) {
            return &kind;
        }
    }
    return nullptr;
}

std::string to_text(const Event& event) {
    const KindSchema* schema = schema_of(event.kind);
    if (schema == nullptr) {
        return "unknown kind=" + std::to_string(static_cast<int>(event.kind));
    }
    std::string out(schema->name);
    for (std::size_t i = 0; i < schema->fields.size(); ++i) {
        const FieldSchema& field = schema->fields[i];
        out += ' ';
        out += field.name;
        out += '=';
        const bool bits = field.code == fixed32 || field.code == fixed64;
        if (bits) {
            out += "0x";
        }
        append_number(out, event.fields[i], bits ? 16 : 10);
    }
    if (schema->has_bytes) {
        out += " bytes=\"" + printable(event.bytes) + "\"";
    }
    return out;
}

void append_row_form(const Event& event, std::string& out) {
    const KindSchema* schema = schema_of(event.kind);
    if (schema == nullptr || !event.numbered()) {
        return;
    }
    out += static_cast<char>(event.kind);
    for (std::size_t i = 0; i < schema->fields.size(); ++i) {
        if (!schema->fields[i].content) {
            append_varint(out, event.fields[i]);
        }
    }
    if (schema->has_bytes) {
        append_varint(out, event.bytes.size());
        out += event.bytes;
    }
}

}  // namespace kvw
