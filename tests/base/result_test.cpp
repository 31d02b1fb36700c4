#include "src/base/result.h"

#include <doctest/doctest.h>

#include <memory>
#include <string_view>

#include "src/base/clock.h"

using namespace kvw;

namespace {

Result<int> half_of(int whole) {
    if (whole % 2 != 0) {
        return Error{ErrorCode::bad_input, std::to_string(whole) + " is odd"};
    }
    return whole / 2;
}

Result<std::string> half_as_text(int whole) {
    const Result<int> half = half_of(whole);
    if (!half) {
        return half.error();
    }
    return std::to_string(*half);
}

}  // namespace

TEST_CASE("a result is a value or an error, and errors travel between result types") {
    CHECK(half_as_text(6) == "3");
    const auto odd = half_as_text(7);
    REQUIRE_FALSE(odd);
    CHECK(odd.error().code == ErrorCode::bad_input);
    CHECK(odd.error().message == "7 is odd");
    CHECK(Status());
    CHECK_FALSE(Status(Error{ErrorCode::io, "no"}));
}

TEST_CASE("a result may hold what can only be moved") {
    const auto make = []() -> Result<std::unique_ptr<int>> { return std::make_unique<int>(7); };
    auto made = make();
    REQUIRE(made);
    const std::unique_ptr<int> taken = std::move(*made);
    CHECK(*taken == 7);
}

TEST_CASE("every error code has a name of its own and an exit status of the documented ones") {
    std::string names;
    for (int i = 0; i <= static_cast<int>(ErrorCode::cancelled); ++i) {
        const auto code = static_cast<ErrorCode>(i);
        const std::string name = error_name(code);
        CHECK_FALSE(name.empty());
        CHECK(names.find(" " + name + " ") == std::string::npos);
        names.append(" ").append(name).append(" ");
        const int status = exit_code(code);
        CHECK(((status >= 2 && status <= 7) || status == 130));
    }
    CHECK(std::string_view(error_name(ErrorCode::exceed_context_size)) == "exceed_context_size");
    CHECK(exit_code(ErrorCode::usage) == 2);
    CHECK(exit_code(ErrorCode::bad_model) == 3);
    CHECK(exit_code(ErrorCode::exceed_context_size) == 4);
    CHECK(exit_code(ErrorCode::queue_full) == 4);
    CHECK(exit_code(ErrorCode::disk_full) == 5);
    CHECK(exit_code(ErrorCode::torn) == 6);
    CHECK(exit_code(ErrorCode::violation) == 7);
    CHECK(exit_code(ErrorCode::cancelled) == 130);
}

TEST_CASE("times are written as RFC 3339 in UTC") {
    CHECK(rfc3339(0) == "1970-01-01T00:00:00Z");
    CHECK(rfc3339(1796080835ll * 1'000'000'000) == "2026-11-30T23:20:35Z");
    CHECK(rfc3339(951782400ll * 1'000'000'000 + 999'999'999) == "2000-02-29T00:00:00Z");
    const SystemClock clock;
    const std::int64_t earlier = clock.monotonic_ns();
    CHECK(earlier <= clock.monotonic_ns());
    CHECK(clock.wall_ns() > 1'600'000'000ll * 1'000'000'000);
}
