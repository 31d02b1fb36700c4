#include "src/text/pre_tokenizer.h"

#include <doctest/doctest.h>

#include <string>

using namespace kvw;

namespace {

// The words with | between them.
std::string words(PreTokenizer kind, std::string_view text) {
    WordScanner scanner(kind, text);
    std::string joined;
    std::size_t bytes = 0;
    for (std::string_view word = scanner.next(); !word.empty(); word = scanner.next()) {
        joined.append(joined.empty() ? "" : "|").append(word);
        bytes += word.size();
    }
    CHECK(bytes == text.size());
    return joined;
}

constexpr PreTokenizer kAll[] = {PreTokenizer::gpt2, PreTokenizer::smollm, PreTokenizer::llama_bpe,
                                 PreTokenizer::qwen2};

}  // namespace

TEST_CASE("pre-tokenizers are known by the names in GGUF files, and no others") {
    CHECK(pre_tokenizer_named("gpt-2") == PreTokenizer::gpt2);
    CHECK(pre_tokenizer_named("smollm") == PreTokenizer::smollm);
    CHECK(pre_tokenizer_named("llama-bpe") == PreTokenizer::llama_bpe);
    CHECK(pre_tokenizer_named("qwen2") == PreTokenizer::qwen2);
    CHECK_FALSE(pre_tokenizer_named("gpt2"));
    CHECK_FALSE(pre_tokenizer_named("default"));
    CHECK_FALSE(pre_tokenizer_named(""));
}

TEST_CASE("gpt-2 keeps a leading space with its word, and letters, digits and signs apart") {
    CHECK(words(PreTokenizer::gpt2, "Hello world, 42 apples!") == "Hello| world|,| 42| apples|!");
    CHECK(words(PreTokenizer::gpt2, "a1b22!!?") == "a|1|b|22|!!?");
    CHECK(words(PreTokenizer::gpt2, "naïve Ünicode Ⅷ ½ ٣") == "naïve| Ünicode| Ⅷ| ½| ٣");
}

TEST_CASE("gpt-2 contractions are lower case only") {
    CHECK(words(PreTokenizer::gpt2, "they're we'll I'm he'd it's can't I've") ==
          "they|'re| we|'ll| I|'m| he|'d| it|'s| can|'t| I|'ve");
    CHECK(words(PreTokenizer::gpt2, "IT'S 'r 'l '") == "IT|'|S| '|r| '|l| '");
    CHECK(words(PreTokenizer::gpt2, "'sun") == "'s|un");
    CHECK(words(PreTokenizer::gpt2, " 's") == " '|s");
}

TEST_CASE("gpt-2 gives the last space of a run to the next word") {
    CHECK(words(PreTokenizer::gpt2, "a   b") == "a|  | b");
    CHECK(words(PreTokenizer::gpt2, "a \n b\n\n") == "a| \n| b|\n\n");
    CHECK(words(PreTokenizer::gpt2, "a\n\nb") == "a|\n|\n|b");
    CHECK(words(PreTokenizer::gpt2, "a  ") == "a|  ");
    CHECK(words(PreTokenizer::gpt2, " ") == " ");
    CHECK(words(PreTokenizer::gpt2, "a\u3000\u00a0b") == "a|\u3000|\u00a0|b");
}

TEST_CASE("smollm takes every number character alone, and no space with it") {
    CHECK(words(PreTokenizer::smollm, "in 1999, x2") == "in| |1|9|9|9|,| x|2");
    CHECK(words(PreTokenizer::smollm, "a  7") == "a|  |7");
    CHECK(words(PreTokenizer::smollm, "½Ⅷ٣9") == "½|Ⅷ|٣|9");
    CHECK(words(PreTokenizer::smollm, "don't 5's") == "don|'t| |5|'s");
    CHECK(words(PreTokenizer::smollm, "  \n1") == "  \n|1");
}

TEST_CASE("llama-bpe takes digits by threes, qwen2 one by one") {
    CHECK(words(PreTokenizer::llama_bpe, "1234567 89") == "123|456|7| |89");
    CHECK(words(PreTokenizer::qwen2, "1234 5") == "1|2|3|4| |5");
    CHECK(words(PreTokenizer::llama_bpe, "½Ⅷ٣9") == "½Ⅷ٣|9");
}

TEST_CASE("llama-bpe and qwen2 take one sign with a word, and line ends with signs") {
    for (const PreTokenizer kind : {PreTokenizer::llama_bpe, PreTokenizer::qwen2}) {
        CHECK(words(kind, "(hello) \"x\"") == "(hello|)| \"|x|\"");
        CHECK(words(kind, "end.\r\n\r\nnext") == "end|.\r\n\r\n|next");
        CHECK(words(kind, "\tindented\t\tmore") == "\tindented|\t|\tmore");
        CHECK(words(kind, "a ...\n b") == "a| ...\n| b");
        CHECK(words(kind, "\nword") == "\n|word");
        CHECK(words(kind, "Don'T CAN'LL 'Ve") == "Don|'T| CAN|'LL| '|Ve");
    }
}

TEST_CASE("llama-bpe and qwen2 end a run of spaces at its last line end") {
    for (const PreTokenizer kind : {PreTokenizer::llama_bpe, PreTokenizer::qwen2}) {
        CHECK(words(kind, "a \n \n  b") == "a| \n \n| | b");
        CHECK(words(kind, "a  \n") == "a|  \n");
        CHECK(words(kind, "a   ") == "a|   ");
        CHECK(words(kind, "a   1") == "a|  | |1");
        CHECK(words(kind, "   ") == "   ");
    }
}

TEST_CASE("combining marks and emoji are signs, CJK is letters") {
    CHECK(words(PreTokenizer::gpt2, "e\u0301a") == "e|\u0301|a");
    CHECK(words(PreTokenizer::gpt2, "日本語テキスト。") == "日本語テキスト|。");
    CHECK(words(PreTokenizer::gpt2, "hi 😀😀 there") == "hi| 😀😀| there");
    CHECK(words(PreTokenizer::qwen2, "e\u0301a") == "e|\u0301a");
}

TEST_CASE("every scanner takes a mebibyte of one thing in one pass") {
    for (const PreTokenizer kind : kAll) {
        for (const std::string unit :
             {"a", " ", "\n", "1", "!", "\u0301", "'", " \n", "日", "a "}) {
            std::string text;
            while (text.size() < (1u << 20)) {
                text += unit;
            }
            WordScanner scanner(kind, text);
            std::size_t bytes = 0;
            for (std::string_view word = scanner.next(); !word.empty(); word = scanner.next()) {
                bytes += word.size();
            }
            CHECK(bytes == text.size());
        }
    }
}
