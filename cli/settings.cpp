#include "cli/settings.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <set>

#include "cli/places.h"
#include "src/base/check.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

Error usage(std::string message) { return {ErrorCode::usage, std::move(message)}; }

// One byte more than is allowed is enough to refuse the rest.
Result<ConfigFile> read_config_file(const std::string& name) {
    Result<File> file = File::open_read(name == "-" ? "/dev/stdin" : name);
    if (!file) {
        return file.error();
    }
    std::string bytes(kConfigBytesMax + 1, '\0');
    std::size_t used = 0;
    while (used < bytes.size()) {
        const Result<std::size_t> got = file->read_some(
            {reinterpret_cast<std::uint8_t*>(bytes.data()) + used, bytes.size() - used});
        if (!got) {
            return got.error();
        }
        if (*got == 0) {
            break;
        }
        used += *got;
    }
    bytes.resize(used);
    return ConfigFile{name, read_config(bytes)};
}

// ---- the file against the flags

bool is_section(std::string_view name) {
    return std::find(std::begin(kSections), std::end(kSections), name) != std::end(kSections);
}

const char* wanted(ValueType type) {
    switch (type) {
        case ValueType::text:
            return "text in quotes";
        case ValueType::whole:
            return "a whole number";
        case ValueType::real:
            return "a number";
        case ValueType::yes_no:
            return "true or false";
        case ValueType::texts:
            return "text in quotes or a list of it";
        case ValueType::whole_or_text:
            return "a whole number or text in quotes";
    }
    return "";
}

bool fits(ConfigKind kind, ValueType type) {
    switch (type) {
        case ValueType::text:
            return kind == ConfigKind::text;
        case ValueType::whole:
            return kind == ConfigKind::whole;
        case ValueType::real:
            return kind == ConfigKind::real || kind == ConfigKind::whole;
        case ValueType::yes_no:
            return kind == ConfigKind::yes_no;
        case ValueType::texts:
            return kind == ConfigKind::texts || kind == ConfigKind::text;
        case ValueType::whole_or_text:
            return kind == ConfigKind::whole || kind == ConfigKind::text;
    }
    return false;
}

// False for a flag that is given as not given.
bool says_something(ValueType type, const std::vector<std::string>& values) {
    if (type != ValueType::yes_no) {
        return true;
    }
    const Result<bool> on = values.empty() ? Result<bool>(false) : yes_or_no(values.back());
    return !on || *on;
}

const ConfigEntry* entry_of(const std::optional<ConfigFile>& file, const Setting& setting) {
    if (!file || setting.section.empty()) {
        return nullptr;
    }
    const std::vector<ConfigEntry>& entries = file->text.entries;
    const auto found = std::find_if(entries.begin(), entries.end(), [&](const ConfigEntry& entry) {
        return entry.section == setting.section && entry.key == setting.key;
    });
    return found != entries.end() ? &*found : nullptr;
}

// Reads a file against all settings.
class Reading {
  public:
    Reading(const ConfigFile& file, const Settings& settings) : file_(file), settings_(settings) {}

    std::vector<ConfigProblem> problems() {
        for (const ConfigSection& section : file_.text.sections) {
            read(section);
        }
        for (const ConfigEntry& entry : file_.text.entries) {
            if (entry.section.empty()) {
                stray(entry);
            } else if (entry.section == "tenants") {
                read_for_tenant(entry);
            } else if (is_section(entry.section)) {
                read(entry);
            }
        }
        std::stable_sort(problems_.begin(), problems_.end(),
                         [](const auto& a, const auto& b) { return a.at < b.at; });
        return std::move(problems_);
    }

  private:
    void report(ConfigPlace at, std::string message) {
        problems_.push_back({at, std::move(message)});
    }

    void read(const ConfigSection& section) {
        if (section.name == "tenants") {
            if (const Status named = check_tenant_name(section.tenant); !named) {
                report(section.at, named.error().message);
            }
        } else if (!is_section(section.name)) {
            std::vector<std::string> names(std::begin(kSections), std::end(kSections));
            names.emplace_back("tenants");
            const std::string hint = did_you_mean(section.name, names);
            report(section.at,
                   fmt::format("unknown section [{}].{}", section.name,
                               hint.empty() ? " There are " + joined(names, ", ") : hint));
        }
    }

    // A key in front of all sections.
    void stray(const ConfigEntry& entry) {
        if (is_section(entry.key) || entry.key == "tenants") {
            report(entry.key_at, fmt::format("[{}] is a section, not {}", entry.key, entry.shown));
        } else {
            unknown(entry, "before the first section",
                    [](const Setting& s) { return !s.section.empty(); });
        }
    }

    template <class Here>
    void unknown(const ConfigEntry& entry, const std::string& place, Here here) {
        std::vector<std::string> keys;
        for (const Setting& setting : settings_) {
            if (setting.key == entry.key && !setting.section.empty()) {
                report(entry.key_at,
                       fmt::format("'{}' belongs in [{}]", entry.key, setting.section));
                return;
            }
            if (here(setting)) {
                keys.push_back(setting.key);
            }
        }
        report(entry.key_at, fmt::format("unknown key '{}' {}.{}", entry.key, place,
                                         did_you_mean(entry.key, keys)));
    }

