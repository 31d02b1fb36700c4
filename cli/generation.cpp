#include "cli/generation.h"

#include "cli/signals.h"

namespace kvw::cli {

namespace {

using Time = std::chrono::steady_clock::time_point;

struct Times {
    Time submitted = std::chrono::steady_clock::now();
    std::optional<Time> first, last;

    void token() {
        last = std::chrono::steady_clock::now();
        first = first ? first : last;
    }
};

double per_second(std::uint64_t count, Time from, Time to) {
    const double seconds = std::chrono::duration<double>(to - from).count();
    return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

void put_times(Generated& made, const Times& times) {
    if (times.first) {
        made.ttft_ms =
            std::chrono::duration<double, std::milli>(*times.first - times.submitted).count();
        made.prefill_tps = per_second(made.facts.prompt_tokens - made.facts.cached_tokens,
                                      times.submitted, *times.first);
        made.decode_tps = per_second(made.ids.size() - 1, *times.first, *times.last);
    }
}

}  // namespace

Generated generate(Engine& engine, GenerateRequest request, Session& session, Progress& progress) {
    Generated made;
    made.prompt_ids = request.prompt_ids;
    Times times;
    progress.begin();
    const Result<RequestId> id = engine.submit(std::move(request));
    if (!id) {
        made.error = id.error();
        made.refused = true;
        return made;
    }
    made.request = std::to_string(number(*id));
    AnswerStream answer(session);
    bool cancelled = false;
    while (!made.finish) {
        if (!cancelled && (stop_signal() != 0 || session.out.broken())) {
            engine.cancel(*id);
            cancelled = true;
        }
        Result<std::vector<Output>> outputs = engine.step();
        if (!outputs) {
            made.error = outputs.error();
            made.engine_stopped = true;
            break;
        }
        for (Output& output : *outputs) {
            progress.clear();
            if (output.id) {
                times.token();
            }
            if (!output.first_logits.empty()) {
                made.first_logits = std::move(output.first_logits);
            }
            answer.take(output);
            if (session.out.broken()) {
                engine.undelivered(*id);
            } else {
                engine.delivered(*id, output.bytes);
            }
            made.finish = output.finish;
            made.error = output.error;
        }
        made.facts = engine.facts(*id);
        if (made.facts.completion_tokens == 0 && made.facts.prompt_tokens > 0) {
            progress.show("reading the prompt", static_cast<double>(made.facts.prefilled) /
                                                    static_cast<double>(made.facts.prompt_tokens));
        }
    }
    progress.clear();
    answer.finish();
    if (made.finish == FinishReason::deadline && !made.error) {
        made.error = Error{ErrorCode::deadline, "the deadline passed after " +
                                                    std::to_string(made.facts.completion_tokens) +
                                                    " tokens (--deadline)"};
    }
    made.ids = answer.ids();
    made.text = answer.text();
    put_times(made, times);
    return made;
}

}  // namespace kvw::cli
