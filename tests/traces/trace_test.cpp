#include "traces/trace.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::test;

namespace {

struct Written {
    std::vector<std::string> lines;
    std::vector<std::string> texts;
    std::string row_forms;
    std::uint64_t numbered = 0;
};

void note_random(TraceWriter& writer, std::mt19937_64& random, Written& written) {
    const auto kinds = event_schema();
    const KeptEvent kept = random_event(random, kinds[random() % kinds.size()]);
    note(writer, kept);
    written.lines.push_back(kept.line());
    written.numbered += kept.event.numbered();
    Event event = kept.event;
    event.bytes = kept.bytes;
    append_row_form(event, written.row_forms);
}

void text_random(TraceWriter& writer, std::mt19937_64& random, Written& written) {
    const auto kind = static_cast<TextKind>(1 + random() % 5);
    std::string bytes(random() % 50, '\0');
    for (char& byte : bytes) {
        byte = static_cast<char>(random());
    }
    const std::uint32_t tenant = 1 + static_cast<std::uint32_t>(random() % 4);
    const TextRecord record{TenantId{tenant}, RequestId{tenant * 10 + random() % 3}, kind, bytes};
    writer.text(record);
    keep_text(written.texts, record);
}

void sort(std::vector<std::string>& lines) { std::sort(lines.begin(), lines.end()); }

// Enough events for several chunks, in few calls.
std::uint64_t note_many(TraceWriter& writer, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        writer.note(Event::of(events::WitnessSum{i % 9, i, i * 0x9e3779b97f4a7c15ull}));
    }
    return count;
}

}  // namespace

TEST_CASE("a closed trace gives back every event, every text and its totals") {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        TempFolder folder;
        const Path path = folder / "run.kvw.zst";
        std::mt19937_64 random(seed);
        auto writer = new_writer(path);
        Written written;
        CHECK(writer->next_event() == 1);
        for (int step = 0; step < 50; ++step) {
            for (std::size_t n = random() % 20; n > 0; --n) {
                note_random(*writer, random, written);
            }
            if (random() % 3 == 0) {
                text_random(*writer, random, written);
            }
            CHECK(writer->next_event() == written.numbered + 1);
            REQUIRE(writer->commit().has_value());
        }
        const auto totals = writer->close();
        REQUIRE(totals.has_value());

        Read read = read_all(path);
        REQUIRE_FALSE(read.error.has_value());
        CHECK(read.lines == written.lines);
        sort(read.texts);
        sort(written.texts);
        CHECK(read.texts == written.texts);
        REQUIRE(read.ending->end == TraceEnd::closed);
        CHECK(read.ending->last_event == written.numbered);
        CHECK(read.ending->reason.empty());
        CHECK(read.ending->totals->events == totals->events);
        CHECK(read.ending->totals->ledger_digest == sha256(written.row_forms));
        CHECK(read.ending->totals->ledger_digest == totals->ledger_digest);
        CHECK(read.ledger_digest == totals->ledger_digest);
        CHECK(read.ending->totals->root == totals->root);
        CHECK(read.ending->totals->bytes == totals->bytes);
        CHECK(read.ending->totals->text_bytes == totals->text_bytes);
        CHECK(std::filesystem::file_size(path) == totals->bytes);
        CHECK_FALSE(std::filesystem::exists(folder / "run.kvw.zst.partial"));
        CHECK_FALSE(std::filesystem::exists(folder / "run.kvw.zst.tail"));

        struct stat facts {};
        REQUIRE(::stat(path.c_str(), &facts) == 0);
        CHECK((facts.st_mode & 0777) == 0600);
    }
}

