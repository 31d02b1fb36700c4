#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>

#include "src/base/check.h"
#include "src/base/random.h"
#include "src/base/text.h"
#include "traces/container.h"
#include "traces/trace.h"

namespace kvw {

using namespace traces;

RunId new_run_id() {
    RunId id{};
    for (std::size_t half = 0; half < 2; ++half) {
        const std::uint64_t bits = entropy64();
        for (std::size_t i = 0; i < 8; ++i) {
            id[half * 8 + i] = static_cast<std::uint8_t>(bits >> (8 * i));
        }
    }
    return id;
}

std::string to_string(const RunId& id) { return hex(id); }

namespace {

Path with_suffix(const Path& path, const char* suffix) { return Path(path.string() + suffix); }

bool is_taken(const Path& path) {
    struct stat facts {};
    return ::lstat(path.c_str(), &facts) == 0;
}

constexpr std::size_t kTextRecordHead = 2 * kVarintMax + 1;  // bytes before the text, at most

// One tenant's text since the last chunk, as the text section will hold it.
struct TenantText {
    ByteBuffer records;
    // Sampled ids come one per step; joined per request they cost one record per chunk.
    std::vector<std::pair<std::uint64_t, std::string>> ids;
    std::unordered_map<std::uint64_t, std::size_t> ids_of;

    void append(std::uint64_t request, std::uint8_t kind, std::string_view bytes) {
        std::uint8_t* at = put_varint(records.room(kTextRecordHead), request);
        *at++ = kind;
        records.set_end(put_varint(at, bytes.size()));
        records.append(bytes);
    }
};

// .partial exists: says whose it is.
Error partial_exists(const Path& partial) {
    auto probe = File::open_append(partial);
    const bool held = probe && !probe->try_lock();
    return {ErrorCode::file_exists,
            printable(partial.string()) +
                (held ? " is being recorded by another process; choose another name"
                      : " is the evidence of a recorder that ended early; verify, recover or move "
                        "it first")};
}

}  // namespace

struct TraceWriter::State {
    WriterOptions options;
    Path partial_path, tail_path;
    File partial, tail;
    std::optional<Error> error;
    bool closed = false;

    // the open chunk
    ColumnWriter columns;
    std::uint64_t chunk_first_event = 1;
    std::uint32_t chunk_events = 0, chunk_notes = 0;
    std::map<std::uint32_t, TenantText> texts;
    std::size_t text_size = 0;  // at most what the text sections will decode to

    // the tail: what the next commit writes
    ByteBuffer rows;
    std::size_t row_begin = 0;  // of the row being filled; its head is filled in when it ends
    std::uint64_t row_event = 0;
    bool row_open = false;
    std::uint64_t tail_size = 0;  // bytes in the file

    // the whole file
    std::uint64_t bytes = 0, chunks = 0, events = 0, notes = 0, text_bytes = 0;
    std::array<std::uint64_t, 128> kind_counts{};
    LedgerDigest ledger;
    MerkleTree tree;
    SeekTable seek;
    ByteBuffer raw;

