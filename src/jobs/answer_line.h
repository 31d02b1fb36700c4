// One line of a job's output, in OpenAI's batch form:
//
//     {"id","custom_id","response":{"status_code","request_id","body"}|null,
//      "error":{"code","message"}|null,
//      "kvwitness":{"request_digest","moment","online":"clean|violation"}}
//
// But for `moment` (and `cached_tokens`, which says what this run had in its cache) it depends on
// the input, the options and the model alone.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/jobs/job_line.h"

namespace kvw {

// Who answers, and where that is recorded.
struct AnswerSource {
    std::string model;               // name
    std::string run;                 // hex run id; empty: not recorded
    std::optional<Digest256> input;  // digest of the whole input; none in a stream
};

// "batch_req_<16 hex digits>_<line>" from the input's digest, in a stream from the line's.
std::string answer_id(const std::optional<Digest256>& input, const Digest256& line,
                      std::uint64_t number);
// The line number in an answer's id; none when it is not one of this input's.
std::optional<std::uint64_t> line_of_answer_id(std::string_view id, const Digest256& input);
// The same without knowing the input, which comes out as its 16 digits.
struct AnswerId {
    std::string input;
    std::uint64_t line = 0;
};
std::optional<AnswerId> parse_answer_id(std::string_view id);

// What an engine's error is to an HTTP client: 400 context and pool, 429 quota and queue, 408
// deadline, 499 cancelled, 500 everything else.
int http_status(ErrorCode code);

// What came of one request.
struct MadeAnswer {
    std::string text;  // bytes
    std::vector<TokenId> ids;
    std::vector<std::vector<Logprob>> logprobs;  // of each id, when the line asks for them
    RequestFacts facts;
    FinishReason finish = FinishReason::stop;  // stop or length
};

// Both end in a line feed. `event`: number of an event of the request, 0 = none.
std::string answer_line(const AnswerSource& source, const JobLine& line, const MadeAnswer& made,
                        const Tokenizer& tokenizer, std::uint64_t event);
// status: none for a line that never became a request.
std::string error_line(const AnswerSource& source, const JobLine& line, const LineError& error,
                       std::optional<int> status, std::uint64_t event, bool violation = false);

}  // namespace kvw
