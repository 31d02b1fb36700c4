#include "src/jobs/job_line.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include "src/base/text.h"
#include "src/jobs/json_text.h"

namespace kvw {

namespace {

using Json = nlohmann::json;

constexpr std::size_t kCustomIdBytesMax = 1024;
constexpr std::size_t kSessionBytesMax = 64;
constexpr std::size_t kStopsMax = 16;
constexpr std::uint32_t kLogprobsMax = 20;
constexpr std::string_view kPrivatePrefix = "line-";
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool is_tenant(std::string_view name) {
    return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    });
}

// What a line's fields give. The first thing that is wrong with it is what is said; the rest is
// not looked at.
class Reader {
  public:
    Reader(std::uint64_t number, std::optional<LineError>& error)
        : where_("line " + std::to_string(number) + ": "), error_(error) {}

    bool good() const { return !error_; }
    void fail(std::string_view code, const std::string& what) {
        if (!error_) {
            error_ = LineError{std::string(code), where_ + what};
        }
    }

    // Null when it is absent or null, and once something was wrong.
    const Json* member(const Json& object, const std::string& name) const {
        const auto found = error_ ? object.end() : object.find(name);
        return found == object.end() || found->is_null() ? nullptr : &*found;
    }
    const Json* needed(const Json& object, const std::string& path, const std::string& name) {
        const Json* value = member(object, name);
        if (value == nullptr) {
            fail("missing_field", path + name + " is missing");
        }
        return value;
    }
    std::optional<std::string> text(const Json& object, const std::string& path,
                                    const std::string& name) {
        const Json* value = member(object, name);
        if (value == nullptr) {
            return std::nullopt;
        }
        if (!value->is_string()) {
            fail("invalid_type", path + name + " is " + kind_of(*value) + "; it must be a string");
            return std::nullopt;
        }
        return value->get<std::string>();
    }
    std::optional<std::uint64_t> whole(const Json& object, const std::string& path,
                                       const std::string& name, std::uint64_t low,
                                       std::uint64_t high) {
        const Json* value = member(object, name);
        if (value == nullptr) {
            return std::nullopt;
        }
        const std::string wanted = "; it must be a whole number from " + std::to_string(low) +
                                   " to " + std::to_string(high);
        if (!value->is_number_integer()) {
            fail("invalid_type", path + name + " is " + kind_of(*value) + wanted);
            return std::nullopt;
        }
        const bool negative = value->is_number_integer() && !value->is_number_unsigned();
        const auto number = value->get<std::uint64_t>();
        if (negative || number < low || number > high) {
            fail("invalid_value", path + name + " is " + value->dump() + wanted);
            return std::nullopt;
        }
        return number;
    }
    void real(const Json& object, const std::string& name, double low, double high, float& target) {
        const Json* value = member(object, name);
        if (value == nullptr) {
            return;
        }
        const auto shown = [](double bound) { return std::to_string(static_cast<int>(bound)); };
        const std::string wanted =
            "; it must be a number from " + shown(low) + " to " + shown(high);
        if (!value->is_number()) {
            return fail("invalid_type", "body." + name + " is " + kind_of(*value) + wanted);
        }
        const auto number = value->get<double>();
        if (!(number >= low && number <= high)) {
            return fail("invalid_value", "body." + name + " is " + value->dump() + wanted);
        }
        target = static_cast<float>(number);
    }
    // Every member's name is one of these.
    void only(const Json& object, const std::string& path, const std::set<std::string>& names) {
        for (const auto& [name, value] : object.items()) {
            if (!names.contains(name)) {
                const bool shown = name.size() <= 64;
                return fail(
                    "unknown_field",
                    (shown ? path + printable(name)
                           : path + "(a name of " + std::to_string(name.size()) + " bytes)") +
                        " is not a known field; --allow-unknown passes over it");
            }
        }
    }

    static std::string kind_of(const Json& value) {
        switch (value.type()) {
            case Json::value_t::object:
                return "an object";
            case Json::value_t::array:
                return "an array of " + std::to_string(value.size());
            case Json::value_t::string:
                return "a string";
            case Json::value_t::boolean:
                return "true or false";
            case Json::value_t::null:
                return "null";
            default:
                return "a number";
        }
    }

  private:
    std::string where_;
    std::optional<LineError>& error_;
};

