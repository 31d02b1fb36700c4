#include "replay/verify.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>

#include "replay/controls.h"
#include "tests/ledger/history.h"
#include "tests/traces/support.h"
#include "traces/trace.h"

namespace kvw {
namespace {

using test::TempFolder;

History load(std::uint64_t pages = 24, std::uint32_t seed = 3) {
    History history(pages);
    random_history(history, seed, 120, 4);
    return history;
}

// Prefixes in common, and with `split` two pools.
History sharing_load(bool split, std::uint32_t seed = 3) {
    History history(40, split ? 32 : 0);
    history.shares = true;
    random_history(history, seed, 200, 3);
    return history;
}

// Records events as a trace; without `close` the recorder is gone after the last one.
Path record(const TempFolder& folder, const std::vector<Event>& events, bool close = true) {
    const Path path = folder / "run.kvw.zst";
    const test::StoppedClock clock;
    auto writer = TraceWriter::create(
        {.path = path, .run_id = test::some_run_id(), .text = TextMode::none}, clock);
    REQUIRE(writer.has_value());
    for (const Event& event : events) {
        (*writer)->note(event);
        if (event.kind == EventKind::step) {
            REQUIRE((*writer)->commit().has_value());
        }
    }
    REQUIRE((*writer)->commit().has_value());
    if (close) {
        REQUIRE((*writer)->close().has_value());
    }
    return path;
}

Certificate certificate_of(const std::vector<Event>& events, bool close = true,
                           const VerifyOptions& options = {}) {
    const TempFolder folder;
    Result<Certificate> certificate = verify(record(folder, events, close), options);
    REQUIRE(certificate.has_value());
    return *certificate;
}

bool has(const std::vector<std::string>& list, const std::string& one) {
    return std::find(list.begin(), list.end(), one) != list.end();
}

void drop(std::vector<Event>& events, EventKind kind, std::size_t n) {
    const auto found = std::find_if(events.begin(), events.end(), [&](const Event& event) {
        return event.kind == kind && n-- == 0;
    });
    REQUIRE(found != events.end());
    events.erase(found);
}

TEST_CASE("a closed run in good order is proven at level record, with controls in every layer") {
    const History history = load();
    const Certificate certificate = certificate_of(history.events);
    CHECK(certificate.verdict == Verdict::proven);
    CHECK(certificate.level == Level::record);
    CHECK(certificate.closed);
    CHECK(certificate.reasons.empty());
    CHECK(certificate.run == to_string(test::some_run_id()));
    CHECK(certificate.root.size() == 64);
    CHECK(certificate.ledger_digest.size() == 64);
    CHECK(certificate.counts.events == history.events.size());
    for (const ProofLayer layer : {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends}) {
        CAPTURE(name_of(layer));
        CHECK(certificate.layers.at(layer) == LayerState::ok);
        CHECK(certificate.controls.at(layer).planted >= 2);
        CHECK(certificate.controls.at(layer).caught == certificate.controls.at(layer).planted);
    }
    for (const TenantVerdict& tenant : certificate.tenants) {
        CHECK(tenant.verdict == Verdict::proven);
    }
    CHECK(exit_code(certificate, Level::record) == 0);
}

TEST_CASE("the shortest run that reads anything has a control in every layer") {
    History history(4);
    const std::uint64_t id = history.begin(history.tenant("local"), 1);
    history.step({id});
    history.finish(id);
    history.end();
    const Certificate certificate = certificate_of(history.events);
    CHECK(certificate.verdict == Verdict::proven);
    CHECK(certificate.controls.at(ProofLayer::ledger).planted == 3);
    CHECK(certificate.controls.at(ProofLayer::kernel).planted == 2);
    CHECK(certificate.controls.at(ProofLayer::ends).planted == 4);
    CHECK_FALSE(certificate.shares_used);
    CHECK(to_json(certificate)["claim"] == "writer_only");
}

TEST_CASE("a run with shares says so, and has controls for them and for what was moved") {
    for (const bool split : {false, true}) {
        CAPTURE(split);
        const History history = sharing_load(split);
        const Certificate certificate = certificate_of(history.events);
        CHECK(certificate.verdict == Verdict::proven);
        CHECK(certificate.shares_used);
        CHECK(certificate.counts.shares > 10);
        CHECK((certificate.counts.transfers > 10) == split);
        const nlohmann::json json = to_json(certificate);
        CHECK(json["claim"] == "writer_or_declared_share");
        CHECK(json["counts"]["shares"] == certificate.counts.shares);
        CHECK(to_text(certificate).find("or one with a declared share") != std::string::npos);
        CHECK(to_text(certificate)
                  .find(std::to_string(certificate.counts.shares) + " pages adopted") !=
              std::string::npos);
        for (const ProofLayer layer : {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends}) {
            CAPTURE(name_of(layer));
            CHECK(certificate.controls.at(layer).caught == certificate.controls.at(layer).planted);
        }
        // Read, row more, scrub, stranger's adopt, share left out; with two pools the transfer.
        CHECK(certificate.controls.at(ProofLayer::ledger).planted >= (split ? 6 : 5));
        CHECK(certificate.controls.at(ProofLayer::ends).planted >= 5);
    }
}

TEST_CASE("an offer that nobody takes leaves the strict claim as it is") {
    History history(8);
    history.shares = true;
    const std::uint64_t id = history.begin(history.tenant("local"), 40);
    history.step({id});
    history.finish(id);
    history.end();
    const Certificate certificate = certificate_of(history.events, true, {.strict = true});
    CHECK(certificate.verdict == Verdict::proven);
    CHECK(to_json(certificate)["claim"] == "writer_only");
}

TEST_CASE("strict: whoever adopts what another request wrote is named with its writer") {
    const History history = sharing_load(false);
    const Certificate certificate = certificate_of(history.events, true, {.strict = true});
    CHECK(certificate.verdict == Verdict::violation);
    CHECK(certificate.violations_total == certificate.counts.shares);
    for (const Violation& violation : certificate.violations) {
        CHECK(violation.kind == ViolationKind::undeclared_share);
        REQUIRE(violation.writer.has_value());
        CHECK(violation.writer->tenant == violation.reader.tenant);
        CHECK_FALSE(*violation.writer == violation.reader);
        CHECK(violation.row_end == kPageTokens);
    }
    CHECK(exit_code(certificate, Level::record) == 1);
}

TEST_CASE("another tenant's page in a table is a violation even when the page is shared") {
    History history(8);
    history.shares = true;
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t donor = history.begin(a, 40);
    history.step({donor});
    const std::uint64_t thief = history.submit(b, 40, 8);
    history.admit(thief);
    history.adopt(thief, 0);
    history.step({thief});
    const Certificate certificate = certificate_of(history.events, false);
    CHECK(certificate.verdict == Verdict::violation);
    const nlohmann::json json = to_json(certificate);
    REQUIRE(json["violations"].size() == 2);
    for (const nlohmann::json& violation : json["violations"]) {
        CHECK(violation["kind"] == "foreign_row");
        CHECK(violation["reader"] == nlohmann::json{{"tenant", "blue"}, {"request", "2"}});
        CHECK(violation["writer"] == nlohmann::json{{"tenant", "acme"}, {"request", "1"}});
    }
}

TEST_CASE("a trace of version 1.0 is proven as it was") {
    const auto certificate = verify(KVW_SOURCE_DIR "/tests/data/record_1_0.kvw.zst");
    REQUIRE(certificate.has_value());
    CHECK(certificate->verdict == Verdict::proven);
    CHECK(certificate->level == Level::record);
    CHECK(certificate->counts.requests == 4);
    CHECK(certificate->counts.slots == 0);
    CHECK(certificate->counts.samples > 0);
    CHECK(certificate->ledger_digest ==
          "199827a9ac2f789ee7aaee2fd8abd7204c629b669c073fd5f63b30bedb735bcf");
    CHECK(to_json(*certificate)["claim"] == "writer_only");

    // The same without slots from a recorder of today is not.
    History history = load();
    std::erase_if(history.events, [](const Event& event) { return event.kind == EventKind::slot; });
    CHECK(certificate_of(history.events).verdict == Verdict::violation);
}

TEST_CASE("a run that was cancelled before its first token is still proven for what it read") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("local"), 40);
    history.step({id}, 16);
    history.add(events::Cancel{id, 3});
    history.finish(id, FinishReason::cancelled);
    history.end();
    CHECK(certificate_of(history.events).verdict == Verdict::proven);
}

