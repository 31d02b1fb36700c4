// How byte-level vocabularies spell bytes: each byte is one printable character, so that every
// token is text ("Ġ" is a space). Source: bytes_to_unicode() of GPT-2's encoder.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvw {

// The character (1 or 2 bytes of UTF-8) that stands for `byte`.
std::string_view spelling_of(std::uint8_t byte);

// The bytes that a spelling stands for; characters that stand for no byte are kept as they are.
std::string bytes_of_spelling(std::string_view spelling);

}  // namespace kvw
