// Traces that were changed, cut, or left by a recorder that died.
#include <doctest/doctest.h>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::test;

namespace {

std::string small_trace(const TempFolder& folder) {
    auto writer = new_writer(folder / "small.kvw.zst");
    std::mt19937_64 random(9);
    writer->note(Event::of(events::NoteClock{1, 2}));
    writer->text({TenantId{1}, RequestId{}, TextKind::key, std::string(32, 'k')});
    note_decode(*writer, 1, 3, random);
    check(writer->close().has_value(), "a test can close its trace");
    return bytes_of(folder / "small.kvw.zst");
}

std::string large_trace(const TempFolder& folder) {
    auto writer = new_writer(folder / "large.kvw.zst");
    std::mt19937_64 random(4);
    for (std::uint64_t i = 0; i < 60000; ++i) {
        writer->note(Event::of(events::WitnessSum{i, i, random()}));
        if (i % 100 == 0) {
            writer->text({TenantId{static_cast<std::uint32_t>(1 + i % 3)}, RequestId{i},
                          TextKind::prompt, "text"});
        }
    }
    check(writer->close().has_value(), "a test can close its trace");
    return bytes_of(folder / "large.kvw.zst");
}

bool is_prefix(const std::vector<std::string>& shorter, const std::vector<std::string>& longer) {
    return shorter.size() <= longer.size() &&
           std::equal(shorter.begin(), shorter.end(), longer.begin());
}

// Cut at `size`: torn or not closed, with whole events only; or too short to tell.
void check_cut(const Path& path, const std::string& whole, std::size_t size, const Read& expected) {
    const bool lines = !expected.lines.empty();
    CAPTURE(size);
    put_bytes(path, std::string_view(whole).substr(0, size));
    const Read read = read_all(path, {}, lines);
    if (read.error) {
        REQUIRE(read.error->code == (size == 0 ? ErrorCode::bad_trace : ErrorCode::torn));
        return;
    }
    REQUIRE((read.ending->end == TraceEnd::torn || read.ending->end == TraceEnd::not_closed));
    REQUIRE(is_prefix(read.lines, expected.lines));
    REQUIRE(read.ending->last_event == read.numbered);
    REQUIRE_FALSE(read.ending->reason.empty());
    REQUIRE_FALSE(read.ending->totals.has_value());
}

// One changed byte: bad_trace, or an end that looks lost when the change is at the end; never
// closed.
void check_change(const Path& path, const std::string& whole, std::size_t at, char mask) {
    CAPTURE(at);
    std::string changed = whole;
    changed[at] ^= mask;
    put_bytes(path, changed);
    const Read read = read_all(path, {}, false);
    if (read.error) {
        REQUIRE(read.error->code == ErrorCode::bad_trace);
    } else {
        REQUIRE(read.ending->end == TraceEnd::torn);
        REQUIRE(at >= whole.size() - 1);
    }
    if (at % 8 == 0) {  // without texts the hashes are compared all the same
        const Read hashes = read_all(path, {.texts = false}, false);
        REQUIRE((hashes.error || hashes.ending->end != TraceEnd::closed));
    }
}

}  // namespace

TEST_CASE("a small trace cut at every byte is never closed") {
    TempFolder folder;
    const std::string whole = small_trace(folder);
    const Read expected = read_all(folder / "small.kvw.zst");
    for (std::size_t size = 0; size < whole.size(); ++size) {
        check_cut(folder / "x", whole, size, expected);
    }
}

TEST_CASE("a small trace with any byte changed is a bad trace") {
    TempFolder folder;
    const std::string whole = small_trace(folder);
    for (std::size_t at = 0; at < whole.size(); ++at) {
        check_change(folder / "x", whole, at, static_cast<char>(1 << at % 8));
        if (at % 4 == 3 && whole[at] != 0) {
            check_change(folder / "x", whole, at, whole[at]);  // becomes zero
        }
    }
}

