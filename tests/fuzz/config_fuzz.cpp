// Arbitrary bytes as a configuration file. What is refused has places inside the file; what is
// taken reads the same with Windows line ends and behind a byte order mark.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cli/config.h"
#include "src/base/check.h"
#include "src/base/text.h"

using namespace kvw;
using namespace kvw::cli;

namespace {

void check_refused(const ConfigText& text, std::string_view bytes) {
    check(text.entries.empty() && text.sections.empty(),
          "of a file that is refused nothing counts");
    check(text.problems.size() <= kConfigProblemsMax, "problems are bounded");
    const auto lines = 1 + std::count(bytes.begin(), bytes.end(), '\n');
    ConfigPlace last;
    for (const ConfigProblem& problem : text.problems) {
        check(!problem.message.empty(), "a problem is named");
        check(problem.at.line >= 1 && problem.at.line <= lines + 1, "a line of the file");
        check(problem.at.column >= 1 && problem.at.column <= bytes.size() + 1, "a column of it");
        last = std::max(last, problem.at);
    }
}

void check_taken(const ConfigText& text) {
    ConfigPlace last;
    for (const ConfigEntry& entry : text.entries) {
        check(entry.key_at >= last, "entries are in the order of the file");
        last = entry.key_at;
        check((entry.kind == ConfigKind::other) <= entry.values.empty(), "no value, no text");
        for (const std::string& value : entry.values) {
            check(!first_invalid_utf8(value), "values are UTF-8");
        }
    }
}

bool same(const ConfigText& a, const ConfigText& b) {
    return std::equal(a.entries.begin(), a.entries.end(), b.entries.begin(), b.entries.end(),
                      [](const ConfigEntry& x, const ConfigEntry& y) {
                          return x.section == y.section && x.tenant == y.tenant && x.key == y.key &&
                                 x.kind == y.kind && x.values == y.values && x.key_at == y.key_at &&
                                 x.value_at == y.value_at;
                      });
}

std::string with_windows_ends(std::string_view bytes) {
    std::string out;
    for (const char c : bytes) {
        out += c == '\n' ? "\r\n" : std::string(1, c);
    }
    return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    const ConfigText text = read_config(bytes);
    if (!text.problems.empty()) {
        check_refused(text, bytes);
        return 0;
    }
    check_taken(text);
    if (size < kConfigBytesMax / 2) {
        if (bytes.find('\r') == std::string_view::npos) {
            check(same(text, read_config(with_windows_ends(bytes))), "line ends do not matter");
        }
        if (!bytes.starts_with(kUtf8Bom)) {
            check(same(text, read_config(std::string(kUtf8Bom) + std::string(bytes))),
                  "a byte order mark does not matter");
        }
    }
    return 0;
}
