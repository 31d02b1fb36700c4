#include "src/jobs/answer_check.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <unordered_map>

#include "src/base/text.h"
#include "src/engine/content.h"
#include "src/jobs/pairing.h"
#include "traces/trace.h"

namespace kvw {

namespace {

using Json = nlohmann::json;

// What a trace says of one request.
struct Recorded {
    std::uint64_t request = 0;
    events::Submit submit{};
    std::optional<events::Reject> reject;
    std::optional<events::Finish> finish;
    std::optional<events::Emitted> emitted;
    std::string prompt;  // text
    bool claimed = false;
};

struct RecordedTrace {
    std::map<std::uint32_t, std::string> tenants;
    std::map<std::uint32_t, Digest256> keys;
    std::unordered_map<std::uint64_t, Recorded> requests;
    std::unordered_map<std::uint64_t, std::uint64_t> by_event;  // submits and rejects
};

void fold(RecordedTrace& trace, const Event& event, std::uint64_t number) {
    switch (event.kind) {
        case EventKind::tenant:
            trace.tenants[static_cast<std::uint32_t>(event.as<events::Tenant>().tenant)] =
                event.bytes;
            break;
        case EventKind::submit: {
            const auto submit = event.as<events::Submit>();
            trace.requests[submit.request].submit = submit;
            trace.requests[submit.request].request = submit.request;
            trace.by_event[number] = submit.request;
            break;
        }
        case EventKind::reject: {
            const auto reject = event.as<events::Reject>();
            trace.requests[reject.request].reject = reject;
            trace.by_event[number] = reject.request;
            break;
        }
        case EventKind::emitted:
            trace.requests[event.as<events::Emitted>().request].emitted =
                event.as<events::Emitted>();
            break;
        case EventKind::finish:
            trace.requests[event.as<events::Finish>().request].finish = event.as<events::Finish>();
            break;
        default:
            break;
    }
}

void fold(RecordedTrace& trace, const TextRecord& text) {
    if (text.kind == TextKind::key && text.bytes.size() == sizeof(Digest256)) {
        std::memcpy(trace.keys[number(text.tenant)].data(), text.bytes.data(), sizeof(Digest256));
    } else if (text.kind == TextKind::prompt) {
        trace.requests[number(text.request)].prompt += text.bytes;
    }
}

Result<RecordedTrace> read_trace(const Path& path, std::string& run) {
    Result<TraceReader> reader = TraceReader::open(path);
    if (!reader) {
        return reader.error();
    }
    run = to_string(reader->header().run_id);
    RecordedTrace trace;
    TraceChunk chunk;
    std::uint64_t last_event = 0;
    for (;;) {
        const Result<bool> more = reader->next(chunk);
        if (!more) {
            return more.error();
        }
        if (!*more) {
            return trace;
        }
        for (const Event& event : chunk.events) {
            last_event += event.numbered() ? 1 : 0;
            fold(trace, event, last_event);
        }
        for (const TextRecord& text : chunk.texts) {
            fold(trace, text);
        }
    }
}

// The input's lines by number, read again when they are wanted.
class Input {
  public:
    static Result<Input> open(const Path& path) {
        Result<File> file = File::open_read(path);
        if (!file) {
            return file.error();
        }
        Input input;
        LineReader reader(file->descriptor());
        for (;;) {
            input.offsets_.push_back(reader.bytes() - reader.buffered());
            const Result<std::optional<RawLine>> line = reader.next();
            if (!line) {
                return line.error();
            }
            if (!*line) {
                break;
            }
            input.lengths_.push_back((*line)->too_long ? 0 : (*line)->bytes.size());
        }
        input.digest_ = reader.digest();
        input.file_ = std::move(*file);
        return input;
    }

    const Digest256& digest() const { return digest_; }
    std::uint64_t lines() const { return lengths_.size(); }
    Result<RawLine> line(std::uint64_t number) const {
        RawLine raw{.number = number};
        raw.bytes.resize(lengths_.at(number - 1));
        const std::span<std::uint8_t> into(reinterpret_cast<std::uint8_t*>(raw.bytes.data()),
                                           raw.bytes.size());
        if (const Status got = file_.read_at(offsets_.at(number - 1), into); !got) {
            return got.error();
        }
        return raw;
    }

