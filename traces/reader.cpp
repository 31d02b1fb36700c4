#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>

#include "src/base/check.h"
#include "src/base/text.h"
#include "traces/container.h"
#include "traces/trace.h"

namespace kvw {

using namespace traces;

namespace {

constexpr std::size_t kHeaderFrameMax = kFileHeaderFixed + kSchemaRawMax + 32;
constexpr std::size_t kFooterFrameMax = kFooterFixed + 128 * (1 + kVarintMax) + 32;
constexpr std::size_t kSector = 512;             // what a disk writes or loses as one
constexpr std::size_t kZerosLookedAt = 1 << 20;  // at the end of a file; more count as this many
constexpr std::size_t kTailEvents = 65536;  // a TraceChunk from the tail ends when it has these

Path with_suffix(const Path& path, const char* suffix) { return Path(path.string() + suffix); }

// Whether a recorder holds the lock. A shared lock, so that two readers do not see each other.
bool is_live(const File& file) {
    if (::flock(file.descriptor(), LOCK_SH | LOCK_NB) != 0) {
        return errno == EWOULDBLOCK;
    }
    ::flock(file.descriptor(), LOCK_UN);
    return false;
}

// What the end of a file says about how it came to be: evidence for torn as against changed.
struct FileEnd {
    std::uint64_t size = 0;
    std::uint64_t zeros_from = 0;  // only zeros from here to the end
    bool all_looked_at_zero = false;
    bool sealed = false;  // ends in something shaped like a seek table: was written to its end

    // Damage to what stands at [begin, end): a write that did not all reach the disk leaves zeros,
    // in whole sectors, up to the end of the file. Anything else was changed.
    bool lost_at(std::uint64_t begin, std::uint64_t end) const {
        if (sealed || size == 0 || zeros_from >= size) {
            return false;
        }
        const bool whole_sector = zeros_from <= (size - 1) / kSector * kSector;
        return begin >= zeros_from || all_looked_at_zero || (whole_sector && end > zeros_from);
    }
};

Result<FileEnd> look_at_end(const File& file, std::uint64_t size) {
    FileEnd end{.size = size, .zeros_from = size};
    if (size >= kFrameHead + kSeekTail) {
        std::uint8_t tail[kSeekTail];
        if (Status read = file.read_at(size - kSeekTail, tail); !read) {
            return read.error();
        }
        const std::uint64_t table = kFrameHead + 8ull * get_u32(tail) + kSeekTail;
        if (get_u32(tail + 5) == kSeekMagic && table <= size) {
            std::uint8_t head[kFrameHead];
            if (Status read = file.read_at(size - table, head); !read) {
                return read.error();
            }
            end.sealed = get_u32(head) == kSeekFrame && get_u32(head + 4) == table - kFrameHead;
        }
    }
    std::array<std::uint8_t, 4096> block;
    const std::uint64_t stop = size > kZerosLookedAt ? size - kZerosLookedAt : 0;
    while (end.zeros_from > stop) {
        const auto step =
            static_cast<std::size_t>(std::min<std::uint64_t>(block.size(), end.zeros_from - stop));
        if (Status read = file.read_at(end.zeros_from - step, {block.data(), step}); !read) {
            return read.error();
        }
        std::size_t zeros = 0;
        while (zeros < step && block[step - 1 - zeros] == 0) {
            ++zeros;
        }
        end.zeros_from -= zeros;
        if (zeros < step) {
            return end;
        }
    }
    end.all_looked_at_zero = size > 0;
    return end;
}

// Whether `bytes`, the first of a file, could be a trace or one that was cut there.
bool begins_like_a_trace(Bytes bytes) {
    std::string expected;
    put_u32(expected, kOwnFrame);
    const std::size_t first = std::min<std::size_t>(bytes.size(), 4);
    if (bytes.empty() || as_text(bytes.first(first)) != expected.substr(0, first)) {
        return false;
    }
    if (bytes.size() <= kFrameHead) {
        return true;
    }
    const std::size_t own = std::min<std::size_t>(bytes.size() - kFrameHead, kHeaderMagic.size());
    return as_text(bytes.subspan(kFrameHead, own)) == kHeaderMagic.substr(0, own);
}

// A field that a later minor version added is 0 in the events of a file that came before.
Plans make_plans(const std::vector<FileKind>& kinds, std::uint32_t minor, Status& status) {
    Plans plans;
    for (const FileKind& in_file : kinds) {
        KindPlan& plan = plans[in_file.code];
        const KindSchema* known = schema_named(in_file.name);
        plan.in_file = true;
        plan.known = known != nullptr;
        plan.has_bytes = in_file.has_bytes;
        plan.critical_unknown = known == nullptr && in_file.critical;
        plan.ignorable_unknown = known == nullptr && !in_file.critical;
        for (const FileField& field : in_file.fields) {
            KindPlan::Field& into = plan.fields.emplace_back();
            into.code = field.code;
            into.content = field.content;
            for (std::size_t i = 0; known != nullptr && i < known->fields.size(); ++i) {
                if (known->fields[i].name == field.name) {
                    into.target = static_cast<std::uint8_t>(i);
                }
            }
            if (known != nullptr && into.target == KindPlan::kUnknownField) {
                plan.critical_unknown |= field.critical;
                plan.ignorable_unknown |= !field.critical;
            }
        }
        if (known == nullptr) {
            continue;
        }
        plan.kind = known->kind;
        for (std::size_t i = 0; i < known->fields.size(); ++i) {
            const bool there =
                std::any_of(plan.fields.begin(), plan.fields.end(),
                            [&](const KindPlan::Field& field) { return field.target == i; });
            if (!there && known->fields[i].since <= minor) {
                status = bad_trace("its schema of " + in_file.name + " has no field " +
                                   std::string(known->fields[i].name));
            }
        }
        if ((in_file.code < 64) != (static_cast<std::uint8_t>(known->kind) < 64)) {
            status = bad_trace("its schema has " + in_file.name + " on the wrong side of 64");
        }
        if (known->has_bytes && !in_file.has_bytes) {
            status = bad_trace("its schema of " + in_file.name + " has no bytes");
        }
    }
    return plans;
}

// A text record is known by these; its pieces are joined.
struct TextKey {
    std::uint32_t tenant = 0;
    std::uint64_t request = 0;
    std::uint8_t kind = 0;
    friend bool operator==(const TextKey&, const TextKey&) = default;
};
struct OpenText {
    TextKey key;
    std::string bytes;
};

}  // namespace

struct TraceReader::State {
    enum class Phase { chunks, tail, done };

