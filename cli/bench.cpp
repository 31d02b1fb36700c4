// bench: prefill and decode through the whole engine, alone and several requests at once, each
// repetition with recording on and off.
#include <fmt/format.h>

#include <memory>

#include "cli/bench_support.h"
#include "cli/commands.h"
#include "cli/models.h"
#include "cli/recording.h"
#include "cli/signals.h"
#include "src/base/random.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

struct BenchFlags {
    ModelFlags model;
    std::string prompts = "512", generated = "128", depths = "0", parallel = "1", format = "table";
    std::optional<std::string> threads;
    std::uint32_t repetitions = 5, step_rows = 512;
};

// pp: n_prompt tokens in one go. tg: n_gen tokens one by one. Both behind `depth` tokens, by
// `parallel` requests of as many tenants at once.
struct Test {
    std::uint32_t n_prompt = 0, n_gen = 0, depth = 0, parallel = 1;

    std::string name() const {
        std::string what = n_gen > 0 ? fmt::format("tg{}", n_gen) : fmt::format("pp{}", n_prompt);
        what += parallel > 1 ? fmt::format(" x{}", parallel) : "";
        return depth > 0 ? fmt::format("{} @ d{}", what, depth) : what;
    }
    std::uint32_t prompt_tokens() const {
        return n_gen > 0 ? std::max(depth, 1u) : depth + n_prompt;
    }
    std::uint32_t tokens_max() const { return n_gen > 0 ? n_gen + 1 : 1; }
};

struct Measured {
    Test test;
    unsigned threads = 0;
    std::vector<double> on, off, overhead;  // tokens per second, tokens per second, percent
    std::vector<double> beside;  // percent of a step that is not the forward pass, recording on
    double trace_bytes_per_token = 0;
};

// One engine, with or without a recording behind it, that runs the same test again and again.
class Bench {
  public:
    Bench(const LoadedModel& loaded, ThreadPool& threads) : loaded_(loaded), threads_(threads) {}

    // `trace`: where to record; none: nowhere.
    Status start(const Test& test, std::uint32_t step_rows, const std::optional<Path>& trace,
                 const Session& session) {
        EventSink* sink = &nothing_;
        if (trace) {
            Result<std::unique_ptr<Recording>> recording =
                Recording::create({.path = *trace, .run_id = new_run_id()}, session);
            if (!recording) {
                return recording.error();
            }
            recording_ = std::move(*recording);
            sink = &recording_->sink();
        }
        const std::uint32_t context = test.prompt_tokens() + test.tokens_max();
        // A page more for each, because a table ends with a whole page.
        const EngineConfig config{
            .context = context,
            .pool_rows = std::uint64_t{test.parallel} * (context + kPageTokens),
            .batch_rows = step_rows,
            .sequences_max = test.parallel,
            .scope = CacheScope::request};
        Result<std::unique_ptr<Engine>> engine = Engine::create(
            *loaded_.model, *loaded_.tokenizer, *loaded_.kernels, threads_, config,
            loaded_.identity,
            {.sink = sink, .tenant_key = [](TenantId, const std::string&) { return fresh_key(); }});
        if (!engine) {
            return engine.error();
        }
        engine_ = std::move(*engine);
        return {};
    }

    struct Rate {
        double tokens_per_second = 0;
        double beside_percent = 0;  // of the time in step() that was not in the forward pass
    };

    // One repetition. The clock runs while all requests do what is measured: from the step that
    // brings the last of them to it, until the first one ends.
    Result<Rate> run(const Test& test, std::uint64_t seed) {
        std::vector<RequestId> ids;
        for (std::uint32_t k = 0; k < test.parallel; ++k) {
            const Result<RequestId> id = engine_->submit(request_of(test, seed, k));
            if (!id) {
                return id.error();
            }
            ids.push_back(*id);
        }
        tokens_ += std::uint64_t{test.parallel} * (test.prompt_tokens() + test.tokens_max() - 1);
        const auto computed = [&] {
            std::uint64_t tokens = 0;
            for (const RequestId id : ids) {
                tokens += engine_->facts(id).prefilled;
            }
            return tokens;
        };
        const auto begun = [&] {
            return std::all_of(ids.begin(), ids.end(), [&](RequestId id) {
                const RequestFacts facts = engine_->facts(id);
                return test.n_gen > 0 ? facts.completion_tokens > 0 : facts.prefilled >= test.depth;
            });
        };
        Mark from = mark(test.n_gen == 0 && test.depth == 0, 0);
        std::optional<Rate> rate;
        for (std::size_t running = ids.size(); running > 0;) {
            Result<std::vector<Output>> outputs = engine_->step();
            if (!outputs) {
                return outputs.error();
            }
            if (stop_signal() != 0) {
                return Error{ErrorCode::cancelled, "stopped by a signal"};
            }
            bool some_ended = false;
            for (const Output& output : *outputs) {
                if (output.error) {
                    return *output.error;
                }
                running -= output.finish ? 1 : 0;
                some_ended |= output.finish.has_value();
                if (!output.bytes.empty()) {
                    engine_->delivered(output.request, output.bytes);
                }
            }
            // Prompts end one after the other, and all of them count.
            if (test.n_gen > 0 ? some_ended && !rate : running == 0) {
                rate = rate_since(from, computed());
            }
            if (!from.set && begun()) {
                from = mark(true, computed());
            }
        }
        return settle(rate.value_or(Rate{}));
    }