    bool type_fits(const ConfigEntry& entry, const Setting& setting) {
        if (fits(entry.kind, setting.type)) {
            return true;
        }
        report(entry.value_at,
               fmt::format("'{}' wants {}, not {}", entry.key, wanted(setting.type), entry.shown));
        return false;
    }

    // Of all commands that have this flag.
    void read(const ConfigEntry& entry) {
        const Setting* first = nullptr;
        Status taken;
        for (const Setting& setting : settings_) {
            if (setting.section != entry.section || setting.key != entry.key) {
                continue;
            }
            if (first == nullptr) {
                first = &setting;
                if (!type_fits(entry, setting)) {
                    return;
                }
            }
            check(setting.type == first->type, "a key means one thing");
            if (Status here = setting.take(entry.values); !here && taken) {
                taken = std::move(here);
            }
        }
        if (first == nullptr) {
            unknown(entry, fmt::format("in [{}]", entry.section),
                    [&](const Setting& s) { return s.section == entry.section; });
        } else if (!taken) {
            report(entry.value_at, fmt::format("{}: {}", entry.key, taken.error().message));
        } else {
            contradiction(entry, *first);
        }
    }

    void contradiction(const ConfigEntry& entry, const Setting& setting) {
        for (const ConfigEntry& other : file_.text.entries) {
            const auto alternative =
                std::find_if(settings_.begin(), settings_.end(), [&](const Setting& s) {
                    return s.app == setting.app && s.section == other.section &&
                           s.key == other.key &&
                           std::count(setting.alternatives.begin(), setting.alternatives.end(),
                                      s.key) > 0;
                });
            if (alternative != settings_.end() && says_something(setting.type, entry.values) &&
                says_something(alternative->type, other.values)) {
                report(std::max(entry.key_at, other.key_at),
                       fmt::format("'{}' and '{}' exclude each other", entry.key, other.key));
            }
        }
    }

    void read_for_tenant(const ConfigEntry& entry) {
        if (entry.tenant.empty()) {
            report(entry.key_at, fmt::format("what holds for tenant '{0}' stands in [tenants.{0}], "
                                             "not in one value",
                                             entry.key));
            return;
        }
        if (!check_tenant_name(entry.tenant)) {
            return;  // said already
        }
        const auto for_tenants = [](const Setting& s) { return s.take_for_tenant != nullptr; };
        const Setting* first = nullptr;
        for (const Setting& setting : settings_) {
            if (!for_tenants(setting) || setting.key != entry.key) {
                continue;
            }
            if (first == nullptr && !type_fits(entry, setting)) {
                return;
            }
            const Status taken = setting.take_for_tenant(entry.tenant, entry.values.back());
            if (first == nullptr && !taken) {
                report(entry.value_at, fmt::format("{}: {}", entry.key, taken.error().message));
            }
            first = &setting;
        }
        if (first == nullptr && entry.shown == "a table") {
            report(entry.key_at,
                   fmt::format("a tenant's name with a dot in it needs quotes: [tenants.\"{}.{}\"]",
                               entry.tenant, entry.key));
        } else if (first == nullptr) {
            unknown(entry, fmt::format("in [tenants.{}]", entry.tenant), for_tenants);
        }
    }

    const ConfigFile& file_;
    const Settings& settings_;
    std::vector<ConfigProblem> problems_;
};

// ---- which source counts

const char* variable_value(const Setting& setting) {
    const char* set = setting.variable.empty() ? nullptr : std::getenv(setting.variable.c_str());
    return set != nullptr && *set != '\0' ? set : nullptr;  // an empty one counts as not set
}

std::string place_text(const ConfigFile& file, const ConfigEntry& entry) {
    return fmt::format("{}:{}", file.name, entry.key_at.line);
}

void set_built_in(Effective& found) {
    found.source = Source::built_in;
    found.where.clear();
    found.values.clear();
    if (!found.setting->shown_default.empty()) {
        found.values = {found.setting->shown_default};
    }
}

Effective found_for(const Setting& setting, const std::optional<ConfigFile>& file,
                    const CLI::App& app) {
    Effective found{.setting = &setting};
    const ConfigEntry* entry = entry_of(file, setting);
    if (setting.app == &app && setting.option->count() > 0) {
        found.source = Source::flag;
        found.values = setting.option->results();
        found.where = "--" + setting.key;
    } else if (const char* set = variable_value(setting)) {
        found.source = Source::variable;
        found.values = {set};
        found.where = setting.variable;
    } else if (entry != nullptr) {
        found.source = Source::file;
        found.values = entry->values;
        found.where = place_text(*file, *entry);
    } else {
        set_built_in(found);
    }
    return found;
}