TEST_CASE("the header says which run, when and how") {
    TempFolder folder;
    auto writer = TraceWriter::create({.path = folder / "a.kvw.zst",
                                       .run_id = some_run_id(7),
                                       .text = TextMode::none,
                                       .imported = true},
                                      StoppedClock(12345));
    REQUIRE(writer.has_value());
    (*writer)->text({TenantId{1}, RequestId{1}, TextKind::prompt, "is not recorded"});
    (*writer)->note(Event::of(events::Step{1, 1}));
    REQUIRE((*writer)->close().has_value());
    CHECK(bytes_of(folder / "a.kvw.zst").find("is not recorded") == std::string::npos);
    auto reader = TraceReader::open(folder / "a.kvw.zst");
    REQUIRE(reader.has_value());
    CHECK(reader->header().major == kTraceMajor);
    CHECK(reader->header().run_id == some_run_id(7));
    CHECK(reader->header().created_ns == 12345);
    CHECK(reader->header().text == TextMode::none);
    CHECK(reader->header().imported);
    TraceChunk chunk;
    REQUIRE(*reader->next(chunk));
    CHECK(chunk.texts.empty());
    TraceReader moved = std::move(*reader);
    CHECK_FALSE(*moved.next(chunk));
    CHECK(moved.ending().end == TraceEnd::closed);
    CHECK(to_string(some_run_id(7)) == "0708090a0b0c0d0e0f10111213141516");
    CHECK(new_run_id() != new_run_id());
}

TEST_CASE("many events become several chunks, which number their events through") {
    TempFolder folder;
    auto writer = new_writer(folder / "a.kvw.zst");
    const std::uint64_t count = note_many(*writer, 60000);
    REQUIRE(writer->close().has_value());
    auto reader = TraceReader::open(folder / "a.kvw.zst");
    REQUIRE(reader.has_value());
    TraceChunk chunk;
    std::uint64_t seen = 0, chunks = 0;
    for (; *reader->next(chunk); ++chunks) {
        CHECK(chunk.first_event == seen + 1);
        for (const Event& event : chunk.events) {
            const auto sum = event.as<events::WitnessSum>();
            REQUIRE(sum.positions == seen);
            REQUIRE(sum.sum == seen * 0x9e3779b97f4a7c15ull);
            ++seen;
        }
    }
    CHECK(seen == count);
    CHECK(chunks >= 3);
    CHECK(reader->ending().end == TraceEnd::closed);
    CHECK(*reader->next(chunk) == false);
    CHECK(chunk.events.empty());
}

TEST_CASE("a text longer than a section comes back whole, whoever else has text meanwhile") {
    TempFolder folder;
    std::string longest;
    std::mt19937_64 random(5);
    while (longest.size() < 3'000'000) {
        longest += static_cast<char>('a' + random() % 26);
    }
    auto writer = new_writer(folder / "a.kvw.zst");
    writer->text({TenantId{7}, RequestId{1}, TextKind::prompt, "short"});
    writer->text({TenantId{5}, RequestId{2}, TextKind::prompt, longest});
    writer->text({TenantId{5}, RequestId{2}, TextKind::ids, "xy"});
    writer->text({TenantId{2}, RequestId{3}, TextKind::prompt, longest.substr(0, 100000)});
    writer->text({TenantId{5}, RequestId{2}, TextKind::ids, "z"});
    writer->note(Event::of(events::Step{1, 1}));
    REQUIRE(writer->commit().has_value());
    std::vector<std::string> expected{"7/1 prompt short", "5/2 prompt " + longest, "5/2 ids xyz",
                                      "2/3 prompt " + longest.substr(0, 100000)};
    sort(expected);
    const auto texts_of = [](const Path& path) {
        Read read = read_all(path);
        CHECK_FALSE(read.error.has_value());
        sort(read.texts);
        return read.texts;
    };
    CHECK(texts_of(folder / "a.kvw.zst") == expected);  // partly from the tail
    REQUIRE(writer->close().has_value());
    CHECK(texts_of(folder / "a.kvw.zst") == expected);
    const Read without = read_all(folder / "a.kvw.zst", {.texts = false});
    CHECK(without.texts.empty());
    CHECK(without.ending->end == TraceEnd::closed);
}

