// What a trace says was asked for: enough to ask for it again. Read in one pass, before execution.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "src/base/file.h"
#include "src/base/result.h"
#include "src/base/sha256.h"
#include "src/engine/engine.h"
#include "traces/event.h"

namespace kvw {

struct RecordedRequest {
    std::uint64_t request = 0;
    std::uint32_t tenant = 0;
    std::uint64_t submit_event = 0;  // the moment it arrived
    events::Submit submit{};
    SamplingOptions sampling;  // with its stop strings
    std::string prompt;        // text: empty when the trace carries none
    std::vector<TokenId> prompt_ids;
    std::vector<TokenId> ids;  // sampled, in order
    bool rejected = false;
    bool malformed = false;  // no prompt: only a line that none could be read from
    // Where what a layer digest covers begins: behind the rows that were adopted, and at 0 once it
    // was preempted, because then it computed all anew.
    std::uint64_t layers_first_from = 0, layers_finish_from = 0;
    bool preempted = false;
    std::optional<events::Finish> finish;
    std::optional<events::Rendered> rendered;
    std::map<std::uint64_t, std::uint64_t> layers_first, layers_finish;  // layer -> keyed digest
    std::map<std::uint64_t, std::uint64_t> samples;        // position -> keyed chain, low 32 bits
    std::map<std::uint64_t, std::uint64_t> sample_events;  // position -> event number
};

struct RecordedRun {
    EngineConfig config;
    ModelIdentity model;
    std::map<std::uint32_t, std::string> tenants;
    std::map<std::uint32_t, Digest256> keys;  // by tenant
    std::map<std::uint64_t, RecordedRequest> requests;
    bool has_text = false;
    // Text that stands in the section of a tenant whose request it is not: request -> tenant.
    std::map<std::uint64_t, std::uint32_t> misplaced_texts;
};

// Fails: bad_trace (also when an event contradicts an earlier one), io.
Result<RecordedRun> read_recorded_run(const Path& trace);

// What one more event or text adds to it: for records that are still being made. `number`: of the
// event. Fails: bad_trace.
Status fold_into(RecordedRun& run, const Event& event, std::uint64_t number);
Status fold_into(RecordedRun& run, const TextRecord& text);

}  // namespace kvw
