#include "src/jobs/requests.h"

#include "src/base/check.h"

namespace kvw {

namespace {

// Beyond what the engine runs at once: it has the next ones at hand when some end.
constexpr std::size_t kSpare = 4;

ErrorCode code_of(FinishReason reason) {
    switch (reason) {
        case FinishReason::cancelled:
            return ErrorCode::cancelled;
        case FinishReason::deadline:
            return ErrorCode::deadline;
        case FinishReason::violation:
            return ErrorCode::violation;
        default:
            return ErrorCode::invariant;
    }
}

std::string words_of(FinishReason reason, const RequestFacts& facts) {
    const std::string after =
        " after " + std::to_string(facts.completion_tokens) + " tokens of the answer";
    switch (reason) {
        case FinishReason::cancelled:
            return "cancelled" + after;
        case FinishReason::deadline:
            return "its deadline (--deadline) passed" + after;
        default:
            return std::string(name_of(reason)) + after;
    }
}

}  // namespace

Requests::Requests(const JobContext& context, JobReport& report, Put put)
    : context_(context), report_(report), put_(std::move(put)) {}

bool Requests::room() const {
    const EngineConfig& config = context_.engine.config();
    return running_.size() < config.sequences_max + kSpare &&
           context_.engine.waiting() < config.queue_max;
}

std::size_t Requests::count_of(const std::string& tenant) const {
    const auto found = by_tenant_.find(tenant);
    return found == by_tenant_.end() ? 0 : found->second;
}

Error Requests::stop_engine(Error error) {
    report_.engine_stopped = true;
    return error;
}

Status Requests::submit(JobLine line) {
    Engine& engine = context_.engine;
    if (line.error) {
        const Result<RequestId> noted = engine.note_malformed(line.tenant, line.bytes);
        if (!noted) {
            return stop_engine(noted.error());
        }
        return end_with_error(line, *line.error, std::nullopt, engine.facts(*noted).first_event);
    }
    const Result<RequestId> id = engine.submit(std::move(line.request));
    line.request = {};
    if (!id && !id.error().limit) {
        return stop_engine(id.error());
    }
    if (!id) {
        const Error& refusal = id.error();
        const LineError error{error_name(refusal.code),
                              "line " + std::to_string(line.number) + ": " + refusal.message};
        return end_with_error(line, error, http_status(refusal.code), engine.events_noted());
    }
    ++by_tenant_[line.tenant];
    by_custom_id_.emplace(*line.custom_id, number(*id));
    const std::uint64_t event = engine.facts(*id).first_event;
    running_.emplace(number(*id), Running{.line = std::move(line), .event = event});
    return {};
}

Status Requests::end_with_error(const JobLine& line, const LineError& error,
                                std::optional<int> status, std::uint64_t event, bool violation) {
    const Result<bool> taken =
        put_(line.number, error_line(context_.source, line, error, status, event, violation), true);
    if (!taken) {
        return taken.error();
    }
    if (*taken) {
        ++report_.totals.finished;
        ++report_.totals.failed;
        ++report_.errors[error.code];
    }
    return {};
}

Status Requests::step() {
    const std::int64_t begun = context_.clock.monotonic_ns();
    Result<std::vector<Output>> outputs = context_.engine.step();
    if (!outputs) {
        return stop_engine(outputs.error());
    }
    for (Output& output : *outputs) {
        if (const Status taken = take(output); !taken || report_.engine_stopped) {
            return taken;
        }
    }
    step_ns_ = context_.clock.monotonic_ns() - begun;
    report_.totals.running = running_.size();
    if (context_.progress) {
        context_.progress(report_.totals);
    }
    return context_.after_step ? context_.after_step() : Status{};
}

Status Requests::take(Output& output) {
    const auto found = running_.find(number(output.request));
    check(found != running_.end(), "an output belongs to a line that is running");
    MadeAnswer& made = found->second.made;
    made.text += output.bytes;
    if (output.id) {
        made.ids.push_back(*output.id);
    }
    if (output.id && found->second.line.logprobs) {
        made.logprobs.push_back(std::move(output.logprobs));
    }
    if (!output.finish) {
        return {};
    }
    Running ended = std::move(found->second);
    running_.erase(found);
    forget(ended.line);
    return finish(output.request, std::move(ended), output);
}

void Requests::forget(const JobLine& line) {
    by_custom_id_.erase(*line.custom_id);
    const auto tenant = by_tenant_.find(line.tenant);
    if (--tenant->second == 0) {
        by_tenant_.erase(tenant);
    }
}

// The line is written before the engine records the end of its request, so that the record says
// what was really taken.
Status Requests::finish(RequestId id, Running running, const Output& output) {
    MadeAnswer& made = running.made;
    made.facts = context_.engine.facts(id);
    made.finish = *output.finish;
    report_.totals.prompt_tokens += made.facts.prompt_tokens;
    report_.totals.completion_tokens += made.facts.completion_tokens;
    if (made.finish != FinishReason::stop && made.finish != FinishReason::length) {
        const ErrorCode code = output.error ? output.error->code : code_of(made.finish);
        const bool violation = made.finish == FinishReason::violation;
        report_.violated |= violation;
        const LineError error{
            error_name(code),
            "line " + std::to_string(running.line.number) + ": " +
                (output.error ? output.error->message : words_of(made.finish, made.facts))};
        return end_with_error(running.line, error, http_status(code), running.event, violation);
    }
    const Result<bool> taken = put_(
        running.line.number,
        answer_line(context_.source, running.line, made, context_.tokenizer, running.event), false);
    if (!taken || !*taken) {
        context_.engine.undelivered(id);  // a complete answer that nobody took
        return taken ? Status{} : Status(taken.error());
    }
    ++report_.totals.finished;
    if (!made.text.empty()) {
        context_.engine.delivered(id, made.text);
    }
    return {};
}

bool Requests::cancel(const std::string& custom_id) {
    const auto found = by_custom_id_.find(custom_id);
    return found != by_custom_id_.end() && context_.engine.cancel(RequestId{found->second});
}

void Requests::cancel_all() {
    for (const auto& [id, running] : running_) {
        context_.engine.cancel(RequestId{id});
    }
}

}  // namespace kvw
