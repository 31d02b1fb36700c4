// Faults as a value: what a test (and only a test, a drill or `replay --fault`) makes go wrong,
// through the code path where it would go wrong. `run` and `batch` have no way to make one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvw {

struct FaultPlan {
    // stale-page-table: from step `at_step` on, request `reader` is handed entry 0 of request
    // `victim`'s table in place of its own entry 0 (page and generation as they are for the
    // victim).
    struct StalePageTable {
        std::uint64_t reader = 0, victim = 0, at_step = 0;
    };
    std::optional<StalePageTable> stale_page_table;
    // disabled-checker: kernels compare no headers; the witness stands alone.
    bool disabled_checker = false;
    // skip-scrub: freed pages become allocatable without scrub and without its event.
    bool skip_scrub = false;
    // scrub-without-effect: the event is noted, the memory is not touched.
    bool scrub_without_effect = false;

    bool active() const {
        return stale_page_table || disabled_checker || skip_scrub || scrub_without_effect;
    }
    // "stale-page-table": the names of CLI.md, comma-separated.
    std::string names() const;
};

}  // namespace kvw
