// trace dump: the events of a trace, in order.
#include <fmt/format.h>

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "cli/commands.h"
#include "cli/event_json.h"
#include "cli/places.h"
#include "src/base/text.h"
#include "traces/schema.h"

namespace kvw::cli {

namespace {

struct DumpFlags {
    std::string trace, range, tenant;
    std::optional<std::uint64_t> request, page;
    std::optional<std::string> trace_dir;
    bool with_content = false;
};

struct Range {
    std::uint64_t first = 1;
    std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
};

// "A..B", "A..", "..B" or one number.
Result<Range> read_range(std::string_view text) {
    Range range;
    if (text.empty()) {
        return range;
    }
    const std::size_t dots = text.find("..");
    const std::string_view first = text.substr(0, dots);
    const std::string_view last = dots == std::string_view::npos ? first : text.substr(dots + 2);
    for (const auto& [part, into] :
         {std::pair(first, &range.first), std::pair(last, &range.last)}) {
        if (part.empty()) {
            continue;
        }
        const Result<std::uint64_t> number =
            whole_number(part, 1, std::numeric_limits<std::uint64_t>::max());
        if (!number) {
            return Error{ErrorCode::usage,
                         fmt::format("'{}' is not a range of events such as 10..20", text)};
        }
        *into = *number;
    }
    return range;
}

// Whose an event is: by its own request, or, for a page between owners, by the last one it had.
class Attribution {
  public:
    // The request and the page of an event; nothing where it has none.
    struct Facts {
        std::optional<std::uint64_t> request, page;
    };

    Facts look(const Event& event) {
        Facts facts;
        if (const KindSchema* schema = schema_of(event.kind)) {
            for (std::size_t i = 0; i < schema->fields.size(); ++i) {
                if (schema->fields[i].name == "request") {
                    facts.request = event.fields[i];
                } else if (schema->fields[i].name == "page") {
                    facts.page = event.fields[i];
                }
            }
        }
        if (event.kind == EventKind::tenant) {
            tenants_[event.as<events::Tenant>().tenant] = event.bytes;
        } else if (event.kind == EventKind::submit) {
            const auto submit = event.as<events::Submit>();
            tenant_of_[submit.request] = submit.tenant;
        } else if (event.kind == EventKind::alloc) {
            owner_of_[*facts.page] = *facts.request;
        } else if (!facts.request && facts.page && event.kind != EventKind::poison_check) {
            const auto owner = owner_of_.find(*facts.page);
            facts.request = owner != owner_of_.end() ? std::optional(owner->second) : std::nullopt;
        }
        return facts;
    }

    std::string_view tenant_of(std::uint64_t request) const {
        const auto number = tenant_of_.find(request);
        const auto name =
            number != tenant_of_.end() ? tenants_.find(number->second) : tenants_.end();
        return name != tenants_.end() ? std::string_view(name->second) : std::string_view();
    }
    const std::map<std::uint64_t, std::string>& tenants() const { return tenants_; }

  private:
    std::map<std::uint64_t, std::string> tenants_;
    std::unordered_map<std::uint64_t, std::uint64_t> tenant_of_, owner_of_;
};

class Dump {
  public:
    Dump(const DumpFlags& flags, Range range, Session& session)
        : flags_(flags), range_(range), session_(session) {}

    void event(const Event& event, std::uint64_t number) {
        const Attribution::Facts facts = attribution_.look(event);
        // A range is of numbers, and notes have none.
        const bool inside = event.numbered() ? number >= range_.first && number <= range_.last
                                             : flags_.range.empty();
        if (!inside || !wanted(event, facts)) {
            return;
        }
        if (session_.machine()) {
            put(event_json(event, number, attribution_.tenants()));
        } else {
            const std::string where = event.numbered() ? std::to_string(number) : "-";
            session_.out.write(fmt::format("{:>8}  {}\n", where, to_text(event)));
        }
    }

    void text(const TextRecord& record) {
        const std::uint64_t id = number(record.request);
        const bool of_request = !flags_.request || *flags_.request == id;
        const auto name = attribution_.tenants().find(number(record.tenant));
        const bool of_tenant = flags_.tenant.empty() || (name != attribution_.tenants().end() &&
                                                         name->second == flags_.tenant);
        if (!flags_.with_content || flags_.page || !of_request || !of_tenant) {
            return;
        }
        const Json object = text_json(record, attribution_.tenants());
        if (session_.machine()) {
            put(object);
        } else {
            session_.out.write(
                "       -  " +
                printable(object.dump(-1, ' ', false, Json::error_handler_t::replace)) + "\n");
        }
    }

    bool past_the_end(std::uint64_t number) const { return number > range_.last; }
    Json take_events() { return std::move(events_); }