    void fail(Error what) {
        if (!error) {
            error = std::move(what);
        }
    }
    std::uint8_t* begin_item(std::size_t room);
    void end_row();
    void add_piece(const TextRecord& record, std::string_view piece, bool goes_on);
    void close_chunk();
    void add_frame(std::string_view frame, std::uint32_t raw_size);
    Status write_partial(std::string_view frames);
    Status finish();
    void remove_files();
};

// Room for one more item of the row being filled, which is begun (behind a tail head, when the tail
// is empty) or ended as needed.
std::uint8_t* TraceWriter::State::begin_item(std::size_t room) {
    if (row_open && rows.size() - row_begin >= kRowHead + kRowPayload) [[unlikely]] {
        end_row();
    }
    if (!row_open) [[unlikely]] {
        if (tail_size == 0 && rows.size() == 0) {
            rows.append(tail_head({options.run_id, chunks, chunk_first_event}));
        }
        row_begin = rows.size();
        row_event = events + 1;
        row_open = true;
        rows.set_end(rows.room(kRowHead) + kRowHead);
    }
    return rows.room(room);
}

void TraceWriter::State::end_row() {
    if (row_open) {
        finish_row(rows.data() + row_begin,
                   static_cast<std::uint32_t>(rows.size() - row_begin - kRowHead), row_event);
        row_open = false;
    }
}

void TraceWriter::State::add_frame(std::string_view frame, std::uint32_t raw_size) {
    seek.add(static_cast<std::uint32_t>(frame.size()), raw_size);
    tree.add(sha256(frame));
}

Status TraceWriter::State::write_partial(std::string_view frames) {
    Status written = partial.write_all(frames);
    if (written) {
        bytes += frames.size();
    }
    return written;
}

// Order matters: a chunk is in .partial before its rows leave the tail, so a crash between the two
// finds the events twice, which the chunk number in the tail's head tells, and never not at all.
void TraceWriter::State::close_chunk() {
    if (error || (columns.count() == 0 && texts.empty())) {
        return;
    }
    ChunkHeader header{.run_id = options.run_id,
                       .number = chunks,
                       .first_event = chunk_first_event,
                       .events = chunk_events,
                       .notes = chunk_notes};
    const auto section = [](std::string_view packed, std::size_t raw_size, std::uint32_t tenant) {
        return Section{tenant, static_cast<std::uint32_t>(packed.size()),
                       static_cast<std::uint32_t>(raw_size), sha256(packed)};
    };
    std::vector<std::string> sections;
    raw.clear();
    columns.take(raw);
    sections.push_back(pack(raw.bytes(), 1));
    header.ledger = section(sections.back(), raw.size(), 0);
    for (auto& [tenant, text] : texts) {
        for (const auto& [request, ids] : text.ids) {
            text.append(request, static_cast<std::uint8_t>(TextKind::ids), ids);
        }
        sections.push_back(pack(text.records.bytes(), 1));
        header.texts.push_back(section(sections.back(), text.records.size(), tenant));
    }
    std::string frames = chunk_header_frame(header);
    add_frame(frames, 0);
    for (std::size_t i = 0; i < sections.size(); ++i) {
        add_frame(sections[i], i == 0 ? header.ledger.raw : header.texts[i - 1].raw);
        text_bytes += i == 0 ? 0 : sections[i].size();
        frames += sections[i];
    }
    if (Status written = write_partial(frames); !written) {
        return fail(written.error());
    }
    if (options.sync_steps) {
        if (Status synced = partial.sync(); !synced) {
            return fail(synced.error());
        }
    }
    if (tail_size > 0) {
        if (Status emptied = tail.truncate(0); !emptied) {
            return fail(emptied.error());
        }
    }
    ++chunks;
    chunk_first_event = events + 1;
    chunk_events = chunk_notes = 0;
    texts.clear();
    text_size = 0;
    rows.clear();
    row_open = false;
    tail_size = 0;
}

void TraceWriter::State::add_piece(const TextRecord& record, std::string_view piece, bool goes_on) {
    const std::size_t grows = kTextRecordHead + piece.size();
    const std::uint32_t tenant = number(record.tenant);
    if (text_size + grows > kChunkText ||
        (texts.size() == kSectionsMax && !texts.contains(tenant))) {
        close_chunk();
    }
    const std::uint64_t request = number(record.request);
    const auto kind = static_cast<std::uint8_t>(record.kind);
    const std::uint8_t marked = kind | (goes_on ? kGoesOn : 0);

    std::uint8_t* at = begin_item(piece.size() + 3 * kVarintMax + 2);
    *at++ = 0;  // no event has kind 0
    at = put_varint(at, tenant);
    at = put_varint(at, request);
    *at++ = marked;
    at = put_varint(at, piece.size());
    if (!piece.empty()) {
        std::memcpy(at, piece.data(), piece.size());
    }
    rows.set_end(at + piece.size());

    TenantText& text = texts[tenant];
    if (record.kind == TextKind::ids) {
        const auto [place, is_new] = text.ids_of.try_emplace(request, text.ids.size());
        if (is_new) {
            text.ids.emplace_back(request, std::string());
            text_size += kTextRecordHead;
        }
        text.ids[place->second].second += piece;
        text_size += piece.size();
    } else {
        text.append(request, marked, piece);
        text_size += grows;
    }
}

Status TraceWriter::State::finish() {
    close_chunk();
    if (error) {
        return *error;
    }
    Footer footer{.run_id = options.run_id,
                  .chunks = chunks,
                  .events = events,
                  .notes = notes,
                  .leaves = tree.leaves(),
                  .ledger_digest = ledger.digest(),
                  .root = tree.root()};
    for (std::size_t code = 0; code < kind_counts.size(); ++code) {
        if (kind_counts[code] > 0) {
            footer.kinds.emplace_back(static_cast<std::uint8_t>(code), kind_counts[code]);
        }
    }
    const std::string frame = footer_frame(footer);
    seek.add(static_cast<std::uint32_t>(frame.size()), 0);
    if (Status written = write_partial(frame + seek.frame()); !written) {
        return written;
    }
    if (Status synced = partial.sync(); !synced) {
        return synced;
    }
    if (Status renamed = options.replace ? rename_replace(partial_path, options.path)
                                         : rename_new(partial_path, options.path);
        !renamed) {
        return renamed;
    }
    ::unlink(tail_path.c_str());  // empty by now: who finds it loses nothing
    return {};
}

void TraceWriter::State::remove_files() {
    partial.close();
    tail.close();
    ::unlink(partial_path.c_str());
    ::unlink(tail_path.c_str());
}

TraceWriter::TraceWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
TraceWriter::~TraceWriter() = default;

Result<std::unique_ptr<TraceWriter>> TraceWriter::create(const WriterOptions& options,
                                                         const Clock& clock) {
    if (options.text == TextMode::encrypted) {
        return Error{
            ErrorCode::usage,
            "this recorder writes text plain or not at all; encrypted is not one of its modes"};
    }
    auto state = std::make_unique<State>();
    state->options = options;
    state->partial_path = with_suffix(options.path, ".partial");
    state->tail_path = with_suffix(options.path, ".tail");
    if (!options.replace && is_taken(options.path)) {
        return Error{ErrorCode::file_exists,
                     printable(options.path.string()) +
                         " exists; name another file, or allow to replace it"};
    }
    for (const Path& path : {options.path, state->tail_path}) {
        if (const Status replaceable = check_replaceable(path); !replaceable) {
            return replaceable.error();
        }
    }
    auto partial = File::create(state->partial_path);
    if (!partial) {
        return partial.error().code == ErrorCode::file_exists ? partial_exists(state->partial_path)
                                                              : partial.error();
    }
    state->partial = std::move(*partial);
    const auto give_up = [&](Error error) {
        state->partial.close();
        ::unlink(state->partial_path.c_str());
        return error;
    };
    // A reader that looks whether the trace is live holds the lock for a moment.
    bool locked = state->partial.try_lock();
    for (int attempt = 0; !locked && attempt < 100; ++attempt) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        locked = state->partial.try_lock();
    }
    if (!locked) {
        return give_up({ErrorCode::io, "cannot lock " + printable(state->partial_path.string()) +
                                           ": someone else holds it"});
    }
    auto tail = File::open_append(state->tail_path);
    if (!tail) {
        return give_up(tail.error());
    }
    state->tail = std::move(*tail);
    const auto tail_size = state->tail.size();
    if (!tail_size) {
        return give_up(tail_size.error());
    }
    if (*tail_size > 0) {
        return give_up({ErrorCode::file_exists,
                        printable(state->tail_path.string()) +
                            " holds the last events of an earlier recorder; move it first"});
    }
    const TraceHeader header{.major = kTraceMajor,
                             .minor = kTraceMinor,
                             .run_id = options.run_id,
                             .created_ns = clock.wall_ns(),
                             .text = options.text,
                             .imported = options.imported};
    const std::string frame = file_header_frame(header, schema_text(own_schema()));
    state->add_frame(frame, 0);
    if (Status written = state->write_partial(frame); !written) {
        state->remove_files();
        return written.error();
    }
    return std::unique_ptr<TraceWriter>(new TraceWriter(std::move(state)));
}