TEST_CASE("refusals alone are a run in which nothing was read") {
    History history(4);
    const std::uint64_t tenant = history.tenant("local");
    history.reject(history.submit(tenant, 1000, 1));
    history.end();
    const Certificate certificate = certificate_of(history.events);
    CHECK(certificate.verdict == Verdict::unproven);
    CHECK(certificate.reasons == std::vector<std::string>{"nothing_read"});
    CHECK(certificate.tenants[0].verdict == Verdict::nothing_read);
    CHECK(exit_code(certificate, Level::none) == 6);
}

TEST_CASE("a violation is named with its moment, its reader and its writer") {
    History history(8);
    const std::uint64_t a = history.tenant("acme"), b = history.tenant("blue");
    const std::uint64_t victim = history.begin(a, 20), thief = history.begin(b, 10);
    history.step({victim});
    history.pages_next = {0};
    history.step({thief});
    history.step({victim});
    const Certificate certificate = certificate_of(history.events, false);
    CHECK(certificate.verdict == Verdict::violation);
    CHECK(has(certificate.reasons, "not_closed"));
    CHECK(exit_code(certificate, Level::record) == 1);
    const nlohmann::json json = to_json(certificate);
    bool named = false;
    for (const nlohmann::json& violation : json["violations"]) {
        if (violation["kind"] == "foreign_row") {
            named = true;
            CHECK(violation["layer"] == "ledger");
            CHECK(violation["reader"] == nlohmann::json{{"tenant", "acme"}, {"request", "1"}});
            CHECK(violation["writer"] == nlohmann::json{{"tenant", "blue"}, {"request", "2"}});
            CHECK(violation["rows"] == nlohmann::json{0, 16});
            const std::string moment = violation["moment"];
            const std::size_t event = std::stoul(moment.substr(33));
            CHECK(moment.substr(0, 33) == to_string(test::some_run_id()) + ":");
            CHECK(history.events[event - 1].kind == EventKind::rows);
        }
    }
    CHECK(named);
}

