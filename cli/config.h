// A configuration file as values with places, still without meaning: which sections and keys there
// are is a matter of the flags (cli/settings.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/config_scan.h"

namespace kvw::cli {

enum class ConfigKind : std::uint8_t { text, whole, real, yes_no, texts, other };

struct ConfigEntry {
    std::string section;  // "kv"; "" before the first section
    std::string tenant;   // in [tenants.NAME] alone
    std::string key;
    ConfigKind kind = ConfigKind::other;
    std::vector<std::string> values;  // as a flag would be given them; none for other
    std::string shown;                // what the value is, in words: "a whole number"
    ConfigPlace key_at, value_at;
};

// "[kv]", or "[tenants.acme]" with its tenant; also one that holds nothing.
struct ConfigSection {
    std::string name, tenant;
    ConfigPlace at;
};

struct ConfigText {
    std::vector<ConfigSection> sections;  // in the order of the file, as the entries
    std::vector<ConfigEntry> entries;
    std::vector<ConfigProblem> problems;  // with any, there are no sections and entries
};

// Scans (cli/config_scan.h), parses and flattens. Fails in `problems` alone.
ConfigText read_config(std::string_view bytes);

}  // namespace kvw::cli
