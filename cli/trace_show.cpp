// trace show: what one trace holds.
#include <fmt/format.h>

#include <map>
#include <memory>

#include "cli/commands.h"
#include "cli/event_json.h"
#include "cli/places.h"
#include "src/base/sha256.h"
#include "src/base/text.h"
#include "traces/schema.h"

namespace kvw::cli {

namespace {

struct ShowFlags {
    std::string trace;
    std::optional<std::string> trace_dir;
    bool with_content = false;
};

struct RequestFound {
    std::uint64_t tenant = 0, submitted_at = 0, prompt_tokens = 0, completion_tokens = 0;
    std::uint64_t cached_tokens = 0, preemptions = 0;
    std::string end = "unfinished";
};

// What is gathered in one pass; the number of requests kept is bounded, counts are not.
struct TraceFound {
    Json model, config, host;
    std::map<std::uint64_t, std::string> tenants;
    std::map<std::uint64_t, RequestFound> requests;
    std::map<std::string, std::uint64_t> events_by_type;
    std::uint64_t events = 0, requests_total = 0;
    std::vector<Json> texts;
};
constexpr std::size_t kRequestsShown = 1000;

Json parsed_or_text(std::string_view bytes) {
    Json value = bytes.size() <= (1 << 16) ? Json::parse(bytes, nullptr, false) : Json();
    return value.is_discarded() || value.is_null() ? Json(std::string(bytes.substr(0, 1 << 16)))
                                                   : value;
}

void gather(TraceFound& found, const Event& event, std::uint64_t number) {
    const KindSchema* schema = schema_of(event.kind);
    ++found.events_by_type[schema != nullptr ? std::string(schema->name) : "unknown"];
    found.events += event.numbered() ? 1 : 0;
    const auto request = [&](std::uint64_t id) {
        const auto at = found.requests.find(id);
        return at != found.requests.end() ? &at->second : nullptr;
    };
    switch (event.kind) {
        case EventKind::model:
            found.model = event_json(event, number, found.tenants);
            break;
        case EventKind::config:
            found.config = parsed_or_text(event.bytes);
            break;
        case EventKind::note_host:
            found.host = parsed_or_text(event.bytes);
            break;
        case EventKind::tenant:
            found.tenants[event.as<events::Tenant>().tenant] = event.bytes;
            break;
        case EventKind::submit: {
            const auto submit = event.as<events::Submit>();
            ++found.requests_total;
            if (found.requests.size() < kRequestsShown) {
                found.requests[submit.request] = {.tenant = submit.tenant,
                                                  .submitted_at = number,
                                                  .prompt_tokens = submit.prompt_tokens};
            }
            break;
        }
        case EventKind::reject: {
            const auto reject = event.as<events::Reject>();
            if (RequestFound* of = request(reject.request)) {
                of->end =
                    std::string("refused: ") + name_of(static_cast<RejectReason>(reject.reason));
            }
            break;
        }
        case EventKind::finish: {
            const auto finish = event.as<events::Finish>();
            if (RequestFound* of = request(finish.request)) {
                of->end = name_of(static_cast<FinishReason>(finish.reason));
                of->completion_tokens = finish.completion_tokens;
                of->cached_tokens = finish.cached_tokens;
            }
            break;
        }
        case EventKind::preempt:
            if (RequestFound* of = request(event.as<events::Preempt>().request)) {
                ++of->preemptions;
            }
            break;
        default:
            break;
    }
}

Result<TraceFound> read_all(TraceReader& reader, bool with_content) {
    TraceFound found;
    TraceChunk chunk;
    while (true) {
        const Result<bool> more = reader.next(chunk);
        if (!more) {
            return more.error();
        }
        if (!*more) {
            return found;
        }
        std::uint64_t number = chunk.first_event;
        for (const Event& event : chunk.events) {
            gather(found, event, number);
            number += event.numbered() ? 1 : 0;
        }
        for (const TextRecord& record : chunk.texts) {
            if (with_content) {
                found.texts.push_back(text_json(record, found.tenants));
            }
        }
    }
}

const char* text_mode_name(TextMode mode) {
    switch (mode) {
        case TextMode::none:
            return "none";
        case TextMode::plain:
            return "plain";
        case TextMode::encrypted:
            return "encrypted";
    }
    return "unknown";
}

std::string tenant_of(const TraceFound& found, std::uint64_t number) {
    const auto at = found.tenants.find(number);
    return at != found.tenants.end() ? at->second : std::to_string(number);
}

Json show_json(const Session& session, const Path& path, const TraceReader& reader,
               const TraceFound& found, bool with_content) {
    const TraceHeader& header = reader.header();
    const TraceEnding& ending = reader.ending();
    Json object = session.object();
    object["path"] = path.string();
    object["run"] = to_string(header.run_id);
    object["format"] = fmt::format("{}.{}", header.major, header.minor);
    object["created"] = rfc3339(header.created_ns);
    object["text"] = text_mode_name(header.text);
    object["imported"] = header.imported;
    object["state"] = name_of(ending.end);
    object["events"] = found.events;
    object["last_event"] = ending.last_event;
    object["ledger_digest"] = hex(reader.ledger_digest());
    if (ending.totals) {
        object["root"] = hex(ending.totals->root);
        object["bytes"] = ending.totals->bytes;
        object["text_bytes"] = ending.totals->text_bytes;
    } else {
        object["reason"] = ending.reason;
    }
    object["model"] = found.model;
    object["config"] = found.config;
    object["host"] = found.host;
    object["counts"] = found.events_by_type;
    // Also where there were none: that nothing was shared is worth saying.
    const auto count = [&](const char* type) {
        const auto at = found.events_by_type.find(type);
        return at != found.events_by_type.end() ? at->second : 0;
    };
    object["shares"] = count("share");
    object["adopts"] = count("adopt");
    object["evictions"] = count("evict");
    object["preemptions"] = count("preempt");
    object["transfers"] = count("transfer");
    object["tenants"] = Json::array();
    for (const auto& [number, name] : found.tenants) {
        object["tenants"].push_back({{"tenant", name}, {"tenant_number", number}});
    }
    object["requests_total"] = found.requests_total;
    object["requests"] = Json::array();
    for (const auto& [id, request] : found.requests) {
        object["requests"].push_back(
            {{"request", std::to_string(id)},
             {"tenant", tenant_of(found, request.tenant)},
             {"moment", moment(to_string(header.run_id), request.submitted_at)},
             {"prompt_tokens", request.prompt_tokens},
             {"cached_tokens", request.cached_tokens},
             {"completion_tokens", request.completion_tokens},
             {"preemptions", request.preemptions},
             {"end", request.end}});
    }
    if (with_content) {
        object["texts"] = found.texts;
    }
    return object;
}

std::string value_text(const Json& value) {
    return printable(value.is_string()
                         ? value.get<std::string>()
                         : value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// The same facts as lines for people.
std::string show_text(const Json& object) {
    std::string out;
    for (const char* key : {"path", "run", "created", "state", "reason", "events", "bytes", "text",
                            "ledger_digest", "root", "config", "host"}) {
        if (object.contains(key)) {
            out += fmt::format("{:<14} {}\n", key, value_text(object[key]));
        }
    }
    if (object["model"].is_object()) {
        out += fmt::format("{:<14} {} {}\n", "model", value_text(object["model"]["name"]),
                           value_text(object["model"]["sha256"]));
    }
    out += fmt::format("{:<14}", "counts");
    for (const auto& [type, count] : object["counts"].items()) {
        out += fmt::format(" {} {}", type, count.get<std::uint64_t>());
    }
    out += fmt::format("\n{:<14} {} shared, {} adopted, {} evicted\n", "pages",
                       object["shares"].get<std::uint64_t>(), object["adopts"].get<std::uint64_t>(),
                       object["evictions"].get<std::uint64_t>());
    out += fmt::format("{:<14} {}\n{:<14} {}\n", "preemptions",
                       object["preemptions"].get<std::uint64_t>(), "transfers",
                       object["transfers"].get<std::uint64_t>());
    out += fmt::format("{:<14} {}\n", "requests", object["requests_total"].get<std::uint64_t>());
    for (const Json& request : object["requests"]) {
        out += fmt::format("  {:>6}  {:<16} {:>6} + {:<6} {:<12} {}\n",
                           value_text(request["request"]), value_text(request["tenant"]),
                           request["prompt_tokens"].get<std::uint64_t>(),
                           request["completion_tokens"].get<std::uint64_t>(),
                           value_text(request["end"]), value_text(request["moment"]));
    }
    if (object.contains("texts")) {
        for (const Json& text : object["texts"]) {
            out += fmt::format("{:<14} {} {}\n", value_text(text["kind"]),
                               text.contains("request") ? value_text(text["request"]) : "",
                               text.contains("text")  ? value_text(text["text"])
                               : text.contains("ids") ? value_text(text["ids"])
                                                      : "");
        }
    }
    return out;
}

Result<int> show(const ShowFlags& flags, Session& session) {
    const Result<Store> store = Store::open(flags.trace_dir);
    const Result<Path> path = store ? store->find(flags.trace) : Result<Path>(store.error());
    if (!path) {
        return path.error();
    }
    Result<TraceReader> reader = TraceReader::open(*path, {.texts = flags.with_content});
    if (!reader) {
        return reader.error();
    }
    const Result<TraceFound> found = read_all(*reader, flags.with_content);
    if (!found) {
        return found.error();
    }
    Json object = show_json(session, *path, *reader, *found, flags.with_content);
    const TraceEnding& ending = reader->ending();
    const bool whole = ending.end == TraceEnd::closed || ending.end == TraceEnd::live;
    if (!whole) {
        const ErrorCode code =
            ending.end == TraceEnd::torn ? ErrorCode::torn : ErrorCode::not_closed;
        const Error error{
            code, fmt::format("{}; the last whole event is {}", ending.reason, ending.last_event)};
        object["error"] = error_object(error, 6);
        session.say(error.message);
    }
    if (session.common.json) {
        session.out.object(object);
    } else {
        session.out.write(show_text(object));
    }
    return whole ? 0 : 6;
}

}  // namespace

void add_trace_show(Commands& commands) {
    const auto flags = std::make_shared<ShowFlags>();
    commands
        .add({"trace show", "trace",
              "describe one trace: model, configuration, tenants, requests, counts",
              "  kvwitness trace show @latest\n"
              "  kvwitness trace show run.kvw.zst --json"},
             [flags](Session& session) { return show(*flags, session); })
        .positional("TRACE", flags->trace, "A file, @latest, or hex digits of a run in the store",
                    true)
        .flag("--with-content", flags->with_content, "Prompts and ids too", false)
        .section("trace")
        .text("--trace-dir", "DIR", flags->trace_dir, "The store; default: the XDG data folder");
}

}  // namespace kvw::cli
