// The tree of commands: parsing, help, completion, and one way out for every end of the program.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "cli/options.h"
#include "cli/session.h"
#include "cli/settings.h"

namespace kvw::cli {

// What a command does once its flags are read: its exit status, or the error that main reports and
// that becomes the exit status. With --json it has printed its one object itself unless it returns
// an error.
using Action = std::function<Result<int>(Session&)>;

struct CommandInfo {
    std::string path;         // "trace ls"
    std::string schema;       // "traces": kvwitness/traces
    std::string description;  // one line
    std::string examples;     // indented lines, shown first in its help
    bool configured = true;   // takes what the configuration file says, or fails when it is wrong
};

class Commands {
  public:
    explicit Commands(Session& session);
    ~Commands();

    // A group of commands ("trace") or a command with sub-commands of its own ("bench").
    void group(const std::string& path, const std::string& description);
    Flags add(const CommandInfo& info, Action action);

    CommonFlags& common() { return session_.common; }
    int run(int argc, char** argv);

    std::string help(const std::string& path) const;  // "" for the whole program
    bool known(const std::string& path) const;
    // "bash", "zsh" or "fish".
    std::string completion(const std::string& shell) const;

    // What all commands declared, and, once the line is parsed: the configuration file of a
    // configured command, and what counts for it.
    const Settings& settings() const { return settings_; }
    const std::optional<ConfigFile>& config_file() const { return config_file_; }
    std::vector<Effective> effective() const;

  private:
    CLI::App* make(const std::string& path, const std::string& description);
    std::string path_in(int argc, char** argv) const;
    Result<int> parse_and_run(int argc, char** argv);
    Error unexpected(const CLI::App& app) const;
    Status configure(const CLI::App& app, bool from_file);

    struct Entry {
        CLI::App* app = nullptr;
        CommandInfo info;
        Action action;
    };
    Session& session_;
    Settings settings_;
    std::optional<ConfigFile> config_file_;
    std::unique_ptr<CLI::App> root_;
    std::map<std::string, Entry> entries_;
    bool show_version_ = false;
};

// One per file of this folder.
void add_run(Commands& commands);
void add_batch(Commands& commands);  // with check, merge
void add_verify(Commands& commands);
void add_replay(Commands& commands);
void add_trace_ls(Commands& commands);
void add_trace_show(Commands& commands);
void add_trace_dump(Commands& commands);
void add_trace_remove(Commands& commands);  // prune, rm
void add_model_info(Commands& commands);    // info, check
void add_model_tokenize(Commands& commands);
void add_bench(Commands& commands);
void add_bench_verify(Commands& commands);
void add_bench_limits(Commands& commands);
void add_config(Commands& commands);  // show, check
void add_completion(Commands& commands);
void add_help(Commands& commands);

// --version, with or without --json.
Result<int> print_version(Session& session);

}  // namespace kvw::cli
