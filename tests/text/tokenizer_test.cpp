#include "src/text/tokenizer.h"

#include <doctest/doctest.h>

#include "src/text/byte_level.h"
#include "tests/text/tiny_tokenizer.h"

using namespace kvw;
using kvw::test::byte_spelling;
using kvw::test::ByteVocabulary;
using kvw::test::GgufBuilder;
using kvw::test::TinyTokenizer;

namespace {

// Merges pairs one at a time, always the lowest rank, leftmost first: slow, and plainly right.
std::vector<std::string> naive_merge(std::vector<std::string> symbols,
                                     const std::vector<std::string>& merges) {
    for (;;) {
        std::size_t best = merges.size();
        std::size_t at = 0;
        for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
            for (std::size_t rank = 0; rank < best; ++rank) {
                if (merges[rank] == symbols[i] + " " + symbols[i + 1]) {
                    best = rank;
                    at = i;
                }
            }
        }
        if (best == merges.size()) {
            return symbols;
        }
        symbols[at] += symbols[at + 1];
        symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
}

bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

}  // namespace

TEST_CASE("the lowest rank merges first, whatever stands to its left") {
    const TinyTokenizer tiny(ByteVocabulary{.merges = {"b c", "a b", "a bc"}});
    CHECK(tiny.pieces("abc") == "abc");
    CHECK(tiny.pieces("abab") == "ab|ab");
    CHECK(tiny.pieces("aabcc") == "a|abc|c");
}

TEST_CASE("pairs of equal rank merge from the left") {
    const TinyTokenizer tiny(ByteVocabulary{.merges = {"a a", "aa aa", "aa a"}});
    CHECK(tiny.pieces("aaa") == "aaa");
    CHECK(tiny.pieces("aaaaa") == "aaaa|a");
    CHECK(tiny.pieces("aaaaaaa") == "aaaa|aaa");
}

TEST_CASE("merging with a heap is the same as merging one pair at a time") {
    const std::vector<std::string> merges = {"a b",  "b a",   "a a",   "ab a", "aa b", "c ab",
                                             "ba c", "aba c", "cab b", "b b",  "bb a", "bba bba"};
    const TinyTokenizer tiny(ByteVocabulary{.merges = merges});
    std::uint32_t state = 7;
    for (int round = 0; round < 400; ++round) {
        std::string text;
        std::vector<std::string> symbols;
        for (int i = 0; i < 3 + round % 40; ++i) {
            state = state * 1664525 + 1013904223;
            text.push_back("abc"[state >> 24 & 3 ? (state >> 16) % 2 : 2]);
            symbols.emplace_back(1, text.back());
        }
        std::string expected;
        for (const std::string& piece : naive_merge(symbols, merges)) {
            expected.append(expected.empty() ? "" : "|").append(piece);
        }
        CHECK(tiny.pieces(text) == expected);
    }
}

TEST_CASE("every byte has a spelling of its own and comes back from it") {
    std::string spelled;
    std::string all;
    for (int byte = 0; byte < 256; ++byte) {
        CHECK(spelling_of(static_cast<std::uint8_t>(byte)) ==
              byte_spelling(static_cast<std::uint8_t>(byte)));
        spelled += spelling_of(static_cast<std::uint8_t>(byte));
        all.push_back(static_cast<char>(byte));
    }
    CHECK(bytes_of_spelling(spelled) == all);
    CHECK(bytes_of_spelling("Ġ日x\xff\xc4") == " 日x\xff\xc4");
}

TEST_CASE("the bytes of a text's ids add up to the text") {
    const TinyTokenizer tiny(ByteVocabulary{
        .merges = {"l l", "h e"}, .control = {"<|im_end|>"}, .user_defined = {"<tool_call>"}});
    for (const std::string text : {"", "hello  world\r\n", "日本\u0301😀 <|im_end|>", "<tool_call>x",
                                   "tab\tnul", "Ġ is not a space"}) {
        for (const SpecialTokens special : {SpecialTokens::as_text, SpecialTokens::parse}) {
            CHECK(tiny->decode(tiny.ids(text, special), true) == text);
        }
    }
    const std::string with_nul("a\0b", 3);
    CHECK(tiny->decode(tiny.ids(with_nul, SpecialTokens::parse)) == with_nul);
}

