#include "src/text/chat.h"

#include <optional>
#include <utility>

#include "src/base/sha256.h"
#include "src/base/text.h"

namespace kvw {

namespace {

constexpr std::string_view kTemplateKey = "tokenizer.chat_template";
constexpr std::string_view kTurnBegin = "<|im_start|>";
constexpr std::string_view kTurnEnd = "<|im_end|>";
constexpr std::string_view kWayOut =
    "; use --template chatml if the model was trained on ChatML, or --raw";

// SHA-256 of the Qwen2.5 template, ends trimmed and its default system text as one NUL.
constexpr std::string_view kQwen25Digest =
    "78d289917d18deff8d4e71c272368236636a2d52e0f74f53802ecf1f6cdff0d6";

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (std::size_t at = text.find(from); at != std::string::npos;
         at = text.find(from, at + to.size())) {
        text.replace(at, from.size(), to);
    }
}

std::string_view trimmed(std::string_view text) {
    constexpr std::string_view kSpace = " \t\r\n";
    const std::size_t begin = text.find_first_not_of(kSpace);
    if (begin == std::string_view::npos) {
        return {};
    }
    return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

bool consume(std::string_view& text, std::string_view prefix) {
    if (!text.starts_with(prefix)) {
        return false;
    }
    text.remove_prefix(prefix.size());
    return true;
}

// Text between quotes that a Jinja renderer would print as it stands.
bool is_plain(std::string_view quoted) {
    return quoted.find_first_of("'\\{}") == std::string_view::npos;
}

// The default system text of a template that is nothing but ChatML turns: empty when it has none,
// nothing when the template does anything else.
std::optional<std::string> chatml_default(std::string_view source) {
    std::string text(trimmed(source));
    replace_all(text, "\\n", "\n");
    replace_all(text, "{{ '", "{{'");
    replace_all(text, "' }}", "'}}");
    std::string_view rest = text;
    std::string system;
    consume(rest,
            "{% if not add_generation_prompt is defined %}"
            "{% set add_generation_prompt = false %}{% endif %}");
    if (!consume(rest, "{% for message in messages %}")) {
        return std::nullopt;
    }
    if (consume(rest,
                "{% if loop.first and messages[0]['role'] != 'system' %}"
                "{{'<|im_start|>system\n")) {
        constexpr std::string_view kEnd = "<|im_end|>\n'}}{% endif %}";
        const std::size_t end = rest.find(kEnd);
        if (end == std::string_view::npos || end == 0 || !is_plain(rest.substr(0, end))) {
            return std::nullopt;
        }
        system = rest.substr(0, end);
        rest.remove_prefix(end + kEnd.size());
    }
    const bool turns =
        consume(rest,
                "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
                "'<|im_end|>' + '\n'}}{% endfor %}"
                "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}");
    return turns && rest.empty() ? std::optional(system) : std::nullopt;
}

// The default system text when `source` is Qwen2.5's template, whatever that text is. Without
// tools, which we never pass, that template is ChatML.
std::optional<std::string> qwen25_default(std::string_view source) {
    constexpr std::string_view kBegin = "{{- '<|im_start|>system\\n";
    constexpr std::string_view kEnd = "<|im_end|>\\n' }}";
    std::string text(trimmed(source));
    // The first place that opens a system turn and says text at once is the default's.
    for (std::size_t at = text.find(kBegin); at != std::string::npos;
         at = text.find(kBegin, at + 1)) {
        const std::size_t begin = at + kBegin.size();
        const std::size_t end = text.find(kEnd, begin);
        if (end == std::string::npos || end == begin) {
            return std::nullopt;
        }
        const std::string system = text.substr(begin, end - begin);
        if (!is_plain(system)) {
            continue;
        }
        replace_all(text, system, std::string_view("\0", 1));
        return hex(sha256(text)) == kQwen25Digest ? std::optional(system) : std::nullopt;
    }
    return std::nullopt;
}

Status check_messages(const std::vector<ChatMessage>& messages) {
    if (messages.empty()) {
        return Error{ErrorCode::bad_input, "a chat needs at least one message"};
    }
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const std::string& role = messages[i].role;
        if (role != "system" && role != "user" && role != "assistant") {
            return Error{ErrorCode::bad_input, "message " + std::to_string(i) +
                                                   " has a role that is not one of system, user, "
                                                   "assistant"};
        }
        if (const auto at = first_invalid_utf8(messages[i].content)) {
            return Error{ErrorCode::bad_input, "message " + std::to_string(i) +
                                                   " is not UTF-8 at byte offset " +
                                                   std::to_string(*at)};
        }
    }
    return {};
}

// The turns as the template would have them: the given ones, after a default system turn if due.
std::vector<ChatMessage> with_default(std::string_view system,
                                      const std::vector<ChatMessage>& messages) {
    std::vector<ChatMessage> turns;
    if (!system.empty() && messages.front().role != "system") {
        turns.push_back({"system", std::string(system)});
    }
    turns.insert(turns.end(), messages.begin(), messages.end());
    return turns;
}

}  // namespace

