#include "traces/schema.h"

#include <doctest/doctest.h>

#include <set>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::test;

TEST_CASE("an event is one line with every field in schema order") {
    const Event alloc = Event::of(events::Alloc{7, 0, 3, 42, 2});
    CHECK(to_text(alloc) == "alloc request=7 group=0 index=3 page=42 generation=2");
    const Event witness = Event::of(events::Witness{7, 0xdeadbeef});
    CHECK(to_text(witness) == "witness request=7 sum=0xdeadbeef");
    const Event tenant = Event::of(events::Tenant{1}, "acme\x1b[31m");
    CHECK(to_text(tenant) == "tenant tenant=1 bytes=\"acme\\x1b[31m\"");
}

TEST_CASE("the row form holds facts and leaves content and notes out") {
    std::string rows;
    append_row_form(Event::of(events::Sample{1, 300, 0x12345678}), rows);
    CHECK(hex(traces::as_bytes(rows)) ==
          "2501ac02");  // kind 37, request 1, position 300; no logits
    rows.clear();
    append_row_form(Event::of(events::Tenant{2}, "ab"), rows);
    CHECK(hex(traces::as_bytes(rows)) == "0502026162");
    rows.clear();
    append_row_form(Event::of(events::NoteClock{1, 2}), rows);
    CHECK(rows.empty());
}

TEST_CASE("kinds are in order, names and codes are each used once") {
    std::set<std::string_view> names;
    int previous = 0;
    for (const KindSchema& kind : event_schema()) {
        CHECK(static_cast<int>(kind.kind) > previous);
        previous = static_cast<int>(kind.kind);
        CHECK(names.insert(kind.name).second);
        CHECK(schema_of(kind.kind) == &kind);
        CHECK(schema_named(kind.name) == &kind);
        CHECK(kind.fields.size() <= kEventFields);
    }
    CHECK(schema_of(EventKind{0}) == nullptr);
    CHECK(schema_of(EventKind{200}) == nullptr);
    CHECK(schema_named("no_such_kind") == nullptr);
    for (const char* name :
         {"submit", "reject", "poison_check", "witness_sum", "run_end", "clock", "host"}) {
        CHECK(schema_named(name) != nullptr);
    }
}

TEST_CASE("the schema table of a file parses back to itself, and nothing else parses") {
    const auto own = traces::own_schema();
    const std::string text = traces::schema_text(own);
    const auto parsed = traces::parse_schema(text);
    REQUIRE(parsed.has_value());
    CHECK(traces::schema_text(*parsed) == text);
    for (const char* wrong :
         {"1 run a:v", "0 run a:v\n", "01 run a:v\n", "128 run a:v\n", "1 run a:x\n",
          "1 run a:v a:d\n", "1 Run a:v\n", "1 run  a:v\n", "2 a\n1 b\n", "1 a\n2 a\n",
          "1 a\n1 b\n", "1 run a\n", "1 run :v\n", "1 run a:v?*\n", "\n", "1\n", "1 \n"}) {
        CAPTURE(wrong);
        CHECK_FALSE(traces::parse_schema(wrong).has_value());
    }
}

TEST_CASE("FORMAT.md lists every kind and field as the schema has them") {
    const std::string format = bytes_of(Path(KVW_SOURCE_DIR) / "traces/FORMAT.md");
    REQUIRE_FALSE(format.empty());
    std::string_view rest;
    const std::string text = traces::schema_text(traces::own_schema());
    rest = text;
    while (!rest.empty()) {
        const std::string line(rest.substr(0, rest.find('\n')));
        rest.remove_prefix(line.size() + 1);
        CAPTURE(line);
        CHECK(format.find("| `" + line + "` |") != std::string::npos);
    }
}

TEST_CASE("a text sink shows events as lines and texts by their size alone") {
    TextSink sink;
    TeeSink both({&sink, &sink});
    both.note(Event::of(events::Drain{4}));
    both.text({TenantId{1}, RequestId{2}, TextKind::prompt, "secret"});
    CHECK(both.commit().has_value());
    CHECK(sink.lines() ==
          "drain page=4\ndrain page=4\ntext prompt tenant=1 request=2 bytes=6\n"
          "text prompt tenant=1 request=2 bytes=6\n");
}
