#include "cli/serving.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/places.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

constexpr double kMemoryShare =
    0.8;  // of what is available, for the pool of a context nobody asked for

Error usage(std::string message) { return {ErrorCode::usage, std::move(message)}; }

Result<std::optional<ChatTemplate>> choose_template(const GenerationFlags& flags,
                                                    const Gguf* gguf) {
    if (flags.raw) {
        return std::optional<ChatTemplate>();
    }
    Result<ChatTemplate> found = Error{ErrorCode::bad_template, "this model has no chat template"};
    if (flags.template_name) {
        found = ChatTemplate::named(*flags.template_name);
    } else if (gguf != nullptr) {
        found = ChatTemplate::of_model(*gguf);
    }
    if (found) {
        return std::optional<ChatTemplate>(std::move(*found));
    }
    if (flags.template_name || flags.chat || flags.system) {
        return found.error();
    }
    return std::optional<ChatTemplate>();
}

// The model's context, or what of it memory allows, which is said.
std::uint32_t default_context(const ModelConfig& model, const Session& session) {
    const std::uint64_t fits =
        static_cast<std::uint64_t>(kMemoryShare * static_cast<double>(memory_available())) /
        model.kv_bytes_per_token() / kPageTokens * kPageTokens;
    if (fits >= model.context || fits == 0) {
        return model.context;
    }
    session.note(
        fmt::format("context {} of the model's {} tokens: that is what memory allows; -c sets it",
                    fits, model.context));
    return static_cast<std::uint32_t>(fits);
}

EngineConfig engine_config(const EngineFlags& flags, const ModelConfig& model,
                           const Session& session) {
    EngineConfig config{
        .context = flags.context != 0 ? flags.context : default_context(model, session),
        .pool_rows = flags.pool_rows,
        .split = flags.roles == "split",
        .prefill_rows = flags.prefill_rows,
        .batch_rows = std::min(flags.batch, flags.step_rows),
        .sequences_max = flags.sequences_max,
        .cotenancy = flags.cotenancy == "any",
        .queue_max = flags.queue_max,
        .quota_rows = flags.quota_rows,
        .stop_on_violation = flags.on_violation == "stop"};
    for (const CacheScope scope : {CacheScope::request, CacheScope::session, CacheScope::tenant}) {
        config.scope = flags.scope == name_of(scope) ? scope : config.scope;
    }
    for (const auto& [name, limits] : flags.tenants) {
        if (limits.quota_rows) {
            config.tenant_quota_rows[name] = *limits.quota_rows;
        }
    }
    return config;
}

Result<std::unique_ptr<Recording>> start_recording(const EngineFlags& engine,
                                                   const TraceFlags& flags,
                                                   const Session& session) {
    RecordingOptions options{.run_id = new_run_id(),
                             .sync = flags.sync,
                             .replace = flags.force,
                             .stop_on_violation = engine.on_violation == "stop",
                             .stop_on_trace_error = flags.on_trace_error == "stop"};
    if (flags.trace) {
        options.path = *flags.trace;
    } else if (!flags.no_trace) {
        const Result<Store> store = Store::open(flags.trace_dir);
        const Result<Path> path = store ? store->new_trace(options.run_id, session.clock.wall_ns())
                                        : Result<Path>(store.error());
        if (!path && options.stop_on_trace_error) {
            return path.error();
        }
        if (path) {
            options.path = *path;
        } else {
            session.say("not recorded: " + path.error().message);
        }
    }
    return Recording::create(options, session);
}

}  // namespace

Status Serving::check_spots(const Session& session) {
    const Status checked = spot_check ? spot_check->check_ended() : Status{};
    if (!checked && checked.error().code == ErrorCode::violation && go_on_after_violation) {
        session.say(checked.error().message);
        return {};
    }
    return checked;
}