    // Bytes of trace for each token computed; 0 without a recording.
    Result<double> finish() {
        if (const Status ended = engine_->finish(); !ended) {
            return ended.error();
        }
        if (!recording_) {
            return 0.0;
        }
        const Result<TraceTotals> totals = recording_->close();
        if (!totals) {
            return totals.error();
        }
        return static_cast<double>(totals->bytes) / static_cast<double>(tokens_);
    }

  private:
    using Time = std::chrono::steady_clock::time_point;
    struct Mark {
        bool set = false;
        Time at;
        std::uint64_t tokens = 0;
        std::chrono::nanoseconds forward{};
    };
    Mark mark(bool set, std::uint64_t tokens) const {
        return {set, std::chrono::steady_clock::now(), tokens, engine_->forward_time()};
    }
    Rate rate_since(const Mark& from, std::uint64_t tokens) const {
        const double seconds = seconds_since(from.at);
        const double forward =
            std::chrono::duration<double>(engine_->forward_time() - from.forward).count();
        return {static_cast<double>(tokens - from.tokens) / seconds, (1 - forward / seconds) * 100};
    }

    GenerateRequest request_of(const Test& test, std::uint64_t seed, std::uint32_t k) const {
        GenerateRequest request{.tenant = fmt::format("bench-{}", k),
                                .tokens_max = test.tokens_max(),
                                .sampling = {.temperature = 0, .ignore_eos = true}};
        for (std::uint32_t i = 0; i < test.prompt_tokens(); ++i) {
            request.prompt_ids.push_back(static_cast<TokenId>(
                uniform_draw(seed, i, k) * static_cast<double>(loaded_.model->config().vocab)));
        }
        return request;
    }

    // Outside the clock: the ends of the requests, and their pages scrubbed for the next ones.
    Result<Rate> settle(Rate rate) {
        while (!engine_->idle()) {
            if (const Result<std::vector<Output>> settled = engine_->step(); !settled) {
                return settled.error();
            }
        }
        return rate;
    }

    const LoadedModel& loaded_;
    ThreadPool& threads_;
    NullSink nothing_;
    std::unique_ptr<Recording> recording_;
    std::unique_ptr<Engine> engine_;
    std::uint64_t tokens_ = 0;
};

Result<Measured> measure(const Test& test, const BenchFlags& flags, const LoadedModel& loaded,
                         ThreadPool& threads, Session& session, Progress& progress) {
    const Result<TemporaryFolder> folder = TemporaryFolder::create();
    if (!folder) {
        return folder.error();
    }
    Bench on(loaded, threads), off(loaded, threads);
    if (const Status started =
            on.start(test, flags.step_rows, folder->path() / "bench.kvw.zst", session);
        !started) {
        return started.error();
    }
    if (const Status started = off.start(test, flags.step_rows, std::nullopt, session); !started) {
        return started.error();
    }
    Measured measured{.test = test, .threads = threads.threads()};
    for (std::uint32_t i = 0; i <= flags.repetitions;
         ++i) {  // the first warms up and does not count
        progress.show(test.name(), static_cast<double>(i) / (flags.repetitions + 1));
        const Result<Bench::Rate> first = (i % 2 == 0 ? on : off).run(test, i);
        const Result<Bench::Rate> second = (i % 2 == 0 ? off : on).run(test, i);
        if (!first || !second) {
            return first ? second.error() : first.error();
        }
        const Bench::Rate& recorded = i % 2 == 0 ? *first : *second;
        const Bench::Rate& unrecorded = i % 2 == 0 ? *second : *first;
        if (i > 0) {
            measured.on.push_back(recorded.tokens_per_second);
            measured.off.push_back(unrecorded.tokens_per_second);
            measured.overhead.push_back(
                (unrecorded.tokens_per_second / recorded.tokens_per_second - 1) * 100);
            measured.beside.push_back(recorded.beside_percent);
        }
    }
    const Result<double> bytes = on.finish();
    const Result<double> nothing = off.finish();
    if (!bytes || !nothing) {
        return bytes ? nothing.error() : bytes.error();
    }
    measured.trace_bytes_per_token = *bytes;
    return measured;
}

