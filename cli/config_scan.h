// What a configuration file must look like before the TOML reader sees a byte of it.
//
// toml++ 3.3.0 follows every dot of a key with a call of its own (a million dots end the process)
// and runs into undefined behaviour at non-ASCII characters outside strings. So the file is small,
// flat, and plain ASCII but for one-line quoted strings and comments, or it is refused here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvw::cli {

inline constexpr std::size_t kConfigBytesMax = 64 << 10;
inline constexpr std::size_t kConfigDotsMax = 16;             // in one key
inline constexpr std::size_t kConfigNestingMax = 16;          // brackets open at once
inline constexpr std::size_t kConfigProblemsMax = 100;        // no more are collected
inline constexpr std::string_view kUtf8Bom = "\xef\xbb\xbf";  // allowed at the very start

// Both from 1; columns count characters, not bytes.
struct ConfigPlace {
    std::uint32_t line = 1, column = 1;
    friend auto operator<=>(const ConfigPlace&, const ConfigPlace&) = default;
};

struct ConfigProblem {
    ConfigPlace at;
    std::string message;
};

// Everything about these bytes that keeps them from the TOML reader, in their order; empty when
// nothing does: at most kConfigBytesMax bytes of UTF-8, no control characters but tab and line
// ends, no strings of several lines, strings that end on their line, and the bounds above.
std::vector<ConfigProblem> scan_config(std::string_view bytes);

}  // namespace kvw::cli
