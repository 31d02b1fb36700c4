// Whether an output file answers an input file: `batch check` and `batch merge`.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "src/jobs/answer_line.h"
#include "src/jobs/job_output.h"

namespace kvw {

inline constexpr std::size_t kAnswerBytesMax = 256 << 20;  // of one output line

// What an output line says of itself.
struct AnswerFrame {
    std::optional<AnswerId> id;
    std::optional<std::string> custom_id;
    std::string request_digest;         // hex
    std::optional<std::string> moment;  // "run:event"
    bool failed = false;                // it has an error
    nlohmann::json line;
};
// Fails: bad_input, naming the line.
Result<AnswerFrame> read_answer(const RawLine& line);

struct PairFinding {
    std::uint64_t line = 0;  // of the input; 0 = none
    std::string kind;        // missing, duplicate, foreign, wrong_digest, wrong_custom_id
    std::string detail;
};

struct Pairing {
    std::uint64_t lines = 0, paired = 0, answered = 0, failed = 0;
    std::vector<PairFinding> findings;  // the first kFindingsKept
    std::uint64_t findings_total = 0;
    bool complete() const { return findings_total == 0; }
};
inline constexpr std::size_t kFindingsKept = 100;

// Every line of the shard has exactly one answer, which carries its digest and its custom_id, and
// no answer is for anything else. The order does not matter. Fails: io, bad_input (an output line
// that is not one).
Result<Pairing> pair_answers(const Path& input, const Path& answers, const Shard& shard);

struct Merged {
    std::uint64_t lines = 0, failed = 0;
};
// Writes the lines of all shards of one input, in its order, into `out`. Fails: bad_input (another
// input, a line twice or missing, a shard missing or not finished), file_exists, io, disk_full.
Result<Merged> merge_shards(const std::vector<Path>& shards, const Path& out, bool replace);

}  // namespace kvw