  private:
    File file_;
    std::vector<std::uint64_t> offsets_;
    std::vector<std::size_t> lengths_;
    Digest256 digest_{};
};

bool same(const std::array<std::uint64_t, 2>& digest, std::uint64_t a, std::uint64_t b) {
    return digest[0] == a && digest[1] == b;
}

// A chat's messages in their order within what was submitted: the template around them is the
// model's.
bool holds_messages(std::string_view prompt, const std::vector<ChatMessage>& messages) {
    std::size_t at = 0;
    for (const ChatMessage& message : messages) {
        const std::size_t found = prompt.find(message.content, at);
        if (found == std::string_view::npos) {
            return false;
        }
        at = found + message.content.size();
    }
    return true;
}

// The answer's bytes as its line has them.
std::optional<std::string> text_of(const Json& line) {
    const Json::json_pointer at("/response/body/choices/0");
    if (!line.contains(at) || !line.at(at).is_object()) {
        return std::nullopt;
    }
    const Json& choice = line.at(at);
    const Json::json_pointer chat("/message/content"), completion("/text");
    for (const Json::json_pointer& place : {chat, completion}) {
        if (choice.contains(place) && choice.at(place).is_string()) {
            return choice.at(place).get<std::string>();
        }
    }
    return std::nullopt;
}

std::string unbase64(std::string_view text) {
    static constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string bytes;
    std::uint32_t bits = 0;
    int count = 0;
    for (const char c : text) {
        const std::size_t digit = kDigits.find(c);
        if (digit == std::string_view::npos) {
            break;
        }
        bits = bits << 6 | static_cast<std::uint32_t>(digit);
        count += 6;
        if (count >= 8) {
            count -= 8;
            bytes.push_back(static_cast<char>(bits >> count));
        }
    }
    return bytes;
}

class Checker {
  public:
    Checker(const Input& input) : input_(input) {}

    Status add_trace(const Path& path) {
        std::string run;
        Result<RecordedTrace> trace = read_trace(path, run);
        if (!trace) {
            return trace.error();
        }
        runs_[run] = traces_.size();
        traces_.push_back(std::move(*trace));
        return {};
    }

    Status take(const RawLine& raw) {
        const Result<AnswerFrame> answer = read_answer(raw);
        if (!answer) {
            return answer.error();
        }
        ++result_.lines;
        const std::optional<std::uint64_t> line =
            answer->id && answer->id->input == hex(input_.digest()).substr(0, 16)
                ? std::optional(answer->id->line)
                : std::nullopt;
        if (!line || *line > input_.lines()) {
            return Error{ErrorCode::bad_input,
                         "line " + std::to_string(raw.number) + " answers no line of this input"};
        }
        return check(*answer, *line);
    }

    AnswerCheck finish(const Pairing& pairing) {
        if (!pairing.complete()) {
            result_.incomplete.insert("answers_missing");
        }
        for (const PairFinding& finding : pairing.findings) {
            if (finding.kind != "missing") {
                result_.findings.push_back({.detail = finding.detail});
            }
        }
        return std::move(result_);
    }

  private:
    Status check(const AnswerFrame& answer, std::uint64_t number_of_line) {
        if (!answer.moment) {
            result_.incomplete.insert("answers_without_moment");
            return {};
        }
        const std::size_t colon = answer.moment->find(':');
        const auto run = runs_.find(answer.moment->substr(0, colon));
        if (colon == std::string::npos || run == runs_.end()) {
            result_.incomplete.insert("answers_of_other_traces");
            return {};
        }
        trace_ = run->second;
        RecordedTrace& trace = traces_[trace_];
        event_ = 0;
        std::from_chars(answer.moment->data() + colon + 1,
                        answer.moment->data() + answer.moment->size(), event_);
        const std::string line = "line " + std::to_string(number_of_line);
        reader_ = {};
        const auto at = trace.by_event.find(event_);
        if (at == trace.by_event.end()) {
            find(line + ": its moment is no submit or reject of the record");
            return {};
        }
        Recorded& request = trace.requests.at(at->second);
        const auto tenant = static_cast<std::uint32_t>(request.submit.tenant);
        reader_ = {TenantId{tenant}, RequestId{request.request}};
        if (std::exchange(request.claimed, true)) {
            find(line + ": another line answers with the same request");
        }
        const auto key = trace.keys.find(tenant);
        if (key == trace.keys.end()) {
            result_.incomplete.insert("answers_without_text");
            return {};
        }
        const std::size_t before = result_.findings.size();
        const Result<RawLine> raw = input_.line(number_of_line);
        if (!raw) {
            return raw.error();
        }
        check_prompt(*raw, request, key->second, line);
        check_answer(answer, request, key->second, line);
        const std::string& name = trace.tenants[tenant];
        if (is_private_tenant(name) && name != private_tenant(number_of_line)) {
            find(line + ": the record gives it to " + name);
        }
        result_.tied += result_.findings.size() == before ? 1 : 0;
        return {};
    }

