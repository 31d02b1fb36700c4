#include "cli/commands.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <system_error>

#include "cli/places.h"
#include "cli/signals.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

// True when the line asks for JSON. Looked at before parsing, because an error of parsing has to be
// one object too.
bool asks_for_json(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string_view word = argv[i];
        if (word == "--") {
            return false;
        }
        if (word == "--json" || word == "--jsonl" || word == "--format=json" ||
            (word == "--format" && i + 1 < argc && std::string_view(argv[i + 1]) == "json")) {
            return true;
        }
    }
    return false;
}

// llama.cpp's `-ub` and `-np` are one flag each; CLI11 would read them as -u -b and -n p. What
// follows a flag that takes text stays as it is.
std::vector<std::string> words_of(int argc, char** argv) {
    static constexpr std::string_view kTakesText[] = {"-p", "--prompt", "--sys", "--stop"};
    std::vector<std::string> words(argv + 1, argv + argc);
    for (std::size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
        const bool is_text =
            i > 0 && std::count(std::begin(kTakesText), std::end(kTakesText), words[i - 1]) > 0;
        if ((words[i] == "-ub" || words[i] == "-np") && !is_text) {
            words[i].insert(0, "-");
        }
    }
    std::reverse(words.begin(), words.end());  // the order CLI11 wants
    return words;
}

std::vector<std::string> names_of_subcommands(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::App* sub : app.get_subcommands({})) {
        names.push_back(sub->get_name());
    }
    return names;
}

std::vector<std::string> names_of_flags(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& name : option->get_lnames()) {
            names.push_back("--" + name);
        }
        for (const std::string& name : option->get_snames()) {
            names.push_back("-" + name);
        }
    }
    return names;
}

void append_row(std::string& out, const std::string& left, const std::string& right) {
    if (left.size() < 34) {
        out += fmt::format("  {:<34}{}\n", left, right);
    } else {
        out += fmt::format("  {}\n  {:<34}{}\n", left, "", right);
    }
}

std::string flag_help(const CLI::Option& option, const Settings& settings) {
    std::string text = option.get_description();
    if (!option.get_default_str().empty()) {
        text += fmt::format(" [{}]", option.get_default_str());
    }
    const auto setting = std::find_if(settings.begin(), settings.end(),
                                      [&](const Setting& s) { return s.option == &option; });
    if (setting != settings.end() && !setting->variable.empty()) {
        text += fmt::format(" ({})", setting->variable);
    }
    return text;
}

std::string render_help(const CLI::App& app, const CommandInfo& info, bool has_action,
                        const Settings& settings) {
    const std::string name = info.path.empty() ? "kvwitness" : "kvwitness " + info.path;
    std::string out = fmt::format("{} - {}\n", name, info.description);
    if (!info.examples.empty()) {
        out += "\nExamples:\n" + info.examples + "\n";
    }
    const std::vector<const CLI::App*> subs = app.get_subcommands({});
    out += "\nUsage: " + name;
    if (!subs.empty()) {
        out += has_action ? " [COMMAND]" : " COMMAND";
    }
    out += " [flags]";
    std::vector<const CLI::Option*> positionals =
        app.get_options([](const CLI::Option* option) { return option->get_positional(); });
    for (const CLI::Option* option : positionals) {
        const std::string shown =
            option->get_name(true) + (option->get_items_expected_max() > 1 ? "..." : "");
        out += option->get_required() ? " " + shown : " [" + shown + "]";
    }
    out += "\n";
    if (!subs.empty()) {
        out += "\nCommands:\n";
        for (const CLI::App* sub : subs) {
            append_row(out, sub->get_name(), sub->get_description());
        }
    }
    for (const CLI::Option* option : positionals) {
        out += option == positionals.front() ? "\nArguments:\n" : "";
        append_row(out, option->get_name(true), option->get_description());
    }
    for (const std::string& group : app.get_groups()) {
        const auto listed = app.get_options([&](const CLI::Option* option) {
            return option->get_group() == group && option->nonpositional();
        });
        if (listed.empty()) {
            continue;
        }
        out += "\n" + group + ":\n";
        for (const CLI::Option* option : listed) {
            const std::string kind =
                option->get_type_size() != 0 ? " " + option->get_type_name() : "";
            append_row(out, option->get_name(false, true) + kind, flag_help(*option, settings));
        }
    }
    return out;
}

}  // namespace

