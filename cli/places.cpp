#include "cli/places.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "cli/options.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

Result<Path> xdg_folder(const char* variable, const char* below_home) {
    const char* set = std::getenv(variable);
    if (set != nullptr && Path(set).is_absolute()) {
        return Path(set) / "kvwitness";
    }
    const char* home = std::getenv("HOME");
    if (home == nullptr || !Path(home).is_absolute()) {
        return Error{ErrorCode::usage,
                     fmt::format("no place to keep files: neither {} nor HOME is an absolute path",
                                 variable)};
    }
    return Path(home) / below_home / "kvwitness";
}

bool is_run_prefix(std::string_view text) {
    return text.size() >= 6 && text.size() <= 32 &&
           text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::uint64_t number_in(const char* path) {
    std::ifstream file(path);
    std::uint64_t value = 0;
    return file >> value ? value : std::numeric_limits<std::uint64_t>::max();
}

}  // namespace

Result<Path> data_folder() { return xdg_folder("XDG_DATA_HOME", ".local/share"); }
Result<Path> state_folder() { return xdg_folder("XDG_STATE_HOME", ".local/state"); }
Result<Path> cache_folder() { return xdg_folder("XDG_CACHE_HOME", ".cache"); }
Result<Path> config_folder() { return xdg_folder("XDG_CONFIG_HOME", ".config"); }

Result<Store> Store::open(const std::optional<std::string>& given) {
    if (given) {
        return Store(Path(*given));
    }
    const Result<Path> data = data_folder();
    if (!data) {
        return data.error();
    }
    return Store(*data / "traces");
}

Result<Path> Store::new_trace(const RunId& run, std::int64_t wall_ns) const {
    const Status made = make_folders(folder_);
    if (!made) {
        return made.error();
    }
    std::string time = rfc3339(wall_ns);
    std::erase_if(time, [](char c) { return c == '-' || c == ':'; });
    return folder_ / fmt::format("{}-{}.kvw.zst", time, to_string(run).substr(0, 8));
}

Result<Path> Store::find(const std::string& trace) const {
    if (const Status named = check_trace_name(trace); !named) {
        return named.error();
    }
    if (trace != "@latest") {
        std::error_code ignored;
        if (std::filesystem::exists(trace, ignored) || !is_run_prefix(trace)) {
            return Path(trace);
        }
    }
    const Result<std::vector<TraceSummary>> traces = list();
    if (!traces) {
        return traces.error();
    }
    std::vector<const TraceSummary*> found;
    for (const TraceSummary& summary : *traces) {
        if (trace == "@latest" || to_string(summary.run_id).starts_with(trace)) {
            found.push_back(&summary);
        }
    }
    if (found.empty()) {
        return Error{ErrorCode::io, fmt::format("no trace {} in {}", trace, folder_.string())};
    }
    if (trace != "@latest" && found.size() > 1) {
        return Error{ErrorCode::usage, fmt::format("{} runs in {} begin with {}: give more digits",
                                                   found.size(), folder_.string(), trace)};
    }
    return found.front()->path;
}

Status check_trace_name(const std::string& trace) {
    std::error_code ignored;
    if (trace.empty()) {
        return Error{ErrorCode::usage, "no trace has an empty name"};
    }
    if (trace == "-" || std::filesystem::is_fifo(trace, ignored)) {
        return Error{ErrorCode::usage,
                     fmt::format("{} is a stream; a trace is read at places all over it, so it "
                                 "must be a file",
                                 trace == "-" ? "- (stdin)" : printable(trace))};
    }
    return {};
}

Status check_output_file(const char* flag, const std::string& name, bool force) {
    if (name.empty() || name == "-") {
        return Error{ErrorCode::usage,
                     fmt::format("{} takes the name of a file, {}", flag,
                                 name.empty() ? "which cannot be empty" : "not - (stdout)")};
    }
    if (const Status replaceable = check_replaceable(name); !replaceable) {
        return replaceable;
    }
    std::error_code ignored;
    if (!force && std::filesystem::exists(std::filesystem::symlink_status(name, ignored))) {
        return Error{ErrorCode::file_exists,
                     fmt::format("{} exists; choose another name or --force", printable(name))};
    }
    return {};
}

const char* name_of(TraceEnd end) {
    switch (end) {
        case TraceEnd::closed:
            return "closed";
        case TraceEnd::not_closed:
            return "not_closed";
        case TraceEnd::torn:
            return "torn";
        case TraceEnd::live:
            return "live";
    }
    return "unknown";
}

std::string moment(const std::string& run_hex, std::uint64_t event) {
    return fmt::format("{}:{}", run_hex, event);
}

Result<std::uint64_t> event_of_moment(std::string_view text, const RunId& run) {
    const std::size_t colon = text.find(':');
    const std::string_view prefix = text.substr(0, std::min(colon, text.size()));
    if (colon == std::string_view::npos || !is_run_prefix(prefix)) {
        return Error{
            ErrorCode::usage,
            fmt::format("'{}' is not a moment: <6 to 32 hex digits of the run>:<event>", text)};
    }
    if (!to_string(run).starts_with(prefix)) {
        return Error{ErrorCode::usage,
                     fmt::format("moment {} is not of run {}", text, to_string(run))};
    }
    return whole_number(text.substr(colon + 1), 1, std::numeric_limits<std::uint64_t>::max());
}

Result<std::string> read_stdin(std::uint64_t bytes_max) {
    std::string text;
    std::string block(1 << 16, '\0');
    while (true) {
        const ssize_t n = ::read(STDIN_FILENO, block.data(), block.size());
        if (n < 0 && errno != EINTR) {
            return errno_error("cannot read", "stdin", errno);
        }
        if (n == 0) {
            return text;
        }
        text.append(block.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
        if (text.size() > bytes_max) {
            return Error{ErrorCode::bad_input,
                         fmt::format("stdin is larger than {} bytes", bytes_max)};
        }
    }
}

Result<std::string> read_input(const std::string& name, std::uint64_t bytes_max) {
    return name == "-" ? read_stdin(bytes_max) : read_file(name, bytes_max);
}

Status check_stack() {
    struct rlimit stack {};
    if (::getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < kStackBytesMin) {
        return Error{ErrorCode::out_of_memory,
                     fmt::format("the stack is limited to {} KiB, {} KiB are needed: ulimit -s {}",
                                 stack.rlim_cur >> 10, kStackBytesMin >> 10, kStackBytesMin >> 10)};
    }
    return {};
}

std::uint64_t memory_available() {
    std::uint64_t bytes = std::numeric_limits<std::uint64_t>::max();
    std::ifstream meminfo("/proc/meminfo");
    std::string line;
    while (std::getline(meminfo, line)) {
        if (line.starts_with("MemAvailable:")) {
            bytes = std::strtoull(line.c_str() + 13, nullptr, 10) * 1024;
        }
    }
    const std::uint64_t most = number_in("/sys/fs/cgroup/memory.max");  // "max" reads as no limit
    const std::uint64_t used = number_in("/sys/fs/cgroup/memory.current");
    return std::min(bytes, most > used ? most - used : bytes);
}

}  // namespace kvw::cli
