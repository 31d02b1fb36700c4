// Flag > KVW_* variable > configuration file > built-in: which value of a setting counts, and where
// it came from.
//
// CLI11 has read the line before anything here is called. Values of the file go through the readers
// of the flags, for all commands, so that a file is right or wrong whoever reads it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/config.h"
#include "cli/options.h"

namespace kvw::cli {

// The sections of the file that hold flags, in the order in which they are shown. Beside them there
// is [tenants.NAME].
inline constexpr std::string_view kSections[] = {"engine", "kv", "limits", "trace", "generation"};

struct ConfigFile {
    std::string name;  // as given, "-" for stdin
    ConfigText text;
};

// `named`, or $KVW_CONFIG, or kvwitness/config.toml in the XDG configuration folder, which need not
// be there. Nothing in the current folder is read unless it is named. The contents may be wrong:
// text.problems. Fails: usage (a named file that is not there), io.
Result<std::optional<ConfigFile>> open_config(const std::optional<std::string>& named);

// "FILE:3:1: message".
std::string to_text(const ConfigFile& file, const ConfigProblem& problem);

// Gives the values of the file to the targets of all settings. Returns everything that is wrong
// with the file, in its order.
std::vector<ConfigProblem> apply_file(const ConfigFile& file, const Settings& settings);

enum class Source : std::uint8_t { built_in, file, variable, flag };
const char* name_of(Source source);  // "built-in", "config", "variable", "flag"

// A setting as it counts for the command that was parsed.
struct Effective {
    const Setting* setting = nullptr;
    std::string tenant;               // a value of [tenants.NAME]
    std::vector<std::string> values;  // none: not set
    Source source = Source::built_in;
    std::string where;       // "FILE:3", "KVW_TOKENS", "--tokens", ""
    bool displaced = false;  // something was set, and an alternative from a stronger source won
};

// Lets variables and flags of the parsed command `app` win over the file, whose values its targets
// hold already. Fails: usage, naming the variable.
Status apply_variables_and_flags(const std::optional<ConfigFile>& file, const Settings& settings,
                                 const CLI::App& app);

// Every setting that has a section, each once, in the order of kSections, then those of tenants.
std::vector<Effective> effective_settings(const std::optional<ConfigFile>& file,
                                          const Settings& settings, const CLI::App& app);

// Variables of this environment that look like ours and are nobody's: "KVW_TOKNES". With hints.
std::vector<std::string> strange_variables(const Settings& settings);

}  // namespace kvw::cli
