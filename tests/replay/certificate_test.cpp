#include "replay/certificate.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace kvw {
namespace {

Owner owner(std::uint32_t tenant, std::uint64_t request) {
    return {TenantId(tenant), RequestId(request)};
}

// What verify makes of a proven trace of two tenants that read and a third one that was refused.
Certificate proven_record() {
    Certificate certificate;
    certificate.run = "0123456789abcdef0123456789abcdef";
    certificate.root = std::string(64, 'a');
    certificate.ledger_digest = std::string(64, 'b');
    certificate.closed = true;
    certificate.counts = {.events = 100,
                          .requests = 4,
                          .tenants = 3,
                          .pages = 5,
                          .reads = 9,
                          .rows_covered = 1234,
                          .witnesses = 9};
    for (const ProofLayer layer : {ProofLayer::ledger, ProofLayer::kernel, ProofLayer::ends}) {
        certificate.layers[layer] = LayerState::ok;
        certificate.controls[layer] = {3, 3};
    }
    const char* names[] = {"acme", "blue", "calm"};
    const std::uint64_t reads[] = {4, 5, 0};
    for (std::uint32_t number = 1; number <= 3; ++number) {
        certificate.tenant_names[number] = names[number - 1];
        certificate.tenants.push_back(
            {.tenant = names[number - 1], .number = number, .reads = reads[number - 1]});
    }
    conclude(certificate);
    return certificate;
}

Violation foreign_read() {
    return {.event = 42,
            .kind = ViolationKind::foreign_row,
            .layer = ProofLayer::ledger,
            .reader = owner(2, 7),
            .writer = owner(1, 3),
            .page = 5,
            .generation = 2,
            .row_begin = 4,
            .row_end = 16,
            .emitted_after = 11,
            .detail = "request 7 reads rows 4 to 15 of page 5, which another owner has"};
}

bool has(const std::vector<std::string>& list, const std::string& one) {
    return std::find(list.begin(), list.end(), one) != list.end();
}

TEST_CASE("a record without violations is proven at level record, and no further") {
    const Certificate certificate = proven_record();
    CHECK(certificate.verdict == Verdict::proven);
    CHECK(certificate.level == Level::record);
    CHECK(certificate.reasons.empty());
    CHECK(certificate.tenants[0].verdict == Verdict::proven);
    CHECK(certificate.tenants[2].verdict == Verdict::nothing_read);  // and does not lower the rest
    CHECK(exit_code(certificate, Level::none) == 0);
    CHECK(exit_code(certificate, Level::record) == 0);
    CHECK(exit_code(certificate, Level::execution) == 6);
}

TEST_CASE("execution and solo raise the level one after the other, never one without the other") {
    Certificate certificate = proven_record();
    merge_layer(certificate, ProofLayer::execution, LayerState::ok, {2, 2}, {});
    conclude(certificate);
    CHECK(certificate.level == Level::execution);
    const std::size_t open_at_execution = certificate.not_excluded.size();
    merge_layer(certificate, ProofLayer::solo, LayerState::ok, {1, 1}, {});
    conclude(certificate);
    CHECK(certificate.level == Level::solo);
    CHECK(certificate.not_excluded.size() < open_at_execution);
    CHECK(exit_code(certificate, Level::solo) == 0);

    Certificate only_solo = proven_record();
    merge_layer(only_solo, ProofLayer::solo, LayerState::ok, {1, 1}, {});
    conclude(only_solo);
    CHECK(only_solo.level == Level::record);
}

TEST_CASE("a layer without a caught control proves nothing") {
    Certificate missed = proven_record();
    missed.controls[ProofLayer::kernel] = {3, 2};
    conclude(missed);
    CHECK(missed.verdict == Verdict::unproven);
    CHECK(missed.layers[ProofLayer::kernel] == LayerState::unproven);
    CHECK(has(missed.reasons, "control_not_caught"));
    CHECK(exit_code(missed, Level::record) == 6);

    Certificate none = proven_record();
    none.controls.erase(ProofLayer::ends);
    conclude(none);
    CHECK(none.verdict == Verdict::unproven);
    CHECK(has(none.reasons, "no_control"));

    // A higher layer that is blind takes nothing from the record.
    Certificate blind = proven_record();
    merge_layer(blind, ProofLayer::execution, LayerState::ok, {1, 0}, {});
    conclude(blind);
    CHECK(blind.verdict == Verdict::proven);
    CHECK(blind.level == Level::record);
    CHECK(has(blind.reasons, "control_not_caught"));
}

TEST_CASE("whatever the record lacks makes it unproven, with its reason") {
    for (const char* code :
         {"not_closed", "torn", "gap", "unknown_critical_event", "fault_plan_active"}) {
        Certificate certificate = proven_record();
        add_incomplete(certificate, code);
        conclude(certificate);
        CHECK(certificate.verdict == Verdict::unproven);
        CHECK(certificate.reasons == std::vector<std::string>{code});
        CHECK(certificate.tenants[0].verdict == Verdict::unproven);
        CHECK(certificate.tenants[2].verdict == Verdict::nothing_read);
        CHECK(exit_code(certificate, Level::none) == 6);
    }
    Certificate empty = proven_record();
    empty.counts.reads = 0;
    conclude(empty);
    CHECK(empty.verdict == Verdict::unproven);
    CHECK(empty.reasons == std::vector<std::string>{"nothing_read"});
}

TEST_CASE(
    "a violation decides, also where the record is torn, and leaves the tenants it does not "
    "touch") {
    Certificate certificate = proven_record();
    certificate.tenants[2].reads = 1;
    certificate.violations = {foreign_read()};
    certificate.violations_total = 1;
    certificate.layers[ProofLayer::ledger] = LayerState::violation;
    conclude(certificate);
    CHECK(certificate.verdict == Verdict::violation);
    CHECK(certificate.tenants[0].verdict == Verdict::violation);  // whose rows were read
    CHECK(certificate.tenants[1].verdict == Verdict::violation);  // who read them
    CHECK(certificate.tenants[2].verdict == Verdict::proven);
    CHECK(exit_code(certificate, Level::record) == 1);

    add_incomplete(certificate, "torn");
    conclude(certificate);
    CHECK(certificate.verdict == Verdict::violation);
    CHECK(has(certificate.reasons, "torn"));
    CHECK(certificate.tenants[2].verdict == Verdict::unproven);
    CHECK(exit_code(certificate, Level::record) == 1);
}

TEST_CASE("a violation that names nobody leaves no tenant proven") {
    Certificate certificate = proven_record();
    certificate.violations = {
        {.event = 99, .kind = ViolationKind::unrecorded_read, .layer = ProofLayer::kernel}};
    certificate.violations_total = 1;
    certificate.layers[ProofLayer::kernel] = LayerState::violation;
    conclude(certificate);
    CHECK(certificate.verdict == Verdict::violation);
    CHECK(certificate.tenants[0].verdict == Verdict::unproven);
    CHECK(certificate.tenants[1].verdict == Verdict::unproven);
}

TEST_CASE("merging a layer again replaces what it said") {
    Certificate certificate = proven_record();
    merge_layer(certificate, ProofLayer::execution, LayerState::ok, {1, 1},
                {{.event = 5, .kind = ViolationKind::bit_divergence, .reader = owner(1, 1)}});
    conclude(certificate);
    CHECK(certificate.verdict == Verdict::violation);
    CHECK(certificate.layers[ProofLayer::execution] == LayerState::violation);
    CHECK(certificate.violations[0].layer == ProofLayer::execution);
    merge_layer(certificate, ProofLayer::execution, LayerState::ok, {1, 1}, {});
    conclude(certificate);
    CHECK(certificate.violations_total == 0);
    CHECK(certificate.verdict == Verdict::proven);
    CHECK(certificate.level == Level::execution);
}

TEST_CASE("the level is the lowest among tenants that read anything") {
    Certificate certificate = proven_record();
    merge_layer(certificate, ProofLayer::execution, LayerState::ok, {1, 1}, {});
    merge_layer(certificate, ProofLayer::solo, LayerState::ok, {1, 1}, {});
    cap_tenant(certificate, TenantId(3), Level::record, "text_shredded");  // it read nothing
    conclude(certificate);
    CHECK(certificate.level == Level::solo);
    cap_tenant(certificate, TenantId(2), Level::record, "text_shredded");
    conclude(certificate);
    CHECK(certificate.level == Level::record);
    CHECK(certificate.tenants[0].level == Level::solo);
    CHECK(certificate.tenants[1].level == Level::record);
    CHECK(certificate.reasons == std::vector<std::string>{"text_shredded"});
}

TEST_CASE("an imported trace is proven at level record at most") {
    Certificate certificate = proven_record();
    certificate.imported = true;
    merge_layer(certificate, ProofLayer::execution, LayerState::ok, {1, 1}, {});
    conclude(certificate);
    CHECK(certificate.level == Level::record);
    CHECK(has(certificate.reasons, "imported"));
}

TEST_CASE("concluding twice changes nothing") {
    Certificate certificate = proven_record();
    add_incomplete(certificate, "torn");
    certificate.reasons.push_back("solo_sampled: 10 of 100 requests");
    certificate.controls[ProofLayer::ends] = {1, 0};
    conclude(certificate);
    const std::string once = to_json(certificate).dump();
    conclude(certificate);
    CHECK(to_json(certificate).dump() == once);
    CHECK(certificate.reasons.size() == 3);
}

TEST_CASE("levels are known by their names") {
    CHECK(level_named("record") == Level::record);
    CHECK(level_named("execution") == Level::execution);
    CHECK(level_named("solo") == Level::solo);
    CHECK_FALSE(level_named("none").has_value());
    CHECK_FALSE(level_named("Record").has_value());
}

TEST_CASE("the JSON form and the text form are those of the golden files") {
    Certificate certificate = proven_record();
    certificate.violations = {foreign_read(),
                              {.event = 77,
                               .kind = ViolationKind::consumed_mismatch,
                               .layer = ProofLayer::ends,
                               .reader = owner(2, 7),
                               .detail = "request 7: the tokens consumed are not the 20 admitted"}};
    certificate.violations_total = 2;
    certificate.layers[ProofLayer::ledger] = LayerState::violation;
    certificate.layers[ProofLayer::ends] = LayerState::violation;
    add_incomplete(certificate, "fault_plan_active");
    conclude(certificate);
    const struct {
        const char* file;
        std::string content;
    } forms[] = {{"certificate.json", to_json(certificate).dump(2) + "\n"},
                 {"certificate.txt", to_text(certificate)}};
    for (const auto& form : forms) {
        CAPTURE(form.file);
        const std::string path = std::string(KVW_SOURCE_DIR "/tests/golden/") + form.file;
        const char* mode = std::getenv("KVW_GOLDEN");
        if (mode != nullptr && std::string_view(mode) == "write") {
            std::ofstream(path, std::ios::binary) << form.content;
        }
        std::ifstream in(path, std::ios::binary);
        const std::string golden{std::istreambuf_iterator<char>(in), {}};
        CHECK(form.content == golden);
    }
}

TEST_CASE("a tenant's name is shown without anything a terminal would obey") {
    Certificate certificate = proven_record();
    certificate.tenants[2].tenant = "a\x1b[2Jb";
    CHECK(to_text(certificate).find('\x1b') == std::string::npos);
}

}  // namespace
}  // namespace kvw