TEST_CASE(
    "a run whose recorder is gone is unproven, and nothing it had no time for is held against it") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("local"), 20);
    history.step({id});
    history.step({id});
    const Certificate certificate = certificate_of(history.events, false);
    CHECK(certificate.verdict == Verdict::unproven);
    CHECK(certificate.violations_total == 0);
    CHECK(has(certificate.reasons, "not_closed"));
    CHECK(certificate.counts.reads == 2);
    CHECK(exit_code(certificate, Level::none) == 6);
}

TEST_CASE("a trace that a recorder still writes is live") {
    const TempFolder folder;
    const test::StoppedClock clock;
    const Path path = folder / "run.kvw.zst";
    auto writer = TraceWriter::create({.path = path, .run_id = test::some_run_id()}, clock);
    REQUIRE(writer.has_value());
    const History history = load();
    for (std::size_t i = 0; i < history.events.size() / 2; ++i) {
        (*writer)->note(history.events[i]);
    }
    REQUIRE((*writer)->commit().has_value());
    const Result<Certificate> certificate = verify(path);
    REQUIRE(certificate.has_value());
    CHECK(certificate->verdict == Verdict::unproven);
    CHECK(has(certificate->reasons, "live"));
    CHECK(certificate->violations_total == 0);
}

TEST_CASE(
    "a cut file is never proven, wherever it is cut, and a violation before the cut stays one") {
    const History clean = load();
    History broken = load();
    drop(broken.events, EventKind::scrub, 2);  // early
    for (const bool planted : {false, true}) {
        const TempFolder folder;
        const Path path = record(folder, planted ? broken.events : clean.events);
        const std::uintmax_t size = std::filesystem::file_size(path);
        for (std::uintmax_t cut = 1; cut < size; cut += 1 + cut / 7) {
            CAPTURE(cut);
            std::filesystem::copy_file(path, folder / "cut.kvw.zst");
            std::filesystem::resize_file(folder / "cut.kvw.zst", size - cut);
            const Result<Certificate> certificate = verify(folder / "cut.kvw.zst");
            if (certificate) {
                CHECK(certificate->verdict != Verdict::proven);
                CHECK(certificate->verdict == (planted && certificate->counts.reads > 0
                                                   ? Verdict::violation
                                                   : Verdict::unproven));
                CHECK(
                    (has(certificate->reasons, "torn") || has(certificate->reasons, "not_closed")));
            } else {
                CHECK(certificate.error().code == ErrorCode::bad_trace);
            }
            std::filesystem::remove(folder / "cut.kvw.zst");
        }
    }
}

