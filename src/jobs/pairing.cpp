#include "src/jobs/pairing.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "src/base/text.h"
#include "src/jobs/json_text.h"

namespace kvw {

namespace {

using Json = nlohmann::json;

std::optional<std::string> text_of(const Json& object, const char* name) {
    const auto found = object.is_object() ? object.find(name) : object.end();
    return object.is_object() && found != object.end() && found->is_string()
               ? std::optional(found->get<std::string>())
               : std::nullopt;
}

// What is kept of an input line.
struct Asked {
    Digest256 digest{};
    Digest256 custom_id{};  // its SHA-256
    bool has_id = false, answered = false;
};

class Pairer {
  public:
    explicit Pairer(const Shard& shard) : shard_(shard) {}

    Status read_input(const Path& path) {
        Result<File> file = File::open_read(path);
        if (!file) {
            return file.error();
        }
        LineReader reader(file->descriptor());
        for (;;) {
            const Result<std::optional<RawLine>> line = reader.next();
            if (!line) {
                return line.error();
            }
            if (!*line) {
                break;
            }
            Asked asked{.digest = (*line)->digest};
            if (const auto id = custom_id_of(**line)) {
                asked.custom_id = sha256(*id);
                asked.has_id = true;
            }
            asked_.push_back(asked);
        }
        input_ = reader.digest();
        result_.lines = shard_.lines_of(asked_.size());
        return {};
    }

    Status take(const RawLine& raw) {
        const Result<AnswerFrame> answer = read_answer(raw);
        if (!answer) {
            return answer.error();
        }
        const std::string where = "output line " + std::to_string(raw.number);
        if (!answer->id || answer->id->input != hex(input_).substr(0, answer->id->input.size())) {
            find(0, "foreign", where + " answers another input");
            return {};
        }
        const std::uint64_t line = answer->id->line;
        if (line > asked_.size() || !shard_.has(line)) {
            find(line, "foreign",
                 where + " answers line " + std::to_string(line) + ", which is not one of these");
            return {};
        }
        Asked& asked = asked_[line - 1];
        const std::size_t before = result_.findings_total;
        if (asked.answered) {
            find(line, "duplicate", where + " answers it once more");
        }
        asked.answered = true;
        if (answer->request_digest != hex(asked.digest)) {
            find(line, "wrong_digest", where + " carries another request_digest");
        }
        const bool same_id = answer->custom_id
                                 ? asked.has_id && sha256(*answer->custom_id) == asked.custom_id
                                 : !asked.has_id;
        if (!same_id) {
            find(line, "wrong_custom_id", where + " carries another custom_id");
        }
        if (result_.findings_total == before) {
            ++result_.paired;
            ++(answer->failed ? result_.failed : result_.answered);
        }
        return {};
    }

    Pairing finish() {
        for (std::size_t i = 0; i < asked_.size(); ++i) {
            if (shard_.has(i + 1) && !asked_[i].answered) {
                find(i + 1, "missing", "line " + std::to_string(i + 1) + " has no answer");
            }
        }
        return std::move(result_);
    }

  private:
    void find(std::uint64_t line, std::string kind, std::string detail) {
        if (++result_.findings_total <= kFindingsKept) {
            result_.findings.push_back({line, std::move(kind), std::move(detail)});
        }
    }

    Shard shard_;
    Digest256 input_{};
    std::vector<Asked> asked_;
    Pairing result_;
};

// Where a line of a shard lies.
struct Piece {
    std::uint64_t line = 0;
    std::uint64_t offset = 0;
    std::uint32_t shard = 0, bytes = 0;  // without the line feed
};

Error in_shard(const Path& path, const std::string& what) {
    return {ErrorCode::bad_input, printable(path.string()) + ": " + what};
}

class Merger {
  public:
    explicit Merger(const std::vector<Path>& shards) : paths_(shards) {}

    Status read() {
        for (std::uint32_t shard = 0; shard < paths_.size(); ++shard) {
            if (const Status read = read_shard(shard); !read) {
                return read;
            }
        }
        std::sort(pieces_.begin(), pieces_.end(),
                  [](const Piece& a, const Piece& b) { return a.line < b.line; });
        for (std::size_t i = 0; i < pieces_.size(); ++i) {
            const std::uint64_t line = pieces_[i].line;
            if (line == i) {
                return in_shard(paths_[pieces_[i].shard],
                                "line " + std::to_string(line) + " is there twice");
            }
            if (line != i + 1) {
                return Error{ErrorCode::bad_input, "no shard has line " + std::to_string(i + 1) +
                                                       ": of " + std::to_string(paths_.size()) +
                                                       " shards one is missing or not finished"};
            }
        }
        return {};
    }

    Result<Merged> write(const Path& out, bool replace) {
        Path temporary = out;
        temporary += ".partial";
        Result<File> file = File::create(temporary, true);
        if (!file) {
            return file.error();
        }
        Status written = write_into(*file);
        if (written) {
            written = file->sync();
        }
        if (written) {
            written = replace ? rename_replace(temporary, out) : rename_new(temporary, out);
        }
        if (!written) {
            ::unlink(temporary.c_str());
            return written.error();
        }
        return Merged{.lines = pieces_.size(), .failed = failed_};
    }

