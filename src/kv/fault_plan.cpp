#include "src/kv/fault_plan.h"

namespace kvw {

std::string FaultPlan::names() const {
    std::string names;
    const auto add = [&](bool active, const char* name) {
        if (active) {
            names += names.empty() ? "" : ",";
            names += name;
        }
    };
    add(stale_page_table.has_value(), "stale-page-table");
    add(disabled_checker, "disabled-checker");
    add(skip_scrub, "skip-scrub");
    add(scrub_without_effect, "scrub-without-effect");
    return names;
}

}  // namespace kvw
