#include "src/jobs/answer_line.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "src/base/text.h"

namespace kvw {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kIdPrefix = "batch_req_";
constexpr std::size_t kInputDigits = 16;
constexpr double kLogprobLeast = -9999.0;  // JSON has no infinity; OpenAI's word for it

std::string to_line(const Json& object) {
    return object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

double shown_logprob(const Logprob& entry) {
    return std::max(static_cast<double>(entry.logprob), kLogprobLeast);
}

Json token_object(const Tokenizer& tokenizer, const Logprob& entry) {
    const std::string bytes = tokenizer.bytes(entry.id, true);
    Json values = Json::array();
    for (const char byte : bytes) {
        values.push_back(static_cast<std::uint8_t>(byte));
    }
    return {{"token", utf8_lossy(bytes)},
            {"logprob", shown_logprob(entry)},
            {"bytes", std::move(values)}};
}

Json chat_logprobs(const MadeAnswer& made, std::uint32_t shown, const Tokenizer& tokenizer) {
    Json content = Json::array();
    for (const std::vector<Logprob>& entries : made.logprobs) {
        Json token = token_object(tokenizer, entries.front());
        token["top_logprobs"] = Json::array();
        for (std::size_t i = 1; i < entries.size() && i <= shown; ++i) {
            token["top_logprobs"].push_back(token_object(tokenizer, entries[i]));
        }
        content.push_back(std::move(token));
    }
    return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json completion_logprobs(const MadeAnswer& made, std::uint32_t shown, const Tokenizer& tokenizer) {
    Json tokens = Json::array(), values = Json::array(), top = Json::array(),
         offsets = Json::array();
    std::size_t characters = 0;
    for (const std::vector<Logprob>& entries : made.logprobs) {
        const std::string bytes = tokenizer.bytes(entries.front().id, true);
        tokens.push_back(utf8_lossy(bytes));
        values.push_back(shown_logprob(entries.front()));
        offsets.push_back(characters);
        characters += static_cast<std::size_t>(
            std::count_if(bytes.begin(), bytes.end(), [](char c) { return (c & 0xc0) != 0x80; }));
        Json alternatives = Json::object();
        for (std::size_t i = 1; i < entries.size() && i <= shown; ++i) {
            alternatives[utf8_lossy(tokenizer.bytes(entries[i].id, true))] =
                shown_logprob(entries[i]);
        }
        top.push_back(std::move(alternatives));
    }
    return {{"tokens", std::move(tokens)},
            {"token_logprobs", std::move(values)},
            {"top_logprobs", shown > 0 ? std::move(top) : Json(nullptr)},
            {"text_offset", std::move(offsets)}};
}

Json body_of(const AnswerSource& source, const JobLine& line, const MadeAnswer& made,
             const Tokenizer& tokenizer, const std::string& suffix) {
    const bool chat = line.endpoint == Endpoint::chat;
    const std::string text = utf8_lossy(made.text);
    Json choice{{"index", 0}};
    if (chat) {
        choice["message"] = {{"role", "assistant"}, {"content", text}};
    } else {
        choice["text"] = text;
    }
    choice["logprobs"] = nullptr;
    if (line.logprobs) {
        choice["logprobs"] = chat ? chat_logprobs(made, *line.logprobs, tokenizer)
                                  : completion_logprobs(made, *line.logprobs, tokenizer);
    }
    choice["finish_reason"] = name_of(made.finish);
    const RequestFacts& facts = made.facts;
    return {{"id", (chat ? "chatcmpl-" : "cmpl-") + suffix},
            {"object", chat ? "chat.completion" : "text_completion"},
            {"created", 0},
            {"model", source.model},
            {"choices", Json::array({std::move(choice)})},
            {"usage",
             {{"prompt_tokens", facts.prompt_tokens},
              {"completion_tokens", facts.completion_tokens},
              {"total_tokens", facts.prompt_tokens + facts.completion_tokens},
              {"prompt_tokens_details", {{"cached_tokens", facts.cached_tokens}}}}}};
}

Json frame(const AnswerSource& source, const JobLine& line, std::uint64_t event, bool violation) {
    Json object{{"id", answer_id(source.input, line.digest, line.number)},
                {"custom_id", line.custom_id ? Json(*line.custom_id) : Json(nullptr)},
                {"response", nullptr},
                {"error", nullptr}};
    object["kvwitness"] = {{"request_digest", hex(line.digest)},
                           {"moment", source.run.empty() || event == 0
                                          ? Json(nullptr)
                                          : Json(source.run + ":" + std::to_string(event))},
                           {"online", violation ? "violation" : "clean"}};
    return object;
}

std::string suffix_of(const std::string& id) { return id.substr(kIdPrefix.size()); }

}  // namespace

std::string answer_id(const std::optional<Digest256>& input, const Digest256& line,
                      std::uint64_t number) {
    return std::string(kIdPrefix) + hex(input ? *input : line).substr(0, kInputDigits) + "_" +
           std::to_string(number);
}

std::optional<AnswerId> parse_answer_id(std::string_view id) {
    if (!id.starts_with(kIdPrefix)) {
        return std::nullopt;
    }
    id.remove_prefix(kIdPrefix.size());
    const std::size_t line_at = kInputDigits + 1;
    if (id.size() <= line_at || id[kInputDigits] != '_' ||
        id.substr(0, kInputDigits).find_first_not_of("0123456789abcdef") != id.npos ||
        id[line_at] == '0') {
        return std::nullopt;
    }
    AnswerId parsed{.input = std::string(id.substr(0, kInputDigits))};
    const char* end = id.data() + id.size();
    const auto [at, problem] = std::from_chars(id.data() + line_at, end, parsed.line);
    return problem == std::errc() && at == end ? std::optional(parsed) : std::nullopt;
}

std::optional<std::uint64_t> line_of_answer_id(std::string_view id, const Digest256& input) {
    const std::optional<AnswerId> parsed = parse_answer_id(id);
    return parsed && parsed->input == hex(input).substr(0, kInputDigits)
               ? std::optional(parsed->line)
               : std::nullopt;
}

int http_status(ErrorCode code) {
    switch (code) {
        case ErrorCode::exceed_context_size:
        case ErrorCode::prefill_pool:
        case ErrorCode::decode_pool:
        case ErrorCode::out_of_pages:
        case ErrorCode::bad_input:
        case ErrorCode::usage:
            return 400;
        case ErrorCode::tenant_quota:
        case ErrorCode::queue_full:
            return 429;
        case ErrorCode::deadline:
            return 408;
        case ErrorCode::cancelled:
            return 499;
        default:
            return 500;
    }
}

std::string answer_line(const AnswerSource& source, const JobLine& line, const MadeAnswer& made,
                        const Tokenizer& tokenizer, std::uint64_t event) {
    Json object = frame(source, line, event, false);
    const std::string suffix = suffix_of(object["id"].get<std::string>());
    object["response"] = {{"status_code", 200},
                          {"request_id", "req_" + suffix},
                          {"body", body_of(source, line, made, tokenizer, suffix)}};
    if (first_invalid_utf8(made.text)) {
        object["kvwitness"]["text_b64"] = base64(made.text);
    }
    return to_line(object);
}

std::string error_line(const AnswerSource& source, const JobLine& line, const LineError& error,
                       std::optional<int> status, std::uint64_t event, bool violation) {
    Json object = frame(source, line, event, violation);
    if (status) {
        object["response"] = {{"status_code", *status},
                              {"request_id", "req_" + suffix_of(object["id"].get<std::string>())},
                              {"body", nullptr}};
    }
    object["error"] = {{"code", error.code}, {"message", error.message}};
    return to_line(object);
}

}  // namespace kvw
