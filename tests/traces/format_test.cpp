// The format as others meet it: newer recorders, the zstd command, and the worked example of
// FORMAT.md.
#include <doctest/doctest.h>
#include <zstd.h>

#include <cstdlib>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::test;

namespace {

// step (30) as we know it, and three kinds and a field from a future minor version.
const std::string kFutureSchema =
    "30 step step:d sequences:v\n"
    "33 witness request:d colour:v? sum:4\n"
    "60 merge request:d rows:v\n"
    "61 mood? value:8*\n"
    "70 weather$? degrees:v\n";

HandMade future_trace() {
    HandMade made;
    made.header.minor = 9;
    made.schema = kFutureSchema;
    HandMade::Chunk chunk;
    chunk.events = 5;
    chunk.notes = 1;
    const auto column = [&](std::string bytes) { chunk.raw += leb128(bytes.size()) + bytes; };
    using namespace std::string_literals;
    column("\x1e\x3c\x3d\x46\x21\x3c"s);          // step merge mood weather witness merge
    column("\x02"s);                              // step.step = 1
    column("\x04"s);                              // step.sequences = 4
    column("\x04"s);                              // witness.request = 2
    column("\x07"s);                              // witness.colour = 7
    column("\x78\x56\x34\x12"s);                  // witness.sum
    column("\x02\x02"s);                          // merge.request = 1, 2
    column("\x05\x06"s);                          // merge.rows
    column("\x01\x02\x03\x04\x05\x06\x07\x08"s);  // mood.value
    column("\x15"s);                              // weather.degrees
    column("\x04"s);                              // weather: four bytes
    column("rain"s);
    made.chunks.push_back(chunk);
    made.row_forms = "\x1e\x01\x04"s + "\x3c\x01\x05"s + "\x3d"s +
                     "\x21\x02\x07\xf8\xac\xd1\x91\x01"s + "\x3c\x02\x06"s;
    made.kinds = {{30, 1}, {33, 1}, {60, 2}, {61, 1}, {70, 1}};
    return made;
}

// Hex digits of the golden file; everything behind '#' is for people.
std::string bytes_of_dump(const std::string& dump) {
    std::string digits;
    bool comment = false;
    for (const char c : dump) {
        comment = c == '#' || (comment && c != '\n');
        if (!comment && std::isxdigit(static_cast<unsigned char>(c))) {
            digits += c;
        }
    }
    return unhex(digits);
}

class Dump {
  public:
    explicit Dump(std::string bytes) : bytes_(std::move(bytes)) {}
    void part(std::size_t size, const std::string& what) {
        for (std::size_t done = 0; done < size; done += 16) {
            const std::size_t here = std::min<std::size_t>(16, size - done);
            std::string line;
            for (std::size_t i = 0; i < here; ++i) {
                line += hex(traces::as_bytes(bytes_).subspan(at_ + i, 1));
                line += i + 1 < here ? " " : "";
            }
            if (done == 0) {
                line.resize(std::max<std::size_t>(line.size(), 47), ' ');
                line += "  # " + std::to_string(at_) + ": " + what;
            }
            text_ += line + "\n";
            at_ += here;
        }
    }
    std::size_t at() const { return at_; }
    std::uint32_t u32(std::size_t offset) const {
        return traces::get_u32(traces::as_bytes(bytes_).data() + at_ + offset);
    }
    bool done() const { return at_ == bytes_.size(); }
    const std::string& text() const { return text_; }