TEST_CASE("a changed byte is bad input") {
    const TempFolder folder;
    const Path path = record(folder, load().events);
    std::string bytes = test::bytes_of(path);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
    std::ofstream(path, std::ios::binary) << bytes;
    const Result<Certificate> certificate = verify(path);
    REQUIRE_FALSE(certificate.has_value());
    CHECK(certificate.error().code == ErrorCode::bad_trace);
    CHECK_FALSE(verify(folder / "nowhere.kvw.zst").has_value());
}

TEST_CASE(
    "gaps, fault plans, unchecked headers and a missing end lower the verdict and accuse nobody") {
    const struct {
        const char* code;
        std::function<void(std::vector<Event>&)> change;
    } cases[] = {
        {"gap",
         [](auto& events) {
             events.insert(events.begin() + 4, Event::of(events::Gap{1, 5}));
         }},
        {"fault_plan_active",
         [](auto& events) {
             events.insert(events.begin() + 4, Event::of(events::Fault{1}, "late-write"));
         }},
        {"headers_not_checked", [](auto& events) { events[0].fields[2] = 0; }},
        {"no_run_end", [](auto& events) { events.pop_back(); }},
    };
    for (const auto& one : cases) {
        CAPTURE(one.code);
        History history = load();
        one.change(history.events);
        const Certificate certificate = certificate_of(history.events);
        CHECK(certificate.verdict == Verdict::unproven);
        CHECK(certificate.violations_total == 0);
        CHECK(certificate.reasons == std::vector<std::string>{one.code});
        CHECK(exit_code(certificate, Level::record) == 6);
    }
}

TEST_CASE("a fault plan hides no violation, and the recorder's own conclusion adds none") {
    History history = load();
    history.events.insert(history.events.begin() + 4, Event::of(events::Fault{1}, "skip-scrub"));
    drop(history.events, EventKind::scrub, 2);
    CHECK(certificate_of(history.events).verdict == Verdict::violation);

    History accused = load();
    accused.events.insert(accused.events.end() - 1,
                          Event::of(events::Violation{1, 0, 1, 0, 16, 2, 2}, "foreign_row"));
    CHECK(certificate_of(accused.events).verdict == Verdict::proven);
}

TEST_CASE("without controls nothing is proven") {
    const TempFolder folder;
    const Result<Certificate> certificate =
        verify(record(folder, load().events), {.controls = false});
    REQUIRE(certificate.has_value());
    CHECK(certificate->verdict == Verdict::unproven);
    CHECK(has(certificate->reasons, "controls_off"));
}

