// What the trace tests share: a folder of their own, a clock that stands still, events of every
// kind.
#pragma once

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "src/base/check.h"
#include "traces/container.h"
#include "traces/schema.h"
#include "traces/trace.h"

namespace kvw::test {

class TempFolder {
  public:
    TempFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "kvw-traces-XXXXXX").string();
        check(::mkdtemp(name.data()) != nullptr, "a temporary folder can be made");
        path_ = name;
    }
    ~TempFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    Path operator/(const std::string& name) const { return path_ / name; }
    const Path& path() const { return path_; }

  private:
    Path path_;
};

class StoppedClock final : public Clock {
  public:
    explicit StoppedClock(std::int64_t wall_ns = 1'700'000'000'000'000'000) : wall_ns_(wall_ns) {}
    std::int64_t wall_ns() const override { return wall_ns_; }
    std::int64_t monotonic_ns() const override { return 0; }

  private:
    std::int64_t wall_ns_;
};

inline RunId some_run_id(std::uint8_t first = 0x10) {
    RunId id{};
    for (std::size_t i = 0; i < id.size(); ++i) {
        id[i] = static_cast<std::uint8_t>(first + i);
    }
    return id;
}

inline std::string bytes_of(const Path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

inline void put_bytes(const Path& path, std::string_view bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// An event with its own copy of the bytes, so that it outlives what it was read from.
struct KeptEvent {
    Event event;
    std::string bytes;
    std::string line() const {
        Event whole = event;
        whole.bytes = bytes;
        return to_text(whole);
    }
};

// Small numbers mostly, sometimes anything that the field can hold.
inline std::uint64_t random_field(std::mt19937_64& random, FieldCode code) {
    const std::uint64_t any = random();
    const std::uint64_t value =
        any % 8 != 0 ? random() >> (44 + random() % 20) : random() >> random() % 64;
    return code == FieldCode::fixed32 ? value & 0xffffffff : value;
}

inline KeptEvent random_event(std::mt19937_64& random, const KindSchema& schema) {
    KeptEvent kept;
    kept.event.kind = schema.kind;
    for (std::size_t i = 0; i < schema.fields.size(); ++i) {
        kept.event.fields[i] = random_field(random, schema.fields[i].code);
    }
    if (schema.has_bytes) {
        for (std::size_t n = random() % 40; n > 0; --n) {
            kept.bytes += static_cast<char>(random());
        }
    }
    return kept;
}

inline void note(TraceWriter& writer, const KeptEvent& kept) {
    Event event = kept.event;
    event.bytes = kept.bytes;
    writer.note(event);
}

// Everything that a reader says about a file, as lines.
struct Read {
    std::vector<std::string> lines;  // to_text of every event
    std::vector<std::string> texts;  // "tenant/request kind bytes", ids of one request joined
    std::optional<TraceEnding> ending;
    std::optional<Error> error;  // of open() or next()
    Digest256 ledger_digest{};
    std::uint64_t numbered = 0;
    bool from_tail = false;
};

inline void keep_text(std::vector<std::string>& texts, const TextRecord& text) {
    const std::string head = std::to_string(number(text.tenant)) + "/" +
                             std::to_string(number(text.request)) + " " + name_of(text.kind) + " ";
    if (text.kind == TextKind::ids) {
        for (std::string& earlier : texts) {
            if (earlier.starts_with(head)) {
                earlier += text.bytes;
                return;
            }
        }
    }
    texts.push_back(head + std::string(text.bytes));
}

// `lines` false: only counted, for traces with many events.
inline Read read_all(const Path& path, const ReaderOptions& options = {}, bool lines = true) {
    Read read;
    auto reader = TraceReader::open(path, options);
    if (!reader) {
        read.error = reader.error();
        return read;
    }
    TraceChunk chunk;
    for (;;) {
        const auto more = reader->next(chunk);
        if (!more) {
            read.error = more.error();
            return read;
        }
        if (!*more) {
            break;
        }
        for (const Event& event : chunk.events) {
            if (lines) {
                read.lines.push_back(to_text(event));
            }
            read.numbered += event.numbered();
        }
        for (const TextRecord& text : chunk.texts) {
            keep_text(read.texts, text);
        }
        read.from_tail |= chunk.from_tail;
    }
    read.ending = reader->ending();
    read.ledger_digest = reader->ledger_digest();
    return read;
}

inline std::unique_ptr<TraceWriter> new_writer(const Path& path, TextMode text = TextMode::plain,
                                               bool replace = false) {
    auto writer = TraceWriter::create(
        {.path = path, .run_id = some_run_id(), .text = text, .replace = replace}, StoppedClock());
    check(writer.has_value(), "a test can create its trace");
    return std::move(*writer);
}

inline std::string leb128(std::uint64_t value) {
    std::uint8_t bytes[traces::kVarintMax];
    const std::uint8_t* end = traces::put_varint(bytes, value);
    return {reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(end - bytes)};
}

// One request that is answered with `tokens` tokens, as the engine would note it: per token a step,
// its rows, its witness, its sample and the id. Commits at each step.
inline void note_decode(TraceWriter& writer, std::uint64_t request, std::uint64_t tokens,
                        std::mt19937_64& random) {
    using namespace events;
    const RequestId id{request};
    const TenantId tenant{1};
    writer.note(Event::of(events::Submit{request, 1, 5, tokens, random(), random(), 0, 2}));
    writer.text({tenant, id, TextKind::prompt, "Once upon a time there was"});
    writer.note(Event::of(Admit{request, 5 + tokens, random(), random()}));
    for (std::uint64_t i = 0; i < tokens; ++i) {
        const std::uint64_t end = 5 + i;
        if (i % kPageTokens == 0) {
            const std::uint64_t page = i / kPageTokens;
            writer.note(Event::of(Alloc{request, 0, page, page, request}));
            writer.note(Event::of(PoisonCheck{page, 240, 0}));
        }
        writer.note(Event::of(events::Step{i + 1, 1}));
        writer.note(
            Event::of(events::Rows{request, i == 0 ? 5u : 1u, end, 0, 1 + i / kPageTokens}));
        writer.note(Event::of(Witness{request, random() & 0xffffffff}));
        writer.note(Event::of(Sample{request, end, random() & 0xffffffff}));
        // Ranks of tokens fall off roughly like words do.
        const double u = std::uniform_real_distribution<double>(0, 1)(random);
        writer.text(
            {tenant, id, TextKind::ids, leb128(static_cast<std::uint64_t>(std::pow(49152.0, u)))});
        check(writer.commit().has_value(), "a test's disk has room");
    }
    writer.note(Event::of(Finish{request, 2, 5, tokens, tokens * 4, random(), random(), random(), 0}));
}

// A closed trace put together from parts, every hash right: for what no recorder of ours would
// write.
struct HandMade {
    struct Chunk {
        std::uint32_t events = 0, notes = 0;
        std::string raw;                                           // ledger section
        std::vector<std::pair<std::uint32_t, std::string>> texts;  // tenant, raw text section
    };
    TraceHeader header{
        .major = kTraceMajor, .run_id = some_run_id(), .created_ns = 0, .text = TextMode::plain};
    std::string schema = traces::schema_text(traces::own_schema());
    std::vector<Chunk> chunks;
    std::string row_forms;
    std::vector<std::pair<std::uint8_t, std::uint64_t>> kinds;  // for the footer
    bool clean_end = true;

    std::string bytes() const {
        using namespace traces;
        std::string file;
        MerkleTree tree;
        SeekTable seek;
        const auto add = [&](const std::string& frame, std::size_t raw) {
            file += frame;
            tree.add(sha256(frame));
            seek.add(static_cast<std::uint32_t>(frame.size()), static_cast<std::uint32_t>(raw));
        };
        add(file_header_frame(header, schema), 0);
        Footer footer{.run_id = header.run_id,
                      .chunks = chunks.size(),
                      .clean_end = clean_end,
                      .kinds = kinds};
        for (std::size_t i = 0; i < chunks.size(); ++i) {
            const Chunk& chunk = chunks[i];
            std::vector<std::string> sections{pack(as_bytes(chunk.raw), 1)};
            const auto section = [&](std::uint32_t tenant, std::size_t raw) {
                return Section{tenant, static_cast<std::uint32_t>(sections.back().size()),
                               static_cast<std::uint32_t>(raw), sha256(sections.back())};
            };
            ChunkHeader head{.run_id = header.run_id,
                             .number = i,
                             .first_event = footer.events + 1,
                             .events = chunk.events,
                             .notes = chunk.notes,
                             .ledger = section(0, chunk.raw.size())};
            for (const auto& [tenant, raw] : chunk.texts) {
                sections.push_back(pack(as_bytes(raw), 1));
                head.texts.push_back(section(tenant, raw.size()));
            }
            add(chunk_header_frame(head), 0);
            for (std::size_t k = 0; k < sections.size(); ++k) {
                add(sections[k], k == 0 ? chunk.raw.size() : chunk.texts[k - 1].second.size());
            }
            footer.events += chunk.events;
            footer.notes += chunk.notes;
        }
        footer.leaves = tree.leaves();
        footer.root = tree.root();
        footer.ledger_digest = sha256(row_forms);
        const std::string frame = footer_frame(footer);
        seek.add(static_cast<std::uint32_t>(frame.size()), 0);
        return file + frame + seek.frame();
    }
};

}  // namespace kvw::test
