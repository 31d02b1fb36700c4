#include "kernels/sequence.h"

#include <tuple>

namespace kvw {

namespace {

// A total order over everything two faults of one step can differ in, so that the one kept does not
// depend on which thread came first.
auto order(const TileFault& fault) {
    return std::tuple(fault.layer, fault.head, fault.table_index, fault.access, fault.from_shadow,
                      fault.rows, fault.shadow_writer);
}

}  // namespace

void SequenceReport::report(const TileFault& fault) {
    const std::lock_guard<std::mutex> held(fault_lock);
    faults.fetch_add(1, std::memory_order_relaxed);
    if (first_faults.empty()) {
        first_faults.push_back(fault);
    } else if (order(fault) < order(first_faults.front())) {
        first_faults.front() = fault;
    }
}

void SequenceReport::clear() {
    const std::lock_guard<std::mutex> held(fault_lock);
    witness = 0;
    rows_read = 0;
    rows_written = 0;
    faults = 0;
    first_faults.clear();
}

}  // namespace kvw