    Path path;
    ReaderOptions options;
    File file, tail;
    bool is_partial = false, live = false;
    FileEnd end;
    TraceHeader header;
    Plans plans;

    Phase phase = Phase::chunks;
    std::uint64_t offset = 0;  // in the file, then in the tail
    std::uint64_t tail_size = 0;
    std::uint64_t chunks = 0, events = 0, notes = 0, text_bytes = 0;
    std::uint64_t first_tail_event = 0;
    EventCounts counts;
    LedgerDigest ledger;
    MerkleTree tree;
    SeekTable seek;
    std::optional<std::string>
        damage;  // .partial ends torn, so the tail can at best say what came after
    std::optional<Error> error;
    TraceEnding ending;

    // what the last chunk's views point into
    std::vector<std::uint8_t> packed, raw;
    std::vector<std::vector<std::uint8_t>> text_raw;
    std::deque<std::string> joined;
    std::map<std::uint32_t, OpenText> open_texts;  // by tenant: the next piece is to come
    std::size_t open_bytes = 0;

    Error bad(std::string what) const {
        return bad_trace(printable(path.string()) + ": " + std::move(what));
    }
    Error bad_chunk(const std::string& what) const {
        return bad("chunk " + std::to_string(chunks) + " at byte " + std::to_string(offset) + ": " +
                   what);
    }
    std::string at_byte(const std::string& what, std::uint64_t byte) const {
        return what + " at byte " + std::to_string(byte);
    }

