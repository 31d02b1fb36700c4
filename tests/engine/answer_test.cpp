#include "src/engine/answer.h"

#include <doctest/doctest.h>

#include <random>

#include "src/base/text.h"
#include "tests/engine/tiny_model.h"

namespace kvw {
namespace {

using test::kTinyEnd;
using test::TinyModel;

constexpr TokenId kHe = 256;  // "he", one token
constexpr TokenId kLl = 257;  // "ll"

Answer answer(std::vector<std::string> stops = {}) {
    return Answer(TinyModel::shared().tokenizer(), std::move(stops));
}

std::vector<TokenId> bytes_as_ids(std::string_view text) {
    std::vector<TokenId> ids;
    for (const char c : text) {
        ids.push_back(static_cast<std::uint8_t>(c));
    }
    return ids;
}

struct Told {
    std::string text;
    bool stopped = false;
};

Told tell(Answer& answer, const std::vector<TokenId>& ids) {
    Told told;
    for (const TokenId id : ids) {
        Answer::Delta delta = answer.push(id);
        CHECK_FALSE(first_invalid_utf8(delta.bytes));
        told.text += delta.bytes;
        if (delta.stopped) {
            told.stopped = true;
            break;
        }
    }
    told.text += answer.finish();
    CHECK(told.text == answer.delivered());
    return told;
}

TEST_CASE("tokens come out as their bytes, whole characters at a time") {
    Answer euro = answer();
    CHECK(euro.push(0xe2).bytes.empty());
    CHECK(euro.push(0x82).bytes.empty());
    CHECK(euro.push(0xac).bytes == "\xe2\x82\xac");
    CHECK(euro.push(kHe).bytes == "he");
    CHECK(euro.delivered() ==
          "\xe2\x82\xac"
          "he");
}

TEST_CASE("half a character at the end comes out as it is") {
    Answer cut = answer();
    CHECK(cut.push('a').bytes == "a");
    CHECK(cut.push(0xf0).bytes.empty());
    CHECK(cut.push(0x9f).bytes.empty());
    CHECK(cut.finish() == "\xf0\x9f");
    CHECK(cut.delivered() == "a\xf0\x9f");
    CHECK(cut.finish().empty());
}

TEST_CASE("a token that ends the generation shows nothing, and nothing comes after it") {
    Answer ended = answer();
    ended.push(kHe);
    const Answer::Delta end = ended.push(kTinyEnd);
    CHECK(end.stopped);
    CHECK(end.bytes.empty());
    CHECK(ended.push(kHe).stopped);
    CHECK(ended.push(kHe).bytes.empty());
    CHECK(ended.delivered() == "he");

    Answer held = answer({"help"});  // "hel" is held back until it is clear that it is no stop
    held.push(kHe);
    held.push('l');
    CHECK(held.push(kTinyEnd).bytes == "hel");
}

TEST_CASE("a stop string ends the answer before itself, across tokens and inside one") {
    Answer across = answer({"hello"});
    CHECK(across.push('x').bytes == "x");
    CHECK(across.push(kHe).bytes.empty());
    CHECK(across.push(kLl).bytes.empty());
    const Answer::Delta end = across.push('o');
    CHECK(end.stopped);
    CHECK(end.bytes.empty());
    CHECK(across.delivered() == "x");

    Answer inside = answer({"e"});
    const Answer::Delta first = inside.push(kHe);
    CHECK(first.stopped);
    CHECK(first.bytes == "h");
}

TEST_CASE("what was held back for a stop string that did not come is shown") {
    Answer held = answer({"hello", "\n\n"});
    CHECK(held.push(kHe).bytes.empty());
    CHECK(held.push(kLl).bytes.empty());
    CHECK(held.push('!').bytes == "hell!");
    CHECK(held.push('\n').bytes.empty());
    CHECK(held.push('h').bytes == "\n");
    CHECK(held.finish() == "h");
}

TEST_CASE("the stop string that is complete first wins, as for a reader of single bytes") {
    const std::vector<std::string> stops{"abcd", "c", "xyz"};
    for (const char* text : {"abcd", "ababcabcd", "xyabxyz", "c", "xyxyzc"}) {
        std::string expected = text;
        std::size_t end = std::string::npos, begin = 0;
        for (const std::string& stop : stops) {
            const std::size_t at = expected.find(stop);
            if (at != std::string::npos && at + stop.size() < end) {
                end = at + stop.size();
                begin = at;
            }
        }
        Answer one = answer(stops);
        const Told told = tell(one, bytes_as_ids(text));
        CHECK(told.stopped);
        CHECK(told.text == expected.substr(0, begin));
    }
}

TEST_CASE("where the tokens are cut does not change the answer") {
    // The same text as single bytes, or with "he" and "ll" as one token each, in random mixtures.
    std::mt19937 random(4);
    const std::vector<std::string> pieces{"he", "ll", "o", " ", "\xc3\xa9", "h", "l", "e"};
    for (int i = 0; i < 500; ++i) {
        std::string text;
        for (int k = 0; k < 12; ++k) {
            text += pieces[random() % pieces.size()];
        }
        std::vector<TokenId> merged;
        for (std::size_t at = 0; at < text.size();) {
            const bool pair = random() % 2 == 0;
            if (pair && text.substr(at, 2) == "he") {
                merged.push_back(kHe);
                at += 2;
            } else if (pair && text.substr(at, 2) == "ll") {
                merged.push_back(kLl);
                at += 2;
            } else {
                merged.push_back(static_cast<std::uint8_t>(text[at++]));
            }
        }
        const std::vector<std::string> stops{"hell", "lo", "\xc3\xa9h", "eo"};
        Answer single = answer(stops), mixed = answer(stops);
        const Told a = tell(single, bytes_as_ids(text));
        const Told b = tell(mixed, merged);
        CAPTURE(text);
        CHECK(a.text == b.text);
        CHECK(a.stopped == b.stopped);
        CHECK(text.starts_with(a.text));
        CHECK((a.stopped || a.text == text));
    }
}

}  // namespace
}  // namespace kvw