// The line as an object, or what is wrong with it.
Json object_of(const RawLine& raw, Reader& read) {
    std::string_view text = raw.bytes;
    if (raw.number == 1 && text.starts_with(kByteOrderMark)) {
        text.remove_prefix(kByteOrderMark.size());
    }
    if (raw.too_long) {
        read.fail("line_too_long", "it has " + std::to_string(raw.length) + " bytes; at most " +
                                       std::to_string(kLineBytesMax) + " are read");
    } else if (text.empty()) {
        read.fail("empty_line", "it is empty");
    } else if (const std::optional<std::size_t> bad = first_invalid_utf8(text)) {
        read.fail("invalid_utf8", "it is not UTF-8: byte " + std::to_string(*bad) + " of " +
                                      std::to_string(text.size()) + " begins no character");
    } else {
        JsonText parsed = parse_json(text);
        if (!parsed.problem.empty()) {
            read.fail("invalid_json_line", parsed.problem);
        } else if (!parsed.value.is_object()) {
            read.fail("invalid_json_line",
                      "it is " + Reader::kind_of(parsed.value) + "; it must be an object");
        } else {
            return std::move(parsed.value);
        }
    }
    return Json::object();
}

std::optional<std::string> read_custom_id(const Json& object, Reader& read) {
    const auto found = object.find("custom_id");
    if (found == object.end()) {
        read.fail("missing_custom_id", "it has no custom_id");
        return std::nullopt;
    }
    if (!found->is_string()) {
        read.fail("invalid_custom_id",
                  "custom_id is " + Reader::kind_of(*found) + "; it must be a string");
        return std::nullopt;
    }
    auto id = found->get<std::string>();
    if (id.empty() || id.size() > kCustomIdBytesMax) {
        read.fail("invalid_custom_id", "custom_id has " + std::to_string(id.size()) +
                                           " bytes; it must have 1 to " +
                                           std::to_string(kCustomIdBytesMax));
        return std::nullopt;
    }
    return id;
}

std::string content_of(const Json& message, const std::string& path, Reader& read,
                       bool allow_unknown) {
    const Json* content = read.needed(message, path, "content");
    if (content == nullptr || content->is_string()) {
        return content == nullptr ? "" : content->get<std::string>();
    }
    if (!content->is_array()) {
        read.fail("invalid_type", path + "content is " + Reader::kind_of(*content) +
                                      "; it must be a string or an array of text parts");
        return {};
    }
    std::string all;
    for (std::size_t i = 0; i < content->size() && read.good(); ++i) {
        const Json& part = (*content)[i];
        const std::string at = path + "content[" + std::to_string(i) + "].";
        if (!part.is_object() || part.value("type", Json()) != "text") {
            read.fail("unsupported_value", at + "type is not text; only text is understood");
            break;
        }
        if (!allow_unknown) {
            read.only(part, at, {"type", "text"});
        }
        read.needed(part, at, "text");
        all += read.text(part, at, "text").value_or("");
    }
    return all;
}

void read_messages(const Json& body, LinePrompt& prompt, Reader& read, bool allow_unknown) {
    const Json* messages = read.needed(body, "body.", "messages");
    if (messages == nullptr) {
        return;
    }
    if (!messages->is_array() || messages->empty()) {
        return read.fail(messages->is_array() ? "invalid_value" : "invalid_type",
                         "body.messages is " + Reader::kind_of(*messages) +
                             "; it must be an array of at least 1 message");
    }
    for (std::size_t i = 0; i < messages->size() && read.good(); ++i) {
        const Json& message = (*messages)[i];
        const std::string at = "body.messages[" + std::to_string(i) + "]";
        if (!message.is_object()) {
            return read.fail("invalid_type",
                             at + " is " + Reader::kind_of(message) + "; it must be an object");
        }
        if (!allow_unknown) {
            read.only(message, at + ".", {"role", "content"});
        }
        read.needed(message, at + ".", "role");
        const std::string role = read.text(message, at + ".", "role").value_or("");
        if (role != "system" && role != "user" && role != "assistant") {
            return read.fail("invalid_value", at + ".role is not one of system, user, assistant");
        }
        prompt.messages.push_back({role, content_of(message, at + ".", read, allow_unknown)});
    }
}

