// The one-way order of the folders, read from the #include lines of the whole tree.
//
//   base -> kernels, traces -> ledger -> gguf -> text, model -> kv -> engine -> jobs -> replay ->
//   cli
//
// A file may include what stands to the left of its folder, and its own folder; two folders that
// stand side by side (kernels and traces, text and model) do not see each other.

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct Layer {
    std::string_view folder;
    int place;  // from the left
};

constexpr std::array<Layer, 12> kLayers = {{
    {"src/base", 0},
    {"kernels", 1},
    {"traces", 1},
    {"src/ledger", 2},
    {"src/gguf", 3},
    {"src/text", 4},
    {"src/model", 4},
    {"src/kv", 5},
    {"src/engine", 6},
    {"src/jobs", 7},
    {"replay", 8},
    {"cli", 9},
}};

// The part of replay/ that judges a trace alone, and what it must not see, however indirectly.
constexpr std::string_view kVerifyPart[] = {"replay/certificate", "replay/controls",
                                            "replay/verify"};
constexpr std::string_view kNotForVerify[] = {"src/engine/", "src/kv/",   "src/model/",
                                              "src/text/",   "src/gguf/", "kernels/"};

// File name (from the root) -> its text.
using Tree = std::map<std::string, std::string>;

struct Include {
    std::string from;
    std::size_t line;
    std::string to;

    std::string shown() const { return from + ":" + std::to_string(line) + " includes " + to; }
};

const Layer* layer_of(std::string_view file) {
    for (const Layer& layer : kLayers) {
        if (file.starts_with(layer.folder) && file.substr(layer.folder.size()).starts_with("/")) {
            return &layer;
        }
    }
    return nullptr;
}

std::vector<Include> includes_of(const Tree& tree) {
    std::vector<Include> includes;
    for (const auto& [file, text] : tree) {
        std::istringstream lines(text);
        std::string line;
        for (std::size_t number = 1; std::getline(lines, line); ++number) {
            std::istringstream words(line);
            std::string directive;
            std::string target;
            char hash = '\0';
            words >> hash >> directive >> target;
            if (hash == '#' && directive.starts_with("include\"")) {
                target = directive.substr(7);
                directive = "include";
            }
            if (hash == '#' && directive == "include" && target.size() > 2 && target[0] == '"') {
                includes.push_back({file, number, target.substr(1, target.find('"', 1) - 1)});
            }
        }
    }
    return includes;
}

std::vector<std::string> arrows_that_point_up(const Tree& tree) {
    std::vector<std::string> wrong;
    for (const Include& include : includes_of(tree)) {
        const Layer* from = layer_of(include.from);
        const Layer* to = layer_of(include.to);
        if (from == nullptr) {
            wrong.push_back(include.from + " lies in a folder that the order does not know");
        } else if (to == nullptr) {
            wrong.push_back(include.shown() +
                            ", which is in no folder of the order (includes start "
                            "at the root)");
        } else if (from != to && to->place >= from->place) {
            wrong.push_back(include.shown() + ": " + std::string(from->folder) + " may not see " +
                            std::string(to->folder));
        }
    }
    return wrong;
}

std::vector<std::string> includes_of_nothing(const Tree& tree) {
    std::vector<std::string> wrong;
    for (const Include& include : includes_of(tree)) {
        if (!tree.contains(include.to)) {
            wrong.push_back(include.shown() + ", which does not exist");
        }
    }
    return wrong;
}

// Everything that verify's files reach, with the way there.
std::vector<std::string> what_verify_must_not_see(const Tree& tree) {
    std::map<std::string, std::vector<Include>> by_file;
    for (const Include& include : includes_of(tree)) {
        by_file[include.from].push_back(include);
    }
    std::vector<std::pair<std::string, std::string>> open;  // file, way there
    std::set<std::string> seen;
    for (const auto& entry : tree) {
        const std::string& file = entry.first;
        const bool judges = std::any_of(std::begin(kVerifyPart), std::end(kVerifyPart),
                                        [&](std::string_view p) { return file.starts_with(p); });
        if (judges) {
            open.emplace_back(file, "");
            seen.insert(file);
        }
    }
    std::vector<std::string> wrong;
    while (!open.empty()) {
        const auto [file, way] = open.back();
        open.pop_back();
        for (const Include& include : by_file[file]) {
            const std::string here = way.empty() ? include.shown() : way + "; " + include.shown();
            for (const std::string_view hidden : kNotForVerify) {
                if (include.to.starts_with(hidden)) {
                    wrong.push_back(here + ": verify may not see " + std::string(hidden));
                }
            }
            if (seen.insert(include.to).second) {
                open.emplace_back(include.to, here);
            }
        }
    }
    return wrong;
}

