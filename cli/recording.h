// What the events of one run go through: the writer of its trace, the live ledger beside it, and a
// digest of the record that exists without a trace too.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cli/session.h"
#include "src/ledger/ledger.h"
#include "traces/sink.h"
#include "traces/trace.h"

namespace kvw::cli {

// digest.ledger of what was noted: SHA-256 over the row form of the numbered events.
class DigestSink final : public EventSink {
  public:
    void note(const Event& event) override;
    void text(const TextRecord&) override {}
    Status commit() override { return {}; }
    Digest256 digest();

  private:
    Sha256 hash_;
    std::string rows_;
};

struct RecordingOptions {
    std::optional<Path> path;  // none: no trace
    RunId run_id{};
    bool sync = false;
    bool replace = false;
    bool stop_on_violation = true;
    bool stop_on_trace_error = true;  // else a warning, and the run goes on unrecorded
};

class Recording {
  public:
    // Fails as TraceWriter::create; with stop_on_trace_error off it goes on without a trace.
    static Result<std::unique_ptr<Recording>> create(const RecordingOptions& options,
                                                     const Session& session);
    ~Recording();

    EventSink& sink();
    const RunId& run_id() const { return options_.run_id; }
    std::string run_hex() const { return to_string(options_.run_id); }
    // Where the trace is, or will be once closed; none when there is none.
    std::optional<Path> trace() const;
    bool violated() const { return !ledger_.ledger().violations().empty(); }

    // The end of the run: closes the trace. Without one, only the ledger digest is filled in.
    Result<TraceTotals> close();
    // Nothing of the run is kept: it never began.
    void discard();

  private:
    class Forgiving;
    explicit Recording(const RecordingOptions& options);

    RecordingOptions options_;
    std::unique_ptr<TraceWriter> writer_;
    std::unique_ptr<Forgiving> forgiving_;
    std::unique_ptr<DigestSink> digest_;
    LiveLedger ledger_;
    std::unique_ptr<TeeSink> tee_;
};

// A fresh random key for a tenant's keyed digests.
Digest256 fresh_key();
// The facts of this execution, as a note: instruction set, threads, device, build.
Event host_note(std::string& json, const char* device, const char* isa, unsigned threads);

}  // namespace kvw::cli
