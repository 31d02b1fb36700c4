// verify: the proof from the record alone. No engine, no model, no text is needed or linked.
#pragma once

#include <cstdint>
#include <functional>

#include "replay/certificate.h"
#include "src/base/file.h"
#include "src/base/result.h"

namespace kvw {

struct VerifyOptions {
    bool strict = false;   // any share is a violation
    bool controls = true;  // off only in benchmarks that say so
    // Called about every 64 KiB of events with the number of events seen; may be empty.
    std::function<void(std::uint64_t)> progress;
};

// One pass over the trace, bounded memory: layers ledger, kernel, ends, and the controls of each.
// What is torn, not closed, unknown, empty or without a caught control is UNPROVEN with its reason.
// Fails: io; bad_trace (any digest mismatch, not a trace). A torn trace is a certificate, not a
// failure.
Result<Certificate> verify(const Path& trace, const VerifyOptions& options = {});

}  // namespace kvw