void TraceWriter::note(const Event& event) {
    State& state = *state_;
    check(!state.closed, "nothing is noted in a closed trace");
    if (state.error) [[unlikely]] {
        return;
    }
    const KindSchema* schema = state.columns.schema(event.kind);
    check(schema != nullptr, "an event has a kind of the schema");
    if (event.bytes.size() > kEventBytesMax) [[unlikely]] {
        return state.fail(
            {ErrorCode::bad_input, "the " + std::string(schema->name) + " event carries " +
                                       std::to_string(event.bytes.size()) + " bytes; at most " +
                                       std::to_string(kEventBytesMax) + " are recorded"});
    }
    if (state.columns.size() + state.columns.bytes_max(event) > kChunkRaw) [[unlikely]] {
        state.close_chunk();
        if (state.error) {
            return;
        }
    }

    // One item of the tail: the row form, which digest.ledger hashes, then the content fields.
    const std::size_t room = (kEventFields + 1) * kVarintMax + 16 + event.bytes.size();
    std::uint8_t* const begin = state.begin_item(room);
    std::uint8_t* at = begin;
    *at++ = static_cast<std::uint8_t>(event.kind);
    const FieldSchema* const fields = schema->fields.data();
    const std::size_t field_count = schema->fields.size();
    bool content = false;
    for (std::size_t i = 0; i < field_count; ++i) {
        if (!fields[i].content) {
            at = put_varint(at, event.fields[i]);
        } else {
            content = true;
        }
    }
    if (schema->has_bytes) {
        at = put_varint(at, event.bytes.size());
        if (!event.bytes.empty()) {
            std::memcpy(at, event.bytes.data(), event.bytes.size());
        }
        at += event.bytes.size();
    }
    if (event.numbered()) {
        state.ledger.append_short(begin, static_cast<std::size_t>(at - begin));
        ++state.events;
        ++state.chunk_events;
    } else {
        ++state.notes;
        ++state.chunk_notes;
    }
    if (content) {
        for (std::size_t i = 0; i < field_count; ++i) {
            if (fields[i].content) {
                at = put_varint(at, event.fields[i]);
            }
        }
    }
    state.rows.set_end(at);

    state.columns.add(event);
    ++state.kind_counts[static_cast<std::uint8_t>(event.kind)];
}