  private:
    bool wanted(const Event& event, const Attribution::Facts& facts) const {
        if (flags_.page && facts.page != flags_.page) {
            return false;
        }
        if (flags_.request && facts.request != flags_.request) {
            return false;
        }
        if (flags_.tenant.empty()) {
            return true;
        }
        return facts.request ? attribution_.tenant_of(*facts.request) == flags_.tenant
                             : event.kind == EventKind::tenant && event.bytes == flags_.tenant;
    }

    void put(Json object) {
        if (session_.common.jsonl) {
            session_.out.record(object);
        } else {
            events_.push_back(std::move(object));
        }
    }

    const DumpFlags& flags_;
    Range range_;
    Session& session_;
    Attribution attribution_;
    Json events_ = Json::array();
};

// What is wrong with the trace, if anything: a digest that does not match, or an end that is
// missing.
std::optional<Error> dump_chunks(TraceReader& reader, Dump& dump, const Session& session) {
    TraceChunk chunk;
    while (!session.out.broken()) {
        const Result<bool> more = reader.next(chunk);
        if (!more) {
            return more.error();
        }
        if (!*more) {
            break;
        }
        std::uint64_t number = chunk.first_event;
        for (const Event& event : chunk.events) {
            dump.event(event, number);
            number += event.numbered() ? 1 : 0;
        }
        for (const TextRecord& record : chunk.texts) {
            dump.text(record);
        }
        if (dump.past_the_end(number)) {
            return std::nullopt;
        }
    }
    if (session.out.broken() || reader.ending().end == TraceEnd::closed ||
        reader.ending().end == TraceEnd::live) {
        return std::nullopt;
    }
    const TraceEnding& ending = reader.ending();
    return Error{ending.end == TraceEnd::torn ? ErrorCode::torn : ErrorCode::not_closed,
                 fmt::format("{}; the last whole event is {}", ending.reason, ending.last_event)};
}

Result<int> dump_trace(const DumpFlags& flags, Session& session) {
    const Result<Range> range = read_range(flags.range);
    if (!range) {
        return range.error();
    }
    const Result<Store> store = Store::open(flags.trace_dir);
    const Result<Path> path = store ? store->find(flags.trace) : Result<Path>(store.error());
    if (!path) {
        return path.error();
    }
    Result<TraceReader> reader = TraceReader::open(*path, {.texts = flags.with_content});
    if (!reader) {
        return reader.error();
    }
    Dump dump(flags, *range, session);
    const std::optional<Error> problem = dump_chunks(*reader, dump, session);
    const int status = problem ? exit_code(problem->code) : 0;
    if (problem) {
        session.say(problem->message);
    }
    if (session.common.json && !session.common.jsonl) {
        Json object = session.object();
        object["trace"] = path->string();
        object["run"] = to_string(reader->header().run_id);
        object["events"] = dump.take_events();
        if (problem) {
            object["error"] = error_object(*problem, status);
        }
        session.out.object(object);
    } else if (session.common.jsonl && problem) {
        Json object = session.object();
        object["error"] = error_object(*problem, status);
        session.out.object(object);
    }
    return status;
}

}  // namespace

void add_trace_dump(Commands& commands) {
    const auto flags = std::make_shared<DumpFlags>();
    commands
        .add({"trace dump", "events", "print the events of a trace",
              "  kvwitness trace dump @latest\n"
              "  kvwitness trace dump run.kvw.zst 100..200 --jsonl\n"
              "  kvwitness trace dump run.kvw.zst --page 3"},
             [flags](Session& session) { return dump_trace(*flags, session); })
        .positional("TRACE", flags->trace, "A file, @latest, or hex digits of a run in the store",
                    true)
        .positional("A..B", flags->range, "Only events with these numbers", false)
        .text("--tenant", "NAME", flags->tenant, "Only this tenant's requests", false)
        .value(
            "--request", "ID", "", "Only this request",
            [flags](std::string_view text) -> Status {
                const Result<std::uint64_t> id =
                    whole_number(text, 0, std::numeric_limits<std::uint64_t>::max());
                if (!id) {
                    return id.error();
                }
                flags->request = *id;
                return {};
            },
            false)
        .value(
            "--page", "N", "", "Only this page",
            [flags](std::string_view text) -> Status {
                const Result<std::uint64_t> page = whole_number(text, 0, 0xffffffff);
                if (!page) {
                    return page.error();
                }
                flags->page = *page;
                return {};
            },
            false)
        .flag("--jsonl", commands.common().jsonl, "One JSON object per event", false)
        .flag("--with-content", flags->with_content, "Prompts, ids and keys too", false)
        .section("trace")
        .text("--trace-dir", "DIR", flags->trace_dir, "The store; default: the XDG data folder");
}

}  // namespace kvw::cli
