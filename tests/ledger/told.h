// What a ledger said, in short, and the events it said it about.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "src/ledger/ledger.h"
#include "traces/event.h"

namespace kvw {

inline std::size_t nth(const std::vector<Event>& events, EventKind kind, std::size_t n = 0) {
    for (std::size_t i = 0; i < events.size(); ++i) {
        if (events[i].kind == kind && n-- == 0) {
            return i;
        }
    }
    FAIL("no such event");
    return 0;
}

inline std::string kinds(const Ledger& ledger) {
    std::string out;
    for (const Violation& violation : ledger.violations()) {
        out += std::string(out.empty() ? "" : " ") + name_of(violation.kind) + "@" +
               name_of(violation.layer);
    }
    return out;
}

inline const Violation* find(const Ledger& ledger, ViolationKind kind,
                             ProofLayer layer = ProofLayer::ledger) {
    for (const Violation& violation : ledger.violations()) {
        if (violation.kind == kind && violation.layer == layer) {
            return &violation;
        }
    }
    return nullptr;
}

inline Owner owner(std::uint32_t tenant, std::uint64_t request) {
    return {TenantId(tenant), RequestId(request)};
}

inline bool has(const std::string& all, const std::string& one) {
    return all.find(one) != std::string::npos;
}

}  // namespace kvw
