#include "src/base/text.h"

#include <cstdio>

namespace kvw {

namespace {

// The length of the well-formed UTF-8 character at the start of `s`, or 0; `point` gets its value.
std::size_t decode(std::string_view s, std::uint32_t& point) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
    const auto follows = [&](std::size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
        return i < s.size() && byte(i) >= low && byte(i) <= high;
    };
    const unsigned a = byte(0);
    if (a < 0x80) {
        point = a;
        return 1;
    }
    if (a >= 0xc2 && a <= 0xdf && follows(1)) {
        point = (a & 0x1f) << 6 | (byte(1) & 0x3f);
        return 2;
    }
    if (a >= 0xe0 && a <= 0xef && follows(1, a == 0xe0 ? 0xa0 : 0x80, a == 0xed ? 0x9f : 0xbf) &&
        follows(2)) {
        point = (a & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f);
        return 3;
    }
    if (a >= 0xf0 && a <= 0xf4 && follows(1, a == 0xf0 ? 0x90 : 0x80, a == 0xf4 ? 0x8f : 0xbf) &&
        follows(2) && follows(3)) {
        point =
            (a & 0x07) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f);
        return 4;
    }
    return 0;
}

bool hidden(std::uint32_t p) {
    return p < 0x20 || (p >= 0x7f && p < 0xa0) || (p >= 0x200b && p <= 0x200f) ||
           (p >= 0x2028 && p <= 0x202e) || (p >= 0x2060 && p <= 0x206f) || p == 0xfeff ||
           p == 0x061c || p == 0x00ad || (p >= 0xe0000 && p <= 0xe007f) ||
           (p >= 0xfff9 && p <= 0xfffb);
}

std::string escaped(std::string_view text, bool keep_lines) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        std::uint32_t point = 0;
        const std::size_t length = decode(text, point);
        char escape[16] = "";
        if (length == 0) {
            std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(text[0]));
        } else if (hidden(point) && !(keep_lines && (point == '\n' || point == '\t'))) {
            std::snprintf(escape, sizeof escape, point < 0x100 ? "\\x%02x" : "\\u%04x", point);
        }
        out += escape[0] != '\0' ? std::string_view(escape) : text.substr(0, length);
        text.remove_prefix(length == 0 ? 1 : length);
    }
    return out;
}

}  // namespace

std::string printable(std::string_view text) { return escaped(text, false); }
std::string printable_lines(std::string_view text) { return escaped(text, true); }

std::optional<std::size_t> first_invalid_utf8(std::string_view bytes) {
    std::size_t at = 0;
    while (at < bytes.size()) {
        std::uint32_t point = 0;
        const std::size_t length = decode(bytes.substr(at), point);
        if (length == 0) {
            return at;
        }
        at += length;
    }
    return std::nullopt;
}

std::size_t incomplete_utf8_suffix(std::string_view bytes) {
    for (std::size_t back = 1; back <= 3 && back <= bytes.size(); ++back) {
        const std::string_view end = bytes.substr(bytes.size() - back);
        const unsigned lead = static_cast<unsigned char>(end[0]);
        if ((lead & 0xc0) == 0x80) {
            continue;
        }
        const std::size_t wanted = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 1;
        if (lead > 0xf4 || back >= wanted) {
            return 0;
        }
        // Complete it with every continuation that could be legal: incomplete only if one works.
        for (const unsigned char second : {0x80, 0x90, 0xa0}) {
            std::string trial(end);
            if (trial.size() == 1) {
                trial.push_back(static_cast<char>(second));
            }
            trial.resize(wanted, '\x80');
            std::uint32_t point = 0;
            if (decode(trial, point) == wanted) {
                return back;
            }
        }
        return 0;
    }
    return 0;
}

std::string utf8_lossy(std::string_view bytes) {
    std::string out;
    out.reserve(bytes.size());
    while (!bytes.empty()) {
        std::uint32_t point = 0;
        std::size_t length = decode(bytes, point);
        if (length > 0) {
            out += bytes.substr(0, length);
        } else {
            out += "\xef\xbf\xbd";
            length = 1;
            // A maximal subpart: the longest prefix that begins a well-formed character.
            for (std::size_t part = 3; part >= 2; --part) {
                if (bytes.size() >= part && incomplete_utf8_suffix(bytes.substr(0, part)) == part) {
                    length = part;
                    break;
                }
            }
        }
        bytes.remove_prefix(length);
    }
    return out;
}

std::string base64(std::string_view bytes) {
    static constexpr char kAlphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t group = 0;
        for (std::size_t k = 0; k < 3; ++k) {
            group =
                group << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
        }
        for (std::size_t k = 0; k < 4; ++k) {
            out.push_back(i + k > bytes.size() ? '=' : kAlphabet[group >> (18 - 6 * k) & 63]);
        }
    }
    return out;
}

std::string human_bytes(std::uint64_t bytes) {
    static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = static_cast<double>(bytes);
    int unit = 0;
    while (value >= 1024 && unit < 4) {
        value /= 1024;
        ++unit;
    }
    char text[32];
    std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
    return text;
}

}  // namespace kvw
