// What every command is given: stdout for the answer or records, stderr for everything else, and
// the flags all commands share.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/result.h"

namespace kvw::cli {

using Json = nlohmann::ordered_json;

// {"schema":"kvwitness/<name>","v":1}
Json object_of(std::string_view schema);
// {"code","message","exit",…}: what is under "error"; a refusal brings its numbers.
Json error_object(const Error& error, int exit);
// One line. Bytes that are not UTF-8 (file names) become U+FFFD.
std::string to_line(const Json& object);

// stdout by write(2). After the first failure nothing more is written and the error stays.
class StandardOutput {
  public:
    bool write(std::string_view bytes);
    // The one object that an exit with --json owes, or one line of records.
    bool object(const Json& object);
    bool record(const Json& object);

    bool broken() const { return error_number_ != 0; }
    bool reader_gone() const;  // EPIPE
    bool is_terminal() const { return terminal_; }
    // 141 when the reader is gone, 5 when the place is full or closed; the reason for people.
    int exit_status() const { return reader_gone() ? 141 : 5; }
    Error error() const;

    StandardOutput();

  private:
    int error_number_ = 0;
    bool terminal_ = false;
};

struct CommonFlags {
    bool json = false;
    bool jsonl = false;
    bool quiet = false;
    bool verbose = false;
    bool no_progress = false;
    bool allow_core = false;
    std::string color = "auto";
    std::optional<std::string> config;  // --config
};

struct Session {
    CommonFlags common;
    StandardOutput out;
    SystemClock clock;
    std::string command;  // "trace ls"
    std::string schema;   // "traces": what the command's object is called

    bool machine() const { return common.json || common.jsonl; }
    // A line on stderr, made safe to show: "kvwitness run: <text>".
    void say(std::string_view text) const;
    // The same without the name in front; nothing with -q.
    void note(std::string_view text) const;
    bool progress_wanted() const;
    // `text` in bold green or red on a terminal that has colour; as it is elsewhere.
    std::string good(std::string_view text) const { return coloured(text, "\x1b[1;32m"); }
    std::string bad(std::string_view text) const { return coloured(text, "\x1b[1;31m"); }
    Json object() const { return object_of(schema); }

  private:
    std::string coloured(std::string_view text, std::string_view code) const;
};

// One line on a terminal's stderr that is rewritten in place, from one second after its begin on.
class Progress {
  public:
    explicit Progress(const Session& session) : on_(session.progress_wanted()) {}
    ~Progress() { clear(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    // Starts the second of patience again.
    void begin();
    void show(std::string_view what, double fraction);
    void show(std::string_view text);
    void clear();

  private:
    using Time = std::chrono::steady_clock::time_point;
    bool on_ = false;
    bool shown_ = false;
    Time begun_ = std::chrono::steady_clock::now();
    Time last_{};
};

// Seconds since `start`.
double seconds_since(std::chrono::steady_clock::time_point start);
// Of several exits at once, the one that counts: 2, 7, 5, 1, 3, 4, 6, 0.
int worse_exit(int a, int b);

}  // namespace kvw::cli