TEST_CASE("control tokens are recognised only when asked, user-defined ones always") {
    const TinyTokenizer tiny(
        ByteVocabulary{.control = {"<|im_end|>"}, .user_defined = {"<tool_call>"}});
    const TokenId end = tiny->find("<|im_end|>");
    const TokenId tool = tiny->find("<tool_call>");
    CHECK(tiny.ids("a<|im_end|><tool_call>", SpecialTokens::parse) ==
          std::vector<TokenId>{'a', end, tool});
    CHECK(tiny.ids("<|im_end|><tool_call>", SpecialTokens::as_text).size() == 11);
    CHECK(tiny.ids("<|im_end|><tool_call>", SpecialTokens::as_text).back() == tool);
    CHECK(tiny.ids("<|im_end", SpecialTokens::parse).size() == 8);
}

TEST_CASE("the longest special token at a place is taken, the leftmost place first") {
    const TinyTokenizer tiny(ByteVocabulary{.control = {"<a>", "<a><b>", "<b>c", "<b"}});
    CHECK(tiny.pieces("<a><b>c", SpecialTokens::parse) == "<a><b>|c");
    CHECK(tiny.pieces("<a><b<b>c", SpecialTokens::parse) == "<a>|<b|<b>c");
    CHECK(tiny.pieces("<<a>", SpecialTokens::parse) == "<|<a>");
    CHECK(tiny.pieces("<a", SpecialTokens::parse) == "<|a");
}

TEST_CASE("text before and after a special token is cut into words on its own") {
    const TinyTokenizer tiny(ByteVocabulary{.merges = {"Ġ x", "Ġ Ġ"}, .control = {"<|e|>"}});
    CHECK(tiny.pieces(" x<|e|>  ", SpecialTokens::parse) == " x|<|e|>|  ");
    CHECK(tiny.pieces("  x<|e|> x", SpecialTokens::parse) == " | x|<|e|>| x");
}

TEST_CASE("a chat mark that the file calls user-defined is a control token all the same") {
    const TinyTokenizer tiny(
        ByteVocabulary{.user_defined = {"<|im_start|>", "<|im_end|>", "<tool_call>"}});
    const TokenId end = tiny->find("<|im_end|>");
    CHECK(tiny->is_control(end));
    CHECK(tiny->is_control(tiny->find("<|im_start|>")));
    CHECK_FALSE(tiny->is_control(tiny->find("<tool_call>")));
    CHECK(tiny->ends_generation(end));
    CHECK(tiny.ids("<|im_end|>", SpecialTokens::as_text).size() == 10);
}

TEST_CASE("text never merges into a control token") {
    const TinyTokenizer tiny(
        ByteVocabulary{.pre = "llama-bpe", .merges = {"a b"}, .control = {"xyz"}});
    CHECK(tiny.ids("xyz", SpecialTokens::as_text) == std::vector<TokenId>{'x', 'y', 'z'});
    CHECK(tiny.ids("xyz", SpecialTokens::parse) == std::vector<TokenId>{tiny->find("xyz")});

    GgufBuilder builder;
    std::vector<std::string> tokens = {"a", "b", "ab"};
    builder.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
    builder.texts("tokenizer.ggml.tokens", tokens).i32s("tokenizer.ggml.token_type", {1, 1, 3});
    builder.texts("tokenizer.ggml.merges", {"a b"});
    const TinyTokenizer marked(builder);
    CHECK(marked.ids("ab", SpecialTokens::as_text) == std::vector<TokenId>{0, 1});
    CHECK(marked.ids("ab", SpecialTokens::parse) == std::vector<TokenId>{2});
}

