// What ties an output file to the traces of the job that made it: every answer's moment is the
// submit of the input line it answers, and its text is what that request's sink took. No model is
// needed, but the traces' text sections are (their keys).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "src/base/file.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace kvw {

struct AnswerFinding {
    std::size_t trace = 0;    // which of the traces
    std::uint64_t event = 0;  // the moment within it
    Owner reader;             // whose answer it should be
    bool input = false;       // what was asked is not what the line asks; else what was answered
    std::string detail;       // line numbers and names of fields, never content
};

struct AnswerCheck {
    std::uint64_t lines = 0, tied = 0;
    std::vector<AnswerFinding> findings;
    // Why it is not complete: answers_missing, answers_without_moment, answers_of_other_traces,
    // answers_without_text, answers_without_end.
    std::set<std::string> incomplete;
    std::uint64_t planted = 0, caught = 0;  // controls: a changed answer, a changed prompt
};

// Fails: io, bad_input, bad_trace.
Result<AnswerCheck> check_answers(const std::vector<Path>& traces, const Path& answers,
                                  const Path& input);

}  // namespace kvw