Commands::Commands(Session& session) : session_(session), root_(std::make_unique<CLI::App>()) {
    root_->name("kvwitness");
    entries_[""] = {
        root_.get(),
        {"", "error", "runs a language model, records every KV page event, proves who read what",
         "  kvwitness run \"Why is the sky blue?\"      answer, recorded\n"
         "  kvwitness verify @latest                  prove it from the record\n"
         "  kvwitness replay @latest                  and by running it again"},
        {}};
    root_->set_help_flag("-h,--help", "Show this help");
    root_->add_flag("--version", show_version_,
                    "Show version, formats, instruction sets and build");
    root_->add_flag("--json", session_.common.json, "With --version: as one JSON object");
    root_->require_subcommand(0, 1);
    root_->allow_extras();
}

Commands::~Commands() = default;

CLI::App* Commands::make(const std::string& path, const std::string& description) {
    const std::size_t space = path.rfind(' ');
    CLI::App* parent =
        space == std::string::npos ? root_.get() : entries_.at(path.substr(0, space)).app;
    CLI::App* app = parent->add_subcommand(
        space == std::string::npos ? path : path.substr(space + 1), description);
    app->set_help_flag("-h,--help", "Show this help");
    app->require_subcommand(0, 1);
    app->allow_extras();
    return app;
}

void Commands::group(const std::string& path, const std::string& description) {
    CLI::App* app = make(path, description);
    app->add_flag("--json", session_.common.json, "Errors as one JSON object");
    entries_[path] = {app, {path, "error", description, ""}, {}};
}

Flags Commands::add(const CommandInfo& info, Action action) {
    CLI::App* app = make(info.path, info.description);
    entries_[info.path] = {app, info, std::move(action)};
    CommonFlags& common = session_.common;
    Flags flags(*app, settings_);
    flags.group("Common")
        .flag("--json", common.json, "One JSON object on stdout, whatever happens", false)
        .text("--config", "FILE", common.config,
              "Configuration file; default: kvwitness/config.toml in the XDG configuration folder")
        .flag("-q,--quiet", common.quiet, "Nothing on stderr but errors")
        .flag("-v,--verbose", common.verbose, "Say more on stderr")
        .choice("--color", common.color, {"auto", "always", "never"}, "Colour on terminals")
        .flag("--no-progress", common.no_progress, "No progress line on stderr")
        .flag("--allow-core", common.allow_core,
              "Let a crash leave a core file, prompts and keys in it");
    flags.group("Options");
    return flags;
}

std::vector<Effective> Commands::effective() const {
    return effective_settings(config_file_, settings_, *entries_.at(session_.command).app);
}

// The line is parsed: what the file says goes in behind it, then variables and flags once more.
Status Commands::configure(const CLI::App& app, bool from_file) {
    if (from_file) {
        Result<std::optional<ConfigFile>> file = open_config(session_.common.config);
        if (!file) {
            return file.error();
        }
        config_file_ = std::move(*file);
    }
    if (config_file_) {
        const std::vector<ConfigProblem> problems = apply_file(*config_file_, settings_);
        if (!problems.empty()) {
            const std::string more =
                problems.size() == 1
                    ? ""
                    : fmt::format(" ({} more; kvwitness config check {} lists them)",
                                  problems.size() - 1, config_file_->name);
            return Error{ErrorCode::usage, to_text(*config_file_, problems.front()) + more};
        }
    }
    return apply_variables_and_flags(config_file_, settings_, app);
}

bool Commands::known(const std::string& path) const { return entries_.contains(path); }

std::string Commands::help(const std::string& path) const {
    const Entry& entry = entries_.at(path);
    return render_help(*entry.app, entry.info, static_cast<bool>(entry.action), settings_);
}

