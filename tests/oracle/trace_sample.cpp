// Writes traces for read_trace_test.py and says what is in them, as the C++ reader sees it.
//
//     trace_sample write FOLDER    closed.kvw.zst and, as a crash would leave it,
//     open.kvw.zst.partial and .tail trace_sample show FILE       the same JSON lines as
//     read_trace.py FILE --texts, but for the last
#include <fmt/format.h>

#include <cstdio>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::test;

namespace {

void fill(TraceWriter& writer, std::uint64_t seed, std::size_t events) {
    std::mt19937_64 random(seed);
    const auto kinds = event_schema();
    for (std::size_t i = 0; i < events; ++i) {
        note(writer, random_event(random, kinds[random() % kinds.size()]));
        if (i % 50 == 0) {
            const std::uint32_t tenant = 1 + static_cast<std::uint32_t>(random() % 3);
            std::string bytes(i % 1000 == 0 ? 90000 : random() % 30, '\0');
            for (char& byte : bytes) {
                byte = static_cast<char>(random());
            }
            writer.text({TenantId{tenant}, RequestId{random() % 4},
                         static_cast<TextKind>(1 + random() % 5), bytes});
        }
        if (i % 37 == 0) {
            check(writer.commit().has_value(), "a test's disk has room");
        }
    }
    check(writer.commit().has_value(), "a test's disk has room");
}

int show(const Path& path) {
    auto reader = TraceReader::open(path);
    TraceChunk chunk;
    std::uint64_t event_number = 0;
    std::vector<std::string> texts;
    while (reader) {
        const auto more = reader->next(chunk);
        if (!more) {
            fmt::print(stderr, "{}\n", more.error().message);
            return 3;
        }
        if (!*more) {
            break;
        }
        for (const Event& event : chunk.events) {
            const KindSchema& schema = *schema_of(event.kind);
            const std::string at = event.numbered() ? std::to_string(++event_number) : "null";
            std::string line = fmt::format("{{\"event\": {}, \"kind\": \"{}\"", at, schema.name);
            for (std::size_t i = 0; i < schema.fields.size(); ++i) {
                line += fmt::format(", \"{}\": {}", schema.fields[i].name, event.fields[i]);
            }
            if (schema.has_bytes) {
                line += fmt::format(", \"bytes\": \"{}\"", hex(traces::as_bytes(event.bytes)));
            }
            fmt::print("{}}}\n", line);
        }
        for (const TextRecord& text : chunk.texts) {
            texts.push_back(
                fmt::format("{{\"tenant\": {}, \"request\": {}, \"text\": {}, \"bytes\": \"{}\"}}",
                            number(text.tenant), number(text.request), static_cast<int>(text.kind),
                            hex(traces::as_bytes(text.bytes))));
        }
    }
    if (!reader) {
        fmt::print(stderr, "{}\n", reader.error().message);
        return 3;
    }
    for (const std::string& text : texts) {
        fmt::print("{}\n", text);
    }
    const TraceEnding& ending = reader->ending();
    fmt::print("{{\"end\": \"{}\", \"events\": {}, \"ledger_digest\": \"{}\", \"root\": \"{}\"}}\n",
               ending.end == TraceEnd::closed ? "closed" : "not_closed", ending.last_event,
               hex(reader->ledger_digest()), ending.totals ? hex(ending.totals->root) : "");
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string_view command = argc == 3 ? argv[1] : "";
    if (command == "show") {
        return show(argv[2]);
    }
    if (command != "write") {
        fmt::print(stderr, "trace_sample write FOLDER | show FILE\n");
        return 2;
    }
    const Path folder = argv[2];
    auto closed = new_writer(folder / "closed.kvw.zst");
    fill(*closed, 1, 20000);
    check(closed->close().has_value(), "a test's disk has room");
    auto open = new_writer(folder / "open.kvw.zst");
    fill(*open, 2, 18000);
    return 0;  // without close(): what a crash leaves
}
