#include "cli/recording.h"

#include <fmt/format.h>

#include "cli/version.h"
#include "src/base/random.h"
#include "traces/schema.h"

namespace kvw::cli {

void DigestSink::note(const Event& event) {
    append_row_form(event, rows_);
    if (rows_.size() >= (1 << 16)) {
        hash_.update(rows_);
        rows_.clear();
    }
}

Digest256 DigestSink::digest() {
    hash_.update(rows_);
    rows_.clear();
    return hash_.digest();
}

// A writer whose first error is a warning and its end.
class Recording::Forgiving final : public EventSink {
  public:
    Forgiving(TraceWriter& writer, const Session& session) : writer_(writer), session_(session) {}
    void note(const Event& event) override {
        if (!failed_) {
            writer_.note(event);
        }
    }
    void text(const TextRecord& record) override {
        if (!failed_) {
            writer_.text(record);
        }
    }
    Status commit() override {
        const Status written = failed_ ? Status{} : writer_.commit();
        if (!written) {
            failed_ = true;
            session_.say("not recorded from here on: " + written.error().message);
        }
        return {};
    }
    bool failed() const { return failed_; }

  private:
    TraceWriter& writer_;
    const Session& session_;
    bool failed_ = false;
};

Recording::Recording(const RecordingOptions& options)
    : options_(options), ledger_(options.stop_on_violation) {}

Result<std::unique_ptr<Recording>> Recording::create(const RecordingOptions& options,
                                                     const Session& session) {
    std::unique_ptr<Recording> recording(new Recording(options));
    std::vector<EventSink*> sinks;
    if (options.path) {
        Result<std::unique_ptr<TraceWriter>> writer =
            TraceWriter::create({.path = *options.path,
                                 .run_id = options.run_id,
                                 .text = TextMode::plain,
                                 .sync_steps = options.sync,
                                 .replace = options.replace},
                                session.clock);
        if (writer) {
            recording->writer_ = std::move(*writer);
        } else if (options.stop_on_trace_error || writer.error().code == ErrorCode::file_exists) {
            return writer.error();
        } else {
            session.say("not recorded: " + writer.error().message);
        }
    }
    if (recording->writer_ && options.stop_on_trace_error) {
        sinks.push_back(recording->writer_.get());
    } else {
        if (recording->writer_) {
            recording->forgiving_ = std::make_unique<Forgiving>(*recording->writer_, session);
            sinks.push_back(recording->forgiving_.get());
        }
        recording->digest_ = std::make_unique<DigestSink>();
        sinks.push_back(recording->digest_.get());
    }
    sinks.push_back(&recording->ledger_);  // last: a violation is on disk before it stops anything
    recording->tee_ = std::make_unique<TeeSink>(std::move(sinks));
    return recording;
}

Recording::~Recording() = default;

EventSink& Recording::sink() { return *tee_; }

std::optional<Path> Recording::trace() const {
    return writer_ && !(forgiving_ && forgiving_->failed()) ? options_.path : std::nullopt;
}

Result<TraceTotals> Recording::close() {
    if (trace()) {
        Result<TraceTotals> totals = writer_->close();
        if (totals || options_.stop_on_trace_error) {
            return totals;
        }
    }
    return TraceTotals{.ledger_digest = digest_->digest()};
}

void Recording::discard() {
    if (writer_) {
        writer_->discard();
        writer_.reset();
    }
}

Digest256 fresh_key() {
    Digest256 key;
    for (std::size_t i = 0; i < key.size(); i += 8) {
        const std::uint64_t word = entropy64();
        for (std::size_t k = 0; k < 8; ++k) {
            key[i + k] = static_cast<std::uint8_t>(word >> (8 * k));
        }
    }
    return key;
}

Event host_note(std::string& json, const char* device, const char* isa, unsigned threads) {
    json = Json{{"isa", isa}, {"threads", threads}, {"device", device}, {"build", kVersion}}.dump();
    return Event::of(events::NoteHost{1}, json);
}

}  // namespace kvw::cli