// method, url, and what the body says the prompt is.
LinePrompt read_prompt(const Json& object, Reader& read, bool allow_unknown) {
    LinePrompt prompt;
    read.needed(object, "", "method");
    const std::string method = read.text(object, "", "method").value_or("");
    if (method != "POST") {
        read.fail("invalid_method", "method is not POST");
    }
    read.needed(object, "", "url");
    const std::string url = read.text(object, "", "url").value_or("");
    if (url == "/v1/completions") {
        prompt.endpoint = Endpoint::completions;
    } else if (url != "/v1/chat/completions") {
        read.fail("url_mismatch", "url is neither /v1/chat/completions nor /v1/completions");
    }
    const Json* body = read.needed(object, "", "body");
    if (body == nullptr) {
        return prompt;
    }
    if (!body->is_object()) {
        read.fail("invalid_type", "body is " + Reader::kind_of(*body) + "; it must be an object");
    } else if (prompt.endpoint == Endpoint::chat) {
        read_messages(*body, prompt, read, allow_unknown);
    } else {
        read.needed(*body, "body.", "prompt");
        prompt.text = read.text(*body, "body.", "prompt").value_or("");
    }
    return prompt;
}

std::vector<std::string> read_stops(const Json& stop, Reader& read) {
    const std::string wanted = "; it must be a string or an array of at most " +
                               std::to_string(kStopsMax) + " of them, none of them empty";
    const Json all = stop.is_array() ? stop : Json::array({stop});
    std::vector<std::string> stops;
    for (const Json& one : all) {
        if (!one.is_string()) {
            read.fail("invalid_type", "body.stop is " + Reader::kind_of(stop) + wanted);
            return {};
        }
        stops.push_back(one.get<std::string>());
    }
    const bool empty = std::any_of(stops.begin(), stops.end(),
                                   [](const std::string& text) { return text.empty(); });
    if (empty || stops.size() > kStopsMax) {
        read.fail("invalid_value", "body.stop is " + Reader::kind_of(stop) +
                                       (empty ? " with an empty text" : "") + wanted);
    }
    return stops;
}

void read_logprobs(const Json& body, JobLine& line, Reader& read) {
    const Json* asked = read.member(body, "logprobs");
    if (asked == nullptr) {
        return;
    }
    if (line.endpoint == Endpoint::chat && !asked->is_boolean()) {
        return read.fail("invalid_type", "body.logprobs is " + Reader::kind_of(*asked) +
                                             "; in a chat it must be true or false");
    }
    if (line.endpoint == Endpoint::completions) {
        if (const auto count = read.whole(body, "body.", "logprobs", 0, kLogprobsMax)) {
            line.logprobs = static_cast<std::uint32_t>(*count);
        }
        return;
    }
    line.logprobs = asked->get<bool>() ? std::optional(line.logprobs.value_or(0)) : std::nullopt;
}

// Any 64-bit whole number, negative ones too: OpenAI's is signed, ours is not.
void read_seed(const Json& body, std::optional<std::uint64_t>& seed, Reader& read) {
    const Json* value = read.member(body, "seed");
    if (value == nullptr) {
        return;
    }
    if (!value->is_number_integer()) {
        return read.fail("invalid_type", "body.seed is " + Reader::kind_of(*value) +
                                             "; it must be a whole number of 64 bits");
    }
    seed = value->is_number_unsigned() ? value->get<std::uint64_t>()
                                       : static_cast<std::uint64_t>(value->get<std::int64_t>());
}

void read_limits(const Json& body, GenerateRequest& request, Reader& read) {
    constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
    const auto tokens = read.whole(body, "body.", "max_tokens", 1, kMost);
    const auto completion = read.whole(body, "body.", "max_completion_tokens", 1, kMost);
    if (tokens && completion && *tokens != *completion) {
        return read.fail("invalid_value", "body.max_tokens is " + std::to_string(*tokens) +
                                              " and body.max_completion_tokens " +
                                              std::to_string(*completion) +
                                              "; one of them is enough");
    }
    if (const auto most = tokens ? tokens : completion) {
        request.tokens_max = static_cast<std::uint32_t>(*most);
    }
}

