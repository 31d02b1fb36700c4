// JSON that came from outside, as a value.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvw {

inline constexpr std::size_t kJsonDepthMax = 64;  // arrays and objects inside each other

struct JsonText {
    nlohmann::json value;
    std::string problem;  // empty: `value` is the text. Names offsets and limits, never the text
};

// One JSON value and nothing behind it but white space. Refused as well: more than kJsonDepthMax
// levels, a name that occurs twice in one object, a number beyond what a double holds, a byte order
// mark.
JsonText parse_json(std::string_view text);

}  // namespace kvw
