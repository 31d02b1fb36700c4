// Where things are kept: the XDG folders, the store of traces, and what this machine has to give.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/file.h"
#include "src/base/result.h"
#include "traces/trace.h"

namespace kvw::cli {

// $XDG_DATA_HOME/kvwitness and its kin, or the folder below $HOME when the variable is unset or not
// absolute. Fail: usage, when there is no home either.
Result<Path> data_folder();
Result<Path> state_folder();
Result<Path> cache_folder();
Result<Path> config_folder();

// The traces of one folder. Made on first use, 0700.
class Store {
  public:
    // `given` (--trace-dir), or traces/ in the data folder.
    static Result<Store> open(const std::optional<std::string>& given);

    const Path& folder() const { return folder_; }
    // <UTC time>-<run prefix>.kvw.zst, in a folder that exists then.
    Result<Path> new_trace(const RunId& run, std::int64_t wall_ns) const;
    Result<std::vector<TraceSummary>> list() const { return list_traces(folder_); }
    // What a command's TRACE means: a file, "@latest", or at least 6 hex digits of a run in the
    // store. Fails: as check_trace_name(); io, when it is none of them.
    Result<Path> find(const std::string& trace) const;

  private:
    explicit Store(Path folder) : folder_(std::move(folder)) {}
    Path folder_;
};

// What TRACE can be at all: not an empty name, not "-" or another stream. Fails: usage.
Status check_trace_name(const std::string& trace);
// A file that a command is to write, named by `flag`; asked before any work. Fails: usage, for an
// empty name or "-"; file_exists, for what is there and `force` does not replace, which is
// everything but a regular file.
Status check_output_file(const char* flag, const std::string& name, bool force);

const char* name_of(TraceEnd end);  // "closed", "not_closed", "torn", "live"

// `run:event` as printed everywhere.
std::string moment(const std::string& run_hex, std::uint64_t event);
// The event of a moment of this run: "<hex prefix>:<event>". Fails: usage.
Result<std::uint64_t> event_of_moment(std::string_view text, const RunId& run);

// All of stdin. Fails: io, bad_input when it is larger than `bytes_max`.
Result<std::string> read_stdin(std::uint64_t bytes_max);
// "-" is stdin.
Result<std::string> read_input(const std::string& name, std::uint64_t bytes_max);

// What a thread may need: attention keeps its rows of scores (200 KiB) there, and the environment
// counts too.
inline constexpr std::uint64_t kStackBytesMin = 512 << 10;
// Fails: out_of_memory, naming both sizes.
Status check_stack();

// Bytes that can still be used without swapping: the system's and, if less, the control group's.
std::uint64_t memory_available();

}  // namespace kvw::cli