  private:
    std::string bytes_, text_;
    std::size_t at_ = 0;
};

std::string tiny_trace(const TempFolder& folder) {
    auto writer = new_writer(folder / "tiny.kvw.zst");
    writer->note(Event::of(events::NoteClock{1'700'000'000'000'000'000, 5}));
    writer->note(Event::of(events::Tenant{1}, "acme"));
    writer->note(
        Event::of(events::Submit{1, 1, 2, 1, 0x1111111111111111, 0x2222222222222222, 1, 2}));
    writer->text({TenantId{1}, RequestId{1}, TextKind::prompt, "Hi"});
    writer->note(Event::of(events::Alloc{1, 0, 0, 3, 1}));
    writer->note(Event::of(events::Step{1, 1}));
    writer->note(Event::of(events::Rows{1, 2, 2, 0, 1}));
    writer->note(Event::of(events::Witness{1, 0xcafef00d}));
    writer->note(Event::of(events::Slot{1, 0, 1, 1}));
    writer->note(Event::of(events::Sample{1, 2, 0x0badcafe}));
    writer->text({TenantId{1}, RequestId{1}, TextKind::ids, leb128(300)});
    check(writer->commit().has_value() && writer->close().has_value(),
          "a test can write its trace");
    return bytes_of(folder / "tiny.kvw.zst");
}

std::string annotated(const std::string& bytes) {
    Dump dump(bytes);
    const auto head = [&](const char* what) {
        dump.part(4, std::string("skippable frame: ") + what);
        dump.part(4, "its length");
        dump.part(8, "own magic");
    };
    std::uint32_t size = dump.u32(4);
    head("file header");
    dump.part(4, "version: major, minor");
    dump.part(4, "text mode, flags, two zero bytes");
    dump.part(16, "run id");
    dump.part(8, "created, ns since the epoch");
    dump.part(4, "schema: packed bytes");
    dump.part(4, "schema: decoded bytes");
    dump.part(size - 48 - 32, "schema, a zstd frame");
    dump.part(32, "SHA-256 of bytes 0 up to here");

    const std::uint32_t ledger = dump.u32(56), texts = dump.u32(96);
    head("chunk header");
    dump.part(16, "run id");
    dump.part(8, "chunk number");
    dump.part(8, "first event");
    dump.part(4, "numbered events");
    dump.part(4, "notes");
    dump.part(4, "ledger: packed bytes");
    dump.part(4, "ledger: decoded bytes");
    dump.part(32, "ledger: SHA-256 as stored");
    dump.part(4, "text sections");
    check(texts == 1, "the example has one text section");
    dump.part(4, "text: tenant");
    const std::uint32_t text = dump.u32(0);
    dump.part(4, "text: packed bytes");
    dump.part(4, "text: decoded bytes");
    dump.part(32, "text: SHA-256 as stored");
    dump.part(32, "SHA-256 of this frame up to here");
    dump.part(ledger, "ledger section, a zstd frame");
    dump.part(text, "text section of tenant 1, a zstd frame");

    size = dump.u32(4);
    head("footer");
    dump.part(16, "run id");
    dump.part(8, "chunks");
    dump.part(8, "numbered events");
    dump.part(8, "notes");
    dump.part(8, "leaves");
    dump.part(32, "digest.ledger");
    dump.part(32, "root");
    dump.part(4, "flags: clean end");
    dump.part(4, "kinds that occur");
    dump.part(size - 128 - 32, "kind and count of each");
    dump.part(32, "SHA-256 of this frame up to here");
    size = dump.u32(4);
    dump.part(4, "skippable frame: seek table");
    dump.part(4, "its length");
    dump.part(size - 9, "packed and decoded bytes of each frame");
    dump.part(4, "frames");
    dump.part(1, "descriptor");
    dump.part(4, "seekable magic");
    check(dump.done(), "the example is annotated to its end");
    return dump.text();
}

}  // namespace

TEST_CASE("events of a newer minor version are skipped, counted and keep their numbers") {
    TempFolder folder;
    HandMade made = future_trace();
    // Kinds of ours that the file's schema leaves out do not occur in it: that is fine.
    put_bytes(folder / "x", made.bytes());
    const Read read = read_all(folder / "x");
    REQUIRE_FALSE(read.error.has_value());
    CHECK(read.lines ==
          std::vector<std::string>{"step step=1 sequences=4", "unknown kind=0", "unknown kind=0",
                                   "witness request=2 sum=0x12345678", "unknown kind=0"});
    CHECK(read.ending->end == TraceEnd::closed);
    CHECK(read.ending->unknown_critical == 2);   // merge
    CHECK(read.ending->unknown_ignorable == 3);  // mood, weather, witness with its colour
    CHECK(read.ending->last_event == 5);
    CHECK(read.ledger_digest == sha256(made.row_forms));
}

