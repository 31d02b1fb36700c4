// Where a job's finished lines go, and how none is lost on the way.
//
// A line that was given out is durable: it goes into OUT.journal first, which is synced in groups,
// and from there into OUT, in the order of the input (or as lines finish). At the end OUT is whole
// and synced, and the journal is gone. What is in the journal after a crash is finished: a resumed
// job keeps it byte for byte. The journal is
//
//     {"schema":"kvwitness/journal","v":1,"input","lines","options","shard","order"}
//     @<line> <ok|error> <bytes> <16 hex digits of the bytes' SHA-256>
//     <the output line>
//     …
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "src/base/file.h"
#include "src/jobs/line_reader.h"

namespace kvw {

// Which lines are this job's: those with (line - 1) % count == index.
struct Shard {
    std::uint64_t index = 0, count = 1;
    bool has(std::uint64_t line) const { return (line - 1) % count == index; }
    std::uint64_t lines_of(std::uint64_t all) const {
        return all / count + (all % count > index ? 1 : 0);
    }
};

class JobOutput {
  public:
    virtual ~JobOutput() = default;
    // True when the line was finished by an earlier run of the job.
    virtual bool has(std::uint64_t) const { return false; }
    // Takes a finished line, line feed included. False: the reader is gone and nothing more is
    // taken. Fails: io, disk_full.
    virtual Result<bool> put(std::uint64_t line, std::string_view bytes, bool failed) = 0;
    // To be called between steps: `step_ns` is about how long the next one takes.
    virtual Status tick(std::int64_t now_ns, std::int64_t step_ns) = 0;
    virtual bool reader_gone() const = 0;
};

struct FileOutputOptions {
    Path path;                   // "-": `stdout_descriptor`, and no journal that stays
    std::optional<Path> errors;  // a copy of the lines with an error
    bool resume = false, replace = false, in_order = true;
    int stdout_descriptor = 1;
    InputFacts input;
    Shard shard;
    std::string options;  // digest of everything else that answers depend on
};

class FileOutput final : public JobOutput {
  public:
    // Fails: file_exists (without resume or replace; and when another job holds the journal),
    // bad_input (resume: another input or other options, or an OUT that is not this journal's), io,
    // disk_full.
    static Result<std::unique_ptr<FileOutput>> create(const FileOutputOptions& options);

    bool has(std::uint64_t line) const override { return line < done_.size() && done_[line]; }
    Result<bool> put(std::uint64_t line, std::string_view bytes, bool failed) override;
    Status tick(std::int64_t now_ns, std::int64_t step_ns) override;
    bool reader_gone() const override { return reader_gone_; }

    // The end: everything finished is synced and in OUT. With `complete` OUT is synced, too, and
    // the journal removed; else it stays for a resume.
    Status close(bool complete);

    std::uint64_t resumed() const { return resumed_; }
    std::uint64_t resumed_failed() const { return resumed_failed_; }

  private:
    struct Entry {
        std::uint64_t offset = 0;  // in the journal
        std::uint32_t bytes = 0;
        bool failed = false;
    };
    explicit FileOutput(const FileOutputOptions& options) : options_(options) {}
    bool to_stdout() const { return options_.path == "-"; }
    std::string header() const;
    Status start();
    Status resume();
    Status read_journal();
    Status match_out();
    void note(std::uint64_t line, Entry entry);
    bool ready() const;
    Result<std::string> take_ready();
    Status sync();
    Status flush();
    Status write_out(std::string_view bytes);

    FileOutputOptions options_;
    File journal_, out_, errors_;
    std::uint64_t journal_bytes_ = 0;
    std::vector<bool> done_;                  // by line
    std::map<std::uint64_t, Entry> waiting_;  // in order: by line; else by arrival
    std::uint64_t next_ = 0;                  // key of the next entry to go to OUT
    std::uint64_t arrivals_ = 0;
    std::uint64_t resumed_ = 0, resumed_failed_ = 0;
    std::optional<std::int64_t> unsynced_since_ns_;
    bool unsynced_ = false, reader_gone_ = false;
};

}  // namespace kvw