Result<ChatTemplate> ChatTemplate::of_model(const Gguf& gguf) {
    const std::string file = printable(gguf.path().string());
    if (!gguf.has(kTemplateKey)) {
        return Error{ErrorCode::bad_template,
                     file + " has no chat template" + std::string(kWayOut)};
    }
    const auto source = gguf.string_at(kTemplateKey);
    if (!source) {
        return source.error();
    }
    ChatTemplate known;
    if (auto system = chatml_default(*source)) {
        known.name_ = system->empty() ? "chatml" : "chatml-system";
        known.default_system_ = std::move(*system);
    } else if (auto qwen = qwen25_default(*source)) {
        known.name_ = "qwen2.5";
        known.default_system_ = std::move(*qwen);
    } else {
        return Error{ErrorCode::bad_template,
                     file + " has a chat template that is not known here (SHA-256 " +
                         hex(sha256(*source)).substr(0, 16) + ")" + std::string(kWayOut)};
    }
    return known;
}

Result<ChatTemplate> ChatTemplate::named(std::string_view name) {
    if (name != "chatml") {
        return Error{ErrorCode::bad_template,
                     "no template is named \"" + printable(name) + "\"; there is: chatml"};
    }
    ChatTemplate chatml;
    chatml.name_ = "chatml";
    return chatml;
}

Result<std::string> ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                         bool add_generation_prompt) const {
    if (Status valid = check_messages(messages); !valid) {
        return valid.error();
    }
    std::string text;
    for (const ChatMessage& turn : with_default(default_system_, messages)) {
        text.append(kTurnBegin).append(turn.role).append("\n");
        text.append(turn.content).append(kTurnEnd).append("\n");
    }
    if (add_generation_prompt) {
        text.append(kTurnBegin).append("assistant\n");
    }
    return text;
}

Result<std::vector<TokenId>> ChatTemplate::encode(const Tokenizer& tokenizer,
                                                  const std::vector<ChatMessage>& messages,
                                                  bool add_generation_prompt) const {
    if (Status valid = check_messages(messages); !valid) {
        return valid.error();
    }
    const TokenId begin = tokenizer.find(kTurnBegin);
    const TokenId end = tokenizer.find(kTurnEnd);
    if (begin < 0 || end < 0) {
        return Error{ErrorCode::bad_template, "the model's vocabulary has no " +
                                                  std::string(begin < 0 ? kTurnBegin : kTurnEnd) +
                                                  " token, which template " + name_ +
                                                  " needs; use --raw"};
    }
    std::vector<TokenId> ids;
    // Template text and message text between two marks are one text to the tokenizer: words may
    // span them, as they do in the rendered form that models are trained on.
    const auto append_text = [&](const std::string& text) -> Status {
        const auto part = tokenizer.encode(text, SpecialTokens::as_text);
        if (!part) {
            return part.error();
        }
        ids.insert(ids.end(), part->begin(), part->end());
        return {};
    };
    for (const ChatMessage& turn : with_default(default_system_, messages)) {
        ids.push_back(begin);
        if (Status done = append_text(turn.role + "\n" + turn.content); !done) {
            return done.error();
        }
        ids.push_back(end);
        if (Status done = append_text("\n"); !done) {
            return done.error();
        }
    }
    if (add_generation_prompt) {
        ids.push_back(begin);
        if (Status done = append_text("assistant\n"); !done) {
            return done.error();
        }
    }
    return ids;
}

}  // namespace kvw
