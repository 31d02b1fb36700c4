// completion: generated from the same tree of flags that parses them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"

namespace kvw::cli {

namespace {

// One place in the tree: the words typed so far, and what may come next.
struct Place {
    std::string path;  // "trace ls"; "" at the start
    std::vector<std::string> words;
    std::vector<std::pair<std::string, std::string>> described;  // word, help
};

void collect(const CLI::App& app, const std::string& path, std::vector<Place>& places) {
    Place place{path, {}, {}};
    const auto add = [&](const std::string& word, const std::string& help) {
        place.words.push_back(word);
        place.described.emplace_back(word, help);
    };
    for (const CLI::App* sub : app.get_subcommands({})) {
        add(sub->get_name(), sub->get_description());
        collect(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name(), places);
    }
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& name : option->get_lnames()) {
            add("--" + name, option->get_description());
        }
        for (const std::string& name : option->get_snames()) {
            add("-" + name, option->get_description());
        }
    }
    places.push_back(std::move(place));
}

// Both shells walk the line the same way: words that make a longer known path lengthen it.
std::string path_walk(const std::vector<Place>& places, const char* words, const char* first) {
    std::string known;
    for (const Place& place : places) {
        known +=
            place.path.empty() ? "" : fmt::format("{}'{}'", known.empty() ? "" : "|", place.path);
    }
    return fmt::format(
        "    local path='' word next\n"
        "    for word in {}; do\n"
        "        next=\"${{path:+$path }}$word\"\n"
        "        case \"$next\" in\n"
        "            {}) path=$next ;;\n"
        "        esac\n"
        "    done\n",
        fmt::format("\"${{{}[@]:{}}}\"", words, first), known);
}

std::string case_of_paths(const std::vector<Place>& places) {
    std::string out = "    case \"$path\" in\n";
    for (const Place& place : places) {
        out += fmt::format("        '{}') next='{}' ;;\n", place.path, joined(place.words, " "));
    }
    return out + "    esac\n";
}

std::string bash(const std::vector<Place>& places) {
    return "# bash completion of kvwitness: source <(kvwitness completion bash)\n_kvwitness() {\n" +
           path_walk(places, "COMP_WORDS", "1:COMP_CWORD-1") + case_of_paths(places) +
           "    COMPREPLY=($(compgen -W \"$next\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
           "}\n"
           "complete -o default -F _kvwitness kvwitness\n";
}

std::string zsh(const std::vector<Place>& places) {
    return "#compdef kvwitness\n# zsh completion of kvwitness: source <(kvwitness completion "
           "zsh)\n_kvwitness() {\n" +
           path_walk(places, "words", "1:$((CURRENT-2))") + case_of_paths(places) +
           "    compadd -- ${(s: :)next}\n"
           "    _files\n"
           "}\n"
           "compdef _kvwitness kvwitness\n";
}

std::string quoted_for_fish(std::string text) {
    std::string out;
    for (const char c : text) {
        out += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    }
    return out;
}

std::string fish(const std::vector<Place>& places) {
    std::string out =
        "# fish completion of kvwitness: kvwitness completion fish | source\n"
        "function __kvwitness_at\n"
        "    set -l path\n"
        "    for word in (commandline -opc)[2..]\n"
        "        set -l next (string trim \"$path $word\")\n"
        "        switch $next\n"
        "            case";
    for (const Place& place : places) {
        out += place.path.empty() ? "" : fmt::format(" '{}'", place.path);
    }
    out +=
        "\n"
        "                set path $next\n"
        "        end\n"
        "    end\n"
        "    test \"$path\" = \"$argv[1]\"\n"
        "end\n";
    for (const Place& place : places) {
        for (const auto& [word, help] : place.described) {
            const char* form = word.starts_with("--") ? "-l" : word.starts_with("-") ? "-s" : "-a";
            out += fmt::format("complete -c kvwitness -n \"__kvwitness_at '{}'\" {} '{}' -d '{}'\n",
                               place.path, form, word.substr(word.find_first_not_of('-')),
                               quoted_for_fish(help));
        }
    }
    return out;
}

}  // namespace

std::string Commands::completion(const std::string& shell) const {
    std::vector<Place> places;
    collect(*root_, "", places);
    return shell == "bash" ? bash(places) : shell == "zsh" ? zsh(places) : fish(places);
}

void add_completion(Commands& commands) {
    const auto shell = std::make_shared<std::string>();
    commands
        .add({"completion", "completion", "print a completion script for bash, zsh or fish",
              "  source <(kvwitness completion bash)\n"
              "  kvwitness completion fish | source",
              false},
             [shell, &commands](Session& session) -> Result<int> {
                 if (*shell != "bash" && *shell != "zsh" && *shell != "fish") {
                     return Error{ErrorCode::usage,
                                  fmt::format("'{}' is not one of bash|zsh|fish", *shell)};
                 }
                 if (session.common.json) {
                     Json object = session.object();
                     object["shell"] = *shell;
                     object["script"] = commands.completion(*shell);
                     session.out.object(object);
                 } else {
                     session.out.write(commands.completion(*shell));
                 }
                 return 0;
             })
        .positional("SHELL", *shell, "bash, zsh or fish", true);
}

}  // namespace kvw::cli