// ---- output

Json result_json(const Measured& measured, const LoadedModel& loaded, std::uint32_t step_rows) {
    Json samples = Json::array(), off_samples = Json::array();
    for (std::size_t i = 0; i < measured.on.size(); ++i) {
        samples.push_back(rounded(measured.on[i], 3));
        off_samples.push_back(rounded(measured.off[i], 3));
    }
    return Json{{"test", measured.test.name()},
                {"n_prompt", measured.test.n_prompt},
                {"n_gen", measured.test.n_gen},
                {"depth", measured.test.depth},
                {"parallel", measured.test.parallel},
                {"threads", measured.threads},
                {"ubatch", step_rows},
                {"isa", loaded.kernels->isa},
                {"median_ts", rounded(median(measured.on), 3)},
                {"avg_ts", rounded(mean(measured.on), 3)},
                {"stddev_ts", rounded(standard_deviation(measured.on), 3)},
                {"samples", samples},
                {"recording_off_median_ts", rounded(median(measured.off), 3)},
                {"recording_off_samples", off_samples},
                {"recording_overhead_percent", rounded(median(measured.overhead), 3)},
                {"beside_forward_percent", rounded(median(measured.beside), 3)},
                {"trace_bytes_per_token", rounded(measured.trace_bytes_per_token, 2)}};
}

Json bench_json(const Session& session, const LoadedModel& loaded, const Json& results) {
    Json object = session.object();
    object["model"] = {{"name", loaded.identity.name},
                       {"sha256", hex(loaded.identity.sha256)},
                       {"weight_bytes", loaded.model->weight_bytes()},
                       {"weight_bytes_per_token", loaded.model->weight_bytes_per_token()}};
    object["load_ms"] = rounded(loaded.load_ms, 2);
    object["results"] = results;
    return object;
}

const std::vector<std::string> kColumns = {"test",
                                           "threads",
                                           "isa",
                                           "median_ts",
                                           "avg_ts",
                                           "stddev_ts",
                                           "recording_off_median_ts",
                                           "recording_overhead_percent",
                                           "beside_forward_percent",
                                           "trace_bytes_per_token"};