TEST_CASE("llama-bpe takes a word that is in the vocabulary as it is, the others do not") {
    ByteVocabulary vocabulary{.pre = "llama-bpe", .merges = {"a b"}, .words = {"cab", "Ġcab"}};
    CHECK(TinyTokenizer(vocabulary).pieces("cab cab cabs") == "cab| cab| |c|ab|s");
    vocabulary.pre = "qwen2";
    CHECK(TinyTokenizer(vocabulary).pieces("cab") == "c|ab");
}

TEST_CASE("control tokens have no bytes unless shown, and ids out of range have none") {
    const TinyTokenizer tiny(ByteVocabulary{.control = {"<|im_end|>"}, .user_defined = {"<tool>"}});
    const TokenId end = tiny->find("<|im_end|>");
    CHECK(tiny->bytes(end) == "");
    CHECK(tiny->bytes(end, true) == "<|im_end|>");
    CHECK(tiny->bytes(tiny->find("<tool>")) == "<tool>");
    CHECK(tiny->bytes(0xe6) == "\xe6");
    CHECK(tiny->bytes(-1) == "");
    CHECK(tiny->bytes(static_cast<TokenId>(tiny->size())) == "");
    CHECK(tiny->bytes(INT32_MAX, true) == "");
    CHECK_FALSE(tiny->is_control(-1));
    CHECK_FALSE(tiny->ends_generation(-1));
    CHECK(tiny->find("") == -1);
    CHECK(tiny->find("no such token") == -1);
}

TEST_CASE("an unused token is never matched and shows nothing") {
    GgufBuilder builder;
    builder.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
    builder.texts("tokenizer.ggml.tokens", {"a", "b", "[PAD2]"});
    builder.i32s("tokenizer.ggml.token_type", {1, 1, 5}).texts("tokenizer.ggml.merges", {});
    const TinyTokenizer tiny(builder);
    CHECK(tiny->bytes(2) == "");
    CHECK(tiny->bytes(2, true) == "[PAD2]");
    CHECK_FALSE(tiny->encode("[PAD2]", SpecialTokens::parse));
}

TEST_CASE("a prompt that is not UTF-8 is refused with the offset of its first bad byte") {
    const TinyTokenizer tiny(ByteVocabulary{});
    const std::pair<std::string, std::size_t> cases[] = {
        {"\xff", 0},      {"ab\xc3", 2},         {"a\xe2\x82", 1},       {"\xf0\x9f\x98", 0},
        {"a\xc3\x28", 1}, {"xy\xed\xa0\x80", 2}, {"\xc0\xaf", 0},        {"\xf4\x90\x80\x80", 0},
        {"\x80", 0},      {"abc\xe4\xbd", 3},    {"\xf5\x80\x80\x80", 0}};
    for (const auto& [text, offset] : cases) {
        const auto ids = tiny->encode(text, SpecialTokens::parse);
        REQUIRE_FALSE(ids);
        CHECK(ids.error().code == ErrorCode::bad_input);
        CHECK(ids.error().message ==
              "the text is not UTF-8 at byte offset " + std::to_string(offset));
    }
}

TEST_CASE("a byte without a token is refused, not left out") {
    GgufBuilder builder;
    builder.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
    builder.texts("tokenizer.ggml.tokens", {"a", "b"}).texts("tokenizer.ggml.merges", {});
    const TinyTokenizer tiny(builder);
    CHECK(tiny.ids("abba", SpecialTokens::parse) == std::vector<TokenId>{0, 1, 1, 0});
    const auto ids = tiny->encode("ab\x04", SpecialTokens::parse);
    REQUIRE_FALSE(ids);
    CHECK(ids.error().code == ErrorCode::bad_input);
    CHECK(ids.error().message ==
          "the model's vocabulary has no token for byte 0x04, at byte offset 2");
}