TEST_CASE("what was committed can be read while the recorder lives, and is said to be live") {
    TempFolder folder;
    const Path path = folder / "a.kvw.zst";
    auto writer = new_writer(path);
    note_many(*writer, 40000);
    REQUIRE(writer->commit().has_value());
    writer->note(Event::of(events::Step{1, 1}));  // noted, not committed
    const Read read = read_all(path);
    REQUIRE_FALSE(read.error.has_value());
    CHECK(read.lines.size() == 40000);
    CHECK(read.ending->last_event == 40000);
    CHECK(read.ending->end == TraceEnd::live);
    CHECK(read.from_tail);
    writer.reset();  // the lock goes, the files stay
    CHECK(read_all(path).ending->end == TraceEnd::not_closed);
    CHECK(read_all(folder / "a").ending->end == TraceEnd::not_closed);
    CHECK(read_all(folder / "a.kvw.zst.partial").ending->end == TraceEnd::not_closed);
}

TEST_CASE("a commit is one write of what is new") {
    TempFolder folder;
    auto writer = new_writer(folder / "a.kvw.zst");
    const Path tail = folder / "a.kvw.zst.tail";
    REQUIRE(writer->commit().has_value());
    CHECK(std::filesystem::file_size(tail) == 0);
    writer->note(Event::of(events::Step{1, 1}));
    writer->note(Event::of(events::Drain{1}));
    CHECK(std::filesystem::file_size(tail) == 0);
    REQUIRE(writer->commit().has_value());
    const auto first = std::filesystem::file_size(tail);
    CHECK(first == traces::kTailHead + traces::kRowHead + 3 + 2);
    REQUIRE(writer->commit().has_value());
    CHECK(std::filesystem::file_size(tail) == first);
    writer->note(Event::of(events::Drain{2}));
    REQUIRE(writer->commit().has_value());
    CHECK(std::filesystem::file_size(tail) == first + traces::kRowHead + 2);
    const Read read = read_all(folder / "a.kvw.zst");
    CHECK(read.lines ==
          std::vector<std::string>{"step step=1 sequences=1", "drain page=1", "drain page=2"});
}

TEST_CASE("nothing that exists is replaced or taken over unless asked") {
    TempFolder folder;
    const auto create = [&](bool replace) {
        return TraceWriter::create(
            {.path = folder / "a.kvw.zst", .run_id = some_run_id(), .replace = replace},
            StoppedClock());
    };
    const auto refusal = [&](bool replace) {
        const auto writer = create(replace);
        REQUIRE_FALSE(writer.has_value());
        CHECK(writer.error().code == ErrorCode::file_exists);
        return writer.error().message;
    };
    auto first = create(false);
    REQUIRE(first.has_value());
    CHECK(refusal(false).find("is being recorded") != std::string::npos);
    first->reset();
    CHECK(refusal(true).find("a.kvw.zst.partial is the evidence") != std::string::npos);
    std::filesystem::remove(folder / "a.kvw.zst.partial");

    put_bytes(folder / "a.kvw.zst.tail", "rows of someone");
    CHECK(refusal(false).find(".tail") != std::string::npos);
    CHECK(bytes_of(folder / "a.kvw.zst.tail") == "rows of someone");
    CHECK_FALSE(std::filesystem::exists(folder / "a.kvw.zst.partial"));
    std::filesystem::remove(folder / "a.kvw.zst.tail");

    put_bytes(folder / "a.kvw.zst", "precious");
    CHECK(refusal(false).find("exists") != std::string::npos);
    auto forced = create(true);
    REQUIRE(forced.has_value());
    CHECK(bytes_of(folder / "a.kvw.zst") == "precious");  // until the new one is whole
    REQUIRE((*forced)->close().has_value());
    CHECK(read_all(folder / "a.kvw.zst").ending->end == TraceEnd::closed);

    auto late = TraceWriter::create({.path = folder / "b.kvw.zst", .run_id = some_run_id()},
                                    StoppedClock());
    REQUIRE(late.has_value());
    put_bytes(folder / "b.kvw.zst", "came in between");
    const auto closed = (*late)->close();
    REQUIRE_FALSE(closed.has_value());
    CHECK(closed.error().code == ErrorCode::file_exists);
    CHECK(bytes_of(folder / "b.kvw.zst") == "came in between");
    CHECK(read_all(folder / "b.kvw.zst.partial").ending->end == TraceEnd::live);
    late->reset();
    CHECK(read_all(folder / "b.kvw.zst.partial").ending->end ==
          TraceEnd::closed);  // whole, under its open name

    CHECK(TraceWriter::create({.path = folder / "no/where.kvw.zst"}, StoppedClock()).error().code ==
          ErrorCode::io);
    CHECK(TraceWriter::create({.path = folder / "c.kvw.zst", .text = TextMode::encrypted},
                              StoppedClock())
              .error()
              .code == ErrorCode::usage);
}