std::string cell(const Json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string csv(const Json& results) {
    std::string out = joined(kColumns, ",") + "\n";
    for (const Json& result : results) {
        std::vector<std::string> cells;
        for (const std::string& column : kColumns) {
            cells.push_back(cell(result[column]));
        }
        out += joined(cells, ",") + "\n";
    }
    return out;
}

std::string table(const Json& results, bool markdown) {
    const char* bar = markdown ? "|" : " ";
    const auto row = [&](std::string_view test, std::string_view threads, std::string_view isa,
                         std::string_view speed, std::string_view off, std::string_view overhead,
                         std::string_view beside, std::string_view bytes) {
        return fmt::format(
            "{0} {1:<14} {0} {2:>7} {0} {3:<7} {0} {4:>18} {0} {5:>13} {0} {6:>10} {0} {7:>14} "
            "{0} {8:>11} {0}\n",
            bar, test, threads, isa, speed, off, overhead, beside, bytes);
    };
    std::string out = row("test", "threads", "isa", "t/s, median ± sd", "recording off", "overhead",
                          "beside forward", "trace B/tok");
    out += markdown ? "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n" : "";
    for (const Json& result : results) {
        out += row(cell(result["test"]), cell(result["threads"]), cell(result["isa"]),
                   fmt::format("{:.2f} ± {:.2f}", result["median_ts"].get<double>(),
                               result["stddev_ts"].get<double>()),
                   fmt::format("{:.2f}", result["recording_off_median_ts"].get<double>()),
                   fmt::format("{:+.2f} %", result["recording_overhead_percent"].get<double>()),
                   fmt::format("{:.2f} %", result["beside_forward_percent"].get<double>()),
                   fmt::format("{:.1f}", result["trace_bytes_per_token"].get<double>()));
    }
    return out;
}

// ---- the command

Result<std::vector<Test>> tests_of(const BenchFlags& flags) {
    const Result<std::vector<std::uint64_t>> prompts = whole_numbers(flags.prompts, 0, 1 << 20);
    const Result<std::vector<std::uint64_t>> generated = whole_numbers(flags.generated, 0, 1 << 20);
    const Result<std::vector<std::uint64_t>> depths = whole_numbers(flags.depths, 0, 1 << 20);
    const Result<std::vector<std::uint64_t>> parallels = whole_numbers(flags.parallel, 1, 4096);
    for (const auto* list : {&prompts, &generated, &depths, &parallels}) {
        if (!*list) {
            return list->error();
        }
    }
    std::vector<Test> tests;
    for (const std::uint64_t depth : *depths) {
        for (const std::uint64_t parallel : *parallels) {
            const auto add = [&](std::uint64_t n_prompt, std::uint64_t n_gen) {
                if (n_prompt + n_gen > 0) {
                    tests.push_back({.n_prompt = static_cast<std::uint32_t>(n_prompt),
                                     .n_gen = static_cast<std::uint32_t>(n_gen),
                                     .depth = static_cast<std::uint32_t>(depth),
                                     .parallel = static_cast<std::uint32_t>(parallel)});
                }
            };
            for (const std::uint64_t n : *prompts) {
                add(n, 0);
            }
            for (const std::uint64_t n : *generated) {
                add(0, n);
            }
        }
    }
    if (tests.empty()) {
        return Error{ErrorCode::usage, "nothing to measure: -p and -n are both 0"};
    }
    return tests;
}

Result<int> bench(const BenchFlags& flags, Session& session) {
    const Result<std::vector<Test>> tests = tests_of(flags);
    if (!tests) {
        return tests.error();
    }
    Result<std::vector<std::uint64_t>> threads =
        flags.threads ? whole_numbers(*flags.threads, 1, 1024)
                      : std::vector<std::uint64_t>{usable_processors()};
    if (!threads) {
        return threads.error();
    }
    finish_steps_on_signal(true);
    Progress progress(session);
    const Result<LoadedModel> loaded = load_model(flags.model, progress);
    if (!loaded) {
        return loaded.error();
    }
    const bool json = session.common.json || flags.format == "json";
    Json results = Json::array();
    for (const std::uint64_t count : *threads) {
        ThreadPool pool(static_cast<unsigned>(count));
        for (const Test& test : *tests) {
            const Result<Measured> measured =
                measure(test, flags, *loaded, pool, session, progress);
            progress.clear();
            if (!measured) {
                return measured.error();
            }
            results.push_back(result_json(*measured, *loaded, flags.step_rows));
        }
    }
    if (json) {
        session.out.object(bench_json(session, *loaded, results));
    } else {
        session.out.write(flags.format == "csv" ? csv(results)
                                                : table(results, flags.format == "md"));
    }
    return 0;
}

}  // namespace

void add_bench(Commands& commands) {
    const auto bench_flags = std::make_shared<BenchFlags>();
    BenchFlags& flags = *bench_flags;
    Flags options = commands.add(
        {"bench", "bench", "measure prefill and decode, with recording on and off in turn",
         "  kvwitness bench\n"
         "  kvwitness bench -p 512 -n 128 -d 0,1024 -t 1,2 -r 5 --format md\n"
         "  kvwitness bench -np 1,4,8,16\n"
         "  kvwitness bench verify"},
        [bench_flags](Session& session) { return bench(*bench_flags, session); });
    options.text("-p,--n-prompt", "LIST", flags.prompts, "Prompt sizes (pp); 0: none", false)
        .text("-n,--n-gen", "LIST", flags.generated, "Answer sizes (tg); 0: none", false)
        .text("-d,--depth", "LIST", flags.depths, "Tokens in the cache before either", false)
        .text("--np,--parallel", "LIST", flags.parallel,
              "Requests at once, each of its own tenant (also -np)", false)
        .text("-t,--threads", "LIST", flags.threads,
              "Threads; default: all processors this process may use", false)
        .whole("-r,--repetitions", flags.repetitions, 1, 1000, "Repetitions of each test")
        .section("engine")
        .whole("--ub,--ubatch", flags.step_rows, 1, 65536, "Most tokens in one step (also -ub)")
        .section("")
        .choice("--format", flags.format, {"table", "json", "csv", "md"},
                "How results are printed");
    add_model_flag(options, flags.model);
    add_device_flags(options, flags.model);
}

}  // namespace kvw::cli
