// replay: verify, then the run again with every load checked, then each request alone.
#include "replay/replay.h"

#include <fmt/format.h>

#include <memory>

#include "cli/certificates.h"
#include "cli/commands.h"
#include "cli/models.h"
#include "cli/places.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

struct ReplayFlags {
    std::string trace;
    ModelFlags model;
    std::optional<std::string> trace_dir, certificate, solo, until;
    std::string require = "record";
    bool no_solo = false, strict = false, other_model = false, force = false;
};

// "10%" or a request's number.
Status read_solo(const ReplayFlags& flags, SoloChoice& choice) {
    choice.on = !flags.no_solo;
    if (!flags.solo) {
        return {};
    }
    if (flags.no_solo) {
        return Error{ErrorCode::usage, "--solo and --no-solo exclude each other"};
    }
    if (flags.solo->ends_with('%')) {
        const Result<double> percent =
            real_number(flags.solo->substr(0, flags.solo->size() - 1), 0, 100);
        if (!percent) {
            return percent.error();
        }
        choice.percent = *percent;
        return {};
    }
    const Result<std::uint64_t> request =
        whole_number(*flags.solo, 1, std::numeric_limits<std::uint64_t>::max());
    if (!request) {
        return Error{
            ErrorCode::usage,
            fmt::format("--solo: '{}' is neither a request nor a share such as 10%", *flags.solo)};
    }
    choice.request = *request;
    return {};
}

Result<std::optional<std::uint64_t>> read_until(const ReplayFlags& flags, const Path& trace) {
    if (!flags.until) {
        return std::optional<std::uint64_t>();
    }
    const Result<TraceReader> reader = TraceReader::open(trace, {.texts = false});
    if (!reader) {
        return reader.error();
    }
    const Result<std::uint64_t> event = event_of_moment(*flags.until, reader->header().run_id);
    if (!event) {
        return event.error();
    }
    return std::optional<std::uint64_t>(*event);
}

Json divergence_object(const Divergence& divergence, const std::string& run) {
    Json object{{"moment", moment(run, divergence.event)},
                {"request", divergence.request != 0 ? Json(std::to_string(divergence.request))
                                                    : Json(nullptr)},
                {"token", divergence.token ? Json(*divergence.token) : Json(nullptr)},
                {"layer", divergence.layer ? Json(*divergence.layer) : Json(nullptr)},
                {"detail", printable(divergence.detail)}};
    return object;
}

std::string divergence_text(const Divergence& divergence, const std::string& run) {
    std::string text = "first difference: moment " + moment(run, divergence.event);
    if (divergence.request != 0) {
        text += fmt::format(", request {}", divergence.request);
    }
    if (divergence.token) {
        text += fmt::format(", token {}", *divergence.token);
    }
    if (divergence.layer) {
        text += fmt::format(", layer {}", *divergence.layer);
    }
    return text + "\n  " + printable(divergence.detail) + "\n";
}

std::string phase_line(const char* name, std::string_view state, double seconds) {
    return fmt::format("{:<10} {}{}\n", name, state,
                       seconds > 0 ? fmt::format(" ({:.2f} s)", seconds) : "");
}

LayerState state_of(const Certificate& certificate, ProofLayer layer) {
    const auto found = certificate.layers.find(layer);
    return found != certificate.layers.end() ? found->second : LayerState::not_run;
}

// The phases with their times, what was found, and the verdict last.
std::string result_text(const ReplayResult& result, const Session& session) {
    const Certificate& certificate = result.certificate;
    LayerState record = LayerState::ok;
    for (const ProofLayer layer : {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends}) {
        const LayerState state = state_of(certificate, layer);
        if (record == LayerState::ok || state == LayerState::violation) {
            record = state;
        }
    }
    std::string text =
        phase_line("verify", name_of(record), result.record_s) +
        phase_line("execution", name_of(state_of(certificate, ProofLayer::execution)),
                   result.execution_s) +
        phase_line("solo", name_of(state_of(certificate, ProofLayer::solo)), result.solo_s);
    if (result.divergence) {
        text += divergence_text(*result.divergence, certificate.run);
    }
    // The certificate begins with its verdict; here that line comes last.
    const std::string whole = certificate_text(certificate, session);
    const std::size_t line = whole.find('\n') + 1;
    return text + whole.substr(line) + whole.substr(0, line);
}