TEST_CASE("a schema that lacks what we know, or turns facts into notes, is a bad trace") {
    TempFolder folder;
    for (const char* schema : {"30 step step:d\n",              // no sequences
                               "5 tenant tenant:d\n",           // no bytes
                               "80 step step:d sequences:v\n",  // a note now
                               "30 step step:d sequences:v", "nonsense\n"}) {
        CAPTURE(schema);
        HandMade made;
        made.schema = schema;
        put_bytes(folder / "x", made.bytes());
        const auto reader = TraceReader::open(folder / "x");
        REQUIRE_FALSE(reader.has_value());
        CHECK(reader.error().code == ErrorCode::bad_trace);
    }
}

TEST_CASE("sections that are well hashed and ill formed are bad traces") {
    TempFolder folder;
    using namespace std::string_literals;
    const auto verdict = [&](HandMade::Chunk chunk, bool good_totals = true) {
        HandMade made;
        made.kinds = {{24, 1}};
        made.row_forms = "\x18\x04"s;
        made.chunks = {std::move(chunk)};
        if (!good_totals) {
            made.kinds = {{24, 2}};
        }
        put_bytes(folder / "x", made.bytes());
        return read_all(folder / "x");
    };
    const std::string drain = "\x01\x18\x01\x08"s;  // one drain, of page 4
    CHECK(verdict({1, 0, drain, {}}).ending->end == TraceEnd::closed);
    CHECK(verdict({1, 0, drain, {}}, false).error->code == ErrorCode::bad_trace);
    for (const auto& chunk : std::vector<HandMade::Chunk>{
             {2, 0, drain, {}},                    // counts one event too many
             {0, 1, drain, {}},                    // calls a fact a note
             {1, 0, drain + "\x00"s, {}},          // goes on
             {1, 0, "\x01\x18\x02\x88\x00"s, {}},  // not canonical
             {1, 0, "\x01\x18\x02\x08\x08"s, {}},  // two values for one event
             {1, 0, "\x01\x18\x00"s, {}},          // none
             {1, 0, "\x01\x18"s, {}},              // no column
             {1, 0, "\x01\x36\x01\x08"s, {}},      // a kind without schema
             {1, 0, "\x01\xff\x01\x08"s, {}},
             {1, 0, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x18"s, {}},
             {1, 0, drain, {{1, "\x01\x02\x05shor"s}}},  // a text over its section
             {1,
              0,
              drain,
              {{1, "\x01\x82\x02xx\x02\x02\x01y"s}}},  // one text begins inside another
             {1, 0, drain, {{1, "\x01\x82\x02xx"s}}},  // and one never ends
             {1, 0, drain, {{1, "\x01\x85\x02xx"s}}},  // ids do not go on
         }) {
        CAPTURE(hex(traces::as_bytes(chunk.raw)));
        const Read read = verdict(chunk);
        REQUIRE(read.error.has_value());
        CHECK(read.error->code == ErrorCode::bad_trace);
    }
    // Text of a kind that we do not know is left out and counted.
    const Read read = verdict({1, 0, drain, {{1, "\x01\x50\x02xx\x01\x02\x01y"s}}});
    CHECK(read.texts == std::vector<std::string>{"1/1 prompt y"});
    CHECK(read.ending->unknown_ignorable == 1);

    HandMade unclean;
    unclean.clean_end = false;
    put_bytes(folder / "x", unclean.bytes());
    CHECK(read_all(folder / "x").ending->end == TraceEnd::not_closed);

    HandMade none;
    none.header.text = TextMode::none;
    none.kinds = {{24, 1}};
    none.row_forms = "\x18\x04"s;
    none.chunks = {{1, 0, drain, {{1, "\x01\x02\x01y"s}}}};
    put_bytes(folder / "x", none.bytes());
    CHECK(read_all(folder / "x").error->code == ErrorCode::bad_trace);
}

TEST_CASE("the zstd command accepts a trace and prints its sections") {
    if (std::system("command -v zstd > /dev/null 2>&1") != 0) {
        MESSAGE("no zstd command here");
        return;
    }
    TempFolder folder;
    put_bytes(folder / "tiny.kvw.zst", tiny_trace(folder));
    const std::string file = (folder / "tiny.kvw.zst").string();
    const std::string out = (folder / "out").string();
    CHECK(std::system(("zstd -q -t '" + file + "'").c_str()) == 0);
    CHECK(std::system(("zstd -q -dc '" + file + "' > '" + out + "'").c_str()) == 0);
    CHECK(bytes_of(out).find("acme") != std::string::npos);
    CHECK(bytes_of(out).ends_with("\x02Hi\x01\x05\x02\xac\x02"));
}

TEST_CASE("what version 1.0 wrote is read with the fields it did not know as 0") {
    TempFolder folder;
    put_bytes(folder / "old.kvw.zst",
              bytes_of_dump(bytes_of(Path(KVW_SOURCE_DIR) / "tests/golden/tiny_trace_1_0.txt")));
    const Read read = read_all(folder / "old.kvw.zst");
    REQUIRE_FALSE(read.error.has_value());
    CHECK(read.ending->end == TraceEnd::closed);
    CHECK(read.ending->unknown_critical == 0);
    REQUIRE(read.lines.size() == 8);
    CHECK(read.lines[2] ==
          "submit request=1 tenant=1 prompt_tokens=2 tokens_max=1 "
          "input0=0x1111111111111111 input1=0x2222222222222222 session=0 scope=0");

    // A file that says it is of today and lacks them is a bad one; so is an old one that lacks
    // more.
    const std::string submit =
        "10 submit request:d tenant:d prompt_tokens:v tokens_max:v input0:8*";
    const struct {
        std::uint32_t minor;
        std::string schema;
        bool good;
    } cases[] = {
        {0, submit + " input1:8*\n", true},
        {1, submit + " input1:8*\n", false},
        {0, submit + "\n", false},
        {0, "28 adopt request:d index:d page:d generation:v digest0:8*\n", false},
    };
    for (const auto& one : cases) {
        CAPTURE(one.minor);
        CAPTURE(one.schema);
        HandMade made;
        made.header.minor = one.minor;
        made.schema = one.schema;
        put_bytes(folder / "x", made.bytes());
        CHECK(TraceReader::open(folder / "x").has_value() == one.good);
    }
}

TEST_CASE("the worked example of the format is what we write, and always stays readable") {
    TempFolder folder;
    const std::string bytes = tiny_trace(folder);
    const Path golden = Path(KVW_SOURCE_DIR) / "tests/golden/tiny_trace.txt";
    const char* mode = std::getenv("KVW_GOLDEN");
    if (mode != nullptr && std::string_view(mode) == "write") {
        std::filesystem::create_directories(golden.parent_path());
        put_bytes(golden, annotated(bytes));
    }
    const std::string dump = bytes_of(golden);
    const std::string kept = bytes_of_dump(dump);
    REQUIRE(kept.size() > 500);
    // Another zstd may pack the same sections into other bytes.
    if (ZSTD_versionNumber() == 10504) {
        CHECK(annotated(bytes) == dump);
    }
    put_bytes(folder / "golden.kvw.zst", kept);
    const Read read = read_all(folder / "golden.kvw.zst");
    REQUIRE_FALSE(read.error.has_value());
    CHECK(read.ending->end == TraceEnd::closed);
    CHECK(read.lines ==
          std::vector<std::string>{
              "clock wall_ns=1700000000000000000 monotonic_ns=5", "tenant tenant=1 bytes=\"acme\"",
              "submit request=1 tenant=1 prompt_tokens=2 tokens_max=1 "
              "input0=0x1111111111111111 input1=0x2222222222222222 session=1 scope=2",
              "alloc request=1 group=0 index=0 page=3 generation=1", "step step=1 sequences=1",
              "rows request=1 count=2 end=2 group=0 version=1", "witness request=1 sum=0xcafef00d",
              "slot request=1 slot=0 stamped_request=1 stamped_step=1",
              "sample request=1 position=2 logits=0xbadcafe"});
    CHECK(read.texts == std::vector<std::string>{"1/1 prompt Hi", "1/1 ids \xac\x02"});
}
