#include <unistd.h>

#include "tests/jobs/job_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

std::vector<RawLine> read_all(const std::string& text) {
    const Folder folder;
    write(folder / "in", text);
    const Result<File> file = File::open_read(folder / "in");
    REQUIRE(file);
    LineReader reader(file->descriptor());
    std::vector<RawLine> lines;
    for (;;) {
        auto line = reader.next();
        REQUIRE(line);
        if (!*line) {
            CHECK(reader.digest() == sha256(text));
            const Result<InputFacts> facts = scan_input(folder / "in");
            REQUIRE(facts);
            CHECK(facts->lines == lines.size());
            CHECK(facts->digest == sha256(text));
            CHECK(facts->bytes == text.size());
            return lines;
        }
        lines.push_back(std::move(**line));
    }
}

}  // namespace

TEST_CASE("lines end in LF or CRLF, and the last may end in nothing") {
    CHECK(read_all("").empty());
    const auto lines = read_all("a\nb\r\n\n\r\nc\rd");
    REQUIRE(lines.size() == 5);
    CHECK(lines[0].bytes == "a");
    CHECK(lines[1].bytes == "b");
    CHECK(lines[2].bytes.empty());
    CHECK(lines[3].bytes.empty());
    CHECK(lines[4].bytes == "c\rd");
    CHECK(lines[4].number == 5);
    CHECK(lines[1].digest == sha256("b"));
    CHECK(read_all("a\n").size() == 1);
    CHECK(read_all("a\r")[0].bytes == "a\r");
}

TEST_CASE("a line over the limit is hashed and counted but not kept, and the next one is whole") {
    const std::string most(kLineBytesMax, 'x');
    for (const std::string ending : {"\n", "\r\n"}) {
        const auto lines =
            read_all(most + ending + most + "y" + ending + most + most + "z\r" + ending + "end");
        REQUIRE(lines.size() == 4);
        CHECK_FALSE(lines[0].too_long);
        CHECK(lines[0].bytes == most);
        CHECK(lines[1].too_long);
        CHECK(lines[1].bytes.empty());
        CHECK(lines[1].length == most.size() + 1);
        CHECK(lines[1].digest == sha256(most + "y"));
        // A carriage return before a line feed is the terminator's.
        CHECK(lines[2].digest == sha256(most + most + (ending == "\n" ? "z" : "z\r")));
        CHECK(lines[3].bytes == "end");
    }
}

TEST_CASE("lines of a pipe come as they are written") {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    LineReader reader(ends[0]);
    REQUIRE(::write(ends[1], "one\ntw", 6) == 6);
    REQUIRE(*reader.fill());
    CHECK(reader.take()->bytes == "one");
    CHECK_FALSE(reader.take());
    REQUIRE(::write(ends[1], "o\n", 2) == 2);
    REQUIRE(*reader.fill());
    CHECK(reader.take()->bytes == "two");
    close(ends[1]);
    CHECK_FALSE(*reader.fill());
    CHECK_FALSE(reader.take());
    close(ends[0]);
}