TEST_CASE("BOS, EOS and what ends a generation come from the file") {
    ByteVocabulary vocabulary{.control = {"<s>", "<|im_end|>", "<|eot_id|>", "<other>"},
                              .eos = "<other>"};
    GgufBuilder builder = TinyTokenizer::with_vocabulary(vocabulary);
    builder.u32("tokenizer.ggml.bos_token_id", 256).boolean("tokenizer.ggml.add_bos_token", true);
    const TinyTokenizer tiny(builder);
    CHECK(tiny->bos() == 256);
    CHECK(tiny->eos() == tiny->find("<other>"));
    CHECK(tiny->adds_bos());
    CHECK(tiny->ends_generation(tiny->find("<other>")));
    CHECK(tiny->ends_generation(tiny->find("<|im_end|>")));
    CHECK(tiny->ends_generation(tiny->find("<|eot_id|>")));
    CHECK_FALSE(tiny->ends_generation(tiny->find("<s>")));
    CHECK(tiny.ids("x", SpecialTokens::parse) == std::vector<TokenId>{'x'});  // adds none itself

    const TinyTokenizer silent(ByteVocabulary{});
    CHECK(silent->bos() == -1);
    CHECK(silent->eos() == -1);
    CHECK_FALSE(silent->adds_bos());
}

TEST_CASE("a file that is silent about BOS means yes only for llama-bpe") {
    for (const std::string pre : {"gpt-2", "smollm", "llama-bpe", "qwen2"}) {
        GgufBuilder builder =
            TinyTokenizer::with_vocabulary(ByteVocabulary{.pre = pre, .control = {"<s>"}});
        builder.u32("tokenizer.ggml.bos_token_id", 256);
        CHECK(TinyTokenizer(builder)->adds_bos() == (pre == "llama-bpe"));
    }
}

TEST_CASE("an unknown pre-tokenizer or tokenizer model is refused by name") {
    CHECK(TinyTokenizer(ByteVocabulary{.pre = "tekken"}).error() ==
          "tiny.gguf: pre-tokenizer \"tekken\" is not supported; supported: gpt-2, smollm, "
          "llama-bpe, qwen2");
    GgufBuilder builder;
    builder.text("tokenizer.ggml.model", "llama");
    CHECK(TinyTokenizer(builder).error() ==
          "tiny.gguf: tokenizer model \"llama\" is not supported; supported: gpt2");
    CHECK(contains(TinyTokenizer(GgufBuilder()).error(), "\"tokenizer.ggml.model\" is missing"));
}

TEST_CASE("a vocabulary that contradicts itself is refused") {
    const auto refused = [](const std::vector<std::string>& tokens,
                            const std::vector<std::int32_t>& types,
                            const std::vector<std::string>& merges) {
        GgufBuilder builder;
        builder.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
        builder.texts("tokenizer.ggml.tokens", tokens);
        builder.i32s("tokenizer.ggml.token_type", types).texts("tokenizer.ggml.merges", merges);
        return TinyTokenizer(builder).error();
    };
    CHECK(refused({"a", "b", "ab"}, {1, 1, 1}, {"a b"}) == "");
    CHECK(contains(refused({}, {}, {}), "has 0 tokens"));
    CHECK(contains(refused({"a", "a"}, {1, 1}, {}), "token 1 has the spelling of an earlier one"));
    CHECK(contains(refused({"a", "b"}, {1}, {}), "has 1 entries for 2 tokens"));
    CHECK(contains(refused({"a"}, {7}, {}), "gives token 0 type 7; 1 to 6 are known"));
    CHECK(contains(refused({"a", "b"}, {1, 1}, {"a b"}), "merge 0 names or makes a token"));
    CHECK(contains(refused({"a", "aa"}, {1, 1}, {"a x"}), "merge 0 names or makes a token"));
    CHECK(contains(refused({"a", "aa"}, {1, 1}, {"aa"}), "merge 0 is not two spellings"));
    CHECK(contains(refused({"a", "aa"}, {1, 1}, {"a a", "a a"}), "merge 1 repeats an earlier one"));

    GgufBuilder builder = TinyTokenizer::with_vocabulary(ByteVocabulary{});
    builder.u32("tokenizer.ggml.eos_token_id", 256);
    CHECK(contains(TinyTokenizer(builder).error(), "eos_token_id is 256 in a vocabulary of 256"));
}