TEST_CASE("only a regular file is replaced by a trace") {
    TempFolder folder;
    REQUIRE(::mkfifo((folder / "a.kvw.zst").c_str(), 0600) == 0);
    REQUIRE(::mkfifo((folder / "b.kvw.zst.tail").c_str(), 0600) == 0);
    for (const char* name : {"a.kvw.zst", "b.kvw.zst"}) {
        const auto writer = TraceWriter::create(
            {.path = folder / name, .run_id = some_run_id(), .replace = true}, StoppedClock());
        REQUIRE_FALSE(writer.has_value());
        CHECK(writer.error().code == ErrorCode::file_exists);
        CHECK_FALSE(std::filesystem::exists(folder / (std::string(name) + ".partial")));
    }
    CHECK(std::filesystem::is_fifo(folder / "a.kvw.zst"));
    CHECK(std::filesystem::is_fifo(folder / "b.kvw.zst.tail"));
}

TEST_CASE("a name stands for the trace, then for its open form, and an empty one for none") {
    TempFolder folder;
    const auto resolved = [&](const char* name) {
        const auto path = resolve_trace(folder / name);
        return path ? path->filename().string() : std::string(error_name(path.error().code));
    };
    CHECK(resolved("a") == "io");
    put_bytes(folder / "a.kvw.zst.partial", "x");
    CHECK(resolved("a") == "a.kvw.zst.partial");
    CHECK(resolved("a.kvw.zst") == "a.kvw.zst.partial");
    put_bytes(folder / "a.kvw.zst", "x");
    CHECK(resolved("a") == "a.kvw.zst");
    put_bytes(folder / ".partial", "x");
    CHECK(resolved("") == "io");  // the folder itself
    CHECK_FALSE(resolve_trace(""));
}

