#include "src/jobs/job_output.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <nlohmann/json.hpp>

#include "src/base/check.h"
#include "src/base/text.h"
#include "src/jobs/json_text.h"

namespace kvw {

namespace {

constexpr std::int64_t kGroupCommitNs = 200'000'000;
constexpr std::size_t kHeadBytesMax = 128;
constexpr std::size_t kBlockBytes = 64 << 10;

std::string short_hash(std::string_view bytes) { return hex(sha256(bytes)).substr(0, 16); }

std::span<std::uint8_t> writable(std::string& text) {
    return {reinterpret_cast<std::uint8_t*>(text.data()), text.size()};
}

Path journal_of(const Path& out) {
    Path path = out;
    return path += ".journal";
}

bool is_there(const Path& path) {
    std::error_code ignored;
    return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
}

Error exists_error(const Path& path, const std::string& way_out) {
    return {ErrorCode::file_exists, printable(path.string()) + " exists; " + way_out};
}

struct Head {
    std::uint64_t line = 0;
    std::uint32_t bytes = 0;
    bool failed = false;
    std::string hash;
};

// "@12 ok 345 0123456789abcdef"
std::optional<Head> parse_head(std::string_view text) {
    Head head;
    const auto number = [&](auto& value) {
        const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
        text.remove_prefix(static_cast<std::size_t>(end - text.data()));
        return problem == std::errc();
    };
    const auto literal = [&](std::string_view word) {
        const bool there = text.starts_with(word);
        text.remove_prefix(there ? word.size() : 0);
        return there;
    };
    if (!literal("@") || !number(head.line) || !literal(" ")) {
        return std::nullopt;
    }
    head.failed = literal("error ");
    if ((!head.failed && !literal("ok ")) || !number(head.bytes) || !literal(" ") ||
        text.size() != 16) {
        return std::nullopt;
    }
    head.hash = text;
    return head;
}

}  // namespace

Result<std::unique_ptr<FileOutput>> FileOutput::create(const FileOutputOptions& options) {
    std::unique_ptr<FileOutput> output(new FileOutput(options));
    output->done_.resize(options.input.lines + 1);
    output->next_ = options.in_order ? options.shard.index + 1 : 0;
    const bool goes_on =
        options.resume && !output->to_stdout() && is_there(journal_of(options.path));
    const Status ready = goes_on ? output->resume() : output->start();
    if (!ready) {
        return ready.error();
    }
    return output;
}

std::string FileOutput::header() const {
    const nlohmann::ordered_json header{{"schema", "kvwitness/journal"},
                                        {"v", 1},
                                        {"input", hex(options_.input.digest)},
                                        {"lines", options_.input.lines},
                                        {"options", options_.options},
                                        {"shard", std::to_string(options_.shard.index) + "/" +
                                                      std::to_string(options_.shard.count)},
                                        {"order", options_.in_order ? "input" : "completion"}};
    return header.dump() + "\n";
}

Status FileOutput::start() {
    const Path journal_path = journal_of(options_.path);
    if (to_stdout()) {
        // Lines that wait for an earlier one lie in a file without a name.
        std::error_code problem;
        const Path folder = std::filesystem::temp_directory_path(problem);
        std::string name = (folder / "kvwitness-XXXXXX").string();
        const int descriptor = problem ? -1 : ::mkstemp(name.data());
        if (descriptor < 0) {
            return errno_error("cannot create", name, problem ? problem.value() : errno);
        }
        ::close(descriptor);
        Result<File> journal = File::create(name, true);
        ::unlink(name.c_str());
        if (!journal) {
            return journal.error();
        }
        journal_ = std::move(*journal);
        return {};
    }
    if (!options_.replace && is_there(options_.path)) {
        return exists_error(options_.path, "choose another name, --force or --resume");
    }
    if (!options_.replace && is_there(journal_path)) {
        return exists_error(journal_path,
                            "a job was not finished: --resume goes on with it, --force forgets it");
    }
    if (options_.errors && !options_.replace && is_there(*options_.errors)) {
        return exists_error(*options_.errors, "choose another name or --force");
    }
    Result<File> journal = File::open_append(journal_path);
    if (!journal) {
        return journal.error();
    }
    journal_ = std::move(*journal);
    if (!journal_.try_lock()) {
        return exists_error(journal_path, "another process is working on it");
    }
    if (const Status emptied = journal_.truncate(0); !emptied) {
        return emptied;
    }
    const std::string first = header();
    if (const Status written = journal_.write_all(first); !written) {
        return written;
    }
    journal_bytes_ = first.size();
    if (const Status synced = journal_.sync(); !synced) {
        return synced;
    }
    Result<File> out = File::create(options_.path, options_.replace);
    if (!out) {
        return out.error();
    }
    out_ = std::move(*out);
    if (options_.errors) {
        Result<File> errors = File::create(*options_.errors, options_.replace);
        if (!errors) {
            return errors.error();
        }
        errors_ = std::move(*errors);
    }
    return sync_folder(options_.path.parent_path());
}

// ---- going on

Status FileOutput::resume() {
    Result<File> journal = File::open_append(journal_of(options_.path));
    if (!journal) {
        return journal.error();
    }
    journal_ = std::move(*journal);
    if (!journal_.try_lock()) {
        return exists_error(journal_.path(), "another process is working on it");
    }
    if (const Status read = read_journal(); !read) {
        return read;
    }
    if (options_.errors) {
        // A copy: it is made anew from the journal.
        Result<File> errors = File::create(*options_.errors, true);
        if (!errors) {
            return errors.error();
        }
        errors_ = std::move(*errors);
    }
    Result<File> out = File::open_append(options_.path);
    if (!out) {
        return out.error();
    }
    out_ = std::move(*out);
    if (const Status matched = match_out(); !matched) {
        return matched;
    }
    return flush();
}

// The header must be this job's; then whole entries, up to the first that is not.
Status FileOutput::read_journal() {
    const Result<std::uint64_t> size = journal_.size();
    if (!size) {
        return size.error();
    }
    const std::string name = printable(journal_.path().string());
    const std::string mine = header();
    // Read line by line through a window; payloads are read by their length.
    std::string window;
    std::uint64_t at = 0;
    const auto line_at = [&](std::uint64_t offset, std::size_t most) -> Result<std::string> {
        window.resize(std::min<std::uint64_t>(most, *size - offset));
        if (const Status got = journal_.read_at(offset, writable(window)); !got) {
            return got.error();
        }
        const std::size_t feed = window.find('\n');
        return feed == std::string::npos ? std::string() : window.substr(0, feed + 1);
    };
    const Result<std::string> first = line_at(0, 4096);
    if (!first) {
        return first.error();
    }
    if (!first->empty() && *first != mine) {
        const auto found = parse_json(*first).value;
        const auto said = [&](const char* key) {
            return found.is_object() && found.contains(key) ? found.at(key).dump() : "null";
        };
        const auto ours = parse_json(mine).value;
        for (const char* key : {"schema", "v", "input", "lines", "shard", "order", "options"}) {
            if (said(key) != ours.at(key).dump()) {
                return Error{ErrorCode::bad_input,
                             name + " was begun with another " + key + ": " + printable(said(key)) +
                                 ", now " + ours.at(key).dump() +
                                 "; give what it was begun with, or begin anew with --force"};
            }
        }
        return Error{ErrorCode::bad_input, name + " is not a journal of this version"};
    }
    at = first->size();
    std::string payload;
    while (at > 0 && at < *size) {
        const Result<std::string> text = line_at(at, kHeadBytesMax);
        if (!text) {
            return text.error();
        }
        const std::optional<Head> head =
            text->empty() ? std::nullopt
                          : parse_head(std::string_view(*text).substr(0, text->size() - 1));
        const std::uint64_t begin = at + text->size();
        if (!head || head->line >= done_.size() || !options_.shard.has(head->line) ||
            head->bytes > *size - begin || done_[head->line]) {
            break;
        }
        payload.resize(head->bytes);
        if (const Status got = journal_.read_at(begin, writable(payload)); !got) {
            return got;
        }
        if (short_hash(payload) != head->hash) {
            break;
        }
        note(head->line, {begin, head->bytes, head->failed});
        ++resumed_;
        resumed_failed_ += head->failed ? 1 : 0;
        at = begin + head->bytes;
    }
    if (const Status cut = journal_.truncate(at); !cut) {
        return cut;
    }
    journal_bytes_ = at;
    if (at == 0) {
        // The crash came before the header was down: nothing had begun.
        if (const Status written = journal_.write_all(mine); !written) {
            return written;
        }
        journal_bytes_ = mine.size();
    }
    return journal_.sync();
}

// OUT must be what the journal would have written, up to a torn last line, which is dropped.
Status FileOutput::match_out() {
    const Result<std::uint64_t> size = out_.size();
    if (!size) {
        return size.error();
    }
    std::uint64_t at = 0;
    std::string there;
    while (at < *size && ready()) {
        const std::uint64_t key = next_;
        const Entry entry = waiting_.at(key);
        const Result<std::string> line = take_ready();
        if (!line) {
            return line.error();
        }
        there.resize(std::min<std::uint64_t>(line->size(), *size - at));
        if (const Status got = out_.read_at(at, writable(there)); !got) {
            return got;
        }
        if (!line->starts_with(there)) {
            break;
        }
        if (there.size() < line->size()) {
            waiting_.emplace(key, entry);  // torn: it is written again
            next_ = key;
            return out_.truncate(at);
        }
        at += line->size();
        if (entry.failed && errors_) {
            if (const Status copied = errors_.write_all(*line); !copied) {
                return copied;
            }
        }
    }
    if (at < *size) {
        return Error{ErrorCode::bad_input, printable(options_.path.string()) +
                                               " differs from its journal at byte " +
                                               std::to_string(at) + " of " + std::to_string(*size) +
                                               "; it was changed, so it cannot be gone on with"};
    }
    return {};
}

// ---- lines

void FileOutput::note(std::uint64_t line, Entry entry) {
    done_.at(line) = true;
    waiting_.emplace(options_.in_order ? line : arrivals_++, entry);
}

bool FileOutput::ready() const { return !waiting_.empty() && waiting_.begin()->first == next_; }

Result<std::string> FileOutput::take_ready() {
    const Entry entry = waiting_.begin()->second;
    std::string line(entry.bytes, '\0');
    if (const Status got = journal_.read_at(entry.offset, writable(line)); !got) {
        return got.error();
    }
    waiting_.erase(waiting_.begin());
    next_ += options_.in_order ? options_.shard.count : 1;
    return line;
}

Result<bool> FileOutput::put(std::uint64_t line, std::string_view bytes, bool failed) {
    check(line < done_.size() && !done_[line], "a line is finished once");
    if (reader_gone_) {
        return false;
    }
    std::string entry = "@" + std::to_string(line) + (failed ? " error " : " ok ") +
                        std::to_string(bytes.size()) + " " + short_hash(bytes) + "\n";
    const std::uint64_t begin = journal_bytes_ + entry.size();
    entry += bytes;
    if (const Status written = journal_.write_all(entry); !written) {
        return written.error();
    }
    journal_bytes_ += entry.size();
    note(line, {begin, static_cast<std::uint32_t>(bytes.size()), failed});
    unsynced_ = true;
    return true;
}

Status FileOutput::tick(std::int64_t now_ns, std::int64_t step_ns) {
    if (!unsynced_) {
        return {};
    }
    if (!unsynced_since_ns_) {
        unsynced_since_ns_ = now_ns;
    }
    if (!to_stdout() && now_ns + step_ns < *unsynced_since_ns_ + kGroupCommitNs) {
        return {};
    }
    if (const Status synced = sync(); !synced) {
        return synced;
    }
    return flush();
}

Status FileOutput::sync() {
    unsynced_ = false;
    unsynced_since_ns_.reset();
    return to_stdout() ? Status{} : journal_.sync();
}

Status FileOutput::flush() {
    std::string block, failed_lines;
    while (!reader_gone_ && (ready() || !block.empty())) {
        bool last = true;
        if (ready()) {
            const bool failed = waiting_.begin()->second.failed;
            const Result<std::string> line = take_ready();
            if (!line) {
                return line.error();
            }
            block += *line;
            failed_lines += failed && errors_ ? *line : "";
            last = !ready();
        }
        if (block.size() >= kBlockBytes || last) {
            if (const Status written = write_out(block); !written) {
                return written;
            }
            if (errors_) {
                if (const Status copied = errors_.write_all(failed_lines); !copied) {
                    return copied;
                }
            }
            block.clear();
            failed_lines.clear();
        }
    }
    return {};
}

Status FileOutput::write_out(std::string_view bytes) {
    if (!to_stdout()) {
        return out_.write_all(bytes);
    }
    while (!bytes.empty()) {
        const ssize_t put = ::write(options_.stdout_descriptor, bytes.data(), bytes.size());
        if (put < 0 && errno == EPIPE) {
            reader_gone_ = true;
            return {};
        }
        if (put < 0 && errno != EINTR) {
            return errno_error("cannot write to", "stdout", errno);
        }
        bytes.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(put, 0)));
    }
    return {};
}

Status FileOutput::close(bool complete) {
    if (const Status synced = sync(); !synced) {
        return synced;
    }
    if (const Status flushed = flush(); !flushed) {
        return flushed;
    }
    if (to_stdout()) {
        return {};
    }
    for (File* file : {&out_, &errors_}) {
        if (*file) {
            if (const Status synced = file->sync(); !synced) {
                return synced;
            }
        }
    }
    if (!complete) {
        return {};
    }
    check(waiting_.empty(), "a complete job has no line left to write");
    ::unlink(journal_.path().c_str());
    journal_.close();
    return sync_folder(options_.path.parent_path());
}

}  // namespace kvw