TEST_CASE("controls are planted early and again in the later half") {
    History history(64);
    random_history(history, 5, 1500, 6);
    Ledger ledger;
    Controls controls;
    std::uint64_t number = 0, planted_in_first_half = 0;
    const std::span<const Event> events = history.events;
    REQUIRE(events.size() > 10000);
    for (std::size_t i = 0; i < events.size(); ++i) {
        controls.before(ledger, events.subspan(i));
        ledger.apply(events[i], ++number);
        if (i == events.size() / 2) {
            planted_in_first_half = controls.counts().at(ProofLayer::ledger).planted;
        }
    }
    CHECK(planted_in_first_half >= 6);
    CHECK(controls.counts().at(ProofLayer::ledger).planted > planted_in_first_half);
    CHECK(controls.counts().at(ProofLayer::ledger).planted < 60);  // their cost is bounded
    for (const auto& [layer, count] : controls.counts()) {
        CHECK(count.caught == count.planted);
    }
    ledger.finish(true);
    CHECK(ledger.violations_total() == 0);  // the copies were copies
}

TEST_CASE("random clean runs are proven with every control caught, chunks and tails included") {
    for (std::uint32_t seed = 100; seed < 145; ++seed) {
        CAPTURE(seed);
        const History history = seed % 3 == 0 ? load(24, seed) : sharing_load(seed % 3 == 1, seed);
        const Certificate certificate = certificate_of(history.events);
        CHECK(certificate.verdict == Verdict::proven);
    }
}

TEST_CASE("numbers of an unknown version or class are not called proven") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("local"), 20);
    history.step({id});
    history.finish(id, FinishReason::cancelled);
    history.end();
    REQUIRE(certificate_of(history.events).verdict == Verdict::proven);
    for (const auto& [kind, field] : {std::pair{EventKind::run, 0}, {EventKind::model, 9}}) {
        std::vector<Event> changed = history.events;
        const auto event = std::find_if(changed.begin(), changed.end(),
                                        [&](const Event& e) { return e.kind == kind; });
        REQUIRE(event != changed.end());
        event->fields[static_cast<std::size_t>(field)] = 77;
        const Certificate certificate = certificate_of(changed);
        CHECK(certificate.verdict == Verdict::unproven);
        CHECK(certificate.reasons == std::vector<std::string>{"unknown_numerics"});
    }
}

TEST_CASE("a look at no words, and a look before the scrub, are no looks at the poison") {
    History history(8);
    const std::uint64_t id = history.begin(history.tenant("local"), 20);
    history.step({id});
    history.finish(id, FinishReason::cancelled);
    history.end();
    REQUIRE(certificate_of(history.events).verdict == Verdict::proven);
    std::vector<Event> blind = history.events;
    const auto is_check = [](const Event& e) { return e.kind == EventKind::poison_check; };
    const auto check = std::find_if(blind.begin(), blind.end(), is_check);
    REQUIRE(check != blind.end());
    std::vector<Event> early = blind;
    check->fields[1] = 0;
    CHECK(certificate_of(blind).verdict == Verdict::violation);
    const auto at = std::find_if(early.begin(), early.end(), is_check);
    REQUIRE(at != early.begin());
    REQUIRE(std::prev(at)->kind == EventKind::scrub);
    std::iter_swap(at, std::prev(at));
    CHECK(certificate_of(early).verdict == Verdict::violation);
}

TEST_CASE("progress comes with the number of events") {
    const TempFolder folder;
    History history(64);
    random_history(history, 9, 9000, 6);
    REQUIRE(history.events.size() > 70000);
    const Path path = record(folder, history.events);
    std::vector<std::uint64_t> seen;
    const auto certificate =
        verify(path, {.progress = [&](std::uint64_t events) { seen.push_back(events); }});
    REQUIRE(certificate.has_value());
    CHECK(certificate->verdict == Verdict::proven);
    REQUIRE_FALSE(seen.empty());
    CHECK(seen.back() <= history.events.size());
    CHECK(std::is_sorted(seen.begin(), seen.end()));
}

}  // namespace
}  // namespace kvw