void TraceWriter::text(const TextRecord& record) {
    State& state = *state_;
    check(!state.closed, "no text is noted in a closed trace");
    if (state.error || state.options.text == TextMode::none) {
        return;
    }
    if (record.bytes.size() > kTextMax) {
        return state.fail({ErrorCode::bad_input,
                           "a text of " + std::to_string(record.bytes.size()) + " bytes is over " +
                               std::to_string(kTextMax) + ", the most that is recorded"});
    }
    std::string_view rest = record.bytes;
    do {
        const std::string_view piece = rest.substr(0, kTextPiece);
        rest.remove_prefix(piece.size());
        state.add_piece(record, piece, !rest.empty() && record.kind != TextKind::ids);
    } while (!rest.empty() && !state.error);
}

Status TraceWriter::commit() {
    State& state = *state_;
    check(!state.closed, "a closed trace commits no more");
    if (state.error) {
        return *state.error;
    }
    if (state.rows.size() == 0) {
        return {};
    }
    state.end_row();
    Status written = state.tail.write_all(state.rows.bytes());
    if (written && state.options.sync_steps) {
        written = state.tail.sync();
    }
    if (!written) {
        state.fail(written.error());
        return written;
    }
    state.tail_size += state.rows.size();
    state.rows.clear();
    return {};
}

std::uint64_t TraceWriter::next_event() const { return state_->events + 1; }

Result<TraceTotals> TraceWriter::close() {
    State& state = *state_;
    check(!state.closed, "a trace is closed once");
    if (state.error) {
        return *state.error;
    }
    if (Status finished = state.finish(); !finished) {
        state.fail(finished.error());
        return finished.error();
    }
    state.closed = true;
    state.partial.close();
    state.tail.close();
    return TraceTotals{.events = state.events,
                       .ledger_digest = state.ledger.digest(),
                       .root = state.tree.root(),
                       .bytes = state.bytes,
                       .text_bytes = state.text_bytes};
}

void TraceWriter::discard() {
    if (!state_->closed) {
        state_->remove_files();
        state_->closed = true;
    }
}

const Path& TraceWriter::path() const { return state_->options.path; }

}  // namespace kvw
