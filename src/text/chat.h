// Chat templates, recognised and rendered by our own code: nothing in a model file is ever
// executed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/gguf/gguf.h"
#include "src/text/tokenizer.h"

namespace kvw {

struct ChatMessage {
    std::string role;  // "system", "user", "assistant"
    std::string content;
};

class ChatTemplate {
  public:
    // The template of the file's `tokenizer.chat_template`, when it is one we know. Fails:
    // bad_template, naming the way out (--raw, --template NAME).
    static Result<ChatTemplate> of_model(const Gguf& gguf);
    // By name: "chatml". Fails: bad_template, listing the names.
    static Result<ChatTemplate> named(std::string_view name);

    // "chatml", "chatml-system" (with a default system text), "qwen2.5" (likewise; without tools).
    std::string_view name() const { return name_; }
    // The text a renderer would give (for comparison and display). Fails: bad_input, with the
    // number of the message, on an empty chat, another role or invalid UTF-8.
    Result<std::string> render(const std::vector<ChatMessage>& messages,
                               bool add_generation_prompt) const;
    // The ids: only the template itself makes control tokens; a marker inside a message stays text.
    // Adds no BOS. Fails as render(), and bad_template when the vocabulary lacks the marks.
    Result<std::vector<TokenId>> encode(const Tokenizer& tokenizer,
                                        const std::vector<ChatMessage>& messages,
                                        bool add_generation_prompt) const;

  private:
    std::string name_;
    // What the template says when no system message comes first; may be empty.
    std::string default_system_;
};

}  // namespace kvw
