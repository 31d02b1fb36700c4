// How verify and replay say what they found.
#pragma once

#include <optional>
#include <string>

#include "cli/session.h"
#include "replay/certificate.h"
#include "src/base/file.h"

namespace kvw::cli {

// "record", "execution" or "solo". Fails: usage.
Result<Level> required_level(const std::string& name);

// The certificate of a trace that could not be read: UNPROVEN, with the reason under "error".
Json unreadable_certificate(const Error& error);

// For people, the verdict in colour.
std::string certificate_text(const Certificate& certificate, const Session& session);

// --certificate FILE. Fails: usage and file_exists (before any work), io.
Status check_certificate_file(const std::optional<std::string>& file, bool force);
Status write_certificate_file(const std::optional<std::string>& file, bool force,
                              const Json& certificate);

}  // namespace kvw::cli