Result<int> replay_trace(const ReplayFlags& flags, Session& session) {
    const Result<Level> required = required_level(flags.require);
    ReplayOptions options{.strict = flags.strict, .other_model = flags.other_model};
    if (!required) {
        return required.error();
    }
    if (const Status chosen = read_solo(flags, options.solo); !chosen) {
        return chosen.error();
    }
    if (const Status free = check_certificate_file(flags.certificate, flags.force); !free) {
        return free.error();
    }
    const Result<Store> store = Store::open(flags.trace_dir);
    const Result<Path> path = store ? store->find(flags.trace) : Result<Path>(store.error());
    if (!path) {
        return path.error();
    }
    const Result<std::optional<std::uint64_t>> until = read_until(flags, *path);
    if (!until) {
        return until.error();
    }
    options.until = *until;
    Progress progress(session);
    const Result<LoadedModel> loaded = load_model(flags.model, progress);
    if (!loaded) {
        return loaded.error();
    }
    progress.begin();
    options.progress = [&](const char* phase, double fraction) { progress.show(phase, fraction); };
    const ReplayModel model{.model = *loaded->model,
                            .tokenizer = *loaded->tokenizer,
                            .kernels = *loaded->kernels,
                            .threads = *loaded->threads,
                            .sha256 = loaded->identity.sha256};
    const Result<ReplayResult> result = kvw::replay(*path, model, options);
    progress.clear();
    if (!result) {
        return result.error();
    }
    Json object(to_json(result->certificate));
    if (result->divergence) {
        object["divergence"] = divergence_object(*result->divergence, result->certificate.run);
    }
    if (session.common.json) {
        session.out.object(object);
    } else {
        session.out.write(result_text(*result, session));
    }
    int status = exit_code(result->certificate, *required);
    if (const Status written = write_certificate_file(flags.certificate, flags.force, object);
        !written) {
        session.say(written.error().message);
        status = worse_exit(status, exit_code(written.error().code));
    }
    return status;
}

}  // namespace

void add_replay(Commands& commands) {
    const auto replay_flags = std::make_shared<ReplayFlags>();
    ReplayFlags& replay = *replay_flags;
    Flags flags = commands.add(
        {"replay", "certificate",
         "prove by running it again: verify, execution, then every request alone",
         "  kvwitness replay @latest\n"
         "  kvwitness replay run.kvw.zst -m model.gguf --json\n"
         "  kvwitness replay run.kvw.zst --solo 10%"},
        [replay_flags](Session& session) { return replay_trace(*replay_flags, session); });
    flags
        .positional("TRACE", replay.trace, "A file, @latest, or hex digits of a run in the store",
                    true)
        .flag("--no-solo", replay.no_solo, "Stop after execution", false)
        .text("--solo", "REQ|P%", replay.solo,
              "Run only this request, or this share of requests, alone", false)
        .text("--until", "MOMENT", replay.until, "Stop execution after this moment", false)
        .flag("--other-model", replay.other_model,
              "Go on although the model is not the recorded one", false)
        .text("--require", "LEVEL", replay.require,
              "Exit 6 below this level: record, execution or solo")
        .flag("--strict", replay.strict, "Any declared share is a violation")
        .text("--certificate", "FILE", replay.certificate,
              "Write the certificate (JSON) into this file", false)
        .flag("--force", replay.force, "Replace an existing certificate file", false)
        .section("trace")
        .text("--trace-dir", "DIR", replay.trace_dir, "The store; default: the XDG data folder");
    flags.group("Engine");
    add_model_flags(flags, replay.model);
}

}  // namespace kvw::cli
