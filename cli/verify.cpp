// verify: the proof from the record alone.
#include "replay/verify.h"

#include <fmt/format.h>

#include <memory>

#include "cli/certificates.h"
#include "cli/commands.h"
#include "cli/places.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

struct VerifyFlags {
    std::vector<std::string> traces;
    std::optional<std::string> trace_dir, certificate;
    std::string require = "record";
    bool strict = false, force = false;
};

struct Verified {
    std::string trace;
    Json certificate;
    Verdict verdict = Verdict::unproven;
    int status = 0;
};

Verified verify_one(const std::string& name, const Store& store, const VerifyFlags& flags,
                    Level required, Session& session, bool several) {
    Progress progress(session);
    const Result<Path> path = store.find(name);
    const VerifyOptions options{.strict = flags.strict, .progress = [&](std::uint64_t events) {
                                    progress.show(fmt::format("{} events", events));
                                }};
    const Result<Certificate> certificate =
        path ? kvw::verify(*path, options) : Result<Certificate>(path.error());
    progress.clear();
    if (several && !session.common.json) {
        session.out.write(printable(path ? path->string() : name) + "\n");
    }
    if (!certificate) {
        if (!session.common.json && several) {
            session.out.write(session.bad("UNPROVEN") + ": " +
                              printable(certificate.error().message) + "\n\n");
        }
        session.say(certificate.error().message);
        return {name, unreadable_certificate(certificate.error()), Verdict::unproven,
                exit_code(certificate.error().code)};
    }
    if (!session.common.json) {
        session.out.write(certificate_text(*certificate, session) + (several ? "\n" : ""));
    }
    return {path->string(), Json(to_json(*certificate)), certificate->verdict,
            exit_code(*certificate, required)};
}

// All proven, or one with a violation, or neither.
std::string_view verdict_of(const std::vector<Verified>& all) {
    bool proven = true;
    for (const Verified& one : all) {
        if (one.verdict == Verdict::violation) {
            return name_of(Verdict::violation);
        }
        proven &= one.verdict == Verdict::proven;
    }
    return name_of(proven ? Verdict::proven : Verdict::unproven);
}

Json certificates_object(const std::vector<Verified>& all) {
    Json object = object_of("certificates");
    object["verdict"] = verdict_of(all);
    object["traces"] = Json::array();
    for (const Verified& one : all) {
        Json certificate = one.certificate;
        certificate["file"] = one.trace;
        object["traces"].push_back(std::move(certificate));
    }
    return object;
}

Result<int> verify_all(const VerifyFlags& flags, Session& session) {
    const Result<Level> required = required_level(flags.require);
    if (!required) {
        return required.error();
    }
    if (const Status free = check_certificate_file(flags.certificate, flags.force); !free) {
        return free.error();
    }
    const Result<Store> store = Store::open(flags.trace_dir);
    if (!store) {
        return store.error();
    }
    const bool several = flags.traces.size() > 1;
    std::vector<Verified> all;
    int status = 0;
    for (const std::string& trace : flags.traces) {
        all.push_back(verify_one(trace, *store, flags, *required, session, several));
        status = worse_exit(status, all.back().status);
    }
    const Json object = several ? certificates_object(all) : all.front().certificate;
    if (session.common.json) {
        session.out.object(object);
    }
    if (const Status written = write_certificate_file(flags.certificate, flags.force, object);
        !written) {
        session.say(written.error().message);
        status = worse_exit(status, exit_code(written.error().code));
    }
    return status;
}

}  // namespace

void add_verify(Commands& commands) {
    const auto verify_flags = std::make_shared<VerifyFlags>();
    VerifyFlags& verify = *verify_flags;
    commands
        .add({"verify", "certificate",
              "prove from the record who read whose rows; no model is needed",
              "  kvwitness verify @latest\n"
              "  kvwitness verify run1.kvw.zst run2.kvw.zst --json\n"
              "  kvwitness verify run.kvw.zst --certificate run.json"},
             [verify_flags](Session& session) { return verify_all(*verify_flags, session); })
        .positionals("TRACE", verify.traces, "A file, @latest, or hex digits of a run in the store")
        .text("--require", "LEVEL", verify.require,
              "Exit 6 below this level: record, execution or solo")
        .flag("--strict", verify.strict, "Any declared share is a violation")
        .text("--certificate", "FILE", verify.certificate,
              "Write the certificate (JSON) into this file", false)
        .flag("--force", verify.force, "Replace an existing certificate file")
        .text("--trace-dir", "DIR", verify.trace_dir, "The store; default: the XDG data folder");
}

}  // namespace kvw::cli
