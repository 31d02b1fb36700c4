#include "cli/certificates.h"

#include <fmt/format.h>

#include "cli/places.h"

namespace kvw::cli {

Result<Level> required_level(const std::string& name) {
    const std::optional<Level> level = level_named(name);
    if (!level || *level == Level::none) {
        return Error{ErrorCode::usage,
                     fmt::format("--require: '{}' is not one of record|execution|solo", name)};
    }
    return *level;
}

Json unreadable_certificate(const Error& error) {
    Json object = object_of("certificate");
    object["verdict"] = "UNPROVEN";
    object["error"] = error_object(error, exit_code(error.code));
    return object;
}

std::string certificate_text(const Certificate& certificate, const Session& session) {
    std::string text = to_text(certificate);
    const std::string verdict = name_of(certificate.verdict);
    if (text.starts_with(verdict)) {
        const std::string shown =
            certificate.verdict == Verdict::proven ? session.good(verdict) : session.bad(verdict);
        text.replace(0, verdict.size(), shown);
    }
    return text;
}

Status check_certificate_file(const std::optional<std::string>& file, bool force) {
    if (file == "-") {
        return Error{ErrorCode::usage,
                     "--certificate takes the name of a file; on stdout, --json prints it instead "
                     "of the verdict in words"};
    }
    return file ? check_output_file("--certificate", *file, force) : Status{};
}

Status write_certificate_file(const std::optional<std::string>& file, bool force,
                              const Json& certificate) {
    if (!file) {
        return {};
    }
    Result<File> out = File::create(*file, force);
    if (!out) {
        return out.error();
    }
    return out->write_all(certificate.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace kvw::cli
