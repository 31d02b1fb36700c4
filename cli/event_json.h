// Events as JSON records: request ids as decimal strings, digests and sums as hex, reasons by name.
#pragma once

#include <map>
#include <string>

#include "cli/session.h"
#include "traces/event.h"

namespace kvw::cli {

// `tenants`: names by number, so that a submit can name its tenant.
Json event_json(const Event& event, std::uint64_t event_number,
                const std::map<std::uint64_t, std::string>& tenants);
// What a text record holds: prompts as text, ids as numbers; a key as hex.
Json text_json(const TextRecord& record, const std::map<std::uint64_t, std::string>& tenants);

}  // namespace kvw::cli