TEST_CASE("a discarded trace leaves nothing") {
    TempFolder folder;
    auto writer = new_writer(folder / "a.kvw.zst");
    writer->note(Event::of(events::Step{1, 1}));
    REQUIRE(writer->commit().has_value());
    writer->discard();
    writer.reset();
    CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("what is no trace is said to be none") {
    TempFolder folder;
    const auto code_of = [&](std::string_view bytes) {
        put_bytes(folder / "x", bytes);
        const auto reader = TraceReader::open(folder / "x");
        REQUIRE_FALSE(reader.has_value());
        CHECK(reader.error().message.find((folder / "x").string()) != std::string::npos);
        return reader.error().code;
    };
    CHECK(code_of("") == ErrorCode::bad_trace);
    CHECK(code_of("hello") == ErrorCode::bad_trace);
    CHECK(code_of(std::string(5000, 'x')) == ErrorCode::bad_trace);
    CHECK(code_of(std::string(5000, '\0')) == ErrorCode::bad_trace);
    CHECK(code_of(traces::pack(traces::as_bytes("a zstd frame"), 1)) == ErrorCode::bad_trace);
    CHECK(TraceReader::open(folder / "absent").error().code == ErrorCode::io);
    CHECK(TraceReader::open(folder.path()).error().code == ErrorCode::io);

    HandMade future;
    future.header.major = kTraceMajor + 1;
    put_bytes(folder / "x", future.bytes());
    const auto reader = TraceReader::open(folder / "x");
    REQUIRE_FALSE(reader.has_value());
    CHECK(reader.error().code == ErrorCode::bad_trace);
    CHECK(reader.error().message.find("version 2") != std::string::npos);
}

TEST_CASE("traces of a folder are listed newest first, with how they end") {
    TempFolder folder;
    const auto write = [&](const std::string& name, std::int64_t at) {
        auto writer =
            TraceWriter::create({.path = folder / name, .run_id = some_run_id()}, StoppedClock(at));
        REQUIRE(writer.has_value());
        (*writer)->note(Event::of(events::Step{1, 1}));
        REQUIRE((*writer)->commit().has_value());
        return std::move(*writer);
    };
    REQUIRE(write("old.kvw.zst", 100)->close().has_value());
    write("crashed.kvw.zst", 300).reset();
    auto open = write("open.kvw.zst", 200);
    put_bytes(folder / "other.kvw.zst", "no trace");
    put_bytes(folder / "note.txt", "no trace");
    const auto traces = list_traces(folder.path());
    REQUIRE(traces.has_value());
    REQUIRE(traces->size() == 3);
    CHECK((*traces)[0].path == folder / "crashed.kvw.zst.partial");
    CHECK((*traces)[0].end == TraceEnd::not_closed);
    CHECK((*traces)[1].end == TraceEnd::live);
    CHECK((*traces)[2].path == folder / "old.kvw.zst");
    CHECK((*traces)[2].end == TraceEnd::closed);
    CHECK((*traces)[2].created_ns == 100);
    CHECK((*traces)[2].bytes == std::filesystem::file_size(folder / "old.kvw.zst"));
    CHECK(list_traces(folder / "none")->empty());
}

TEST_CASE("an event or a text over its limit stops the recording") {
    TempFolder folder;
    auto writer = new_writer(folder / "a.kvw.zst");
    const std::string big(traces::kEventBytesMax + 1, 'x');
    writer->note(Event::of(events::Config{1}, std::string_view(big).substr(1)));
    REQUIRE(writer->commit().has_value());
    writer->note(Event::of(events::Config{1}, big));
    CHECK(writer->commit().error().code == ErrorCode::bad_input);
    CHECK(writer->commit().error().code == ErrorCode::bad_input);
    CHECK(writer->close().error().code == ErrorCode::bad_input);
    writer.reset();
    CHECK(read_all(folder / "a.kvw.zst").ending->last_event == 1);
}

TEST_CASE("a decoded token costs few bytes") {
    TempFolder folder;
    std::mt19937_64 random(1);
    auto writer = new_writer(folder / "a.kvw.zst");
    note_decode(*writer, 1, 2000, random);
    const auto totals = writer->close();
    REQUIRE(totals.has_value());
    CHECK(totals->bytes <
          2000 * 11);  // 8 of them are the witness and the logits digest, which are noise
    auto empty = new_writer(folder / "b.kvw.zst");
    CHECK(empty->close()->bytes < 1400);
}

TEST_CASE("a full disk ends the recording with an error and keeps what was acknowledged") {
    std::signal(SIGXFSZ, SIG_IGN);
    struct rlimit before {};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    for (rlim_t limit : {500u, 900u, 1000u, 1500u, 2500u, 60000u, 300000u}) {
        CAPTURE(limit);
        TempFolder folder;
        const Path path = folder / "a.kvw.zst";
        ::setrlimit(RLIMIT_FSIZE, [&] {
            static struct rlimit low;
            low = before;
            low.rlim_cur = limit;
            return &low;
        }());
        std::uint64_t noted = 0, acknowledged = 0;
        std::optional<Error> error;
        {
            auto created =
                TraceWriter::create({.path = path, .run_id = some_run_id()}, StoppedClock());
            if (!created) {
                error = created.error();
            }
            while (!error) {
                noted += note_many(**created, 500);
                const Status committed = (*created)->commit();
                if (committed) {
                    acknowledged = noted;
                } else {
                    error = committed.error();
                    CHECK((*created)->commit().error().code == error->code);
                    CHECK((*created)->close().error().code == error->code);
                }
            }
        }
        ::setrlimit(RLIMIT_FSIZE, &before);
        CHECK(error->code == ErrorCode::disk_full);
        if (acknowledged == 0 && !std::filesystem::exists(folder / "a.kvw.zst.partial")) {
            continue;  // not even the header fitted, and nothing was left behind
        }
        const Read read = read_all(path, {}, false);
        REQUIRE_FALSE(read.error.has_value());
        CHECK(read.ending->end != TraceEnd::closed);
        CHECK(read.ending->last_event >= acknowledged);
        CHECK(read.ending->last_event == read.numbered);
    }
}