Tree tree_on_disk() {
    const fs::path root = KVW_SOURCE_DIR;
    Tree tree;
    for (const char* top : {"src", "kernels", "traces", "replay", "cli"}) {
        if (!fs::exists(root / top)) {
            continue;
        }
        for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
            // version.h.in becomes version.h at configure time
            const fs::path file = entry.path().extension() == ".in"
                                      ? fs::path(entry.path()).replace_extension()
                                      : entry.path();
            const std::string extension = file.extension();
            const bool source = extension == ".h" || extension == ".cpp" || extension == ".cu" ||
                                extension == ".cuh" || extension == ".inc";
            if (entry.is_regular_file() && source) {
                std::ifstream in(entry.path());
                std::ostringstream text;
                text << in.rdbuf();
                tree[file.lexically_relative(root).generic_string()] = text.str();
            }
        }
    }
    return tree;
}

void report(const std::vector<std::string>& wrong) {
    for (const std::string& line : wrong) {
        FAIL_CHECK(line);
    }
}

}  // namespace

TEST_CASE("no include points up the order of the folders") {
    const Tree tree = tree_on_disk();
    REQUIRE(tree.size() > 20);
    report(arrows_that_point_up(tree));
}

TEST_CASE("every include names a file of the tree from its root") {
    report(includes_of_nothing(tree_on_disk()));
}

TEST_CASE("verify sees neither engine, pages, model, text, model files nor kernels") {
    report(what_verify_must_not_see(tree_on_disk()));
}

TEST_CASE("an arrow that points up is found, with file and line") {
    const Tree tree = {
        {"src/kv/pool.cpp", "// pool\n#include \"src/engine/engine.h\"\n#include <vector>\n"},
        {"kernels/ref/sum.cpp", "#include \"traces/trace.h\"\n#include \"kernels/kernels.h\"\n"},
        {"traces/writer.cpp", "#  include   \"kernels/tile.h\"\n#include\"src/base/file.h\"\n"},
        {"src/text/chat.cpp", "#include \"src/model/model.h\"\n#include \"chat.h\"\n"},
        {"cli/main.cpp", "#include \"replay/verify.h\"\n#include \"src/engine/engine.h\"\n"},
    };
    CHECK(arrows_that_point_up(tree) ==
          std::vector<std::string>{
              "kernels/ref/sum.cpp:1 includes traces/trace.h: kernels may not see traces",
              "src/kv/pool.cpp:2 includes src/engine/engine.h: src/kv may not see src/engine",
              "src/text/chat.cpp:1 includes src/model/model.h: src/text may not see src/model",
              "src/text/chat.cpp:2 includes chat.h, which is in no folder of the order (includes "
              "start at the root)",
              "traces/writer.cpp:1 includes kernels/tile.h: traces may not see kernels",
          });
    CHECK(includes_of_nothing(tree).size() == 9);
}

TEST_CASE("what verify must not see is found through other files, too") {
    const Tree tree = {
        {"replay/verify.cpp", "#include \"replay/verify.h\"\n#include \"src/ledger/ledger.h\"\n"},
        {"replay/verify.h", "\n\n#include \"replay/parts.h\"\n"},
        {"replay/parts.h", "#include \"src/engine/engine.h\"\n"},
        {"replay/execute.cpp", "#include \"src/engine/engine.h\"\n"},
        {"src/engine/engine.h", ""},
        {"src/ledger/ledger.h", ""},
    };
    CHECK(what_verify_must_not_see(tree) ==
          std::vector<std::string>{
              "replay/verify.h:3 includes replay/parts.h; replay/parts.h:1 includes "
              "src/engine/engine.h: verify may not see src/engine/"});
}
