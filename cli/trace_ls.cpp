// trace ls: the traces of the store.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/places.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

struct ListFlags {
    std::optional<std::string> trace_dir;
};

Json summary_json(const TraceSummary& summary) {
    return Json{{"name", summary.path.filename().string()},
                {"path", summary.path.string()},
                {"run", to_string(summary.run_id)},
                {"created", rfc3339(summary.created_ns)},
                {"bytes", summary.bytes},
                {"state", summary.readable ? name_of(summary.end) : "unreadable"}};
}

std::string table(const std::vector<TraceSummary>& traces) {
    std::string out =
        fmt::format("{:<21} {:<9} {:>10}  {:<11} {}\n", "CREATED", "RUN", "SIZE", "STATE", "NAME");
    for (const TraceSummary& summary : traces) {
        out += fmt::format("{:<21} {:<9} {:>10}  {:<11} {}\n", rfc3339(summary.created_ns),
                           to_string(summary.run_id).substr(0, 8), human_bytes(summary.bytes),
                           summary.readable ? name_of(summary.end) : "unreadable",
                           printable(summary.path.filename().string()));
    }
    return out;
}

Result<int> list(const ListFlags& flags, Session& session) {
    const Result<Store> store = Store::open(flags.trace_dir);
    if (!store) {
        return store.error();
    }
    const Result<std::vector<TraceSummary>> traces = store->list();
    if (!traces) {
        return traces.error();
    }
    if (session.common.jsonl) {
        for (const TraceSummary& summary : *traces) {
            Json line = object_of("trace_summary");
            line.update(summary_json(summary));
            session.out.record(line);
        }
    } else if (session.common.json) {
        Json object = session.object();
        object["folder"] = store->folder().string();
        object["traces"] = Json::array();
        for (const TraceSummary& summary : *traces) {
            object["traces"].push_back(summary_json(summary));
        }
        session.out.object(object);
    } else if (traces->empty()) {
        session.note("no traces in " + store->folder().string());
    } else {
        session.out.write(table(*traces));
    }
    return 0;
}

}  // namespace

void add_trace_ls(Commands& commands) {
    const auto flags = std::make_shared<ListFlags>();
    commands
        .add({"trace ls", "traces", "list the traces of the store, newest first",
              "  kvwitness trace ls\n"
              "  kvwitness trace ls --jsonl"},
             [flags](Session& session) { return list(*flags, session); })
        .flag("--jsonl", commands.common().jsonl, "One JSON object per trace", false)
        .section("trace")
        .text("--trace-dir", "DIR", flags->trace_dir, "The store; default: the XDG data folder");
}

}  // namespace kvw::cli
