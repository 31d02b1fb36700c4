// Cuts text into the words inside which byte pairs may merge, as the regular expressions of the
// tokenizers do, in one pass and without a regex engine.
//
//   gpt-2      's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   smollm     each \p{N} alone, then gpt-2 on what lies between
//   llama-bpe  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
//              | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   qwen2      the same with \p{N} instead of \p{N}{1,3}
//
// Sources: the tokenizer.json files of GPT-2, SmolLM2, Llama 3 and Qwen2. \s is White_Space of the
// Unicode Character Database; categories come from utf8proc.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace kvw {

enum class PreTokenizer { gpt2, smollm, llama_bpe, qwen2 };

// By the name that `tokenizer.ggml.pre` gives; none for a name we do not know.
std::optional<PreTokenizer> pre_tokenizer_named(std::string_view name);

class WordScanner {
  public:
    // `text` is well-formed UTF-8 and outlives the scanner.
    WordScanner(PreTokenizer kind, std::string_view text) : kind_(kind), text_(text) {}

    // The next word; empty at the end. The words add up to the text.
    std::string_view next();

  private:
    std::size_t gpt2_end(std::size_t at, std::size_t limit) const;
    std::size_t smollm_end();
    std::size_t llama_end(std::size_t at, std::size_t digits_max) const;

    PreTokenizer kind_;
    std::string_view text_;
    std::size_t at_ = 0;
    std::size_t numberless_to_ = 0;  // smollm: no number character in [at_, numberless_to_)
};

}  // namespace kvw
