// The requests of a job that are in the engine, from their lines to their answers. Internal to
// src/jobs.
#pragma once

#include <unordered_map>

#include "src/jobs/job.h"

namespace kvw {

class Requests {
  public:
    // Where finished lines go: false when the reader is gone.
    using Put =
        std::function<Result<bool>(std::uint64_t line, std::string_view bytes, bool failed)>;
    Requests(const JobContext& context, JobReport& report, Put put);

    // True while the engine can be given one more without its queue running full.
    bool room() const;
    // Submits, or ends the line at once when it is malformed or refused. Fails: what ends the job.
    Status submit(JobLine line);
    // One step of the engine; ends the lines that finished in it.
    Status step();

    // False: no such line is in the engine.
    bool cancel(const std::string& custom_id);
    void cancel_all();

    bool empty() const { return running_.empty(); }
    std::size_t count_of(const std::string& tenant) const;
    std::int64_t step_ns() const { return step_ns_; }  // that the last step took

  private:
    struct Running {
        JobLine line;
        std::uint64_t event = 0;  // its submit
        MadeAnswer made;
    };
    Status end_with_error(const JobLine& line, const LineError& error, std::optional<int> status,
                          std::uint64_t event, bool violation = false);
    Status take(Output& output);
    Status finish(RequestId id, Running running, const Output& output);
    void forget(const JobLine& line);
    Error stop_engine(Error error);

    const JobContext& context_;
    JobReport& report_;
    Put put_;
    std::unordered_map<std::uint64_t, Running> running_;  // by request
    std::unordered_map<std::string, std::uint64_t> by_custom_id_;
    std::unordered_map<std::string, std::size_t> by_tenant_;
    std::int64_t step_ns_ = 0;
};

}  // namespace kvw
