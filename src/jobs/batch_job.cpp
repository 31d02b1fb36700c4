#include "src/jobs/requests.h"

namespace kvw {

namespace {

class BatchJob {
  public:
    BatchJob(const JobContext& context, const JobOptions& options, int input,
             const InputFacts& facts, const Shard& shard, JobOutput& output)
        : context_(context),
          facts_(facts),
          shard_(shard),
          output_(output),
          reader_(input),
          parser_(options, context.tokenizer, context.chat, false),
          requests_(context, report_,
                    [&output](std::uint64_t line, std::string_view bytes, bool failed) {
                        return output.put(line, bytes, failed);
                    }) {
        report_.totals.lines = shard.lines_of(facts.lines);
    }

    JobReport run() {
        if (const Status ended = work(); !ended) {
            report_.error = ended.error();
        }
        report_.reader_gone = output_.reader_gone();
        if (report_.reader_gone && !report_.engine_stopped) {
            requests_.cancel_all();
        }
        return std::move(report_);
    }

  private:
    bool asked_to_stop() const { return context_.stop && context_.stop(); }

    Status work() {
        while (!output_.reader_gone()) {
            if (const Status fed = feed(); !fed) {
                return fed;
            }
            if (asked_to_stop()) {
                report_.stopped = true;
                return {};
            }
            if (requests_.empty() && read_all_) {
                return same_input();
            }
            if (const Status stepped = requests_.step(); !stepped || report_.engine_stopped) {
                return stepped;
            }
            if (const Status written = tick(); !written) {
                return written;
            }
        }
        return {};
    }

    Status tick() { return output_.tick(context_.clock.monotonic_ns(), requests_.step_ns()); }

    // As many lines as the engine has room for.
    Status feed() {
        while (!read_all_ && requests_.room() && !asked_to_stop() && !output_.reader_gone()) {
            const Result<std::optional<RawLine>> line = reader_.next();
            if (!line) {
                return line.error();
            }
            if (!*line) {
                read_all_ = true;
                break;
            }
            const std::uint64_t number = (*line)->number;
            if (number > facts_.lines) {
                return changed();
            }
            if (!shard_.has(number) || output_.has(number)) {
                parser_.pass_over(**line);
                continue;
            }
            if (const Status submitted = requests_.submit(parser_.parse(**line)); !submitted) {
                return submitted;
            }
            if (const Status written = tick(); !written) {
                return written;
            }
        }
        return {};
    }

    Status same_input() const { return reader_.digest() == facts_.digest ? Status{} : changed(); }
    static Error changed() {
        return {ErrorCode::file_changed,
                "the input changed while it was worked on: its digest is not the one that the "
                "answers carry"};
    }

    const JobContext& context_;
    const InputFacts& facts_;
    Shard shard_;
    JobOutput& output_;
    JobReport report_;
    LineReader reader_;
    LineParser parser_;
    Requests requests_;
    bool read_all_ = false;
};

}  // namespace

JobReport run_batch(const JobContext& context, const JobOptions& options, int input,
                    const InputFacts& facts, const Shard& shard, JobOutput& output) {
    return BatchJob(context, options, input, facts, shard, output).run();
}

}  // namespace kvw
