// Text that came from outside, made safe to show, and UTF-8 as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvw {

// `text` with control characters (C0, DEL, C1), bidirectional and zero-width marks and invalid
// bytes as visible escapes such as \x1b and \u202e. Everything shown on a terminal or in a message
// passes here.
std::string printable(std::string_view text);

// The same, but newline and tab stay: for answers on a terminal.
std::string printable_lines(std::string_view text);

// The offset of the first byte that is not part of well-formed UTF-8 (Unicode 15, table 3-7).
std::optional<std::size_t> first_invalid_utf8(std::string_view bytes);

// `bytes` with each maximal invalid part replaced by U+FFFD.
std::string utf8_lossy(std::string_view bytes);

// How many bytes at the end of `bytes` could be the start of a character that is not complete
// (0..3).
std::size_t incomplete_utf8_suffix(std::string_view bytes);

std::string base64(std::string_view bytes);

// 1536 -> "1.5 KiB".
std::string human_bytes(std::uint64_t bytes);

}  // namespace kvw
