// Text to token ids and back, for GGUF vocabularies of model `gpt2` (byte-level BPE).
//
// The pre-tokenizer is a hand-written linear-time scanner chosen by `tokenizer.ggml.pre`: gpt-2,
// smollm, llama-bpe, qwen2; any other name is refused by name. Merges go by rank, ties leftmost, in
// O(n log n) whatever the input. No recursion on input; no std::regex.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/gguf/gguf.h"

namespace kvw {

using TokenId = std::int32_t;

enum class SpecialTokens : bool {
    as_text = false,  // "<|im_end|>" in the input is ten characters of text; user-defined tokens,
                      // which are text of their own accord ("<tool_call>"), are still single tokens
    parse = true,     // control and user-defined tokens are recognised where they stand
};

class Tokenizer {
  public:
    // Keeps views into `gguf`, which must outlive it. Fails: bad_model (malformed vocabulary,
    // unknown model or pre-type, named).
    static Result<Tokenizer> create(const Gguf& gguf);
    // The vocabulary of the hash model: token i < 256 is byte i, then <|endoftext|>, <|im_start|>,
    // <|im_end|>; no merges, no BOS. Encodes any bytes, UTF-8 or not.
    static Tokenizer of_bytes();
    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    // Adds no BOS or EOS. Of special tokens that begin at one place the longest is taken. Fails:
    // bad_input, naming the byte offset, on invalid UTF-8 and on a byte that the vocabulary has no
    // token for (nothing is ever left out of the input).
    Result<std::vector<TokenId>> encode(std::string_view text, SpecialTokens special) const;

    // The bytes of one token. Control tokens give their spelling only with `show_control`, else
    // nothing. Fails as an empty string for an id out of range. The bytes of a text's ids add up to
    // the text.
    std::string bytes(TokenId id, bool show_control = false) const;
    std::string decode(std::span<const TokenId> ids, bool show_control = false) const;

    std::uint32_t size() const;      // vocabulary size
    std::string_view model() const;  // "gpt2"
    std::string_view pre() const;    // "smollm"
    TokenId bos() const;             // -1 when the file names none
    TokenId eos() const;
    bool adds_bos() const;  // as the file says; when it is silent, only llama-bpe does
    bool is_control(TokenId id) const;
    // Ends a generation: EOS, EOT, and the end-of-turn tokens the file's vocabulary has
    // (<|im_end|>, …).
    bool ends_generation(TokenId id) const;
    // A token by its exact vocabulary text, -1 if none.
    TokenId find(std::string_view spelling) const;

  private:
    struct State;
    explicit Tokenizer(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

// Collects the bytes of one answer and hands out only whole characters, so that a stream never
// shows half of one. What is left at the end comes out of finish() as it is.
class Utf8Stream {
  public:
    // The bytes that may be shown now that `bytes` were added.
    std::string push(std::string_view bytes);
    std::string finish();

  private:
    std::string held_;
};

}  // namespace kvw