// The fields beside messages and prompt.
void read_body(const Json& body, JobLine& line, std::optional<std::uint64_t>& seed, Reader& read,
               bool allow_unknown) {
    if (!allow_unknown) {
        std::set<std::string> known = {
            "model", "max_tokens",       "max_completion_tokens", "temperature", "top_p", "seed",
            "stop",  "presence_penalty", "frequency_penalty",     "logprobs",    "user",  "n",
            "stream"};
        known.insert(line.endpoint == Endpoint::chat ? "messages" : "prompt");
        read.only(body, "body.", known);
    }
    read.text(body, "body.", "model");
    read.text(body, "body.", "user");
    if (const Json* n = read.member(body, "n"); n != nullptr && *n != 1) {
        read.fail("unsupported_value", "body.n is " +
                                           (n->is_number() ? n->dump() : Reader::kind_of(*n)) +
                                           "; each line has 1 answer");
    }
    if (const Json* stream = read.member(body, "stream"); stream != nullptr && *stream != false) {
        read.fail("unsupported_value", "body.stream must be false: each line has one answer line");
    }
    GenerateRequest& request = line.request;
    SamplingOptions& sampling = request.sampling;
    read_limits(body, request, read);
    read.real(body, "temperature", 0, 2, sampling.temperature);
    read.real(body, "top_p", 0, 1, sampling.top_p);
    read.real(body, "presence_penalty", -2, 2, sampling.presence_penalty);
    read.real(body, "frequency_penalty", -2, 2, sampling.frequency_penalty);
    read_seed(body, seed, read);
    if (const Json* stop = read.member(body, "stop")) {
        sampling.stops = read_stops(*stop, read);
    }
    read_logprobs(body, line, read);
    if (line.logprobs) {
        request.logprobs = std::max(*line.logprobs, 1u);
    }
}

void read_tenant(const Json& object, const JobOptions& options, JobLine& line, Reader& read) {
    if (options.tenant_field != "tenant" && object.contains("tenant")) {
        return read.fail("tenant_not_allowed",
                         "tenant counts only with --tenant-field tenant; it was not given");
    }
    if (!options.tenant_field) {
        return;
    }
    const std::string& field = *options.tenant_field;
    const std::optional<std::string> tenant = read.text(object, "", field);
    if (!tenant) {
        return;
    }
    if (!is_tenant(*tenant)) {
        return read.fail("invalid_tenant", field + " has " + std::to_string(tenant->size()) +
                                               " bytes; a tenant is 1 to 64 of a-z 0-9 . _ -");
    }
    if (is_private_tenant(*tenant)) {
        return read.fail("invalid_tenant", field + " is " + *tenant +
                                               ", a name that is kept for lines without a tenant");
    }
    line.tenant = *tenant;
}

void read_sharing(const Json& object, const JobOptions& options, JobLine& line, Reader& read) {
    GenerateRequest& request = line.request;
    request.session = read.text(object, "", "session").value_or(options.session);
    if (read.member(object, "session") != nullptr &&
        (request.session.empty() || request.session.size() > kSessionBytesMax)) {
        read.fail("invalid_session", "session has " + std::to_string(request.session.size()) +
                                         " bytes; it must have 1 to " +
                                         std::to_string(kSessionBytesMax));
    }
    if (const auto scope = read.text(object, "", "cache_scope")) {
        for (const CacheScope one :
             {CacheScope::request, CacheScope::session, CacheScope::tenant}) {
            if (*scope == name_of(one)) {
                request.scope = one;
            }
        }
        if (!request.scope) {
            read.fail("invalid_value", "cache_scope is not one of request, session, tenant");
        }
    }
    if (line.tenant == private_tenant(line.number)) {
        request.scope = CacheScope::request;
    }
}

std::string short_digest(std::string_view text) {
    const Digest256 digest = sha256(text);
    return std::string(reinterpret_cast<const char*>(digest.data()), digest.size() / 2);
}

}  // namespace

std::string private_tenant(std::uint64_t line) {
    return std::string(kPrivatePrefix) + std::to_string(line);
}

bool is_private_tenant(std::string_view name) {
    return name.size() > kPrivatePrefix.size() && name.starts_with(kPrivatePrefix) &&
           name.find_first_not_of("0123456789", kPrivatePrefix.size()) == std::string_view::npos;
}

std::uint64_t derived_seed(std::uint64_t job_seed, const std::string& custom_id,
                           const Digest256& line) {
    Sha256 hash;
    hash.update("kvwitness line seed " + std::to_string(job_seed) + " " +
                std::to_string(custom_id.size()) + " " + custom_id);
    hash.update(line);
    const Digest256 digest = hash.digest();
    std::uint64_t seed = 0;
    for (std::size_t i = 0; i < 8; ++i) {
        seed = seed << 8 | digest[i];
    }
    return seed;
}

std::optional<std::string> custom_id_of(const RawLine& line) {
    std::optional<LineError> ignored;
    Reader read(line.number, ignored);
    return read_custom_id(object_of(line, read), read);
}