// The command that the line names, as far as it can be told without parsing: leading words, flags
// that take no value aside.
std::string Commands::path_in(int argc, char** argv) const {
    std::string path;
    for (int i = 1; i < argc; ++i) {
        const std::string_view word = argv[i];
        if (word == "--version" || word == "--json" || word == "-h" || word == "--help") {
            continue;
        }
        const std::string longer =
            path.empty() ? std::string(word) : path + " " + std::string(word);
        if (!entries_.contains(longer)) {
            break;
        }
        path = longer;
    }
    return path;
}

Error Commands::unexpected(const CLI::App& app) const {
    const std::vector<std::string> words = app.remaining();
    const auto is_mark = [](const std::string& word) { return word == "--"; };
    const auto found = std::find_if_not(words.begin(), words.end(), is_mark);
    const std::string word = found != words.end() ? *found : "--";
    if (word.size() > 1 && word[0] == '-') {
        const std::string flag = word.substr(0, word.find('='));
        return {ErrorCode::usage,
                fmt::format("unknown flag '{}'.{}", flag, did_you_mean(flag, names_of_flags(app)))};
    }
    if (!app.get_subcommands({}).empty()) {
        return {ErrorCode::usage, fmt::format("unknown command '{}'.{}", word,
                                              did_you_mean(word, names_of_subcommands(app)))};
    }
    // Not shown: it may be part of a prompt that was not quoted.
    return {ErrorCode::usage,
            fmt::format("{} argument(s) too many; text of several words needs quotes",
                        app.remaining_size())};
}

Result<int> Commands::parse_and_run(int argc, char** argv) {
    const std::string path = path_in(argc, argv);
    const Entry& entry = entries_.at(path);
    session_.command = path;
    session_.schema = entry.info.schema;
    if (const Status stack = check_stack(); !stack) {
        return stack.error();
    }
    try {
        root_->parse(words_of(argc, argv));
    } catch (const CLI::CallForHelp&) {
        if (asks_for_json(argc, argv)) {
            Json object = object_of("help");
            object["command"] = path;
            object["text"] = help(path);
            session_.out.object(object);
        } else {
            session_.out.write(help(path));
        }
        return 0;
    } catch (const CLI::ParseError& problem) {
        return Error{ErrorCode::usage, problem.what()};
    }
    for (const CLI::App* app = entry.app; app != nullptr; app = app->get_parent()) {
        if (app->remaining_size() != 0) {
            return unexpected(*app);
        }
    }
    if (show_version_) {
        return print_version(session_);
    }
    if (!entry.action) {
        if (!session_.machine()) {
            session_.note(help(path));
        }
        return Error{ErrorCode::usage,
                     path.empty() ? "no command given" : "which " + path + " command?"};
    }
    if (const Status configured = configure(*entry.app, entry.info.configured); !configured) {
        return configured.error();
    }
    if (!session_.common.allow_core) {
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    }
    return entry.action(session_);
}

int Commands::run(int argc, char** argv) {
    const bool json = asks_for_json(argc, argv);
    if (json) {
        owe_object(entries_.at(path_in(argc, argv)).info.schema);
    }
    Result<int> result = 0;
    try {
        result = parse_and_run(argc, argv);
    } catch (const std::bad_alloc&) {
        result = Error{ErrorCode::out_of_memory, "not enough memory"};
    } catch (const std::system_error& problem) {  // a thread that could not be started
        result = Error{ErrorCode::out_of_memory, problem.what()};
    } catch (const std::exception& problem) {
        result = Error{ErrorCode::invariant, problem.what()};
    }
    if (result && session_.out.broken() && (*result == 0 || session_.out.reader_gone())) {
        if (session_.out.reader_gone()) {
            return 141;
        }
        result = session_.out.error();
    }
    if (result) {
        return *result;
    }
    const Error& error = result.error();
    const int status = error.code == ErrorCode::cancelled && stop_signal() != 0
                           ? 128 + stop_signal()
                           : exit_code(error.code);
    session_.say(error.message);
    if (json || session_.machine()) {
        Json object = session_.object();
        if (session_.schema == "certificate" && status != 2) {
            object["verdict"] = "UNPROVEN";
        }
        object["error"] = error_object(error, status);
        session_.out.object(object);
        if (session_.out.reader_gone()) {
            return 141;
        }
    }
    return status;
}

}  // namespace kvw::cli
