// Traces on disk: NAME.kvw.zst, valid zstd, described byte for byte in FORMAT.md.
//
// While a run records there are NAME.partial (whole chunks) and NAME.tail (the open chunk, one
// write per step); closing writes the footer, syncs and renames without replacing. Whoever finds
// .partial and .tail without a recorder's lock knows where the record ends.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/file.h"
#include "src/base/result.h"
#include "src/base/sha256.h"
#include "traces/event.h"
#include "traces/sink.h"

namespace kvw {

inline constexpr std::uint32_t kTraceMajor = 1;
inline constexpr std::uint32_t kTraceMinor = 1;

enum class TextMode : std::uint8_t { none = 0, plain = 1, encrypted = 2 };

using RunId = std::array<std::uint8_t, 16>;  // random; printed as 32 hex digits
RunId new_run_id();
std::string to_string(const RunId& id);

struct WriterOptions {
    Path path;  // NAME.kvw.zst; must not exist
    RunId run_id{};
    TextMode text = TextMode::plain;
    bool sync_steps = false;  // fsync the tail at each commit (power loss), else page cache
    bool replace = false;     // --force: an existing regular file may be replaced when closing
    bool imported = false;    // made from an edited or foreign record: record level at most
};

struct TraceTotals {
    std::uint64_t events = 0;      // numbered
    Digest256 ledger_digest{};     // digest.ledger
    Digest256 root{};              // RFC 6962 root over the leaves
    std::uint64_t bytes = 0;       // of the file
    std::uint64_t text_bytes = 0;  // of its text sections, as stored
};

// Records one run. One thread. After an error every later commit() returns it again.
class TraceWriter final : public EventSink {
  public:
    // Creates NAME.partial (locked) and NAME.tail, where NAME is the whole of options.path. Fails:
    // file_exists, also for a .partial that another recorder left or holds; usage for
    // TextMode::encrypted, which this writer does not do; io, disk_full.
    static Result<std::unique_ptr<TraceWriter>> create(const WriterOptions& options,
                                                       const Clock& clock);
    ~TraceWriter() override;  // without close(): leaves .partial and .tail as a crash would

    void note(const Event& event) override;
    void text(const TextRecord& record) override;
    Status commit() override;
    std::uint64_t next_event() const;  // the number the next numbered event will get
    // Last chunk, footer, seek table, fsync, rename, fsync folder, unlink tail.
    Result<TraceTotals> close();
    // Removes .partial and .tail of a run that never began to mean anything.
    void discard();
    const Path& path() const;

  private:
    struct State;
    explicit TraceWriter(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

struct TraceHeader {
    std::uint32_t major = 0, minor = 0;
    RunId run_id{};
    std::int64_t created_ns = 0;
    TextMode text = TextMode::none;
    bool imported = false;
};

enum class TraceEnd : std::uint8_t {
    closed,      // footer with a clean-end flag, everything matched
    not_closed,  // .partial (+ .tail) of a recorder that is gone, or a file without a footer
    torn,        // the file ends in the middle of something
    live,        // a recorder holds the lock
};

struct TraceEnding {
    TraceEnd end = TraceEnd::torn;
    std::uint64_t last_event = 0;        // the last whole numbered event
    std::string reason;                  // for people: what is missing, at which byte
    std::optional<TraceTotals> totals;   // closed only: as the footer says, recomputed and equal
    std::uint64_t unknown_critical = 0;  // events of kinds this reader does not know
    std::uint64_t unknown_ignorable = 0;
};

struct TraceChunk {
    std::uint64_t first_event = 0;  // number of the first numbered event
    // Notes stand where they were noted. A numbered event of a kind that this reader does not know
    // is here as kind 0 without fields, so that counting gives every event its number.
    std::vector<Event> events;
    std::vector<TextRecord> texts;
    bool from_tail = false;
};

struct ReaderOptions {
    bool texts = true;  // false: text sections are hashed but not decoded
};

// The file that `path` stands for: NAME.kvw.zst, or the same when only NAME.kvw.zst.partial and
// .tail are there, or a .partial; ".kvw.zst" itself may be left out. Fails: io.
Result<Path> resolve_trace(const Path& path);

// Reads one trace in one pass with bounded memory. Hostile input: every length is bounded before it
// is allocated.
class TraceReader {
  public:
    // Reads resolve_trace(path). Fails: io; bad_trace when it is not a trace or of an unknown major
    // version; torn when it is too short to tell.
    static Result<TraceReader> open(const Path& path, const ReaderOptions& options = {});
    TraceReader(TraceReader&&) noexcept;
    TraceReader& operator=(TraceReader&&) noexcept;
    ~TraceReader();

    const TraceHeader& header() const;
    // The next chunk (views in it live until the next call); false at the end of what can be read
    // (see ending()). Fails: bad_trace on any digest mismatch, with chunk number and byte offset;
    // io.
    Result<bool> next(TraceChunk& chunk);
    // After next() returned false. digest.ledger of what was read is in ledger_digest().
    const TraceEnding& ending() const;
    Digest256 ledger_digest() const;

  private:
    struct State;
    explicit TraceReader(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

// One trace found in a folder, by its header alone.
struct TraceSummary {
    Path path;
    RunId run_id{};
    std::int64_t created_ns = 0;
    std::uint64_t bytes = 0;
    TraceEnd end = TraceEnd::torn;
    bool readable = true;
};
// Newest first. Skips what is not a trace; a missing folder is an empty list.
Result<std::vector<TraceSummary>> list_traces(const Path& folder);

}  // namespace kvw
