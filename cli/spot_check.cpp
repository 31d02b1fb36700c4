#include "cli/spot_check.h"

#include <utility>

#include "replay/solo.h"

namespace kvw::cli {

namespace {

// Events that a re-run needs, all of which begin with their request.
bool is_about_a_request(EventKind kind) {
    switch (kind) {
        case EventKind::submit:
        case EventKind::sampling:
        case EventKind::reject:
        case EventKind::adopt:
        case EventKind::preempt:
        case EventKind::layer:
        case EventKind::sample:
        case EventKind::rendered:
        case EventKind::finish:
            return true;
        default:
            return false;
    }
}

}  // namespace

void SpotCheck::note(const Event& event) {
    events_ += event.numbered() ? 1 : 0;
    if (!is_about_a_request(event.kind) || !chosen(choice_, event.fields[0])) {
        return;
    }
    if (const Status folded = fold_into(run_, event, events_); !folded && status_) {
        status_ = folded;
    }
    if (event.kind == EventKind::finish) {
        ended_.push_back(event.fields[0]);
    } else if (event.kind == EventKind::reject) {
        run_.requests.erase(event.fields[0]);
    }
}

void SpotCheck::text(const TextRecord& record) {
    if (record.kind == TextKind::key || chosen(choice_, number(record.request))) {
        if (const Status folded = fold_into(run_, record); !folded && status_) {
            status_ = folded;
        }
    }
}

Status SpotCheck::check_ended() {
    for (const std::uint64_t request : std::exchange(ended_, {})) {
        ReplayOptions options;
        options.solo.request = request;
        options.solo.controls = checked_ == 0;
        const Result<SoloResult> alone = run_solo(run_, model_, options);
        run_.requests.erase(request);
        if (!alone) {
            return alone.error();
        }
        checked_ += alone->requests;
        if (!alone->violations.empty()) {
            violated_ = true;
            return Error{ErrorCode::violation, "spot check at event " +
                                                   std::to_string(alone->violations.front().event) +
                                                   ": " + alone->violations.front().detail};
        }
        if (alone->controls.caught < alone->controls.planted) {
            return Error{ErrorCode::invariant,
                         "the spot check did not see a fault that was planted to be seen"};
        }
    }
    return {};
}

}  // namespace kvw::cli
