// Jobs over the engine: a file of lines answered in order, or a stream of lines answered as they
// finish. Every line of the input ends exactly once, and leaves a submit in the record.
//
// Both keep as many requests in the engine as it can run, and a few that wait: its queue never
// overflows because of a job. One thread, between whose steps input is read and output written.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "src/jobs/answer_line.h"
#include "src/jobs/job_output.h"

namespace kvw {

struct JobProgress {
    std::uint64_t lines = 0;  // to do in all; 0 = not known
    std::uint64_t finished = 0, failed = 0, running = 0;
    std::uint64_t prompt_tokens = 0, completion_tokens = 0;  // of finished requests
};

struct JobContext {
    Engine& engine;
    const Tokenizer& tokenizer;
    const ChatTemplate* chat = nullptr;  // null: chat lines are errors
    const Clock& clock;
    AnswerSource source;
    std::function<bool()> stop;                        // a signal asked to; may be empty
    std::function<Status()> after_step;                // an error ends the job; may be empty
    std::function<void(const JobProgress&)> progress;  // after each step; may be empty
};

struct JobReport {
    JobProgress totals;                           // of this run of the job
    std::map<std::string, std::uint64_t> errors;  // lines that failed, by code
    bool stopped = false;                         // by context.stop, before the end
    bool reader_gone = false;                     // nobody reads the answers any more
    bool violated = false;        // a request ended with a violation and the engine went on
    bool engine_stopped = false;  // only the engine's destruction may follow
    std::optional<Error> error;   // what ended the job
};

// Lines of `input` (positioned at its start) that are the shard's and not yet in `output`. Stopped:
// what was finished is in `output`, and lines that were running are left for a resume. Ends with
// file_changed when the input is not what `facts` says.
JobReport run_batch(const JobContext& context, const JobOptions& options, int input,
                    const InputFacts& facts, const Shard& shard, JobOutput& output);

// Lines as they arrive; {"cancel":"<custom_id>"} ends one; answers in the order in which they
// finish, each written whole before the next step. Stopped, or with its reader gone, it cancels
// what runs.
JobReport run_stream(const JobContext& context, const JobOptions& options, int input, int output);

}  // namespace kvw
