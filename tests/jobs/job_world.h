// A small model, an engine over it and files in a folder of their own.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "src/base/random.h"
#include "src/jobs/job.h"
#include "src/jobs/pairing.h"
#include "src/ledger/ledger.h"
#include "tests/engine/tiny_model.h"
#include "traces/trace.h"

namespace kvw::test {

using Json = nlohmann::json;

class Folder {
  public:
    Folder()
        : path_(std::filesystem::temp_directory_path() /
                ("kvw-jobs-" + std::to_string(entropy64()))) {
        std::filesystem::create_directory(path_);
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    Path operator/(const std::string& name) const { return path_ / name; }

  private:
    Path path_;
};

inline void write(const Path& path, std::string_view text) {
    std::ofstream(path, std::ios::binary) << text;
}

inline std::string contents(const Path& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
}

inline std::vector<Json> lines_of(const std::string& text) {
    std::vector<Json> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        lines.push_back(Json::parse(line));
    }
    return lines;
}

// A completions line. Greedy, because a draw may hit the token whose embedding is infinite.
inline std::string asks(const std::string& custom_id, const std::string& prompt, int tokens = 4,
                        const Json& more = Json::object()) {
    Json line{{"custom_id", custom_id},
              {"method", "POST"},
              {"url", "/v1/completions"},
              {"body", {{"prompt", prompt}, {"max_tokens", tokens}, {"temperature", 0}}}};
    line.merge_patch(more);
    return line.dump() + "\n";
}

// The lines without what differs from run to run.
inline std::string without_moments(const std::string& text) {
    std::string kept;
    for (Json line : lines_of(text)) {
        line.at("kvwitness").erase("moment");
        kept += line.dump() + "\n";
    }
    return kept;
}

// One run of a job: an engine and its trace.
class JobRun {
  public:
    explicit JobRun(const Path& trace = {}, EngineConfig config = {.sequences_max = 4})
        : threads_(1),
          context_{.engine = *start(trace, config),
                   .tokenizer = TinyModel::shared().tokenizer(),
                   .clock = clock_,
                   .source = {.model = "tiny", .run = to_string(run_id_)}} {}

    JobContext& context() { return context_; }
    Engine& engine() { return *engine_; }
    // Closes the run; its record shows no violation.
    void finish() {
        REQUIRE(engine_->finish());
        if (writer_) {
            REQUIRE(writer_->close());
        }
        for (const Violation& violation : ledger_.ledger().violations()) {
            const std::string what = std::string(name_of(violation.kind)) + " at event " +
                                     std::to_string(violation.event) + ": " + violation.detail;
            FAIL_CHECK(what);
        }
    }

    JobReport batch(const Path& input, FileOutput& output, const InputFacts& facts,
                    JobOptions options = {}, Shard shard = {}) {
        context_.source.input = facts.digest;
        Result<File> file = File::open_read(input);
        REQUIRE(file);
        return run_batch(context_, options, file->descriptor(), facts, shard, output);
    }

  private:
    Engine* start(const Path& trace, const EngineConfig& config) {
        std::vector<EventSink*> sinks = {&ledger_};
        if (!trace.empty()) {
            auto writer = TraceWriter::create({.path = trace, .run_id = run_id_}, clock_);
            REQUIRE(writer);
            writer_ = std::move(*writer);
            sinks.push_back(writer_.get());
        }
        tee_ = std::make_unique<TeeSink>(sinks);
        auto engine =
            Engine::create(TinyModel::shared().model(), TinyModel::shared().tokenizer(),
                           best_kernels(), threads_, config, {.name = "tiny"},
                           {.sink = tee_.get(), .tenant_key = fixed_key, .clock = &clock_});
        REQUIRE_MESSAGE(engine, (engine ? "" : engine.error().message));
        engine_ = std::move(*engine);
        return engine_.get();
    }

    SystemClock clock_;
    RunId run_id_ = new_run_id();
    ThreadPool threads_;
    LiveLedger ledger_{false};
    std::unique_ptr<TraceWriter> writer_;
    std::unique_ptr<TeeSink> tee_;
    std::unique_ptr<Engine> engine_;
    JobContext context_;
};

inline FileOutputOptions output_options(const Path& input, const Path& out) {
    const Result<InputFacts> facts = scan_input(input);
    REQUIRE(facts);
    return {.path = out, .input = *facts, .options = "test"};
}

// A whole job: its output, and what it reported.
struct Done {
    std::string out;
    JobReport report;
};
inline Done run_job(const Path& input, FileOutputOptions options, const JobOptions& lines = {},
                    const Path& trace = {}, EngineConfig config = {.sequences_max = 4}) {
    JobRun run(trace, config);
    auto output = FileOutput::create(options);
    REQUIRE_MESSAGE(output, (output ? "" : output.error().message));
    JobReport report = run.batch(input, **output, options.input, lines, options.shard);
    REQUIRE_MESSAGE(!report.error, (report.error ? report.error->message : ""));
    REQUIRE((*output)->close(true));
    run.finish();
    return {contents(options.path), std::move(report)};
}

}  // namespace kvw::test
