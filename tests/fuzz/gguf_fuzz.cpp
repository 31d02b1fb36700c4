// Any bytes as a model file: parse() and everything that reads from what it accepted, up to a
// tokenizer and a chat, either succeed or refuse.

#include "src/base/check.h"
#include "src/base/text.h"
#include "src/gguf/gguf.h"
#include "src/text/chat.h"
#include "src/text/tokenizer.h"

namespace {

// Adds up bytes, so that each is really read.
std::uint64_t sum_of(std::span<const std::uint8_t> bytes) {
    std::uint64_t sum = 0;
    for (const std::uint8_t byte : bytes) {
        sum += byte;
    }
    return sum;
}

void read_metadata(const kvw::Gguf& gguf) {
    for (const auto& [key, value] : gguf.metadata()) {
        kvw::check(gguf.has(key), "a listed key is there");
        if (const auto texts = gguf.strings_at(key)) {
            for (const std::string_view text : *texts) {
                (void)kvw::printable(text);
            }
        }
        (void)gguf.unsigned_at(key);
        (void)gguf.number_at(key);
        (void)gguf.bool_at(key);
        (void)gguf.string_at(key);
        (void)gguf.ints_at(key);
        (void)gguf.floats_at(key);
    }
}

void use_tokenizer(const kvw::Gguf& gguf) {
    const auto tokenizer = kvw::Tokenizer::create(gguf);
    if (!tokenizer) {
        return;
    }
    const std::string_view text = "it's 1984 <|im_end|>\n\n  déjà vu";
    for (const auto special : {kvw::SpecialTokens::as_text, kvw::SpecialTokens::parse}) {
        if (const auto ids = tokenizer->encode(text, special)) {
            for (const kvw::TokenId id : *ids) {
                kvw::check(id >= 0 && static_cast<std::uint32_t>(id) < tokenizer->size(),
                           "an id is in the vocabulary");
            }
            (void)tokenizer->decode(*ids, true);
        }
    }
    if (const auto chat = kvw::ChatTemplate::of_model(gguf)) {
        (void)chat->encode(*tokenizer, {{"user", std::string(text)}}, true);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto gguf = kvw::Gguf::parse({data, size}, "fuzz.gguf");
    if (!gguf) {
        kvw::check(gguf.error().code == kvw::ErrorCode::bad_model, "a refusal is bad_model");
        return 0;
    }
    read_metadata(*gguf);
    std::uint64_t tensor_bytes = 0;
    for (const kvw::GgufTensor& tensor : gguf->tensors()) {
        (void)sum_of(tensor.bytes);
        tensor_bytes += tensor.bytes.size();
        kvw::check(tensor.cols() * tensor.rows() >= 1, "a tensor has values");
    }
    kvw::check(tensor_bytes <= size, "tensors do not share bytes");
    use_tokenizer(*gguf);
    return 0;
}