  private:
    Status read_shard(std::uint32_t shard) {
        const Path& path = paths_[shard];
        Path journal = path;
        journal += ".journal";
        std::error_code ignored;
        if (std::filesystem::exists(journal, ignored)) {
            return in_shard(path,
                            "its journal is still there: the shard is not finished, "
                            "--resume goes on with it");
        }
        Result<File> file = File::open_read(path);
        if (!file) {
            return file.error();
        }
        LineReader reader(file->descriptor(), kAnswerBytesMax);
        std::optional<std::uint64_t> residue;
        for (std::uint64_t offset = 0;;) {
            const Result<std::optional<RawLine>> line = reader.next();
            if (!line) {
                return line.error();
            }
            if (!*line) {
                break;
            }
            const Result<AnswerFrame> answer = read_answer(**line);
            if (!answer || !answer->id) {
                return in_shard(path, answer ? "line " + std::to_string((*line)->number) +
                                                   " has no id of a batch"
                                             : answer.error().message);
            }
            input_ = input_.empty() ? answer->id->input : input_;
            const std::uint64_t rest = (answer->id->line - 1) % paths_.size();
            if (answer->id->input != input_) {
                return in_shard(path, "it answers another input than the first shard");
            }
            if (residue.value_or(rest) != rest) {
                return in_shard(path, "line " + std::to_string(answer->id->line) +
                                          " does not belong to one of " +
                                          std::to_string(paths_.size()) +
                                          " shards with the lines before it");
            }
            residue = rest;
            failed_ += answer->failed ? 1 : 0;
            pieces_.push_back({answer->id->line, offset, shard,
                               static_cast<std::uint32_t>((*line)->bytes.size())});
            offset = reader.bytes() - reader.buffered();
        }
        files_.push_back(std::move(*file));
        return {};
    }

    Status write_into(File& out) {
        constexpr std::size_t kBlockBytes = 1 << 20;
        std::string block;
        for (const Piece& piece : pieces_) {
            const std::size_t before = block.size();
            block.resize(before + piece.bytes + 1);
            const std::span<std::uint8_t> place(
                reinterpret_cast<std::uint8_t*>(block.data()) + before, piece.bytes);
            if (const Status got = files_[piece.shard].read_at(piece.offset, place); !got) {
                return got;
            }
            block.back() = '\n';
            if (block.size() >= kBlockBytes) {
                if (const Status written = out.write_all(block); !written) {
                    return written;
                }
                block.clear();
            }
        }
        return out.write_all(block);
    }

    const std::vector<Path>& paths_;
    std::vector<File> files_;
    std::string input_;  // the digits that all ids must have
    std::vector<Piece> pieces_;
    std::uint64_t failed_ = 0;
};

}  // namespace

Result<AnswerFrame> read_answer(const RawLine& line) {
    const auto bad = [&](const std::string& what) {
        return Error{ErrorCode::bad_input, "line " + std::to_string(line.number) + ": " + what};
    };
    if (line.too_long) {
        return bad("it has " + std::to_string(line.length) + " bytes, more than any answer");
    }
    JsonText parsed = parse_json(line.bytes);
    if (!parsed.problem.empty()) {
        return bad(parsed.problem);
    }
    AnswerFrame answer;
    const Json& object = parsed.value;
    const std::optional<std::string> id = text_of(object, "id");
    if (!id || !object.contains("kvwitness") || !object.contains("error")) {
        return bad("it is not an output line of a batch: id, error or kvwitness is missing");
    }
    answer.id = parse_answer_id(*id);
    answer.custom_id = text_of(object, "custom_id");
    answer.request_digest = text_of(object["kvwitness"], "request_digest").value_or("");
    answer.moment = text_of(object["kvwitness"], "moment");
    answer.failed = !object["error"].is_null();
    answer.line = std::move(parsed.value);
    return answer;
}

Result<Pairing> pair_answers(const Path& input, const Path& answers, const Shard& shard) {
    Pairer pairer(shard);
    if (const Status read = pairer.read_input(input); !read) {
        return read.error();
    }
    Result<File> file = File::open_read(answers);
    if (!file) {
        return file.error();
    }
    LineReader reader(file->descriptor(), kAnswerBytesMax);
    for (;;) {
        const Result<std::optional<RawLine>> line = reader.next();
        if (!line) {
            return line.error();
        }
        if (!*line) {
            return pairer.finish();
        }
        if (const Status taken = pairer.take(**line); !taken) {
            return Error{taken.error().code,
                         printable(answers.string()) + ": " + taken.error().message};
        }
    }
}

Result<Merged> merge_shards(const std::vector<Path>& shards, const Path& out, bool replace) {
    std::error_code ignored;
    if (!replace && std::filesystem::exists(std::filesystem::symlink_status(out, ignored))) {
        return Error{ErrorCode::file_exists,
                     printable(out.string()) + " exists; choose another name or --force"};
    }
    Merger merger(shards);
    if (const Status read = merger.read(); !read) {
        return read.error();
    }
    return merger.write(out, replace);
}

}  // namespace kvw
