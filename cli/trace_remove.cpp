// trace prune, trace rm: retention, only when asked.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "cli/commands.h"
#include "cli/places.h"
#include "replay/verify.h"

namespace kvw::cli {

namespace {

struct PruneFlags {
    std::optional<std::string> trace_dir;
    std::optional<std::int64_t> keep_seconds;
    std::optional<std::uint64_t> bytes_max;
    bool dry_run = false;
};

struct RemoveFlags {
    std::vector<std::string> traces;
    std::optional<std::string> trace_dir;
};

constexpr std::string_view kPartial = ".partial";

Path beside(const Path& path, std::string_view suffix) {
    return Path(path.string() + std::string(suffix));
}

// NAME for NAME, NAME.partial and NAME.tail.
Path name_of_trace(const Path& path) {
    const std::string text = path.string();
    return text.ends_with(kPartial) ? Path(text.substr(0, text.size() - kPartial.size())) : path;
}

bool is_recording(const Path& name) {
    std::error_code ignored;
    const Path partial = beside(name, kPartial);
    if (!std::filesystem::exists(partial, ignored)) {
        return false;
    }
    Result<File> file = File::open_append(partial);
    return file && !file->try_lock();
}

// Fails: io, also when nothing was there although it must be.
Status remove_file(const Path& path, bool must_be_there) {
    std::error_code failed;
    if (!std::filesystem::remove(path, failed) && (failed || must_be_there)) {
        return errno_error("cannot remove", path, failed ? failed.value() : ENOENT);
    }
    return {};
}

// The file of a trace with what belongs to it: the signature to a whole one, the tail to a
// .partial. Both may be there under one name, from two runs; the other one stays.
Status remove_trace(const Path& path) {
    std::error_code ignored;
    const Path name = name_of_trace(path);
    const bool whole = name == path;
    Status removed = remove_file(path, true);
    if (removed && whole) {
        removed = remove_file(beside(name, ".sig"), false);
    }
    if (removed && !(whole && std::filesystem::exists(beside(name, kPartial), ignored))) {
        removed = remove_file(beside(name, ".tail"), false);
    }
    return removed;
}

// ---- rm

// The file that is to go.
Result<Path> removable(const Path& named) {
    const Result<Path> found = resolve_trace(named);
    if (!found) {
        return found.error();
    }
    const Path& path = *found;
    if (is_recording(name_of_trace(path))) {
        return Error{ErrorCode::usage,
                     fmt::format("{} is being recorded; it was not removed", path.string())};
    }
    const Result<TraceReader> reader = TraceReader::open(path, {.texts = false});
    if (!reader && reader.error().code != ErrorCode::torn) {
        return Error{reader.error().code, reader.error().message + "; it was not removed"};
    }
    return path;
}

Result<int> remove_named(const RemoveFlags& flags, Session& session) {
    const Result<Store> store = Store::open(flags.trace_dir);
    if (!store) {
        return store.error();
    }
    // All are looked at before the first one goes.
    std::vector<Path> paths;
    for (const std::string& trace : flags.traces) {
        const Result<Path> named = store->find(trace);
        const Result<Path> path = named ? removable(*named) : named;
        if (!path) {
            return path.error();
        }
        if (std::find(paths.begin(), paths.end(), *path) == paths.end()) {
            paths.push_back(*path);
        }
    }
    Json object = session.object();
    object["removed"] = Json::array();
    for (const Path& path : paths) {
        if (const Status removed = remove_trace(path); !removed) {
            return removed.error();
        }
        object["removed"].push_back(path.string());
        session.note("removed " + path.string());
    }
    if (session.common.json) {
        session.out.object(object);
    }
    return 0;
}

// ---- prune

// Why a closed trace that is old enough stays: someone may still need it.
std::optional<std::string> why_kept(const TraceSummary& summary) {
    std::error_code ignored;
    if (!summary.readable || summary.end != TraceEnd::closed) {
        return summary.readable ? name_of(summary.end) : "unreadable";
    }
    if (std::filesystem::exists(beside(summary.path, ".sig"), ignored)) {
        return "signed";
    }
    const Result<Certificate> certificate = verify(summary.path, {.controls = false});
    if (!certificate) {
        return error_name(certificate.error().code);
    }
    if (certificate->verdict == Verdict::violation) {
        return "violation";
    }
    return std::nullopt;
}

Result<int> prune(const PruneFlags& flags, Session& session) {
    if (!flags.keep_seconds && !flags.bytes_max) {
        return Error{ErrorCode::usage,
                     "nothing to go by: give --keep 14d, --max-size 5GiB or both"};
    }
    const Result<Store> store = Store::open(flags.trace_dir);
    const Result<std::vector<TraceSummary>> traces =
        store ? store->list() : Result<std::vector<TraceSummary>>(store.error());
    if (!traces) {
        return traces.error();
    }
    std::uint64_t bytes = 0;
    for (const TraceSummary& summary : *traces) {
        bytes += summary.bytes;
    }
    Json object = session.object();
    object["dry_run"] = flags.dry_run;
    object["removed"] = Json::array();
    object["kept"] = Json::array();
    const std::int64_t now = session.clock.wall_ns();
    for (auto oldest = traces->rbegin(); oldest != traces->rend(); ++oldest) {
        const bool too_old =
            flags.keep_seconds && (now - oldest->created_ns) / 1'000'000'000 > *flags.keep_seconds;
        const bool too_many = flags.bytes_max && bytes > *flags.bytes_max;
        if (!too_old && !too_many) {
            continue;
        }
        if (const std::optional<std::string> reason = why_kept(*oldest)) {
            object["kept"].push_back({{"path", oldest->path.string()}, {"reason", *reason}});
            session.note(fmt::format("kept {} ({})", oldest->path.string(), *reason));
            continue;
        }
        if (const Status removed = flags.dry_run ? Status{} : remove_trace(oldest->path);
            !removed) {
            return removed.error();
        }
        bytes -= oldest->bytes;
        object["removed"].push_back(oldest->path.string());
        session.note(fmt::format("{} {}", flags.dry_run ? "would remove" : "removed",
                                 oldest->path.string()));
    }
    object["bytes_left"] = bytes;
    if (session.common.json) {
        session.out.object(object);
    }
    return 0;
}

}  // namespace

void add_trace_remove(Commands& commands) {
    const auto pruned = std::make_shared<PruneFlags>();
    commands
        .add(
            {"trace prune", "prune", "remove the oldest traces that are closed, unsigned and clean",
             "  kvwitness trace prune --keep 14d\n"
             "  kvwitness trace prune --max-size 5GiB --dry-run"},
            [pruned](Session& session) { return prune(*pruned, session); })
        .section("trace")
        .value(
            "--keep", "TIME", "", "Keep what is younger, such as 14d or 36h",
            [pruned](std::string_view text) -> Status {
                const Result<std::int64_t> seconds = duration_seconds(text);
                if (!seconds) {
                    return seconds.error();
                }
                pruned->keep_seconds = *seconds;
                return {};
            },
            false)
        .value(
            "--max-size", "SIZE", "", "Keep at most this much, such as 5GiB",
            [pruned](std::string_view text) -> Status {
                const Result<std::uint64_t> bytes = byte_size(text);
                if (!bytes) {
                    return bytes.error();
                }
                pruned->bytes_max = *bytes;
                return {};
            },
            false, ValueType::whole_or_text)
        .section("")
        .flag("--dry-run", pruned->dry_run, "Say what would go, remove nothing", false)
        .section("trace")
        .text("--trace-dir", "DIR", pruned->trace_dir, "The store; default: the XDG data folder");

    const auto removed = std::make_shared<RemoveFlags>();
    commands
        .add({"trace rm", "rm", "remove traces; one that is being recorded is never removed",
              "  kvwitness trace rm old.kvw.zst\n"
              "  kvwitness trace rm 3f9a2c"},
             [removed](Session& session) { return remove_named(*removed, session); })
        .positionals("TRACE", removed->traces, "Files, @latest, or hex digits of runs in the store")
        .section("trace")
        .text("--trace-dir", "DIR", removed->trace_dir, "The store; default: the XDG data folder");
}

}  // namespace kvw::cli
