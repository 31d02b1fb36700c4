#include "replay/replay.h"

#include <chrono>

#include "replay/execute.h"
#include "replay/solo.h"

namespace kvw {

namespace {

class Stopwatch {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

LayerState state_of(const ControlCount& controls, bool violations, bool complete) {
    if (violations) {
        return LayerState::violation;
    }
    const bool checked = controls.planted > 0 && controls.caught == controls.planted;
    return checked && complete ? LayerState::ok : LayerState::unproven;
}

// Why the record is not worth executing, or nothing.
std::string not_executable(const Certificate& certificate, const RecordedRun& recorded) {
    if (certificate.verdict != Verdict::proven) {
        return "execution_not_run: the record itself is not proven";
    }
    if (!recorded.has_text) {
        return "execution_not_run: the trace carries no text, so nothing can be asked again";
    }
    return {};
}

// Where a divergence is: which token of which request, and the first layer that differs.
void locate(Divergence& divergence, const RecordedRun& recorded, const ReplayModel& model) {
    const auto entry = recorded.requests.find(divergence.request);
    if (divergence.request == 0 || entry == recorded.requests.end()) {
        return;
    }
    if (!divergence.token) {
        // The first sample at or after the event: the token that this difference reaches first.
        for (const auto& [position, event] : entry->second.sample_events) {
            if (event >= divergence.event) {
                divergence.token = position;
                break;
            }
        }
    }
    if (!divergence.layer) {
        const auto layer = first_differing_layer(recorded, model, divergence.request);
        if (layer) {
            divergence.layer = *layer;
        }
    }
}

// Text in a section whose key opens it for a tenant that it is not of.
std::vector<Violation> misplaced_texts(const RecordedRun& recorded) {
    std::vector<Violation> violations;
    for (const auto& [id, tenant] : recorded.misplaced_texts) {
        const RecordedRequest& entry = recorded.requests.at(id);
        Violation violation;
        violation.event = entry.submit_event;
        violation.kind = ViolationKind::wrong_text_section;
        violation.layer = ProofLayer::ends;
        violation.reader.tenant = TenantId{tenant};
        violation.writer = Owner{TenantId{entry.tenant}, RequestId{id}};
        violation.detail = "text of request " + std::to_string(id) +
                           (entry.submit_event == 0 ? ", which was never submitted," : "") +
                           " stands in the section of tenant " + std::to_string(tenant);
        violations.push_back(std::move(violation));
    }
    return violations;
}

}  // namespace

Result<ReplayResult> replay(const Path& trace, const ReplayModel& model,
                            const ReplayOptions& options) {
    ReplayResult result;
    Stopwatch record_watch;
    auto certificate = verify(trace, {.strict = options.strict});
    if (!certificate) {
        return certificate.error();
    }
    result.certificate = std::move(*certificate);
    result.record_s = record_watch.seconds();

    auto recorded = read_recorded_run(trace);
    if (!recorded) {
        return recorded.error();
    }
    if (const Status chosen = check_choice(*recorded, options.solo); !chosen) {
        return chosen.error();
    }
    if (recorded->model.sha256 != model.sha256 && !options.other_model) {
        return Error{
            ErrorCode::bad_model,
            "the trace was recorded with a model of SHA-256 " + hex(recorded->model.sha256) +
                ", this file has " + hex(model.sha256) +
                ": give the recorded model with -m, or --other-model to see where they part"};
    }
    if (!recorded->misplaced_texts.empty()) {
        merge_layer(result.certificate, ProofLayer::ends, LayerState::violation,
                    result.certificate.controls[ProofLayer::ends], misplaced_texts(*recorded));
        conclude(result.certificate);
        return result;
    }
    const std::string why_not = not_executable(result.certificate, *recorded);
    if (!why_not.empty()) {
        result.certificate.reasons.push_back(why_not);
        return result;
    }

    Stopwatch execution_watch;
    auto execution = execute(trace, *recorded, model, options);
    if (!execution) {
        return execution.error();
    }
    result.execution_s = execution_watch.seconds();
    if (execution->divergence) {
        locate(*execution->divergence, *recorded, model);
        result.divergence = execution->divergence;
    }
    if (!execution->complete && !execution->divergence) {
        result.certificate.reasons.push_back("execution_until: stopped where --until said");
    }
    merge_layer(result.certificate, ProofLayer::execution,
                state_of(execution->controls, !execution->violations.empty(), execution->complete),
                execution->controls, execution->violations);

    if (options.solo.on && !execution->divergence && execution->complete) {
        Stopwatch solo_watch;
        auto solo = run_solo(*recorded, model, options);
        if (!solo) {
            return solo.error();
        }
        result.solo_s = solo_watch.seconds();
        if (solo->sampled) {
            result.certificate.reasons.push_back("solo_sampled: " + std::to_string(solo->requests) +
                                                 " requests were re-run alone, not all");
        }
        merge_layer(result.certificate, ProofLayer::solo,
                    state_of(solo->controls, !solo->violations.empty(), !solo->sampled),
                    solo->controls, solo->violations);
    }
    conclude(result.certificate);
    return result;
}

}  // namespace kvw