// All settings of one command, those of a weaker source than their alternative set back.
std::vector<Effective> resolve(const std::optional<ConfigFile>& file, const Settings& settings,
                               const CLI::App& app) {
    std::vector<Effective> all;
    for (const Setting& setting : settings) {
        if (setting.app == &app) {
            all.push_back(found_for(setting, file, app));
        }
    }
    const auto counts = [](const Effective& found) {
        return found.source != Source::built_in &&
               says_something(found.setting->type, found.values);
    };
    for (Effective& one : all) {
        for (const std::string& key : one.setting->alternatives) {
            const auto other = std::find_if(all.begin(), all.end(), [&](const Effective& found) {
                return found.setting->key == key;
            });
            check(other != all.end(), "an alternative is a flag of the same command");
            if (counts(one) && counts(*other) && one.source != other->source) {
                Effective& weaker = one.source < other->source ? one : *other;
                set_built_in(weaker);
                weaker.displaced = true;
            }
        }
    }
    return all;
}

void append_tenants(const ConfigFile& file, const Settings& settings,
                    std::vector<Effective>& into) {
    for (const ConfigEntry& entry : file.text.entries) {
        const auto setting = std::find_if(settings.begin(), settings.end(), [&](const Setting& s) {
            return s.take_for_tenant != nullptr && s.key == entry.key;
        });
        if (entry.section == "tenants" && setting != settings.end()) {
            into.push_back({.setting = &*setting,
                            .tenant = entry.tenant,
                            .values = entry.values,
                            .source = Source::file,
                            .where = place_text(file, entry)});
        }
    }
}

}  // namespace

Result<std::optional<ConfigFile>> open_config(const std::optional<std::string>& named) {
    const char* variable = std::getenv("KVW_CONFIG");
    std::error_code ignored;
    std::string name;
    if (named || (variable != nullptr && *variable != '\0')) {
        name = named ? *named : variable;
        const auto kind = std::filesystem::status(name, ignored).type();
        const bool folder = kind == std::filesystem::file_type::directory;
        if (name != "-" && (folder || kind == std::filesystem::file_type::not_found)) {
            return usage(fmt::format(
                "{}{} {}", named ? "" : "KVW_CONFIG: ",
                folder ? "not a configuration file but a folder:" : "no configuration file", name));
        }
    } else {
        const Result<Path> folder = config_folder();
        if (!folder) {
            return std::optional<ConfigFile>();
        }
        name = (*folder / "config.toml").string();
        if (std::filesystem::status(name, ignored).type() ==
            std::filesystem::file_type::not_found) {
            return std::optional<ConfigFile>();
        }
    }
    Result<ConfigFile> file = read_config_file(name);
    if (!file) {
        return file.error();
    }
    return std::optional<ConfigFile>(std::move(*file));
}

std::string to_text(const ConfigFile& file, const ConfigProblem& problem) {
    return fmt::format("{}:{}:{}: {}", file.name, problem.at.line, problem.at.column,
                       problem.message);
}

std::vector<ConfigProblem> apply_file(const ConfigFile& file, const Settings& settings) {
    return file.text.problems.empty() ? Reading(file, settings).problems() : file.text.problems;
}

const char* name_of(Source source) {
    switch (source) {
        case Source::built_in:
            return "built-in";
        case Source::file:
            return "config";
        case Source::variable:
            return "variable";
        case Source::flag:
            return "flag";
    }
    return "";
}

Status apply_variables_and_flags(const std::optional<ConfigFile>& file, const Settings& settings,
                                 const CLI::App& app) {
    for (const Effective& found : resolve(file, settings, app)) {
        const Setting& setting = *found.setting;
        Status taken;
        if (found.displaced) {
            setting.reset();
        } else if (found.source == Source::variable || found.source == Source::flag) {
            taken = setting.take(found.values);
        }
        if (!taken) {
            return usage(
                fmt::format("{} ({}): {}", setting.names, setting.variable, taken.error().message));
        }
    }
    return {};
}

std::vector<Effective> effective_settings(const std::optional<ConfigFile>& file,
                                          const Settings& settings, const CLI::App& app) {
    std::vector<Effective> own = resolve(file, settings, app);
    std::set<std::pair<std::string, std::string>> seen;
    std::vector<Effective> all;
    for (const std::string_view section : kSections) {
        for (const Setting& setting : settings) {
            if (setting.section != section || !seen.insert({setting.section, setting.key}).second) {
                continue;
            }
            const auto mine = std::find_if(own.begin(), own.end(), [&](const Effective& found) {
                return found.setting->section == section && found.setting->key == setting.key;
            });
            all.push_back(mine != own.end() ? *mine : found_for(setting, file, app));
        }
    }
    if (file) {
        append_tenants(*file, settings, all);
    }
    return all;
}

std::vector<std::string> strange_variables(const Settings& settings) {
    std::vector<std::string> known, strange;
    for (const Setting& setting : settings) {
        known.push_back(setting.variable);
    }
    for (char** at = environ; *at != nullptr; ++at) {
        const std::string_view text = *at;
        const std::string name(text.substr(0, text.find('=')));
        if (name.starts_with("KVW_") &&
            std::find(known.begin(), known.end(), name) == known.end()) {
            strange.push_back(
                fmt::format("{} is no setting's variable.{}", name, did_you_mean(name, known)));
        }
    }
    return strange;
}

}  // namespace kvw::cli