TEST_CASE("a large trace: 300 changed bytes, cuts, lost sectors") {
    TempFolder folder;
    const std::string whole = large_trace(folder);
    const Read expected = read_all(folder / "large.kvw.zst", {}, false);
    REQUIRE(expected.ending->end == TraceEnd::closed);
    std::mt19937_64 random(1);
    for (int i = 0; i < 300; ++i) {
        check_change(folder / "x", whole, random() % whole.size(),
                     static_cast<char>(1 + random() % 255));
    }
    // 64 bytes apart at both ends and at random between: each cut reads the file up to there.
    for (std::size_t size = 64; size < 4096; size += 64) {
        check_cut(folder / "x", whole, size, expected);
        check_cut(folder / "x", whole, whole.size() - size, expected);
    }
    for (int i = 0; i < 60; ++i) {
        check_cut(folder / "x", whole, random() % (whole.size() / 64) * 64, expected);
    }
    for (int i = 0; i < 60; ++i) {  // a power loss: the length is there, the last sectors are not
        const std::size_t kept = random() % (whole.size() / 512) * 512;
        std::string lost = whole;
        std::fill(lost.begin() + static_cast<std::ptrdiff_t>(kept), lost.end(), '\0');
        CAPTURE(kept);
        put_bytes(folder / "x", lost);
        const Read read = read_all(folder / "x", {}, false);
        if (read.error) {
            REQUIRE(read.error->code == (kept == 0 ? ErrorCode::bad_trace : ErrorCode::torn));
        } else {
            REQUIRE(read.ending->end == TraceEnd::torn);
            REQUIRE(read.ending->last_event < expected.numbered);
        }
    }
}

TEST_CASE("frames that are removed, repeated, swapped or taken from another run are seen") {
    TempFolder folder;
    const std::string whole = large_trace(folder);
    std::vector<std::size_t> starts;  // of chunks, and of the footer
    for (std::string_view magic : {traces::kChunkMagic, traces::kFooterMagic}) {
        for (std::size_t at = whole.find(magic); at != whole.npos; at = whole.find(magic, at + 1)) {
            starts.push_back(at - traces::kFrameHead);
        }
    }
    REQUIRE(starts.size() >= 4);
    const auto part = [&](std::size_t i) {
        return whole.substr(starts[i], starts[i + 1] - starts[i]);
    };
    const std::string head = whole.substr(0, starts[0]);
    const std::string foot = whole.substr(starts.back());
    std::string rest;
    for (std::size_t i = 2; i + 1 < starts.size(); ++i) {
        rest += part(i);
    }
    const auto is_bad = [&](const std::string& bytes) {
        put_bytes(folder / "x", bytes);
        const Read read = read_all(folder / "x");
        return read.error && read.error->code == ErrorCode::bad_trace;
    };
    CHECK_FALSE(is_bad(head + part(0) + part(1) + rest + foot));
    CHECK(is_bad(head + part(1) + rest + foot));
    CHECK(is_bad(head + part(0) + rest + foot));
    CHECK(is_bad(head + part(0) + part(0) + part(1) + rest + foot));
    CHECK(is_bad(head + part(1) + part(0) + rest + foot));
    CHECK(is_bad(head + part(0) + foot));
    CHECK(is_bad(head + foot));
    CHECK(is_bad(whole + "x"));
    CHECK(is_bad(whole + whole));
    CHECK(is_bad(head + part(0) + part(1).substr(0, 100) +
                 foot));  // its middle cut out: not torn, changed
    CHECK(is_bad(head + std::string(4096, '\0') + foot));

    auto other = TraceWriter::create({.path = folder / "other.kvw.zst", .run_id = some_run_id(99)},
                                     StoppedClock());
    REQUIRE(other.has_value());
    REQUIRE((*other)->close().has_value());
    const std::string foreign = bytes_of(folder / "other.kvw.zst");
    CHECK(is_bad(foreign.substr(0, foreign.find(traces::kFooterMagic) - 8) + part(0) + part(1) +
                 rest + foot));
}

