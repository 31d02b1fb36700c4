// Any bytes as a prompt, for each pre-tokenizer: text that is not UTF-8 is refused, all other text
// comes back from its ids, and a stream of its bytes shows it whole.

#include <memory>
#include <vector>

#include "src/base/check.h"
#include "src/base/text.h"
#include "src/gguf/gguf.h"
#include "src/text/tokenizer.h"
#include "tests/gguf_builder.h"

namespace {

struct Loaded {
    std::vector<std::uint8_t> bytes;
    std::unique_ptr<kvw::Gguf> gguf;
    std::unique_ptr<kvw::Tokenizer> tokenizer;
};

Loaded load(const char* pre) {
    kvw::test::GgufBuilder builder;
    kvw::test::add_byte_vocabulary(
        builder,
        {.pre = pre,
         .merges = {"Ġ t", "h e", "i n", "Ġt he", "a a", "aa aa", "aaaa aaaa", "Ġ Ġ", "ĠĠ ĠĠ",
                    "Ċ Ċ", "1 2", "12 3", "ã ģ", "' s", "a Ġ", "! !", "Ì ģ", "in g", "Ġ in"},
         .words = {"hello", "Ġhello"},
         .control = {"<|im_start|>", "<|im_end|>", "<|im", "<s>"},
         .user_defined = {"<tool_call>", "ĠĠĠĠĠ", "  "}});
    Loaded loaded;
    loaded.bytes = builder.bytes();
    loaded.gguf = std::make_unique<kvw::Gguf>(*kvw::Gguf::parse(loaded.bytes, "fuzz.gguf"));
    loaded.tokenizer =
        std::make_unique<kvw::Tokenizer>(std::move(*kvw::Tokenizer::create(*loaded.gguf)));
    return loaded;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const Loaded kLoaded[] = {load("gpt-2"), load("smollm"), load("llama-bpe"),
                                     load("qwen2")};
    if (size == 0) {
        return 0;
    }
    const kvw::Tokenizer& tokenizer = *kLoaded[data[0] % 4].tokenizer;
    const auto special = data[0] & 4 ? kvw::SpecialTokens::parse : kvw::SpecialTokens::as_text;
    const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);

    const auto ids = tokenizer.encode(text, special);
    kvw::check(ids.has_value() == !kvw::first_invalid_utf8(text).has_value(),
               "text is refused exactly when it is not UTF-8");
    if (!ids) {
        kvw::check(ids.error().code == kvw::ErrorCode::bad_input, "a refusal is bad_input");
        return 0;
    }
    kvw::check(tokenizer.decode(*ids, true) == text, "the bytes of a text's ids add up to it");
    kvw::Utf8Stream stream;
    std::string shown;
    for (const kvw::TokenId id : *ids) {
        kvw::check(special == kvw::SpecialTokens::parse || !tokenizer.is_control(id),
                   "text never becomes a control token");
        const std::string part = stream.push(tokenizer.bytes(id, true));
        kvw::check(!kvw::first_invalid_utf8(part), "a stream shows whole characters");
        shown += part;
    }
    kvw::check(shown == text && stream.finish().empty(), "a stream shows everything");
    return 0;
}