    Result<bool> next(TraceChunk& chunk);
    Result<bool> next_item(TraceChunk& chunk);
    Result<bool> read_chunk(const ChunkHeader& head, std::uint64_t at, TraceChunk& chunk);
    Result<bool> read_footer(const Footer& footer, std::uint64_t at);
    Result<bool> torn_or_bad(std::uint64_t end_of_item, const std::string& what);
    Result<bool> ended_early(std::string reason, bool torn);
    Result<bool> begin_tail();
    Result<bool> next_rows(TraceChunk& chunk);
    Result<bool> end_of_tail(bool torn, std::string reason);
    bool finish(TraceEnd how, std::string reason);
    const char* read_texts(Bytes section, std::uint32_t tenant, TraceChunk& chunk);
    const char* add_text(TextKey key, std::string_view bytes, TraceChunk& chunk);
    const char* read_row(Bytes payload, TraceChunk& chunk);
};

bool TraceReader::State::finish(TraceEnd how, std::string reason) {
    phase = Phase::done;
    ending.end = live ? TraceEnd::live : how;
    ending.reason = live ? "a recorder is still writing it" : std::move(reason);
    ending.last_event = events;
    ending.unknown_critical = counts.unknown_critical;
    ending.unknown_ignorable = counts.unknown_ignorable;
    return false;
}

// The whole chunks are over and no footer came: the tail may know more.
Result<bool> TraceReader::State::ended_early(std::string reason, bool torn) {
    if (!is_partial) {
        return finish(torn ? TraceEnd::torn : TraceEnd::not_closed, std::move(reason));
    }
    if (torn) {
        damage = std::move(reason);
    }
    phase = Phase::tail;
    return true;
}

// Something is wrong with the item at `offset`. Lost by a crash, or changed?
Result<bool> TraceReader::State::torn_or_bad(std::uint64_t end_of_item, const std::string& what) {
    if (live || end.lost_at(offset, end_of_item)) {
        return ended_early(
            at_byte("its end was lost: only zeros", std::max(offset, end.zeros_from)), true);
    }
    return bad_chunk(what);
}

Result<bool> TraceReader::State::next(TraceChunk& chunk) {
    chunk.texts.clear();  // the events are written over, each once
    chunk.from_tail = false;
    joined.clear();
    // A step gives a chunk or changes the phase.
    while (phase != Phase::done) {
        const Phase before = phase;
        const std::uint64_t chunks_before = chunks;
        const auto went_on = phase == Phase::chunks ? next_item(chunk) : next_rows(chunk);
        if (!went_on || !*went_on) {
            return went_on;
        }
        if (chunks != chunks_before || (before == Phase::tail && phase == Phase::tail)) {
            return true;
        }
    }
    return false;
}

Result<bool> TraceReader::State::next_item(TraceChunk& chunk) {
    const std::uint64_t left = end.size - offset;
    const auto cut = [&](const char* what) {
        if (end.sealed) {
            return Result<bool>(bad_chunk(std::string(what) + " reaches over the end of the file"));
        }
        return ended_early(at_byte(std::string("it ends inside ") + what, end.size), true);
    };
    if (left == 0) {
        if (end.sealed) {
            return bad("it ends in a seek table and has no footer");
        }
        return ended_early(at_byte("it has no footer: recording ended early,", offset), false);
    }
    std::array<std::uint8_t, kChunkHeaderFixed> start{};
    const auto known = static_cast<std::size_t>(std::min<std::uint64_t>(left, start.size()));
    if (Status read = file.read_at(offset, {start.data(), known}); !read) {
        return read.error();
    }
    std::string magic;
    put_u32(magic, kOwnFrame);
    const std::size_t magic_known = std::min<std::size_t>(known, 4);
    if (as_text({start.data(), magic_known}) != magic.substr(0, magic_known)) {
        return torn_or_bad(offset + magic_known, "there is neither a chunk nor a footer");
    }
    if (known < kFrameHead + 8) {
        return cut("a frame head");
    }
    const std::uint64_t size = kFrameHead + std::uint64_t{get_u32(start.data() + 4)};
    const std::string_view own = as_text({start.data() + kFrameHead, 8});
    const bool is_footer = own == kFooterMagic;
    if (!is_footer && own != kChunkMagic) {
        return torn_or_bad(offset + 16, "there is neither a chunk nor a footer");
    }
    const char* what = is_footer ? "a footer" : "a chunk header";
    // The number of text sections fixes a chunk header's length, so a false length does not pass
    // for a cut.
    bool plausible = size <= (is_footer ? kFooterFrameMax : chunk_header_size(kSectionsMax));
    if (!is_footer && known == kChunkHeaderFixed) {
        const std::uint64_t texts = get_u32(start.data() + kChunkHeaderFixed - 4);
        plausible = plausible && texts <= kSectionsMax && size == chunk_header_size(texts);
    }
    if (!plausible) {
        return torn_or_bad(offset + known, std::string(what) + " has a length that it cannot have");
    }
    if (size > left) {
        return cut(what);
    }
    packed.resize(size);
    if (Status read = file.read_at(offset, packed); !read) {
        return read.error();
    }
    if (is_footer) {
        const auto footer = parse_footer(packed);
        if (!footer) {
            return torn_or_bad(offset + size, footer.error().message);
        }
        return read_footer(*footer, offset + size);
    }
    const auto head = parse_chunk_header(packed);
    if (!head) {
        return torn_or_bad(offset + size, head.error().message);
    }
    std::uint64_t chunk_size = size + head->ledger.packed;
    for (const Section& text : head->texts) {
        chunk_size += text.packed;
    }
    if (head->run_id != header.run_id) {
        return bad_chunk("it belongs to run " + to_string(head->run_id) + ", the file to " +
                         to_string(header.run_id));
    }
    if (head->number != chunks || head->first_event != events + 1) {
        return bad_chunk("it is chunk " + std::to_string(head->number) + " from event " +
                         std::to_string(head->first_event) + "; event " +
                         std::to_string(events + 1) + " is due");
    }
    if (chunk_size > left) {
        return cut("a chunk");
    }
    return read_chunk(*head, offset + size, chunk);
}

// A chunk is whole or not there: every section is compared with its hash before any of it counts.
Result<bool> TraceReader::State::read_chunk(const ChunkHeader& head, std::uint64_t at,
                                            TraceChunk& chunk) {
    const auto name = [](const Section& text) {
        return "the text section of tenant " + std::to_string(text.tenant);
    };
    const Digest256 head_sha = sha256(Bytes(packed));
    const auto head_size = static_cast<std::uint32_t>(packed.size());
    std::uint64_t size = head.ledger.packed;
    for (const Section& text : head.texts) {
        size += text.packed;
    }
    packed.resize(size);
    if (Status read = file.read_at(at, packed); !read) {
        return read.error();
    }
    Bytes rest(packed);
    const auto take = [&](const Section& section) {
        const Bytes bytes = rest.first(section.packed);
        rest = rest.subspan(section.packed);
        at += section.packed;
        return sha256(bytes) == section.sha;
    };
    if (!take(head.ledger)) {
        return torn_or_bad(at, "the ledger section does not match its SHA-256");
    }
    for (const Section& text : head.texts) {
        if (!take(text)) {
            return torn_or_bad(at, name(text) + " does not match its SHA-256");
        }
    }

    rest = packed;
    raw.resize(head.ledger.raw + kVarintMax);
    if (Status unpacked = unpack(rest.first(head.ledger.packed), raw.data(), head.ledger.raw);
        !unpacked) {
        return bad_chunk("the ledger section " + unpacked.error().message);
    }
    rest = rest.subspan(head.ledger.packed);
    if (const char* wrong = read_columns({raw.data(), head.ledger.raw}, plans, head.events,
                                         head.notes, chunk.events, ledger, counts)) {
        return bad_chunk(std::string("the ledger section is malformed: ") + wrong);
    }
    if (!head.texts.empty() && header.text == TextMode::none) {
        return bad_chunk("it has text in a trace without text");
    }
    if (options.texts) {
        text_raw.resize(std::max(text_raw.size(), head.texts.size()));
        for (std::size_t i = 0; i < head.texts.size(); ++i) {
            const Section& text = head.texts[i];
            text_raw[i].resize(text.raw);
            if (Status unpacked = unpack(rest.first(text.packed), text_raw[i].data(), text.raw);
                !unpacked) {
                return bad_chunk(name(text) + " " + unpacked.error().message);
            }
            rest = rest.subspan(text.packed);
            if (const char* wrong = read_texts(text_raw[i], text.tenant, chunk)) {
                return bad_chunk(name(text) + ": " + wrong);
            }
        }
        if (open_texts.size() > 1) {
            return bad_chunk("more than one text goes on in the next chunk");
        }
    }

    chunk.first_event = head.first_event;
    tree.add(head_sha);
    seek.add(head_size, 0);
    tree.add(head.ledger.sha);
    seek.add(head.ledger.packed, head.ledger.raw);
    for (const Section& text : head.texts) {
        tree.add(text.sha);
        seek.add(text.packed, text.raw);
        text_bytes += text.packed;
    }
    offset = at;
    events += head.events;
    notes += head.notes;
    ++chunks;
    return true;
}

Result<bool> TraceReader::State::read_footer(const Footer& footer, std::uint64_t at) {
    Footer expected{.run_id = header.run_id,
                    .chunks = chunks,
                    .events = events,
                    .notes = notes,
                    .leaves = tree.leaves(),
                    .ledger_digest = ledger.digest(),
                    .root = tree.root(),
                    .clean_end = footer.clean_end};
    for (std::size_t code = 0; code < counts.kinds.size(); ++code) {
        if (counts.kinds[code] > 0) {
            expected.kinds.emplace_back(static_cast<std::uint8_t>(code), counts.kinds[code]);
        }
    }
    const auto differ = [&](const std::string& what) {
        return bad("the footer at byte " + std::to_string(offset) + " " + what);
    };
    if (footer.run_id != expected.run_id) {
        return differ("belongs to run " + to_string(footer.run_id));
    }
    if (footer.chunks != chunks || footer.events != events || footer.notes != notes) {
        return differ("counts " + std::to_string(footer.chunks) + " chunks and " +
                      std::to_string(footer.events) + " events; there are " +
                      std::to_string(chunks) + " and " + std::to_string(events));
    }
    if (footer.ledger_digest != expected.ledger_digest) {
        return differ("has another ledger digest than the events");
    }
    if (footer != expected) {
        return differ("has another root or other totals than the chunks");
    }
    if (!open_texts.empty()) {
        return differ("comes before the end of a text");
    }
    // The seek table is known byte for byte now. Part of it, or part and zeros, is a crash.
    seek.add(static_cast<std::uint32_t>(at - offset), 0);
    const std::string table = seek.frame();
    const std::uint64_t left = end.size - at;
    std::string found(static_cast<std::size_t>(std::min<std::uint64_t>(left, table.size())), '\0');
    if (Status read =
            file.read_at(at, {reinterpret_cast<std::uint8_t*>(found.data()), found.size()});
        !read) {
        return read.error();
    }
    offset = at;
    if (found == table && left == table.size()) {
        if (!footer.clean_end) {
            return finish(TraceEnd::not_closed, "its footer does not claim a clean end");
        }
        finish(TraceEnd::closed, "");
        ending.totals = TraceTotals{.events = events,
                                    .ledger_digest = expected.ledger_digest,
                                    .root = expected.root,
                                    .bytes = end.size,
                                    .text_bytes = text_bytes};
        return false;
    }
    if (found.empty()) {
        return finish(TraceEnd::not_closed, at_byte("it has no seek table", at));
    }
    const std::size_t equal = static_cast<std::size_t>(
        std::mismatch(found.begin(), found.end(), table.begin()).first - found.begin());
    if (left < table.size() && equal == found.size()) {
        return finish(TraceEnd::torn, at_byte("it ends inside its seek table", end.size));
    }
    if (!end.sealed && (at + equal >= end.zeros_from || end.all_looked_at_zero)) {
        return finish(TraceEnd::torn, at_byte("its end was lost: only zeros", end.zeros_from));
    }
    return bad("the seek table at byte " + std::to_string(at) + " is not the one of this file");
}

// A long text comes in pieces; the next record of its tenant that is not ids goes on with it.
// Sections are in order of tenants, not of time, so the open text of one tenant may wait while
// others come by.
const char* TraceReader::State::add_text(TextKey key, std::string_view bytes, TraceChunk& chunk) {
    const bool goes_on = (key.kind & kGoesOn) != 0;
    key.kind &= static_cast<std::uint8_t>(~kGoesOn);
    const bool is_ids = key.kind == static_cast<std::uint8_t>(TextKind::ids);
    const auto open = is_ids ? open_texts.end() : open_texts.find(key.tenant);
    if (is_ids && goes_on) {
        return "ids go on in another record";
    }
    if (open != open_texts.end() || goes_on) {
        open_bytes += bytes.size();
        if (open_bytes > 2 * kTextMax) {
            return "a text is longer than a text may be";
        }
        OpenText& text = open_texts.try_emplace(key.tenant, OpenText{key, {}}).first->second;
        if (text.key != key) {
            return "a text begins before another one of its tenant is complete";
        }
        text.bytes += bytes;
        if (goes_on) {
            return nullptr;
        }
        open_bytes -= text.bytes.size();
        bytes = joined.emplace_back(std::move(text.bytes));
        open_texts.erase(key.tenant);
    }
    if (key.kind < static_cast<std::uint8_t>(TextKind::key) ||
        key.kind > static_cast<std::uint8_t>(TextKind::ids)) {
        ++counts.unknown_ignorable;
        return nullptr;
    }
    chunk.texts.push_back(
        {TenantId{key.tenant}, RequestId{key.request}, static_cast<TextKind>(key.kind), bytes});
    return nullptr;
}

const char* TraceReader::State::read_texts(Bytes section, std::uint32_t tenant, TraceChunk& chunk) {
    Cursor cursor(section);
    while (!cursor.at_end()) {
        TextKey key{.tenant = tenant, .request = cursor.varint()};
        key.kind = cursor.u8();
        const Bytes bytes = cursor.take(cursor.varint());
        if (!cursor.ok()) {
            return "a record reaches over its end";
        }
        if (const char* wrong = add_text(key, as_text(bytes), chunk)) {
            return wrong;
        }
    }
    return nullptr;
}

// --- the tail of an open trace

Result<bool> TraceReader::State::begin_tail() {
    Path tail_path = file.path();
    tail_path.replace_extension(".tail");
    auto opened = File::open_read(tail_path);
    if (std::error_code ignored; !opened && std::filesystem::exists(tail_path, ignored)) {
        return opened.error();
    }
    const auto size = opened ? opened->size() : Result<std::uint64_t>(std::uint64_t{0});
    if (!size) {
        return size.error();
    }
    tail_size = *size;
    offset = 0;
    if (tail_size == 0) {
        return end_of_tail(false, "recording ended early: no footer");
    }
    tail = std::move(*opened);
    std::array<std::uint8_t, kTailHead> bytes{};
    if (tail_size < bytes.size()) {
        return end_of_tail(true, "its tail ends inside its head");
    }
    if (Status read = tail.read_at(0, bytes); !read) {
        return live ? Result<bool>(finish(TraceEnd::live, "")) : read.error();
    }
    const auto head = parse_tail_head(bytes);
    const auto tail_end = look_at_end(tail, tail_size);
    if (!tail_end) {
        return live ? Result<bool>(finish(TraceEnd::live, "")) : tail_end.error();
    }
    end = *tail_end;
    end.sealed = false;
    if (!head) {
        if (live || end.lost_at(0, kTailHead)) {
            return end_of_tail(true, "the head of its tail was lost");
        }
        return bad("the head of its tail does not match its checksum");
    }
    if (head->run_id != header.run_id || head->chunk < chunks) {
        return end_of_tail(
            false, "recording ended early: no footer, and its tail is older than its last chunk");
    }
    if (head->chunk > chunks || head->first_event != events + 1) {
        return end_of_tail(true,
                           "its tail goes on from event " + std::to_string(head->first_event) +
                               ", but its whole chunks end with event " + std::to_string(events));
    }
    offset = kTailHead;
    return true;
}

Result<bool> TraceReader::State::end_of_tail(bool torn, std::string reason) {
    if (damage) {
        return finish(TraceEnd::torn, *damage);
    }
    return finish(torn ? TraceEnd::torn : TraceEnd::not_closed, std::move(reason));
}

const char* TraceReader::State::read_row(Bytes payload, TraceChunk& chunk) {
    const std::uint8_t* at = payload.data();
    const std::uint8_t* const row_end = at + payload.size();
    while (at < row_end) {
        if (*at != 0) {
            const std::uint8_t code = *at;
            if (const char* wrong =
                    read_row_item(at, row_end, plans, chunk.events, ledger, counts)) {
                return wrong;
            }
            code < 64 ? ++events : ++notes;
            continue;
        }
        Cursor cursor(Bytes(at + 1, row_end));
        TextKey key;
        const std::uint64_t tenant = cursor.varint();
        key.tenant = static_cast<std::uint32_t>(tenant);
        key.request = cursor.varint();
        key.kind = cursor.u8();
        const Bytes bytes = cursor.take(cursor.varint());
        if (!cursor.ok() || tenant >> 32 != 0) {
            return "a text reaches over its row";
        }
        at += 1 + cursor.position();
        const char* wrong = options.texts ? add_text(key, as_text(bytes), chunk) : nullptr;
        if (wrong != nullptr) {
            return wrong;
        }
    }
    return nullptr;
}

Result<bool> TraceReader::State::next_rows(TraceChunk& chunk) {
    if (offset == 0 || !tail) {
        const auto begun = begin_tail();
        if (!begun || !*begun) {
            return begun;
        }
    }
    chunk.first_event = events + 1;
    chunk.events.clear();
    chunk.texts.clear();
    chunk.from_tail = true;
    text_raw.clear();
    while (chunk.events.size() < kTailEvents && chunk.texts.size() < kTailEvents &&
           offset < tail_size) {
        std::array<std::uint8_t, kRowHead> head{};
        const std::uint64_t left = tail_size - offset;
        const std::string where = "the tail's row at byte " + std::to_string(offset);
        // What was read of this chunk stays; the next call comes back here and ends.
        const auto stop = [&](std::string reason) -> Result<bool> {
            if (!chunk.events.empty() || !chunk.texts.empty()) {
                tail_size = offset;
                if (!damage) {
                    damage = std::move(reason);
                }
                return true;
            }
            return end_of_tail(true, std::move(reason));
        };
        if (left < kRowHead) {
            return stop(where + " is cut");
        }
        if (Status read = tail.read_at(offset, head); !read) {
            return live ? stop(where) : Result<bool>(read.error());
        }
        const std::uint32_t size = get_u32(head.data());
        const std::uint64_t event = get_u64(head.data() + 4);
        const std::uint64_t row_end = offset + kRowHead + size;
        const auto torn_or_changed = [&](const std::string& what) -> Result<bool> {
            return live || end.lost_at(offset, row_end)
                       ? stop(where + " was lost: only zeros follow")
                       : bad(where + " " + what);
        };
        if (size == 0 || size > kRowMax) {
            return torn_or_changed("has a length that it cannot have");
        }
        if (size > left - kRowHead) {
            return stop(where + " is cut");
        }
        std::vector<std::uint8_t>& row = text_raw.emplace_back(size + kVarintMax);
        if (Status read = tail.read_at(offset + kRowHead, {row.data(), size}); !read) {
            return live ? stop(where) : Result<bool>(read.error());
        }
        if (crc32({row.data(), size}, crc32(Bytes(head).first(12))) != get_u32(head.data() + 12)) {
            return torn_or_changed("does not match its checksum");
        }
        if (event != events + 1) {
            return live ? stop(where)
                        : Result<bool>(bad(where + " begins with event " + std::to_string(event) +
                                           "; event " + std::to_string(events + 1) + " is due"));
        }
        if (const char* wrong = read_row({row.data(), size}, chunk)) {
            return bad(where + " is malformed: " + wrong);
        }
        offset = row_end;
    }
    if (chunk.events.empty() && chunk.texts.empty()) {
        return end_of_tail(false, "recording ended early: no footer");
    }
    return true;
}

// --- the class

TraceReader::TraceReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
TraceReader::TraceReader(TraceReader&&) noexcept = default;
TraceReader& TraceReader::operator=(TraceReader&&) noexcept = default;
TraceReader::~TraceReader() = default;

namespace {

// As resolve_trace(), opened.
Result<File> find_trace(const Path& path) {
    auto file = File::open_read(path);
    if (file || !path.has_filename()) {
        return file;
    }
    for (const char* suffix : {".partial", ".kvw.zst", ".kvw.zst.partial"}) {
        auto other = File::open_read(with_suffix(path, suffix));
        if (other) {
            return other;
        }
    }
    return file;
}

struct OpenedHeader {
    ParsedHeader parsed;
    std::vector<std::uint8_t> frame;
};

Result<OpenedHeader> read_header(const File& file, const FileEnd& end) {
    const auto not_a_trace = [&](const char* why) {
        return bad_trace(printable(file.path().string()) + " is not a trace: " + why);
    };
    const auto torn = [&] {
        return Error{ErrorCode::torn, printable(file.path().string()) +
                                          " ends inside its header, at byte " +
                                          std::to_string(end.zeros_from)};
    };
    if (end.size == 0) {
        return not_a_trace("it is empty");
    }
    std::array<std::uint8_t, kFileHeaderFixed> start{};
    const auto known = static_cast<std::size_t>(std::min<std::uint64_t>(end.size, start.size()));
    if (Status read = file.read_at(0, {start.data(), known}); !read) {
        return read.error();
    }
    if (!begins_like_a_trace({start.data(), known})) {
        return not_a_trace("it does not begin like one");
    }
    if (known < start.size()) {
        return torn();
    }
    const std::uint64_t size = kFrameHead + std::uint64_t{get_u32(start.data() + 4)};
    const std::uint64_t schema = get_u32(start.data() + kFileHeaderFixed - 8);
    if (size > kHeaderFrameMax || size != kFileHeaderFixed + schema + 32) {
        return end.lost_at(0, known) ? torn()
                                     : not_a_trace("its header has a length that it cannot have");
    }
    if (size > end.size) {
        return end.sealed ? not_a_trace("its header reaches over its end") : torn();
    }
    OpenedHeader opened;
    opened.frame.resize(size);
    if (Status read = file.read_at(0, opened.frame); !read) {
        return read.error();
    }
    auto parsed = parse_file_header(opened.frame);
    if (!parsed) {
        return end.lost_at(0, size)
                   ? torn()
                   : bad_trace(printable(file.path().string()) + ": " + parsed.error().message);
    }
    opened.parsed = std::move(*parsed);
    return opened;
}

}  // namespace

Result<Path> resolve_trace(const Path& path) {
    const auto file = find_trace(path);
    if (!file) {
        return file.error();
    }
    return file->path();
}

Result<TraceReader> TraceReader::open(const Path& path, const ReaderOptions& options) {
    auto file = find_trace(path);
    if (!file) {
        return file.error();
    }
    auto state = std::make_unique<State>();
    state->path = file->path();
    state->options = options;
    state->is_partial = file->path().extension() == ".partial";
    state->live = state->is_partial && is_live(*file);
    const auto size = file->size();
    if (!size) {
        return size.error();
    }
    const auto end = look_at_end(*file, *size);
    if (!end) {
        return end.error();
    }
    state->end = *end;
    auto opened = read_header(*file, *end);
    if (!opened) {
        return opened.error();
    }
    Status mapped;
    state->plans = make_plans(opened->parsed.kinds, opened->parsed.header.minor, mapped);
    if (!mapped) {
        return state->bad(mapped.error().message);
    }
    state->header = opened->parsed.header;
    state->tree.add(sha256(Bytes(opened->frame)));
    state->seek.add(static_cast<std::uint32_t>(opened->frame.size()), 0);
    state->offset = opened->frame.size();
    state->file = std::move(*file);
    return TraceReader(std::move(state));
}

const TraceHeader& TraceReader::header() const { return state_->header; }

Result<bool> TraceReader::next(TraceChunk& chunk) {
    if (state_->error) {
        return *state_->error;
    }
    auto result = state_->next(chunk);
    if (!result) {
        state_->error = result.error();
    }
    if (!result || !*result) {
        chunk.events.clear();
        chunk.texts.clear();
    }
    return result;
}

const TraceEnding& TraceReader::ending() const {
    check(state_->phase == State::Phase::done,
          "a trace's ending is asked for after its last chunk");
    return state_->ending;
}

Digest256 TraceReader::ledger_digest() const { return state_->ledger.digest(); }

Result<std::vector<TraceSummary>> list_traces(const Path& folder) {
    std::vector<TraceSummary> traces;
    std::error_code failed;
    std::filesystem::directory_iterator entries(folder, failed);
    if (failed == std::errc::no_such_file_or_directory) {
        return traces;
    }
    if (failed) {
        return errno_error("cannot list", folder, failed.value());
    }
    for (const auto& entry : entries) {
        const std::string name = entry.path().filename().string();
        const bool is_partial = name.ends_with(".partial");
        if ((!is_partial && !name.ends_with(".kvw.zst")) || !entry.is_regular_file(failed)) {
            continue;
        }
        TraceSummary summary{.path = entry.path()};
        const auto file = File::open_read(entry.path());
        const auto size = file ? file->size() : Result<std::uint64_t>(std::uint64_t{0});
        const auto end = file && size ? look_at_end(*file, *size) : Result<FileEnd>(FileEnd{});
        if (!file || !size || !end) {
            summary.readable = false;
            traces.push_back(std::move(summary));
            continue;
        }
        const auto opened = read_header(*file, *end);
        if (!opened) {
            continue;
        }
        summary.run_id = opened->parsed.header.run_id;
        summary.created_ns = opened->parsed.header.created_ns;
        summary.bytes = *size;
        summary.end = is_partial && is_live(*file) ? TraceEnd::live
                      : end->sealed                ? TraceEnd::closed
                                                   : TraceEnd::not_closed;
        traces.push_back(std::move(summary));
    }
    std::sort(traces.begin(), traces.end(), [](const TraceSummary& a, const TraceSummary& b) {
        return a.created_ns != b.created_ns ? a.created_ns > b.created_ns : a.path < b.path;
    });
    return traces;
}

}  // namespace kvw