TEST_CASE("a mebibyte of one thing is tokenized whole") {
    const TinyTokenizer tiny(ByteVocabulary{.merges = {"a a", "aa aa", "aaaa aaaa", "Ġ Ġ", "Ċ Ċ"},
                                            .control = {"<|im_end|>", "<|im_start|>", "<|"}});
    for (const std::string unit : {"a", " ", "\n", "\u0301", "<", "<|im_", "'"}) {
        std::string text;
        while (text.size() < (1u << 20)) {
            text += unit;
        }
        CHECK(tiny->decode(tiny.ids(text, SpecialTokens::parse), true) == text);
    }
}

TEST_CASE("a stream shows whole characters only") {
    const std::string text = "aé日😀z";
    for (std::size_t step = 1; step <= text.size(); ++step) {
        Utf8Stream stream;
        std::string shown;
        for (std::size_t at = 0; at < text.size(); at += step) {
            const std::string part = stream.push(std::string_view(text).substr(at, step));
            CHECK((part.empty() || (static_cast<unsigned char>(part[0]) & 0xc0) != 0x80));
            shown += part;
        }
        CHECK(shown == text);
        CHECK(stream.finish() == "");
    }
}

TEST_CASE("a stream that ends in half a character gives it out at the end, once") {
    Utf8Stream stream;
    CHECK(stream.push("ab\xe6\x97") == "ab");
    CHECK(stream.push("") == "");
    CHECK(stream.finish() == "\xe6\x97");
    CHECK(stream.finish() == "");
}

TEST_CASE("a stream does not hold back bytes that can never become a character") {
    Utf8Stream stream;
    CHECK(stream.push("\xff") == "\xff");
    CHECK(stream.push("\x80\x80") == "\x80\x80");
    CHECK(stream.push("\xe6") == "");
    CHECK(stream.push("a") ==
          "\xe6"
          "a");
}

TEST_CASE("the byte tokenizer takes any bytes and gives them back") {
    const Tokenizer tokenizer = Tokenizer::of_bytes();
    CHECK(tokenizer.size() == 259);
    std::string text;
    for (int round = 0; round < 3; ++round) {
        for (int byte = 255; byte >= 0; --byte) {
            text += static_cast<char>(byte * (2 * round + 1));
        }
    }
    const auto ids = tokenizer.encode(text, SpecialTokens::parse);
    REQUIRE(ids);
    REQUIRE(ids->size() == text.size());
    for (std::size_t i = 0; i < text.size(); ++i) {
        CHECK((*ids)[i] == static_cast<std::uint8_t>(text[i]));
        CHECK(tokenizer.bytes((*ids)[i]) == text.substr(i, 1));
    }
    CHECK(tokenizer.decode(*ids) == text);
    CHECK(tokenizer.encode("", SpecialTokens::parse)->empty());
}

TEST_CASE(
    "the byte tokenizer's special tokens are three, two of them ends, and only where asked for") {
    const Tokenizer tokenizer = Tokenizer::of_bytes();
    const std::string text = "a<|im_start|>b<|im_end|><|endoftext|>";
    CHECK(*tokenizer.encode(text, SpecialTokens::parse) ==
          std::vector<TokenId>{'a', 257, 'b', 258, 256});
    CHECK(tokenizer.encode(text, SpecialTokens::as_text)->size() == text.size());
    CHECK(tokenizer.eos() == 258);
    CHECK(tokenizer.ends_generation(256));
    CHECK(tokenizer.ends_generation(258));
    CHECK_FALSE(tokenizer.ends_generation(257));
    CHECK_FALSE(tokenizer.ends_generation(10));
    CHECK_FALSE(tokenizer.adds_bos());
}