Result<LinePrompt> prompt_of(const RawLine& line, bool allow_unknown) {
    std::optional<LineError> wrong;
    Reader read(line.number, wrong);
    LinePrompt prompt = read_prompt(object_of(line, read), read, allow_unknown);
    if (wrong) {
        return Error{ErrorCode::bad_input, wrong->message};
    }
    return prompt;
}

LineParser::LineParser(JobOptions options, const Tokenizer& tokenizer, const ChatTemplate* chat,
                       bool stream)
    : options_(std::move(options)), tokenizer_(&tokenizer), chat_(chat), stream_(stream) {}

void LineParser::pass_over(const RawLine& line) {
    if (const auto id = custom_id_of(line)) {
        seen_.insert(short_digest(*id));
    }
}

JobLine LineParser::parse(const RawLine& raw) {
    JobLine line = read(raw);
    if (line.error) {
        line.request = {};
        line.bytes = raw.bytes;
    }
    return line;
}

JobLine LineParser::read(const RawLine& raw) {
    JobLine line{.number = raw.number, .digest = raw.digest};
    line.tenant = options_.tenant.empty() ? private_tenant(raw.number) : options_.tenant;
    Reader read(raw.number, line.error);
    const Json object = object_of(raw, read);
    if (stream_ && read.good() && object.size() == 1 && object.contains("cancel")) {
        line.cancels = read.text(object, "", "cancel");
        if (!line.cancels) {
            read.fail("invalid_type", "cancel must be a custom_id");
        }
        return line;
    }
    line.custom_id = read_custom_id(object, read);
    if (line.custom_id && !seen_.insert(short_digest(*line.custom_id)).second) {
        read.fail("duplicate_custom_id", "an earlier line has the same custom_id");
    }
    read_tenant(object, options_, line, read);
    const LinePrompt prompt = read_prompt(object, read, options_.allow_unknown);
    line.endpoint = prompt.endpoint;
    GenerateRequest& request = line.request;
    request.tokens_max = options_.tokens_max;
    request.sampling = options_.sampling;
    if (options_.logprobs > 0) {
        line.logprobs = options_.logprobs;
    }
    read_sharing(object, options_, line, read);
    if (!options_.allow_unknown) {
        std::set<std::string> known = {"custom_id", "method",  "url",
                                       "body",      "session", "cache_scope"};
        if (options_.tenant_field) {
            known.insert(*options_.tenant_field);
        }
        read.only(object, "", known);
    }
    std::optional<std::uint64_t> seed;
    if (read.good()) {
        read_body(object.at("body"), line, seed, read, options_.allow_unknown);
    }
    if (line.error) {
        return line;
    }
    request.sampling.seed =
        seed ? *seed : derived_seed(options_.sampling.seed, *line.custom_id, line.digest);
    make_request(line, prompt);
    return line;
}

void LineParser::make_request(JobLine& line, const LinePrompt& prompt) {
    Reader read(line.number, line.error);
    GenerateRequest& request = line.request;
    request.tenant = line.tenant;
    request.deadline_ms = options_.deadline_ms ? options_.deadline_ms(line.tenant) : 0;
    if (const Status valid = check_options(request.sampling); !valid) {
        read.fail("invalid_value", valid.error().message);
    }
    if (prompt.endpoint == Endpoint::completions) {
        request.prompt = prompt.text;
        auto ids = tokenizer_->encode(prompt.text, SpecialTokens::parse);
        if (!ids) {
            return read.fail(error_name(ids.error().code), "body.prompt: " + ids.error().message);
        }
        request.prompt_ids = std::move(*ids);
        if (tokenizer_->adds_bos() && tokenizer_->bos() >= 0) {
            request.prompt_ids.insert(request.prompt_ids.begin(), tokenizer_->bos());
        }
        if (request.prompt_ids.empty()) {
            read.fail("invalid_value", "body.prompt has 0 tokens; it must have at least 1");
        }
        return;
    }
    if (chat_ == nullptr) {
        return read.fail("no_chat_template",
                         "the model has no chat template that is known; --template names one");
    }
    std::vector<ChatMessage> messages = prompt.messages;
    if (options_.system && messages.front().role != "system") {
        messages.insert(messages.begin(), {"system", *options_.system});
    }
    auto text = chat_->render(messages, true);
    auto ids = chat_->encode(*tokenizer_, messages, true);
    if (!text || !ids) {
        const Error& error = text ? ids.error() : text.error();
        return read.fail(error_name(error.code), "body.messages: " + error.message);
    }
    request.prompt = std::move(*text);
    request.prompt_ids = std::move(*ids);
}

}  // namespace kvw
