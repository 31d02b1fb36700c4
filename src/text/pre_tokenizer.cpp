#include "src/text/pre_tokenizer.h"

#include <utf8proc.h>

#include <array>
#include <cstdint>

namespace kvw {

namespace {

enum class Class : std::uint8_t { none, letter, number, space, other };  // none: past the end

struct Char {
    std::uint32_t point = 0;
    std::size_t size = 0;  // bytes; 0 past the end
    Class kind = Class::none;
};

bool is_space(std::uint32_t p) {
    return (p >= 0x09 && p <= 0x0d) || p == 0x20 || p == 0x85 || p == 0xa0 || p == 0x1680 ||
           (p >= 0x2000 && p <= 0x200a) || p == 0x2028 || p == 0x2029 || p == 0x202f ||
           p == 0x205f || p == 0x3000;
}

Class class_of(std::uint32_t point) {
    if (is_space(point)) {
        return Class::space;
    }
    switch (utf8proc_category(static_cast<utf8proc_int32_t>(point))) {
        case UTF8PROC_CATEGORY_LU:
        case UTF8PROC_CATEGORY_LL:
        case UTF8PROC_CATEGORY_LT:
        case UTF8PROC_CATEGORY_LM:
        case UTF8PROC_CATEGORY_LO:
            return Class::letter;
        case UTF8PROC_CATEGORY_ND:
        case UTF8PROC_CATEGORY_NL:
        case UTF8PROC_CATEGORY_NO:
            return Class::number;
        default:
            return Class::other;
    }
}

constexpr std::array<Class, 128> kAsciiClass = [] {
    std::array<Class, 128> table{};
    for (unsigned c = 0; c < 128; ++c) {
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        const bool number = c >= '0' && c <= '9';
        const bool space = c == ' ' || (c >= 9 && c <= 13);
        table[c] = letter   ? Class::letter
                   : number ? Class::number
                   : space  ? Class::space
                            : Class::other;
    }
    return table;
}();

// The character at `at`, which is a boundary of well-formed UTF-8; none at `limit`.
Char char_at(std::string_view text, std::size_t at, std::size_t limit) {
    if (at >= limit) {
        return {};
    }
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
    const std::uint32_t a = byte(0);
    if (a < 0x80) {
        return {a, 1, kAsciiClass[a]};
    }
    std::uint32_t point = 0;
    std::size_t size = 0;
    if (a < 0xe0) {
        point = (a & 0x1f) << 6 | (byte(1) & 0x3f);
        size = 2;
    } else if (a < 0xf0) {
        point = (a & 0x0f) << 12 | (byte(1) & 0x3fu) << 6 | (byte(2) & 0x3f);
        size = 3;
    } else {
        point =
            (a & 0x07) << 18 | (byte(1) & 0x3fu) << 12 | (byte(2) & 0x3fu) << 6 | (byte(3) & 0x3f);
        size = 4;
    }
    return {point, size, class_of(point)};
}

// Steps over the characters of class `kind` from `at` on.
std::size_t skip(std::string_view text, std::size_t at, std::size_t limit, Class kind) {
    Char c = char_at(text, at, limit);
    while (c.kind == kind) {
        at += c.size;
        c = char_at(text, at, limit);
    }
    return at;
}

bool is_line_end(const Char& c) { return c.point == '\r' || c.point == '\n'; }

// The bytes of 's 't 'm 'd 're 've 'll at `at`, or 0.
std::size_t contraction(std::string_view text, std::size_t at, std::size_t limit, bool any_case) {
    const auto letter = [&](std::size_t i) -> char {
        if (at + i >= limit) {
            return '\0';
        }
        const char c = text[at + i];
        return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    };
    if (text[at] != '\'') {
        return 0;
    }
    const char a = letter(1);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return 2;
    }
    const char b = letter(2);
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

// \s+(?!\S)|\s+ : a run of spaces leaves its last one to the word that follows.
std::size_t spaces_end(std::string_view text, std::size_t at, std::size_t limit) {
    std::size_t end = at;
    std::size_t last = at;
    Char c = char_at(text, end, limit);
    while (c.kind == Class::space) {
        last = end;
        end += c.size;
        c = char_at(text, end, limit);
    }
    return end == limit || last == at ? end : last;
}

}  // namespace

std::optional<PreTokenizer> pre_tokenizer_named(std::string_view name) {
    if (name == "gpt-2") {
        return PreTokenizer::gpt2;
    }
    if (name == "smollm") {
        return PreTokenizer::smollm;
    }
    if (name == "llama-bpe") {
        return PreTokenizer::llama_bpe;
    }
    if (name == "qwen2") {
        return PreTokenizer::qwen2;
    }
    return std::nullopt;
}

std::string_view WordScanner::next() {
    if (at_ == text_.size()) {
        return {};
    }
    const std::size_t begin = at_;
    switch (kind_) {
        case PreTokenizer::gpt2:
            at_ = gpt2_end(begin, text_.size());
            break;
        case PreTokenizer::smollm:
            at_ = smollm_end();
            break;
        case PreTokenizer::llama_bpe:
            at_ = llama_end(begin, 3);
            break;
        case PreTokenizer::qwen2:
            at_ = llama_end(begin, 1);
            break;
    }
    return text_.substr(begin, at_ - begin);
}

std::size_t WordScanner::gpt2_end(std::size_t at, std::size_t limit) const {
    if (const std::size_t size = contraction(text_, at, limit, false); size > 0) {
        return at + size;
    }
    const Char first = char_at(text_, at, limit);
    const std::size_t begin = first.point == ' ' ? at + 1 : at;
    const Char body = first.point == ' ' ? char_at(text_, begin, limit) : first;
    if (body.kind == Class::none || body.kind == Class::space) {
        return spaces_end(text_, at, limit);
    }
    return skip(text_, begin, limit, body.kind);
}

std::size_t WordScanner::smollm_end() {
    const Char first = char_at(text_, at_, text_.size());
    if (first.kind == Class::number) {
        return at_ + first.size;
    }
    if (at_ >= numberless_to_) {
        numberless_to_ = at_;
        for (Char c = first; c.kind != Class::number && c.kind != Class::none;) {
            numberless_to_ += c.size;
            c = char_at(text_, numberless_to_, text_.size());
        }
    }
    return gpt2_end(at_, numberless_to_);
}

std::size_t WordScanner::llama_end(std::size_t at, std::size_t digits_max) const {
    const std::size_t limit = text_.size();
    if (const std::size_t size = contraction(text_, at, limit, true); size > 0) {
        return at + size;
    }
    const Char first = char_at(text_, at, limit);
    const Char second = char_at(text_, at + first.size, limit);
    if (first.kind == Class::letter) {
        return skip(text_, at, limit, Class::letter);
    }
    if (first.kind != Class::number && !is_line_end(first) && second.kind == Class::letter) {
        return skip(text_, at + first.size, limit, Class::letter);
    }
    if (first.kind == Class::number) {
        std::size_t end = at;
        Char c = first;
        for (std::size_t n = 0; n < digits_max && c.kind == Class::number; ++n) {
            end += c.size;
            c = char_at(text_, end, limit);
        }
        return end;
    }
    if (first.kind == Class::other || (first.point == ' ' && second.kind == Class::other)) {
        std::size_t end = skip(text_, at + (first.point == ' ' ? 1 : 0), limit, Class::other);
        while (is_line_end(char_at(text_, end, limit))) {
            ++end;
        }
        return end;
    }
    std::size_t line_end = at;  // just past the last \r or \n of the run of spaces
    std::size_t end = at;
    for (Char c = first; c.kind == Class::space; c = char_at(text_, end, limit)) {
        end += c.size;
        line_end = is_line_end(c) ? end : line_end;
    }
    return line_end > at ? line_end : spaces_end(text_, at, limit);
}

}  // namespace kvw
