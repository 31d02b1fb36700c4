#include "traces/columns.h"

#include <doctest/doctest.h>

#include "tests/traces/support.h"

using namespace kvw;
using namespace kvw::traces;
using namespace kvw::test;

namespace {

Plans own_plans() {
    Plans plans;
    for (const KindSchema& schema : event_schema()) {
        KindPlan& plan = plans[static_cast<std::uint8_t>(schema.kind)];
        plan.in_file = plan.known = true;
        plan.has_bytes = schema.has_bytes;
        plan.kind = schema.kind;
        for (std::size_t i = 0; i < schema.fields.size(); ++i) {
            plan.fields.push_back(
                {schema.fields[i].code, schema.fields[i].content, static_cast<std::uint8_t>(i)});
        }
    }
    return plans;
}

struct Sampled {
    std::vector<KeptEvent> events;
    std::string raw;  // without padding
    std::uint64_t numbered = 0, notes = 0;
    Digest256 digest{};
};

Sampled random_section(std::uint64_t seed, std::size_t count) {
    std::mt19937_64 random(seed);
    Sampled section;
    ColumnWriter writer;
    std::string rows;
    for (std::size_t i = 0; i < count; ++i) {
        const auto kinds = event_schema();
        section.events.push_back(random_event(random, kinds[random() % kinds.size()]));
        Event event = section.events.back().event;
        event.bytes = section.events.back().bytes;
        const std::size_t before = writer.size();
        const std::size_t most = writer.bytes_max(event);
        writer.add(event);
        CHECK(writer.size() <= before + most);
        append_row_form(event, rows);
        (event.numbered() ? section.numbered : section.notes) += 1;
    }
    section.digest = sha256(rows);
    const std::size_t bound = writer.size();
    ByteBuffer raw;
    writer.take(raw);
    CHECK(raw.size() <= bound);
    CHECK(writer.count() == 0);
    section.raw.assign(reinterpret_cast<const char*>(raw.data()), raw.size());
    return section;
}

const char* read(std::string raw, const Sampled& section, std::vector<Event>& out,
                 LedgerDigest& digest, EventCounts& counts) {
    static std::string kept;  // events point into it
    kept = std::move(raw);
    const std::size_t size = kept.size();
    kept.append(kVarintMax, '\0');
    return read_columns({reinterpret_cast<const std::uint8_t*>(kept.data()), size}, own_plans(),
                        section.numbered, section.notes, out, digest, counts);
}

}  // namespace

TEST_CASE("columns give back every event of every kind, and the digest of their row forms") {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        const Sampled section = random_section(seed, 500);
        std::vector<Event> out(3);  // what was there before does not show
        out[0].fields.fill(99);
        LedgerDigest digest;
        EventCounts counts;
        REQUIRE(read(section.raw, section, out, digest, counts) == nullptr);
        REQUIRE(out.size() == section.events.size());
        for (std::size_t i = 0; i < out.size(); ++i) {
            CHECK(out[i].kind == section.events[i].event.kind);
            CHECK(out[i].fields == section.events[i].event.fields);
            CHECK(out[i].bytes == section.events[i].bytes);
        }
        CHECK(digest.digest() == section.digest);
        CHECK(counts.unknown_critical == 0);
    }
}

TEST_CASE("a changed, cut or longer section never reads past its end") {
    const Sampled section = random_section(7, 60);
    std::vector<Event> out;
    std::mt19937_64 random(3);
    for (std::size_t cut = 0; cut < section.raw.size(); ++cut) {
        LedgerDigest digest;
        EventCounts counts;
        CHECK(read(section.raw.substr(0, cut), section, out, digest, counts) != nullptr);
    }
    LedgerDigest digest;
    EventCounts counts;
    CHECK(read(section.raw + '\0', section, out, digest, counts) != nullptr);
    for (int i = 0; i < 3000;
         ++i) {  // most changes give other numbers, some give nonsense: only crashes count
        std::string changed = section.raw;
        for (int n = 0; n < 1 + i % 3; ++n) {
            changed[random() % changed.size()] = static_cast<char>(random());
        }
        LedgerDigest ignored;
        EventCounts ignored_too;
        (void)read(changed, section, out, ignored, ignored_too);
        CHECK(out.size() <= section.events.size());
    }
}

TEST_CASE("a sum that does not fit its fixed width would be a bug of ours, a full one is not") {
    ColumnWriter writer;
    writer.add(Event::of(events::Witness{~0ull, 0xffffffff}));
    writer.add(Event::of(events::WitnessSum{0, ~0ull, ~0ull}));
    CHECK(writer.count() == 2);
}
