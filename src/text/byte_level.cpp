#include "src/text/byte_level.h"

#include <array>
#include <cstddef>

namespace kvw {

namespace {

constexpr unsigned kPointsMax =
    0x144;  // 256 + 68 bytes that have no printable character of their own

constexpr bool prints_as_itself(unsigned byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

struct Spelling {
    std::array<char, 2> utf8{};
    std::uint8_t size = 0;
};

struct Tables {
    std::array<Spelling, 256> of_byte{};
    std::array<std::int16_t, kPointsMax> byte_of_point{};  // -1: stands for no byte
};

constexpr Tables kTables = [] {
    Tables tables;
    tables.byte_of_point.fill(-1);
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
        const unsigned point = prints_as_itself(byte) ? byte : next++;
        tables.byte_of_point[point] = static_cast<std::int16_t>(byte);
        Spelling& spelling = tables.of_byte[byte];
        if (point < 0x80) {
            spelling = {{static_cast<char>(point)}, 1};
        } else {
            spelling = {
                {static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 0x3f))},
                2};
        }
    }
    return tables;
}();

}  // namespace

std::string_view spelling_of(std::uint8_t byte) {
    const Spelling& spelling = kTables.of_byte[byte];
    return {spelling.utf8.data(), spelling.size};
}

std::string bytes_of_spelling(std::string_view spelling) {
    std::string bytes;
    bytes.reserve(spelling.size());
    for (std::size_t i = 0; i < spelling.size();) {
        const unsigned a = static_cast<unsigned char>(spelling[i]);
        unsigned point = a;
        std::size_t size = 1;
        if (a >= 0xc2 && a <= 0xdf && i + 1 < spelling.size()) {
            const unsigned b = static_cast<unsigned char>(spelling[i + 1]);
            if ((b & 0xc0) == 0x80) {
                point = (a & 0x1f) << 6 | (b & 0x3f);
                size = 2;
            }
        }
        const bool whole = size == 2 || a < 0x80;
        if (whole && point < kPointsMax && kTables.byte_of_point[point] >= 0) {
            bytes.push_back(static_cast<char>(kTables.byte_of_point[point]));
        } else {
            bytes.append(spelling.substr(i, size));
        }
        i += size;
    }
    return bytes;
}

}  // namespace kvw
