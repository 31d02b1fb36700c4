#include "src/base/check.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

using namespace kvw;

TEST_CASE("a broken invariant ends the process with status 7 and says where") {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        ::dup2(ends[1], STDERR_FILENO);
        check(true, "never said");
        check(1 + 1 == 3, "numbers add up");
        ::_exit(0);
    }
    ::close(ends[1]);
    std::string said;
    char buffer[256];
    for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
        said.append(buffer, static_cast<std::size_t>(got));
    }
    ::close(ends[0]);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 7);
    CHECK(said.find("numbers add up") != std::string::npos);
    CHECK(said.find("check_test.cpp") != std::string::npos);
    CHECK(said.find("never said") == std::string::npos);
}
