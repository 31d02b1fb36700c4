#include "cli/session.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "cli/signals.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

void write_stderr(std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return;  // nobody listens; the exit status still speaks
        }
        text.remove_prefix(static_cast<std::size_t>(n));
    }
}

bool environment_says_plain() {
    const char* no_color = std::getenv("NO_COLOR");
    const char* terminal = std::getenv("TERM");
    return (no_color != nullptr && *no_color != '\0') || terminal == nullptr ||
           std::strcmp(terminal, "dumb") == 0;
}

}  // namespace

Json object_of(std::string_view schema) {
    return Json{{"schema", "kvwitness/" + std::string(schema)}, {"v", 1}};
}

Json error_object(const Error& error, int exit) {
    Json object{
        {"code", error_name(error.code)}, {"message", printable(error.message)}, {"exit", exit}};
    if (error.limit) {
        object["n_prompt"] = error.limit->n_prompt;
        object["n_max"] = error.limit->n_max;
        object["limit"] = error.limit->limit;
    }
    return object;
}

std::string to_line(const Json& object) {
    return object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

StandardOutput::StandardOutput() : terminal_(isatty(STDOUT_FILENO) == 1) {}

bool StandardOutput::write(std::string_view bytes) {
    while (!bytes.empty() && error_number_ == 0) {
        const ssize_t n = ::write(STDOUT_FILENO, bytes.data(), bytes.size());
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            error_number_ = n < 0 ? errno : EIO;
            return false;
        }
        bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return error_number_ == 0;
}

bool StandardOutput::object(const Json& object) {
    owe_object("");
    return write(to_line(object));
}

bool StandardOutput::record(const Json& object) { return write(to_line(object)); }

bool StandardOutput::reader_gone() const { return error_number_ == EPIPE; }

Error StandardOutput::error() const {
    const bool full = error_number_ == ENOSPC || error_number_ == EDQUOT || error_number_ == EFBIG;
    return {full ? ErrorCode::disk_full : ErrorCode::io,
            fmt::format("cannot write to stdout: {}", std::strerror(error_number_))};
}

void Session::say(std::string_view text) const {
    write_stderr("kvwitness" + (command.empty() ? "" : " " + command) + ": " + printable(text) +
                 "\n");
}

void Session::note(std::string_view text) const {
    if (!common.quiet) {
        write_stderr(printable_lines(text) + "\n");
    }
}

bool Session::progress_wanted() const {
    return !common.no_progress && !common.quiet && isatty(STDERR_FILENO) == 1 &&
           !(std::getenv("TERM") != nullptr && std::strcmp(std::getenv("TERM"), "dumb") == 0);
}

std::string Session::coloured(std::string_view text, std::string_view code) const {
    const bool colour = common.color == "always" ||
                        (common.color == "auto" && out.is_terminal() && !environment_says_plain());
    return colour ? fmt::format("{}{}\x1b[0m", code, text) : std::string(text);
}

void Progress::begin() {
    clear();
    begun_ = std::chrono::steady_clock::now();
}

void Progress::show(std::string_view what, double fraction) {
    if (on_) {
        show(fmt::format("{} {:.0f} %", what, std::clamp(fraction, 0.0, 1.0) * 100));
    }
}

void Progress::show(std::string_view text) {
    using namespace std::chrono_literals;
    const Time now = std::chrono::steady_clock::now();
    if (!on_ || now - begun_ < 1s || now - last_ < 100ms) {
        return;
    }
    last_ = now;
    shown_ = true;
    write_stderr(fmt::format("\r\x1b[K{}", printable(text)));
}

void Progress::clear() {
    if (shown_) {
        write_stderr("\r\x1b[K");
        shown_ = false;
    }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int worse_exit(int a, int b) {
    static constexpr std::array<int, 8> kOrder = {2, 7, 5, 1, 3, 4, 6, 0};
    return *std::find_if(kOrder.begin(), kOrder.end() - 1,
                         [&](int code) { return code == a || code == b; });
}

}  // namespace kvw::cli
