#include "src/base/check.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

using namespace kvw;

namespace {

struct Ended {
    int status = 0;
    std::string said;
};

// What a process says, on stdout or stderr, in which `part` runs.
template <class Part>
Ended run_apart(const Part& part) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        ::dup2(ends[1], STDOUT_FILENO);
        ::dup2(ends[1], STDERR_FILENO);
        part();
        ::_exit(0);
    }
    ::close(ends[1]);
    Ended ended;
    char buffer[256];
    for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
        ended.said.append(buffer, static_cast<std::size_t>(got));
    }
    ::close(ends[0]);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    ended.status = WEXITSTATUS(status);
    return ended;
}

}  // namespace

TEST_CASE("a broken invariant ends the process with status 7 and says where") {
    const Ended ended = run_apart([] {
        check(true, "never said");
        check(1 + 1 == 3, "numbers add up");
    });
    CHECK(ended.status == 7);
    CHECK(ended.said.find("numbers add up") != std::string::npos);
    CHECK(ended.said.find("check_test.cpp") != std::string::npos);
    CHECK(ended.said.find("never said") == std::string::npos);
}

TEST_CASE("the last words are spoken once, before the process says where") {
    const Ended ended = run_apart([] {
        set_check_last_words([](const char* message) {
            const std::string words = std::string("{") + message + "}\n";
            CHECK(::write(STDOUT_FILENO, words.data(), words.size()) > 0);
            check(false, "nor do last words");
        });
        check(1 + 1 == 3, "numbers add up");
    });
    CHECK(ended.status == 7);
    CHECK(ended.said.starts_with("{numbers add up}\nkvwitness: invariant broken: "));
    CHECK(ended.said.find("{nor") == std::string::npos);
}
