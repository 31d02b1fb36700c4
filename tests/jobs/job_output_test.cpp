#include "src/jobs/job_output.h"

#include <sys/resource.h>

#include <csignal>

#include "tests/jobs/job_world.h"

using namespace kvw;
using namespace kvw::test;

namespace {

struct World {
    Folder folder;
    FileOutputOptions options;

    World() {
        write(folder / "in", "1\n2\n3\n4\n5\n");
        options = output_options(folder / "in", folder / "out");
        options.errors = folder / "errors";
    }
    std::unique_ptr<FileOutput> open() {
        auto output = FileOutput::create(options);
        REQUIRE_MESSAGE(output, (output ? "" : output.error().message));
        return std::move(*output);
    }
    ErrorCode refused() {
        const auto output = FileOutput::create(options);
        REQUIRE_FALSE(output);
        return output.error().code;
    }
    std::string out() const { return contents(folder / "out"); }
};

void put(FileOutput& output, std::uint64_t line, const std::string& text, bool failed = false) {
    const Result<bool> taken = output.put(line, text + "\n", failed);
    REQUIRE(taken);
    CHECK(*taken);
}

void tick(FileOutput& output) {
    REQUIRE(output.tick(0, 0));
    REQUIRE(output.tick(1'000'000'000, 0));
}

}  // namespace

TEST_CASE("lines come out in the order of the input, and none before it is in the journal") {
    World world;
    auto output = world.open();
    put(*output, 2, "two");
    tick(*output);
    CHECK(world.out().empty());
    put(*output, 1, "one", true);
    CHECK(world.out().empty());
    tick(*output);
    CHECK(world.out() == "one\ntwo\n");
    CHECK(contents(world.folder / "errors") == "one\n");
    CHECK(contents(world.folder / "out.journal").find("two\n") != std::string::npos);
    for (const int line : {5, 4, 3}) {
        put(*output, static_cast<std::uint64_t>(line), "later");
    }
    REQUIRE(output->close(true));
    CHECK(world.out() == "one\ntwo\nlater\nlater\nlater\n");
    CHECK_FALSE(std::filesystem::exists(world.folder / "out.journal"));
}

TEST_CASE("a group is synced at the latest when the next step could pass 200 ms") {
    World world;
    auto output = world.open();
    put(*output, 1, "one");
    REQUIRE(output->tick(0, 1'000'000));
    CHECK(world.out().empty());
    REQUIRE(output->tick(150'000'000, 10'000'000));
    CHECK(world.out().empty());
    REQUIRE(output->tick(150'000'000, 60'000'000));
    CHECK(world.out() == "one\n");
}

TEST_CASE("a job that was killed goes on wherever its files were cut") {
    World world;
    auto output = world.open();
    put(*output, 1, "one");
    put(*output, 3, "three", true);
    tick(*output);
    put(*output, 2, "two", true);
    tick(*output);
    output.reset();
    const std::string journal = contents(world.folder / "out.journal");
    const std::string out = world.out();
    REQUIRE(out == "one\ntwo\nthree\n");

    world.options.resume = true;
    for (std::size_t journal_cut = 0; journal_cut <= journal.size(); journal_cut += 11) {
        for (const std::size_t out_cut :
             {std::size_t{0}, std::size_t{2}, std::size_t{4}, out.size()}) {
            CAPTURE(journal_cut);
            CAPTURE(out_cut);
            write(world.folder / "out.journal", journal.substr(0, journal_cut));
            write(world.folder / "out", out.substr(0, out_cut));
            auto again = FileOutput::create(world.options);
            if (!again) {
                // OUT only holds what the journal has: more than it is another file's.
                CHECK(again.error().code == ErrorCode::bad_input);
                CHECK(out_cut > 0);
                CHECK(journal_cut < journal.size());
                continue;
            }
            for (std::uint64_t line = 1; line <= 5; ++line) {
                if (!(*again)->has(line)) {
                    put(**again, line,
                        line == 1   ? "one"
                        : line == 2 ? "two"
                        : line == 3 ? "three"
                                    : "rest",
                        line == 2 || line == 3);
                }
            }
            REQUIRE((*again)->close(true));
            CHECK(world.out() == "one\ntwo\nthree\nrest\nrest\n");
            CHECK(contents(world.folder / "errors") == "two\nthree\n");
        }
    }
}

TEST_CASE("what was begun with another input, order, shard or options is not gone on with") {
    World world;
    world.open();
    CHECK(world.refused() == ErrorCode::file_exists);  // without --resume
    world.options.resume = true;
    world.open();
    const FileOutputOptions good = world.options;
    write(world.folder / "other", "2\n1\n3\n4\n5\n");
    world.options.input = *scan_input(world.folder / "other");
    CHECK(world.refused() == ErrorCode::bad_input);
    world.options = good;
    world.options.in_order = false;
    CHECK(world.refused() == ErrorCode::bad_input);
    world.options = good;
    world.options.shard = {1, 2};
    CHECK(world.refused() == ErrorCode::bad_input);
    world.options = good;
    world.options.options = "others";
    CHECK(world.refused() == ErrorCode::bad_input);
    world.options = good;
    write(world.folder / "out", "somebody's\n");
    CHECK(world.refused() == ErrorCode::bad_input);
    CHECK(world.out() == "somebody's\n");
}

TEST_CASE("two processes never work on one job") {
    World world;
    const auto first = world.open();
    world.options.resume = true;
    CHECK(world.refused() == ErrorCode::file_exists);
}

TEST_CASE("unordered lines come out as they finish and resume alike") {
    World world;
    world.options.in_order = false;
    auto output = world.open();
    put(*output, 4, "four");
    put(*output, 1, "one");
    tick(*output);
    CHECK(world.out() == "four\none\n");
    output.reset();
    write(world.folder / "out", "four\non");
    world.options.resume = true;
    output = world.open();
    CHECK(output->has(4));
    CHECK_FALSE(output->has(2));
    CHECK(output->resumed() == 2);
    for (const int line : {2, 3, 5}) {
        put(*output, static_cast<std::uint64_t>(line), "rest");
    }
    REQUIRE(output->close(true));
    CHECK(world.out() == "four\none\nrest\nrest\nrest\n");
}

TEST_CASE("a full disk is an error, and what was given out before stays") {
    World world;
    auto output = world.open();
    put(*output, 1, "one");
    tick(*output);
    struct rlimit before {};
    getrlimit(RLIMIT_FSIZE, &before);
    auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit small { 600, before.rlim_max };
    setrlimit(RLIMIT_FSIZE, &small);
    const Result<bool> taken = output->put(2, std::string(1000, 'x') + "\n", false);
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    REQUIRE_FALSE(taken);
    CHECK(taken.error().code == ErrorCode::disk_full);
    output.reset();
    CHECK(world.out() == "one\n");
    world.options.resume = true;
    output = world.open();
    CHECK(output->has(1));
    CHECK_FALSE(output->has(2));
}
