// verify: the proof from the record alone.
#include "replay/verify.h"

#include <fmt/format.h>

#include <memory>

#include "cli/certificates.h"
#include "cli/commands.h"
#include "cli/places.h"
#include "src/base/text.h"
#include "src/jobs/answer_check.h"

namespace kvw::cli {

namespace {

struct VerifyFlags {
    std::vector<std::string> traces;
    std::optional<std::string> trace_dir, certificate, answers, input;
    std::string require = "record";
    bool strict = false, force = false;
};

struct Verified {
    std::string trace;
    Json certificate;
    Verdict verdict = Verdict::unproven;
    int status = 0;
};

// What the output file says beside what the trace says, as part of layer `ends`.
void tie_answers(Certificate& certificate, const AnswerCheck& answers, std::size_t trace) {
    std::vector<Violation> violations;
    for (const Violation& violation : certificate.violations) {
        if (violation.layer == ProofLayer::ends) {
            violations.push_back(violation);
        }
    }
    for (const AnswerFinding& finding : answers.findings) {
        if (finding.trace == trace) {
            violations.push_back({.event = finding.event,
                                  .kind = finding.input ? ViolationKind::consumed_mismatch
                                                        : ViolationKind::emitted_not_sampled,
                                  .reader = finding.reader,
                                  .detail = finding.detail});
        }
    }
    ControlCount controls = certificate.controls[ProofLayer::ends];
    controls.planted += answers.planted;
    controls.caught += answers.caught;
    merge_layer(certificate, ProofLayer::ends, certificate.layers[ProofLayer::ends], controls,
                std::move(violations));
    for (const std::string& code : answers.incomplete) {
        add_incomplete(certificate, code);
    }
    conclude(certificate);
}

// None: no answers are to be tied.
Result<std::optional<AnswerCheck>> read_answers(const VerifyFlags& flags, const Store& store) {
    if (!flags.answers && !flags.input) {
        return std::optional<AnswerCheck>();
    }
    if (!flags.answers || !flags.input) {
        return Error{ErrorCode::usage, "--answers OUT and --input IN go together"};
    }
    std::vector<Path> traces;
    for (const std::string& name : flags.traces) {
        const Result<Path> path = store.find(name);
        if (!path) {
            return path.error();
        }
        traces.push_back(*path);
    }
    Result<AnswerCheck> answers = check_answers(traces, *flags.answers, *flags.input);
    if (!answers) {
        return answers.error();
    }
    return std::optional(std::move(*answers));
}

Verified verify_one(const std::string& name, const Store& store, const VerifyFlags& flags,
                    Level required, Session& session, bool several,
                    const std::optional<AnswerCheck>& answers, std::size_t index) {
    Progress progress(session);
    const Result<Path> path = store.find(name);
    const VerifyOptions options{.strict = flags.strict, .progress = [&](std::uint64_t events) {
                                    progress.show(fmt::format("{} events", events));
                                }};
    Result<Certificate> certificate =
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
    if (answers) {
        tie_answers(*certificate, *answers, index);
    }
    Json object(to_json(*certificate));
    if (answers) {
        object["answers"] = {{"lines", answers->lines}, {"tied", answers->tied}};
    }
    if (!session.common.json) {
        session.out.write(certificate_text(*certificate, session));
        if (answers) {
            session.out.write(
                fmt::format("{} of {} answers are tied to the record and their input lines\n",
                            answers->tied, answers->lines));
        }
        session.out.write(several ? "\n" : "");
    }
    return {path->string(), std::move(object), certificate->verdict,
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
    for (const std::string& trace : flags.traces) {
        if (const Status named = check_trace_name(trace); !named) {
            return named.error();
        }
    }
    const Result<Store> store = Store::open(flags.trace_dir);
    if (!store) {
        return store.error();
    }
    const Result<std::optional<AnswerCheck>> answers = read_answers(flags, *store);
    if (!answers) {
        return answers.error();
    }
    const bool several = flags.traces.size() > 1;
    std::vector<Verified> all;
    int status = 0;
    for (const std::string& trace : flags.traces) {
        all.push_back(
            verify_one(trace, *store, flags, *required, session, several, *answers, all.size()));
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
              "  kvwitness verify run.kvw.zst --certificate run.json\n"
              "  kvwitness verify run.kvw.zst --answers out.jsonl --input in.jsonl"},
             [verify_flags](Session& session) { return verify_all(*verify_flags, session); })
        .positionals("TRACE", verify.traces, "A file, @latest, or hex digits of a run in the store")
        .text("--require", "LEVEL", verify.require,
              "Exit 6 below this level: record, execution or solo")
        .text("--answers", "OUT", verify.answers,
              "Tie a batch's output to the record: every answer is its request's own", false)
        .text("--input", "IN", verify.input, "The input that it answers", false)
        .flag("--strict", verify.strict, "Any declared share is a violation")
        .text("--certificate", "FILE", verify.certificate,
              "Write the certificate (JSON) into this file", false)
        .flag("--force", verify.force, "Replace an existing certificate file", false)
        .section("trace")
        .text("--trace-dir", "DIR", verify.trace_dir, "The store; default: the XDG data folder");
}

}  // namespace kvw::cli
