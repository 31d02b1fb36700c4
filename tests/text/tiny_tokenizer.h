// A tokenizer over a vocabulary made in the test: the 256 bytes are ids 0 to 255, in order.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "src/gguf/gguf.h"
#include "src/text/tokenizer.h"
#include "tests/gguf_builder.h"

namespace kvw::test {

class TinyTokenizer {
  public:
    explicit TinyTokenizer(const ByteVocabulary& vocabulary)
        : TinyTokenizer(with_vocabulary(vocabulary)) {}
    explicit TinyTokenizer(const GgufBuilder& builder) : bytes_(builder.bytes()) {
        auto gguf = Gguf::parse(bytes_, "tiny.gguf");
        REQUIRE_MESSAGE(gguf, (gguf ? "" : gguf.error().message));
        gguf_ = std::make_unique<Gguf>(std::move(*gguf));
        auto made = Tokenizer::create(*gguf_);
        if (made) {
            tokenizer_ = std::make_unique<Tokenizer>(std::move(*made));
        } else {
            error_ = made.error().message;
            CHECK(made.error().code == ErrorCode::bad_model);
        }
    }

    static GgufBuilder with_vocabulary(const ByteVocabulary& vocabulary) {
        GgufBuilder builder;
        add_byte_vocabulary(builder, vocabulary);
        return builder;
    }

    // Why it was refused; empty when it was not.
    const std::string& error() const { return error_; }
    const Gguf& gguf() const { return *gguf_; }
    const Tokenizer& operator*() const {
        REQUIRE_MESSAGE(tokenizer_ != nullptr, error_);
        return *tokenizer_;
    }
    const Tokenizer* operator->() const { return &**this; }

    std::vector<TokenId> ids(std::string_view text, SpecialTokens special) const {
        auto ids = (**this).encode(text, special);
        REQUIRE_MESSAGE(ids, (ids ? "" : ids.error().message));
        return *ids;
    }
    // The tokens' spellings with | between them.
    std::string pieces(std::string_view text,
                       SpecialTokens special = SpecialTokens::as_text) const {
        std::string joined;
        for (const TokenId id : ids(text, special)) {
            joined.append(joined.empty() ? "" : "|").append(tokenizer_->bytes(id, true));
        }
        return joined;
    }

  private:
    std::vector<std::uint8_t> bytes_;
    std::unique_ptr<Gguf> gguf_;
    std::unique_ptr<Tokenizer> tokenizer_;
    std::string error_;
};

}  // namespace kvw::test
