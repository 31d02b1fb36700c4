#include "src/base/text.h"

#include <doctest/doctest.h>

using namespace kvw;

TEST_CASE("printable text shows control, bidirectional and zero-width characters as escapes") {
    CHECK(printable("plain text, é, 日本, 😀") == "plain text, é, 日本, 😀");
    CHECK(printable("\x1b[31mred\x1b]8;;x\x07") == "\\x1b[31mred\\x1b]8;;x\\x07");
    CHECK(printable("a\rb\nc\td\x7f") == "a\\x0db\\x0ac\\x09d\\x7f");
    CHECK(printable("\u009b31m") == "\\x9b31m");
    CHECK(printable("a\u202eb\u200bc\u2066d\ufeff") == "a\\u202eb\\u200bc\\u2066d\\ufeff");
    CHECK(printable("\U000e0041") == "\\ue0041");
    CHECK(printable(std::string_view("\0x", 2)) == "\\x00x");
}

TEST_CASE("printable text shows bytes that are not UTF-8 one by one") {
    CHECK(printable("a\xff\xc3") == "a\\xff\\xc3");
    CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");
    CHECK(printable("") == "");
}

TEST_CASE("an answer on a terminal keeps its newlines and tabs, and nothing else") {
    CHECK(printable_lines("a\n\tb\x1b[m\r\n") == "a\n\tb\\x1b[m\\x0d\n");
}

TEST_CASE("the first byte that is not well-formed UTF-8 is found") {
    CHECK_FALSE(first_invalid_utf8(""));
    CHECK_FALSE(first_invalid_utf8("aé日😀\U0010ffff\ud7ff\ue000"));
    CHECK(first_invalid_utf8("\x80") == 0);
    CHECK(first_invalid_utf8("ab\xc3") == 2);
    CHECK(first_invalid_utf8("ab\xc3(") == 2);
    CHECK(first_invalid_utf8("\xc0\xaf") == 0);          // overlong /
    CHECK(first_invalid_utf8("\xe0\x80\xaf") == 0);      // overlong /
    CHECK(first_invalid_utf8("\xf0\x82\x82\xac") == 0);  // overlong €
    CHECK(first_invalid_utf8("x\xed\xa0\x80") == 1);     // a surrogate
    CHECK(first_invalid_utf8("\xf4\x90\x80\x80") == 0);  // past U+10FFFF
    CHECK(first_invalid_utf8("é\xf5") == 2);
}

TEST_CASE("every pair of bytes is judged as the standard's table of well-formed sequences does") {
    for (unsigned a = 0; a < 256; ++a) {
        for (unsigned b = 0; b < 256; ++b) {
            const char pair[] = {static_cast<char>(a), static_cast<char>(b)};
            const bool two = a >= 0xc2 && a <= 0xdf && b >= 0x80 && b <= 0xbf;
            const bool valid = (a < 0x80 && b < 0x80) || two;
            CHECK(first_invalid_utf8(std::string_view(pair, 2)).has_value() == !valid);
        }
    }
}

TEST_CASE("lossy UTF-8 replaces each maximal broken part once") {
    CHECK(utf8_lossy("ok é") == "ok é");
    CHECK(utf8_lossy("a\xff"
                     "b") == "a\ufffdb");
    CHECK(utf8_lossy("\xe2\x82") == "\ufffd");
    CHECK(utf8_lossy("\xf0\x9f\x98") == "\ufffd");
    CHECK(utf8_lossy("\xf0\x9f\x98z") == "\ufffdz");
    CHECK(utf8_lossy("\xc0\xaf") == "\ufffd\ufffd");
    CHECK(utf8_lossy("\xed\xa0\x80") == "\ufffd\ufffd\ufffd");
}

TEST_CASE("an incomplete end is counted, an impossible one is not") {
    CHECK(incomplete_utf8_suffix("") == 0);
    CHECK(incomplete_utf8_suffix("abc") == 0);
    CHECK(incomplete_utf8_suffix("é") == 0);
    CHECK(incomplete_utf8_suffix("a\xc3") == 1);
    CHECK(incomplete_utf8_suffix("a\xe6") == 1);
    CHECK(incomplete_utf8_suffix("a\xe6\x97") == 2);
    CHECK(incomplete_utf8_suffix("\xf0\x9f\x98") == 3);
    CHECK(incomplete_utf8_suffix("\xf0\x9f\x98\x80") == 0);
    CHECK(incomplete_utf8_suffix("\x80\x80\x80") == 0);
    CHECK(incomplete_utf8_suffix("\xed\xa0") == 0);  // only a surrogate could follow
    CHECK(incomplete_utf8_suffix("\xf4\x90") == 0);  // past U+10FFFF
    CHECK(incomplete_utf8_suffix("\xc1") == 0);
    CHECK(incomplete_utf8_suffix("\xff") == 0);
}

TEST_CASE("base64 is that of RFC 4648") {
    CHECK(base64("") == "");
    CHECK(base64("f") == "Zg==");
    CHECK(base64("fo") == "Zm8=");
    CHECK(base64("foo") == "Zm9v");
    CHECK(base64("foob") == "Zm9vYg==");
    CHECK(base64("fooba") == "Zm9vYmE=");
    CHECK(base64("foobar") == "Zm9vYmFy");
    CHECK(base64("\xff\xfe\xfd") == "//79");
}

TEST_CASE("sizes are shown in binary units") {
    CHECK(human_bytes(0) == "0 B");
    CHECK(human_bytes(1023) == "1023 B");
    CHECK(human_bytes(1536) == "1.5 KiB");
    CHECK(human_bytes(98362432) == "93.8 MiB");
    CHECK(human_bytes(1ull << 50) == "1024.0 TiB");
}
