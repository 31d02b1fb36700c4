// One line of a job's input, in OpenAI's batch form, as a request to the engine or as the reason
// why it is none.
//
//     {"custom_id","method":"POST","url":"/v1/chat/completions"|"/v1/completions","body":{…},
//      "session"?,"cache_scope"?, and the field that names the tenant, if one does}
//     {"cancel":"<custom_id>"}                                         in a stream
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_set>

#include "src/engine/engine.h"
#include "src/jobs/line_reader.h"
#include "src/text/chat.h"

namespace kvw {

// What lines are read with: defaults for what they leave out, and what they may say.
struct JobOptions {
    std::string tenant;  // of lines that name none; empty = a private namespace for each line
    std::optional<std::string> tenant_field;  // the member of a line that names its tenant
    bool allow_unknown = false;               // fields that are not known are passed over
    std::optional<std::uint32_t> tokens_max;
    SamplingOptions sampling;  // its seed is mixed into the seed of every line that brings none
    std::uint32_t logprobs = 0;
    std::optional<std::string> system;  // before messages that do not begin with a system message
    std::string session;
    std::function<std::int64_t(const std::string& tenant)> deadline_ms;  // may be empty: none
};

enum class Endpoint : std::uint8_t { chat, completions };

// `code` is for programs; `message` names the line, the field and the limit, never content.
struct LineError {
    std::string code, message;
};

struct JobLine {
    std::uint64_t number = 0;
    Digest256 digest{};  // of the line's bytes
    std::optional<std::string> custom_id;
    std::string tenant;  // never empty: where nothing valid was said, the default
    Endpoint endpoint = Endpoint::chat;
    std::optional<std::uint32_t> logprobs;  // alternatives to list with each token
    GenerateRequest request;                // when there is no error
    std::optional<LineError> error;
    std::string bytes;  // of the line, when there is an error (and it is not too long)
    std::optional<std::string> cancels;  // the custom_id that a cancel line names
};

// The tenant of a line that has nobody else's: "line-7". No line may name one like it.
std::string private_tenant(std::uint64_t line);
bool is_private_tenant(std::string_view name);
// The seed of a line that brings none: from the job's, its custom_id and its digest, so that every
// run, shard and resume draws the same.
std::uint64_t derived_seed(std::uint64_t job_seed, const std::string& custom_id,
                           const Digest256& line);

// custom_id of a line that is an object with such a member; what `batch check` pairs by.
std::optional<std::string> custom_id_of(const RawLine& line);

// The prompt of a line as it stands in it, for comparison with what was recorded.
struct LinePrompt {
    Endpoint endpoint = Endpoint::chat;
    std::string text;                   // completions
    std::vector<ChatMessage> messages;  // chat
};

class LineParser {
  public:
    // `chat` may be null: chat lines are errors then. Both must outlive the parser.
    LineParser(JobOptions options, const Tokenizer& tokenizer, const ChatTemplate* chat,
               bool stream);

    // Lines come in the order of the input: the second of two equal custom_ids is an error.
    JobLine parse(const RawLine& line);
    // A line that is somebody else's or done: only its custom_id counts.
    void pass_over(const RawLine& line);

  private:
    JobLine read(const RawLine& line);
    void make_request(JobLine& line, const LinePrompt& prompt);

    JobOptions options_;
    const Tokenizer* tokenizer_;
    const ChatTemplate* chat_;
    bool stream_;
    std::unordered_set<std::string> seen_;  // the first half of each custom_id's SHA-256
};

// Fails: bad_input, when no prompt can be read from the line.
Result<LinePrompt> prompt_of(const RawLine& line, bool allow_unknown = true);

}  // namespace kvw
