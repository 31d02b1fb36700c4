// config show and config check: what is set and by whom, and whether a file would be taken.
#include <fmt/format.h>

#include <limits>
#include <memory>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

constexpr std::uint64_t kJsonWholeMax = 1ull << 53;

// ---- show

struct ShowFlags {
    GenerationFlags generation;
    EngineFlags engine;
    TraceFlags trace;
    bool origin = false;
};

bool is_whole_up_to(const std::string& text, std::uint64_t most) {
    return whole_number(text, 0, most).has_value();
}

// Text as TOML has it between double quotes.
std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : utf8_lossy(text)) {
        if (c == '"' || c == '\\') {
            out += {'\\', c};
        } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
            out += fmt::format("\\u{:04x}", c);
        } else {
            out += c;
        }
    }
    return out + "\"";
}

std::string toml_value(const Effective& found) {
    const std::string& last = found.values.empty() ? std::string() : found.values.back();
    switch (found.setting->type) {
        case ValueType::texts: {
            std::vector<std::string> each;
            for (const std::string& value : found.values) {
                each.push_back(quoted(value));
            }
            return fmt::format("[{}]", joined(each, ", "));
        }
        case ValueType::yes_no:
            return yes_or_no(last).value_or(false) ? "true" : "false";
        case ValueType::whole:
        case ValueType::real:
            return last;
        case ValueType::whole_or_text:
            return is_whole_up_to(last, std::numeric_limits<std::int64_t>::max()) ? last
                                                                                  : quoted(last);
        case ValueType::text:
            break;
    }
    return quoted(last);
}

Json json_value(const Effective& found) {
    if (found.values.empty()) {
        return nullptr;
    }
    const std::string& last = found.values.back();
    switch (found.setting->type) {
        case ValueType::texts:
            return found.values;
        case ValueType::yes_no:
            return yes_or_no(last).value_or(false);
        case ValueType::real:
            return real_number(last, -1e300, 1e300).value_or(0.0);
        case ValueType::whole:
        case ValueType::whole_or_text:
            if (const Result<std::uint64_t> number = whole_number(last, 0, kJsonWholeMax)) {
                return *number;
            }
            break;
        case ValueType::text:
            break;
    }
    return last;
}

Json json_of(const Effective& found) {
    Json object{{"section", found.tenant.empty() ? found.setting->section : "tenants"}};
    if (!found.tenant.empty()) {
        object["tenant"] = found.tenant;
    }
    object["key"] = found.setting->key;
    object["value"] = json_value(found);
    object["origin"] = name_of(found.source);
    object["where"] = found.where.empty() ? Json(nullptr) : Json(found.where);
    return object;
}

std::string header_of(const Effective& found) {
    return found.tenant.empty() ? fmt::format("[{}]", found.setting->section)
           : found.tenant.find('.') == std::string::npos
               ? fmt::format("[tenants.{}]", found.tenant)
               : fmt::format("[tenants.\"{}\"]", found.tenant);
}

// A configuration file that says the same; what is not set is a comment.
std::string toml_of(const std::vector<Effective>& settings, bool origin) {
    std::string out, header;
    for (const Effective& found : settings) {
        if (header_of(found) != header) {
            header = header_of(found);
            out += (out.empty() ? "" : "\n") + header + "\n";
        }
        const bool set = !found.values.empty() || found.source != Source::built_in;
        const std::string line = set ? fmt::format("{} = {}", found.setting->key, toml_value(found))
                                     : fmt::format("# {} =", found.setting->key);
        out += origin ? fmt::format("{:<34}# {}{}{}\n", line, name_of(found.source),
                                    found.where.empty() ? "" : " ", printable(found.where))
                      : line + "\n";
    }
    return out;
}

Result<int> show(const ShowFlags& flags, const Commands& commands, Session& session) {
    const std::vector<Effective> settings = commands.effective();
    for (const std::string& strange : strange_variables(commands.settings())) {
        session.note(strange);
    }
    if (!session.common.json) {
        session.out.write(toml_of(settings, flags.origin));
        return 0;
    }
    Json object = session.object();
    const std::optional<ConfigFile>& file = commands.config_file();
    object["file"] = file ? Json(file->name) : Json(nullptr);
    object["settings"] = Json::array();
    for (const Effective& found : settings) {
        object["settings"].push_back(json_of(found));
    }
    session.out.object(object);
    return 0;
}

// ---- check

Json json_of(const ConfigFile& file, const ConfigProblem& problem) {
    return Json{{"file", file.name},
                {"line", problem.at.line},
                {"column", problem.at.column},
                {"message", printable(problem.message)}};
}

void print_check(const std::optional<ConfigFile>& file, const std::vector<ConfigProblem>& problems,
                 Session& session) {
    if (!file) {
        session.out.write("no configuration file; everything is built-in\n");
    } else if (problems.empty()) {
        session.out.write(fmt::format("{}: {} settings, no problem\n", printable(file->name),
                                      file->text.entries.size()));
    }
    for (const ConfigProblem& problem : problems) {
        session.out.write(printable(to_text(*file, problem)) + "\n");
    }
}

Result<int> check_file(const std::optional<std::string>& given, const Commands& commands,
                       Session& session) {
    const Result<std::optional<ConfigFile>> opened =
        open_config(given ? given : session.common.config);
    if (!opened) {
        return opened.error();
    }
    const std::optional<ConfigFile>& file = *opened;
    const std::vector<ConfigProblem> problems =
        file ? apply_file(*file, commands.settings()) : std::vector<ConfigProblem>();
    if (!session.common.json) {
        print_check(file, problems, session);
        return problems.empty() ? 0 : 2;
    }
    Json object = session.object();
    object["file"] = file ? Json(file->name) : Json(nullptr);
    object["ok"] = problems.empty();
    object["settings"] = file ? file->text.entries.size() : 0;
    object["problems"] = Json::array();
    for (const ConfigProblem& problem : problems) {
        object["problems"].push_back(json_of(*file, problem));
    }
    if (!problems.empty()) {
        object["error"] = error_object({ErrorCode::usage, to_text(*file, problems.front())}, 2);
    }
    session.out.object(object);
    return problems.empty() ? 0 : 2;
}

}  // namespace

void add_config(Commands& commands) {
    const auto shown = std::make_shared<ShowFlags>();
    Flags flags = commands.add(
        {"config show", "config", "print every setting as a configuration file",
         "  kvwitness config show\n"
         "  kvwitness config show --origin              and where each value comes from\n"
         "  kvwitness config show --temp 0 --origin     as `run --temp 0` would have it\n"
         "  kvwitness config show > config.toml"},
        [shown, &commands](Session& session) { return show(*shown, commands, session); });
    flags.flag("--origin", shown->origin, "Built-in, configuration file and line, variable, flag",
               false);
    add_template_flags(flags, shown->generation);
    add_generation_flags(flags, shown->generation);
    add_engine_flags(flags, shown->engine);
    add_trace_flags(flags, shown->trace);

    const auto file = std::make_shared<std::optional<std::string>>();
    commands
        .add({"config check", "config_check",
              "name everything that is wrong with a configuration file, with line and column",
              "  kvwitness config check\n"
              "  kvwitness config check my.toml --json",
              false},
             [file, &commands](Session& session) { return check_file(*file, commands, session); })
        .positional("FILE", *file, "Default: the file that other commands would read");
}

}  // namespace kvw::cli