    // What was submitted is what the line says.
    void check_prompt(const RawLine& raw, const Recorded& request, const Digest256& key,
                      const std::string& line) {
        const events::Submit& submit = request.submit;
        const auto submitted = [&](std::string_view text) {
            return same(keyed_digest(key, "prompt", text), submit.input0, submit.input1);
        };
        const bool malformed =
            request.reject &&
            request.reject->reason == static_cast<std::uint64_t>(RejectReason::malformed);
        bool as_asked = false;
        if (malformed) {
            as_asked = submitted(raw.bytes);
        } else if (const Result<LinePrompt> prompt = prompt_of(raw); prompt) {
            as_asked =
                prompt->endpoint == Endpoint::completions
                    ? submitted(prompt->text)
                    : submitted(request.prompt) && holds_messages(request.prompt, prompt->messages);
        }
        if (!as_asked) {
            find(line + ": another prompt was submitted than the line has", true);
        }
        if (result_.planted < 2) {
            result_.planted += 1;
            result_.caught += submitted(raw.bytes + "!") ? 0 : 1;
        }
    }

    void check_answer(const AnswerFrame& answer, const Recorded& request, const Digest256& key,
                      const std::string& line) {
        std::optional<std::string> text = text_of(answer.line);
        if (answer.failed || !text) {
            const bool complete =
                request.finish &&
                request.finish->reason <= static_cast<std::uint64_t>(FinishReason::length);
            if (!answer.failed || text || complete) {
                find(line + ": " + (answer.failed ? "it has an error" : "it has no text") +
                     ", the record has an answer");
            }
            return;
        }
        const Json& about = answer.line.at("kvwitness");
        if (about.contains("text_b64") && about.at("text_b64").is_string()) {
            const std::string bytes = unbase64(about.at("text_b64").get<std::string>());
            if (utf8_lossy(bytes) != *text) {
                find(line + ": text and text_b64 are not the same");
            }
            text = bytes;
        }
        if (!request.emitted || !request.finish) {
            // A recorder that was killed: the end of this request is not in its record.
            result_.incomplete.insert("answers_without_end");
            return;
        }
        const events::Emitted& emitted = *request.emitted;
        const auto taken = [&](std::string_view bytes) {
            return bytes.size() == emitted.bytes_out &&
                   same(keyed_digest(key, "bytes", bytes), emitted.digest0, emitted.digest1);
        };
        if (!taken(*text)) {
            find(line + ": its text is not what the record says was given out");
        }
        if (result_.planted < 4 && !text->empty()) {
            std::string changed = *text;
            changed.back() ^= 1;
            ++result_.planted;
            result_.caught += taken(changed) ? 0 : 1;
        }
        const events::Finish& finish = *request.finish;
        const auto says = [&](const char* place, const Json& value) {
            const Json::json_pointer at(place);
            return answer.line.contains(at) && answer.line.at(at) == value;
        };
        const std::string usage = "/response/body/usage/";
        if (!says((usage + "prompt_tokens").c_str(), finish.prompt_tokens) ||
            !says((usage + "completion_tokens").c_str(), finish.completion_tokens) ||
            !says((usage + "prompt_tokens_details/cached_tokens").c_str(), finish.cached_tokens)) {
            find(line + ": its usage is not what the record counted");
        }
        if (!says("/response/body/choices/0/finish_reason",
                  name_of(static_cast<FinishReason>(finish.reason)))) {
            find(line + ": its finish_reason is not the recorded one");
        }
    }

    void find(std::string detail, bool input = false) {
        result_.findings.push_back({.trace = trace_,
                                    .event = event_,
                                    .reader = reader_,
                                    .input = input,
                                    .detail = std::move(detail)});
    }

    const Input& input_;
    std::vector<RecordedTrace> traces_;
    std::map<std::string, std::size_t> runs_;
    AnswerCheck result_;
    std::size_t trace_ = 0;
    std::uint64_t event_ = 0;
    Owner reader_;
};

}  // namespace

Result<AnswerCheck> check_answers(const std::vector<Path>& traces, const Path& answers,
                                  const Path& input_path) {
    const Result<Pairing> pairing = pair_answers(input_path, answers, {});
    if (!pairing) {
        return pairing.error();
    }
    const Result<Input> input = Input::open(input_path);
    if (!input) {
        return input.error();
    }
    Checker checker(*input);
    for (const Path& trace : traces) {
        if (const Status added = checker.add_trace(trace); !added) {
            return added.error();
        }
    }
    Result<File> file = File::open_read(answers);
    if (!file) {
        return file.error();
    }
    LineReader reader(file->descriptor(), kAnswerBytesMax);
    for (;;) {
        const Result<std::optional<RawLine>> line = reader.next();
        if (!line) {
            return line.error();
        }
        if (!*line) {
            return checker.finish(*pairing);
        }
        if (const Status taken = checker.take(**line); !taken) {
            return Error{taken.error().code,
                         printable(answers.string()) + ": " + taken.error().message};
        }
    }
}

}  // namespace kvw