TEST_CASE("a recorder that dies at any moment leaves every acknowledged event") {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
        CAPTURE(seed);
        TempFolder folder;
        std::mt19937_64 random(seed);
        auto writer = new_writer(folder / "a.kvw.zst");
        const Path partial = folder / "a.kvw.zst.partial", tail = folder / "a.kvw.zst.tail";
        std::vector<std::string> noted, texts;
        std::string earlier_tail;
        for (int step = 0; step < 80; ++step) {
            for (std::size_t n = random() % (seed == 6 ? 2500 : 30); n > 0; --n) {
                const KeptEvent kept = random_event(random, *schema_of(EventKind::layer));
                note(*writer, kept);
                noted.push_back(kept.line());
            }
            if (random() % 4 == 0) {
                const TextRecord text{TenantId{1}, RequestId{step + 1ull}, TextKind::prompt,
                                      "words"};
                writer->text(text);
                keep_text(texts, text);
            }
            REQUIRE(writer->commit().has_value());
            if (random() % 8 != 0) {
                continue;
            }
            // Now it dies: the files as they are.
            const std::string now = bytes_of(tail);
            put_bytes(folder / "k.kvw.zst.partial", bytes_of(partial));
            put_bytes(folder / "k.kvw.zst.tail", now);
            Read read = read_all(folder / "k.kvw.zst");
            REQUIRE_FALSE(read.error.has_value());
            REQUIRE(read.ending->end == TraceEnd::not_closed);
            REQUIRE(read.lines == noted);
            REQUIRE(read.texts == texts);
            REQUIRE(read.ending->last_event == noted.size());

            // It dies inside the write of the last row.
            put_bytes(folder / "k.kvw.zst.tail",
                      std::string_view(now).substr(0, now.empty() ? 0 : random() % now.size()));
            read = read_all(folder / "k.kvw.zst");
            REQUIRE_FALSE(read.error.has_value());
            REQUIRE(
                (read.ending->end == TraceEnd::torn || read.ending->end == TraceEnd::not_closed));
            REQUIRE(is_prefix(read.lines, noted));

            // It died between writing a chunk and emptying the tail: the rows are older than the
            // chunk.
            put_bytes(folder / "k.kvw.zst.tail", earlier_tail);
            read = read_all(folder / "k.kvw.zst");
            REQUIRE_FALSE(read.error.has_value());
            REQUIRE(read.ending->end != TraceEnd::closed);
            REQUIRE(is_prefix(read.lines, noted));
            if (random() % 2 == 0) {
                earlier_tail = now;
            }

            // A changed byte in the tail is either seen or makes its end look lost.
            if (!now.empty()) {
                std::string changed = now;
                changed[random() % changed.size()] ^= static_cast<char>(1 + random() % 255);
                put_bytes(folder / "k.kvw.zst.tail", changed);
                read = read_all(folder / "k.kvw.zst");
                if (!read.error) {
                    REQUIRE(read.ending->end == TraceEnd::torn);
                    REQUIRE(is_prefix(read.lines, noted));
                } else {
                    REQUIRE(read.error->code == ErrorCode::bad_trace);
                }
            }
        }
    }
}

TEST_CASE("a chunk that did not fit on the disk is read from the tail that stayed") {
    TempFolder folder;
    auto writer = new_writer(folder / "a.kvw.zst");
    std::vector<std::string> noted;
    for (std::uint64_t i = 1; i <= 500; ++i) {
        writer->note(Event::of(events::Step{i, 1}));
        noted.push_back("step step=" + std::to_string(i) + " sequences=1");
    }
    REQUIRE(writer->commit().has_value());
    const std::string tail = bytes_of(folder / "a.kvw.zst.tail");
    REQUIRE(writer->close().has_value());
    const std::string whole = bytes_of(folder / "a.kvw.zst");
    const std::size_t chunk = whole.find(traces::kChunkMagic) - traces::kFrameHead;
    for (std::size_t size : {chunk, chunk + 3, chunk + 50, chunk + 150, chunk + 200}) {
        CAPTURE(size);
        put_bytes(folder / "k.kvw.zst.partial", std::string_view(whole).substr(0, size));
        put_bytes(folder / "k.kvw.zst.tail", tail);
        const Read read = read_all(folder / "k.kvw.zst");
        REQUIRE_FALSE(read.error.has_value());
        CHECK(read.lines == noted);
        CHECK(read.ending->end == (size == chunk ? TraceEnd::not_closed : TraceEnd::torn));
    }
    // The chunk is whole, the rows are the same events: they do not count twice.
    put_bytes(folder / "k.kvw.zst.partial",
              std::string_view(whole).substr(0, whole.find(traces::kFooterMagic) - 8));
    const Read read = read_all(folder / "k.kvw.zst");
    CHECK(read.lines == noted);
    CHECK_FALSE(read.from_tail);
}
