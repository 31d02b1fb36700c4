// batch: many prompts from a file or a stream, answered and recorded; and what is done with the
// files before and after.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>

#include "cli/commands.h"
#include "cli/places.h"
#include "cli/serving.h"
#include "cli/signals.h"
#include "src/base/text.h"
#include "src/jobs/job.h"
#include "src/jobs/pairing.h"

namespace kvw::cli {

namespace {

struct BatchFlags : GenerationFlags, EngineFlags, TraceFlags {
    std::string input, output;
    std::optional<std::string> tenant_field, errors;
    Shard shard;
    std::uint32_t logprobs = 0;
    bool stream = false, resume = false, unordered = false, allow_unknown = false;
};

Error usage(std::string message) { return {ErrorCode::usage, std::move(message)}; }

bool is_there(const Path& path) {
    std::error_code ignored;
    return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
}

Path with_suffix(const std::string& name, const char* suffix) { return Path(name + suffix); }

Result<Shard> shard_of(std::string_view text) {
    const std::size_t slash = std::min(text.find('/'), text.size());
    const auto index = whole_number(text.substr(0, slash), 0, 1'000'000'000);
    const auto count =
        whole_number(text.substr(std::min(slash + 1, text.size())), 1, 1'000'000'000);
    if (!index || !count || *index >= *count) {
        return usage(fmt::format("'{}' is not a shard: i/n with i from 0 to n - 1", text));
    }
    return Shard{*index, *count};
}

void add_shard_flag(Flags& flags, Shard& shard) {
    flags.value("--shard", "i/n", "", "Only every n-th line, the i-th of them first; i from 0",
                [&shard](std::string_view text) -> Status {
                    const Result<Shard> read = shard_of(text);
                    if (!read) {
                        return read.error();
                    }
                    shard = *read;
                    return {};
                });
}

// ---- before any work

Status check_flags(const BatchFlags& flags, const Session& session) {
    if (flags.output.empty()) {
        return usage("-o FILE says where the answers go; - is stdout");
    }
    if (const Status serving = check_serving_flags(flags, flags, flags); !serving) {
        return serving;
    }
    if (session.common.json && flags.output == "-") {
        return usage("--json prints one object on stdout, where -o - puts the answers");
    }
    if (flags.stream && (flags.output != "-" || flags.resume || flags.unordered ||
                         flags.shard.count > 1 || flags.errors)) {
        return usage(
            "--stream answers on stdout as lines finish: -o -, without --resume, --unordered, "
            "--shard and --errors");
    }
    if (is_private_tenant(flags.tenant)) {
        return usage(
            fmt::format("--tenant {}: that name is kept for lines without a tenant", flags.tenant));
    }
    if (flags.output == "-" && flags.resume) {
        return usage("--resume needs a file to go on with: -o FILE");
    }
    if (flags.tenant_field) {
        static constexpr std::array<std::string_view, 6> kTaken = {
            "custom_id", "method", "url", "body", "session", "cache_scope"};
        if (flags.tenant_field->empty() ||
            std::find(kTaken.begin(), kTaken.end(), *flags.tenant_field) != kTaken.end()) {
            return usage(fmt::format("--tenant-field {}: that field has another meaning",
                                     *flags.tenant_field));
        }
    }
    return {};
}

struct Place {
    std::string name;
    std::optional<std::pair<std::uint64_t, std::uint64_t>> file;  // device and inode
};

Place place_of(const std::string& name, int standard) {
    struct stat facts {};
    const int found = name == "-" ? fstat(standard, &facts) : stat(name.c_str(), &facts);
    Place place{name == "-" ? (standard == 0 ? "stdin" : "stdout") : name, std::nullopt};
    if (found == 0 && S_ISREG(facts.st_mode)) {
        place.file = {facts.st_dev, facts.st_ino};
    }
    return place;
}

// No two of the files are one: an output that is the input would be emptied before it is read.
Status check_files(const BatchFlags& flags) {
    std::vector<Place> places = {place_of(flags.input, 0), place_of(flags.output, 1)};
    if (flags.output != "-") {
        places.push_back(place_of(flags.output + ".journal", 1));
    }
    if (flags.errors) {
        places.push_back(place_of(*flags.errors, 1));
    }
    for (std::size_t a = 0; a < places.size(); ++a) {
        for (std::size_t b = a + 1; b < places.size(); ++b) {
            const bool same_name = places[a].name == places[b].name;
            if (same_name || (places[a].file && places[a].file == places[b].file)) {
                return usage(fmt::format("{} and {} are the same file", printable(places[a].name),
                                         printable(places[b].name)));
            }
        }
    }
    return {};
}

Status check_outputs(const BatchFlags& flags) {
    if (flags.errors == "-") {
        return usage("--errors takes the name of a file, not - (stdout)");
    }
    const Path journal = with_suffix(flags.output, ".journal");
    std::vector<Path> outputs;
    if (flags.output != "-") {
        outputs = {flags.output, journal};
    }
    if (flags.errors) {
        outputs.emplace_back(*flags.errors);
    }
    for (const Path& path : outputs) {
        if (const Status replaceable = check_replaceable(path); !replaceable) {
            return replaceable;
        }
    }
    if (flags.output == "-" || flags.force) {
        return {};
    }
    if (!flags.resume && is_there(flags.output)) {
        return Error{ErrorCode::file_exists,
                     fmt::format("{} exists; choose another name, --force or --resume",
                                 printable(flags.output))};
    }
    if (!flags.resume && is_there(journal)) {
        return Error{ErrorCode::file_exists,
                     fmt::format("{} exists: a job was not finished; --resume goes on with it, "
                                 "--force forgets it",
                                 printable(journal.string()))};
    }
    if (flags.errors && !flags.resume && is_there(*flags.errors)) {
        return Error{
            ErrorCode::file_exists,
            fmt::format("{} exists; choose another name or --force", printable(*flags.errors))};
    }
    const Path folder = Path(flags.output).parent_path();
    std::error_code ignored;
    if (!folder.empty() && !std::filesystem::is_directory(folder, ignored)) {
        return Error{ErrorCode::io,
                     fmt::format("no folder {} for the output", printable(folder.string()))};
    }
    return {};
}

// A resumed job records into a file of its own: NAME-r1.kvw.zst, NAME-r2.kvw.zst, …
std::string next_trace(const std::string& asked) {
    static constexpr std::string_view kEnding = ".kvw.zst";
    const auto taken = [](const std::string& name) {
        return is_there(name) || is_there(name + ".partial");
    };
    const bool has_ending = std::string_view(asked).ends_with(kEnding);
    const std::string stem = asked.substr(0, asked.size() - (has_ending ? kEnding.size() : 0));
    std::string name = asked;
    for (int i = 1; taken(name); ++i) {
        name = fmt::format("{}-r{}{}", stem, i, has_ending ? kEnding : "");
    }
    return name;
}

// ---- input

struct Input {
    File file;  // positioned at its start
    Path path;  // to open it again
    InputFacts facts;
};

// Input is read more than once. What comes through a pipe is put into a file without a name first.
Result<File> spool(int from) {
    std::error_code problem;
    const Path folder = std::filesystem::temp_directory_path(problem);
    std::string name = (folder / "kvwitness-XXXXXX").string();
    const int descriptor = problem ? -1 : mkostemp(name.data(), O_CLOEXEC);
    if (descriptor < 0) {
        return errno_error("cannot create", name, problem ? problem.value() : errno);
    }
    ::close(descriptor);
    Result<File> file = File::create(name, true);
    ::unlink(name.c_str());
    std::vector<char> buffer(1 << 16);
    while (file) {
        const ssize_t got = ::read(from, buffer.data(), buffer.size());
        if (got < 0 && errno != EINTR) {
            return errno_error("cannot read", "the input", errno);
        }
        if (got == 0) {
            break;
        }
        const std::string_view part(buffer.data(),
                                    static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
        if (const Status written = file->write_all(part); !written) {
            return written.error();
        }
    }
    return file;
}

Result<Input> open_input(const std::string& name) {
    Input input;
    input.path = name;
    File spooled;
    if (name == "-" || !place_of(name, STDIN_FILENO).file) {
        Result<File> source = name == "-" ? Result<File>(File()) : File::open_read(name);
        Result<File> file =
            source ? spool(name == "-" ? STDIN_FILENO : source->descriptor()) : std::move(source);
        if (!file) {
            return file.error();
        }
        spooled = std::move(*file);
        input.path = fmt::format("/proc/self/fd/{}", spooled.descriptor());
    }
    const Result<InputFacts> facts = scan_input(input.path);
    Result<File> file = facts ? File::open_read(input.path) : Result<File>(facts.error());
    if (!file) {
        return file.error();
    }
    if (facts->lines == 0) {
        return Error{ErrorCode::bad_input,
                     fmt::format("{} is empty: it has no line to answer (empty_file)",
                                 name == "-" ? "stdin" : printable(name))};
    }
    input.facts = *facts;
    input.file = std::move(*file);
    if (spooled) {
        // The file just opened keeps it; the first descriptor is given up.
        input.path = fmt::format("/proc/self/fd/{}", input.file.descriptor());
    }
    return input;
}

// Everything beside the input that answers depend on; what was begun with other settings is not
// gone on with. Limits that the machine sets by itself are left out.
std::string options_digest(const BatchFlags& flags, const Serving& serving) {
    const SamplingOptions& sampling = flags.sampling;
    const Json options{
        {"model", hex(serving.loaded.identity.sha256)},
        {"template", serving.chat ? std::string(serving.chat->name()) : "raw"},
        {"system", flags.system ? Json(*flags.system) : Json(nullptr)},
        {"tokens", flags.tokens_max ? Json(*flags.tokens_max) : Json(nullptr)},
        {"sampling",
         {sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
          sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty,
          sampling.penalty_last, sampling.ignore_eos}},
        {"stops", sampling.stops},
        {"logprobs", flags.logprobs},
        {"tenant", flags.tenant},
        {"tenant_field", flags.tenant_field ? Json(*flags.tenant_field) : Json(nullptr)},
        {"session", flags.session},
        {"allow_unknown", flags.allow_unknown},
        {"limits", {flags.context, flags.pool_rows, flags.prefill_rows, flags.roles}}};
    return hex(sha256(options.dump(-1, ' ', false, Json::error_handler_t::replace)));
}

// ---- what is said about it

std::string time_left(double seconds) {
    const auto whole = static_cast<std::uint64_t>(std::min(seconds, 359'999.0));
    return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                         : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

// One line on a terminal; elsewhere a line every half minute.
class Reporter {
  public:
    Reporter(Session& session, Progress& progress, std::uint64_t resumed)
        : session_(session), progress_(progress), resumed_(resumed) {}

    void operator()(const JobProgress& now) {
        const double seconds = seconds_since(begun_);
        const double rate = seconds > 0 ? static_cast<double>(now.finished) / seconds : 0;
        const std::uint64_t done = resumed_ + now.finished;
        std::string text = fmt::format("{}", done);
        if (now.lines > 0) {
            text += fmt::format(" of {} lines", now.lines);
        } else {
            text += " lines";
        }
        if (now.failed > 0) {
            text += fmt::format(", {} failed", now.failed);
        }
        text += fmt::format("; {} running; {:.1f} lines/s, {:.0f} tokens/s", now.running, rate,
                            seconds > 0 ? static_cast<double>(now.completion_tokens) / seconds : 0);
        if (now.lines > done && rate > 0) {
            text += "; " + time_left(static_cast<double>(now.lines - done) / rate) + " left";
        }
        progress_.show(text);
        if (!session_.progress_wanted() && !session_.common.no_progress &&
            seconds_since(said_) >= 30) {
            said_ = std::chrono::steady_clock::now();
            session_.note(text);
        }
    }

  private:
    using Time = std::chrono::steady_clock::time_point;
    Session& session_;
    Progress& progress_;
    std::uint64_t resumed_;
    Time begun_ = std::chrono::steady_clock::now(), said_ = begun_;
};

struct Outcome {
    JobReport report;
    std::uint64_t resumed = 0, resumed_failed = 0;
    double seconds = 0;
    std::uint64_t failed() const { return report.totals.failed + resumed_failed; }
    std::uint64_t finished() const { return report.totals.finished + resumed; }
};

std::string words(const Outcome& outcome) {
    const JobProgress& totals = outcome.report.totals;
    std::string text = fmt::format("{} lines", outcome.finished());
    if (totals.lines > outcome.finished()) {
        text += fmt::format(" of {}", totals.lines);
    }
    text += fmt::format(": {} answered", outcome.finished() - outcome.failed());
    if (outcome.failed() > 0) {
        text += fmt::format(", {} failed", outcome.failed());
    }
    if (!outcome.report.errors.empty()) {
        std::vector<std::string> codes;
        for (const auto& [code, count] : outcome.report.errors) {
            codes.push_back(fmt::format("{} {}", code, count));
        }
        text += " (" + joined(codes, ", ") + ")";
    }
    if (outcome.resumed > 0) {
        text += fmt::format("; {} of them before", outcome.resumed);
    }
    text += fmt::format("; {} + {} tokens in {:.1f} s", totals.prompt_tokens,
                        totals.completion_tokens, outcome.seconds);
    if (outcome.seconds > 0) {
        text += fmt::format(", {:.1f} t/s",
                            static_cast<double>(totals.completion_tokens) / outcome.seconds);
    }
    return text;
}

Json summary(const BatchFlags& flags, const Outcome& outcome, const Serving* serving,
             const Session& session) {
    const JobProgress& totals = outcome.report.totals;
    Json object = session.object();
    object["lines"] = totals.lines;
    object["finished"] = outcome.finished();
    object["answered"] = outcome.finished() - outcome.failed();
    object["failed"] = outcome.failed();
    object["resumed"] = outcome.resumed;
    object["errors"] = Json::object();
    for (const auto& [code, count] : outcome.report.errors) {
        object["errors"][code] = count;
    }
    object["prompt_tokens"] = totals.prompt_tokens;
    object["completion_tokens"] = totals.completion_tokens;
    object["seconds"] = outcome.seconds;
    object["output"] = flags.output;
    const std::optional<Path> trace =
        serving != nullptr ? serving->recording->trace() : std::nullopt;
    object["trace"] = trace ? Json(trace->string()) : Json(nullptr);
    object["spot_checked"] =
        serving != nullptr && serving->spot_check ? serving->spot_check->checked() : 0;
    return object;
}

// What the job ended with, worst first; the exit status that goes with it.
struct Ending {
    int status = 0;
    std::optional<Error> error;
};

Ending ending_of(const Outcome& outcome, const Serving& serving, const Status& closed,
                 const Result<TraceTotals>& totals) {
    const JobReport& report = outcome.report;
    Ending ending;
    const auto add = [&](const Error& error) {
        const int worse = worse_exit(ending.status, exit_code(error.code));
        if (!ending.error || worse != ending.status) {
            ending.error = error;
        }
        ending.status = worse;
    };
    if (report.error) {
        add(*report.error);
    }
    if (!closed) {
        add(closed.error());
    }
    if (!totals) {
        add(totals.error());
    }
    if (ending.status != 0) {
        return ending;
    }
    if (report.reader_gone) {
        return {141, Error{ErrorCode::io, "nobody reads the answers"}};
    }
    if (report.stopped) {
        return {128 + stop_signal(), Error{ErrorCode::cancelled, "stopped by a signal"}};
    }
    if (report.violated || serving.violated()) {
        return {1, Error{ErrorCode::violation,
                         "a row was read by a request that did not write it, "
                         "or an answer was not its own; `verify` names it"}};
    }
    return {outcome.failed() > 0 ? 1 : 0, std::nullopt};
}

int finish(const BatchFlags& flags, const Outcome& outcome, const Serving* serving,
           const Ending& ending, Session& session) {
    if (session.common.json) {
        Json object = summary(flags, outcome, serving, session);
        if (ending.error) {
            object["error"] = error_object(*ending.error, ending.status);
        }
        session.out.object(object);
    }
    if (ending.error && ending.status < 128) {
        session.say(ending.error->message);
    }
    const std::string where = serving != nullptr ? where_the_trace_is(*serving) : "nothing to do";
    session.note(fmt::format("[{}; {}]", words(outcome), where));
    if (ending.status != 0 && outcome.report.totals.lines > outcome.finished() &&
        flags.output != "-") {
        session.note("--resume goes on with it");
    }
    return ending.status == 0 && session.out.broken() ? session.out.exit_status() : ending.status;
}

// ---- the job

JobOptions job_options(const BatchFlags& flags) {
    JobOptions options{.tenant = flags.tenant,
                       .tenant_field = flags.tenant_field,
                       .allow_unknown = flags.allow_unknown,
                       .tokens_max = flags.tokens_max,
                       .sampling = flags.sampling,
                       .logprobs = flags.logprobs,
                       .system = flags.system,
                       .session = flags.session};
    options.deadline_ms = [&flags](const std::string& tenant) {
        return flags.deadline_ms_of(tenant);
    };
    return options;
}

// As for run, but that chats on the hash model, which has no file to bring a template, are chatml.
Result<Serving> start_job(const BatchFlags& flags, Session& session, Progress& progress) {
    Result<Serving> serving = start_serving(flags, flags, flags, session, progress);
    if (serving && serving->loaded.model->is_sim() && !serving->chat && !flags.raw) {
        Result<ChatTemplate> chatml = ChatTemplate::named("chatml");
        if (!chatml) {
            return chatml.error();
        }
        serving->chat = std::move(*chatml);
    }
    return serving;
}

JobContext job_context(Serving& serving, const Session& session) {
    const bool recorded = serving.recording->trace().has_value();
    return {.engine = *serving.engine,
            .tokenizer = *serving.loaded.tokenizer,
            .chat = serving.chat ? &*serving.chat : nullptr,
            .clock = session.clock,
            .source = {.model = serving.loaded.identity.name,
                       .run = recorded ? serving.recording->run_hex() : ""},
            .stop = [] { return stop_signal() != 0; },
            .after_step = [&serving, &session] { return serving.check_spots(session); }};
}

Result<int> run_stream_job(const BatchFlags& flags, Session& session) {
    File named;
    if (flags.input != "-") {
        Result<File> file = File::open_read(flags.input);
        if (!file) {
            return file.error();
        }
        named = std::move(*file);
    }
    finish_steps_on_signal(true);
    Progress progress(session);
    Result<Serving> serving = start_job(flags, session, progress);
    if (!serving) {
        return serving.error();
    }
    JobContext context = job_context(*serving, session);
    Reporter reporter(session, progress, 0);
    context.progress = [&reporter](const JobProgress& now) { reporter(now); };
    const auto begun = std::chrono::steady_clock::now();
    Outcome outcome{.report = run_stream(context, job_options(flags),
                                         named ? named.descriptor() : STDIN_FILENO, STDOUT_FILENO)};
    outcome.seconds = seconds_since(begun);
    progress.clear();
    const Result<TraceTotals> totals =
        stop_serving(*serving, outcome.report.engine_stopped, session);
    return finish(flags, outcome, &*serving, ending_of(outcome, *serving, {}, totals), session);
}

// --resume and no journal: the job was finished, or this is not its output.
Result<int> finished_before(const BatchFlags& flags, const Input& input, Session& session) {
    const Result<Pairing> pairing = pair_answers(input.path, flags.output, flags.shard);
    if (!pairing) {
        return pairing.error();
    }
    if (!pairing->complete()) {
        return Error{ErrorCode::bad_input,
                     fmt::format("{} has no journal and does not answer this input: {}",
                                 printable(flags.output), pairing->findings.front().detail)};
    }
    Outcome outcome{.resumed = pairing->lines, .resumed_failed = pairing->failed};
    outcome.report.totals.lines = pairing->lines;
    return finish(flags, outcome, nullptr, {pairing->failed > 0 ? 1 : 0, std::nullopt}, session);
}

Result<int> run_batch_job(const BatchFlags& asked, Session& session) {
    BatchFlags flags = asked;
    Result<Input> input = open_input(flags.input);
    if (!input) {
        return input.error();
    }
    finish_steps_on_signal(true);
    if (flags.resume && is_there(flags.output) &&
        !is_there(with_suffix(flags.output, ".journal"))) {
        return finished_before(flags, *input, session);
    }
    if (flags.resume && flags.trace) {
        flags.trace = next_trace(*flags.trace);
    }
    if (const Status checked = check_trace_places(flags); !checked) {
        return checked.error();
    }
    Progress progress(session);
    Result<Serving> serving = start_job(flags, session, progress);
    if (!serving) {
        return serving.error();
    }
    Result<std::unique_ptr<FileOutput>> output = FileOutput::create(
        {.path = flags.output,
         .errors = flags.errors ? std::optional<Path>(*flags.errors) : std::nullopt,
         .resume = flags.resume,
         .replace = flags.force,
         .in_order = !flags.unordered,
         .input = input->facts,
         .shard = flags.shard,
         .options = options_digest(flags, *serving)});
    if (!output) {
        serving->recording->discard();
        return output.error();
    }
    JobContext context = job_context(*serving, session);
    context.source.input = input->facts.digest;
    Reporter reporter(session, progress, (*output)->resumed());
    context.progress = [&reporter](const JobProgress& now) { reporter(now); };
    const auto begun = std::chrono::steady_clock::now();
    Outcome outcome{.report = run_batch(context, job_options(flags), input->file.descriptor(),
                                        input->facts, flags.shard, **output),
                    .resumed = (*output)->resumed(),
                    .resumed_failed = (*output)->resumed_failed()};
    outcome.seconds = seconds_since(begun);
    progress.clear();
    const JobReport& report = outcome.report;
    const bool complete = !report.error && !report.stopped && !report.reader_gone;
    Status closed = (*output)->close(complete);
    outcome.report.reader_gone |= (*output)->reader_gone();
    const Result<TraceTotals> totals = stop_serving(*serving, report.engine_stopped, session);
    return finish(flags, outcome, &*serving, ending_of(outcome, *serving, closed, totals), session);
}

Result<int> batch(const BatchFlags& asked, Session& session) {
    BatchFlags flags = asked;
    flags.sampling.seed = asked.seed.value_or(0);
    if (flags.input.empty()) {
        return usage("which lines? batch IN.jsonl -o OUT.jsonl; - is stdin");
    }
    if (const Status checked = check_flags(flags, session); !checked) {
        return checked.error();
    }
    if (const Status checked = check_files(flags); !checked) {
        return checked.error();
    }
    if (const Status checked = check_outputs(flags); !checked) {
        return checked.error();
    }
    if (const Status model = check_model(flags.model); !model) {
        return model.error();
    }
    if (flags.stream) {
        if (const Status checked = check_trace_places(flags); !checked) {
            return checked.error();
        }
        return run_stream_job(flags, session);
    }
    return run_batch_job(flags, session);
}

// ---- batch check, batch merge

struct CheckFlags {
    std::string input, output;
    Shard shard;
};

Result<int> check(const CheckFlags& flags, Session& session) {
    if (flags.input == "-" && flags.output == "-") {
        return usage("stdin is either the input or the output, not both");
    }
    const auto path = [](const std::string& name) { return name == "-" ? "/dev/stdin" : name; };
    const Result<Pairing> pairing =
        pair_answers(path(flags.input), path(flags.output), flags.shard);
    if (!pairing) {
        return pairing.error();
    }
    if (session.common.json) {
        Json object = session.object();
        object["lines"] = pairing->lines;
        object["paired"] = pairing->paired;
        object["answered"] = pairing->answered;
        object["failed"] = pairing->failed;
        object["complete"] = pairing->complete();
        object["findings_total"] = pairing->findings_total;
        object["findings"] = Json::array();
        for (const PairFinding& finding : pairing->findings) {
            object["findings"].push_back(
                {{"line", finding.line}, {"kind", finding.kind}, {"detail", finding.detail}});
        }
        session.out.object(object);
    } else {
        for (const PairFinding& finding : pairing->findings) {
            session.out.write(fmt::format("{}: {}\n", finding.kind, finding.detail));
        }
        session.out.write(fmt::format(
            "{} of {} lines paired ({} answered, {} failed): {}\n", pairing->paired, pairing->lines,
            pairing->answered, pairing->failed,
            pairing->complete() ? session.good("complete") : session.bad("not complete")));
    }
    return pairing->complete() ? 0 : 1;
}

struct MergeFlags {
    std::vector<std::string> shards;
    std::string output;
    bool force = false;
};

Result<int> merge(const MergeFlags& flags, Session& session) {
    if (flags.output.empty()) {
        return usage("-o FILE says where the merged lines go");
    }
    if (const Status free = check_output_file("-o", flags.output, flags.force); !free) {
        return free.error();
    }
    const Place out = place_of(flags.output, 1);
    for (const std::string& shard : flags.shards) {
        if (shard == "-") {
            return usage("a shard is read twice, so it must be a file, not - (stdin)");
        }
        if (const Place place = place_of(shard, 0);
            place.name == out.name || (place.file && place.file == out.file)) {
            return usage(fmt::format("{} and {} are the same file", printable(place.name),
                                     printable(out.name)));
        }
    }
    const Result<Merged> merged =
        merge_shards({flags.shards.begin(), flags.shards.end()}, flags.output, flags.force);
    if (!merged) {
        return merged.error();
    }
    if (session.common.json) {
        Json object = session.object();
        object["lines"] = merged->lines;
        object["failed"] = merged->failed;
        object["shards"] = flags.shards.size();
        object["output"] = flags.output;
        session.out.object(object);
    }
    session.note(fmt::format("[{} lines of {} shards, {} failed; {}]", merged->lines,
                             flags.shards.size(), merged->failed, flags.output));
    return 0;
}

}  // namespace

void add_batch(Commands& commands) {
    const auto batch_flags = std::make_shared<BatchFlags>();
    BatchFlags& batch = *batch_flags;
    batch.tenant.clear();  // without --tenant each line has a namespace of its own
    Flags flags = commands.add(
        {"batch", "batch", "answer the lines of a file or a stream, in OpenAI's batch form",
         "  kvwitness batch in.jsonl -o out.jsonl\n"
         "  kvwitness batch in.jsonl -o out.jsonl --resume           after a crash or Ctrl-C\n"
         "  kvwitness batch in.jsonl -o out.jsonl --tenant-field tenant -np 16\n"
         "  kvwitness batch in.jsonl -o out.$i.jsonl --shard $i/8    then: batch merge\n"
         "  kvwitness batch --stream - -o -                          a parent process asks"},
        [batch_flags](Session& session) { return cli::batch(*batch_flags, session); });
    flags.group("Lines")
        .positional("IN", batch.input, "Lines of JSON; - is stdin", false)
        .text("-o,--output", "FILE", batch.output,
              "Where answers go, in the order of the input; - is stdout", false)
        .flag("--stream", batch.stream,
              "Answer lines as they arrive and finish; {\"cancel\":ID} ends one", false)
        .text("--tenant-field", "NAME", batch.tenant_field, "The field that names a line's tenant")
        .flag("--resume", batch.resume, "Go on with a job that was not finished", false)
        .flag("--unordered", batch.unordered, "Write answers as they finish", false)
        .text("--errors", "FILE", batch.errors, "A copy of the lines that failed", false)
        .flag("--allow-unknown", batch.allow_unknown, "Pass over fields that are not known")
        .whole("--logprobs", batch.logprobs, 0, 20,
               "With each token, that many alternatives; 0: as the line says");
    add_shard_flag(flags, batch.shard);
    add_template_flags(flags, batch);
    add_generation_flags(flags, batch);
    add_engine_flags(flags, batch);
    add_trace_flags(flags, batch);

    const auto check_flags = std::make_shared<CheckFlags>();
    Flags checking = commands.add(
        {"batch check", "batch_check", "does an output answer every line of an input, and only it",
         "  kvwitness batch check in.jsonl out.jsonl\n"
         "  kvwitness batch check in.jsonl out.3.jsonl --shard 3/8 --json"},
        [check_flags](Session& session) { return cli::check(*check_flags, session); });
    checking.positional("IN", check_flags->input, "The input", true)
        .positional("OUT", check_flags->output, "The output", true);
    add_shard_flag(checking, check_flags->shard);

    const auto merge_flags = std::make_shared<MergeFlags>();
    commands
        .add({"batch merge", "batch_merge", "one output from those of all shards",
              "  kvwitness batch merge out.*.jsonl -o out.jsonl"},
             [merge_flags](Session& session) { return cli::merge(*merge_flags, session); })
        .positionals("SHARD", merge_flags->shards, "The output of each shard")
        .text("-o,--output", "FILE", merge_flags->output, "The merged output", false)
        .flag("--force", merge_flags->force, "Replace an existing file", false);
}

}  // namespace kvw::cli