Status check_serving_flags(const GenerationFlags& generation, const EngineFlags& engine,
                           const TraceFlags& trace) {
    if (const Status sampling = check_options(generation.sampling); !sampling) {
        return sampling;
    }
    if (generation.raw && (generation.chat || generation.system || generation.template_name)) {
        return usage("--raw takes the prompt as it is: no --chat, --sys or --template beside it");
    }
    if (trace.no_trace && trace.trace) {
        return usage("--trace and --no-trace exclude each other");
    }
    for (const std::string& stop : generation.sampling.stops) {
        if (stop.empty() || first_invalid_utf8(stop)) {
            return usage("--stop needs text that is not empty and is UTF-8");
        }
    }
    if (const std::optional<std::size_t> bad = first_invalid_utf8(generation.system.value_or(""))) {
        return Error{
            ErrorCode::bad_input,
            fmt::format("the system message is not UTF-8: byte {} begins no character", *bad)};
    }
    const Result<const Kernels*> kernels = choose_kernels(engine.model);
    return kernels ? Status{} : Status(kernels.error());
}

Status check_trace_places(const TraceFlags& flags) {
    std::error_code ignored;
    if (flags.key_dir && !std::filesystem::is_directory(*flags.key_dir, ignored)) {
        return Error{ErrorCode::key_folder, fmt::format("no key folder {}", *flags.key_dir)};
    }
    if (!flags.trace) {
        return {};
    }
    const Path path = *flags.trace;
    if (const Status free = check_output_file("--trace", *flags.trace, flags.force); !free) {
        return free;
    }
    const Path parent = path.has_parent_path() ? path.parent_path() : Path(".");
    if (!std::filesystem::is_directory(parent, ignored)) {
        return Error{ErrorCode::io, fmt::format("no folder {} for the trace", parent.string())};
    }
    return {};
}

Result<Serving> start_serving(const GenerationFlags& generation, const EngineFlags& flags,
                              const TraceFlags& trace, Session& session, Progress& progress) {
    Serving serving;
    Result<LoadedModel> loaded = load_model(flags.model, progress);
    if (!loaded) {
        return loaded.error();
    }
    serving.loaded = std::move(*loaded);
    const Model& model = *serving.loaded.model;
    Result<std::optional<ChatTemplate>> chat =
        choose_template(generation, serving.loaded.gguf.get());
    if (!chat) {
        return chat.error();
    }
    serving.chat = std::move(*chat);

    Result<std::unique_ptr<Recording>> recording = start_recording(flags, trace, session);
    if (!recording) {
        return recording.error();
    }
    serving.recording = std::move(*recording);
    serving.go_on_after_violation = flags.on_violation != "stop";
    std::vector<EventSink*> sinks = {&serving.recording->sink()};
    if (flags.spot_check_percent > 0) {
        const LoadedModel& with = serving.loaded;
        serving.spot_check = std::make_unique<SpotCheck>(
            flags.spot_check_percent, ReplayModel{.model = model,
                                                  .tokenizer = *with.tokenizer,
                                                  .kernels = *with.kernels,
                                                  .threads = *with.threads,
                                                  .sha256 = with.identity.sha256});
        sinks.push_back(serving.spot_check.get());
    }
    serving.sink = std::make_unique<TeeSink>(std::move(sinks));
    RunContext context{.sink = serving.sink.get(),
                       .tenant_key = [](TenantId, const std::string&) { return fresh_key(); },
                       .clock = &session.clock};
    Result<std::unique_ptr<Engine>> engine = Engine::create(
        model, *serving.loaded.tokenizer, *serving.loaded.kernels, *serving.loaded.threads,
        engine_config(flags, model.config(), session), serving.loaded.identity, std::move(context));
    if (!engine) {
        serving.recording->discard();
        return engine.error();
    }
    serving.engine = std::move(*engine);
    std::string json;
    serving.recording->sink().note(host_note(json, serving.loaded.device(),
                                             serving.loaded.kernels->isa,
                                             serving.loaded.threads->threads()));
    return serving;
}

Result<TraceTotals> stop_serving(Serving& serving, bool stopped, const Session& session) {
    const Status ended = stopped ? Status{} : serving.engine->finish();
    const Status checked = stopped || !ended ? Status{} : serving.check_spots(session);
    Result<TraceTotals> totals = serving.recording->close();
    if (!ended || !checked) {
        return ended ? checked.error() : ended.error();
    }
    return totals;
}

std::string where_the_trace_is(const Serving& serving) {
    const std::optional<Path> trace = serving.recording->trace();
    return trace ? "trace " + trace->string() : "no trace";
}

}  // namespace kvw::cli
