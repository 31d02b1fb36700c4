// An engine over the tiny model with everything it is given, and what it leaves in the record.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "src/engine/engine.h"
#include "src/ledger/ledger.h"
#include "tests/engine/tiny_model.h"

namespace kvw::test {

struct FakeClock final : Clock {
    std::int64_t now = 0;
    std::int64_t wall_ns() const override { return now; }
    std::int64_t monotonic_ns() const override { return now; }
};

// Keeps events for a look afterwards, and folds them as they come.
class Witnesses final : public EventSink {
  public:
    void note(const Event& event) override {
        events.push_back({event.kind, event.fields, {}});
        texts.emplace_back(event.bytes);
        lines.note(event);
        live.note(event);
        ++since_commit;
    }
    void text(const TextRecord& record) override { lines.text(record); }
    Status commit() override {
        since_commit = 0;
        ++commits;
        if (fails_at == commits) {
            return Error{ErrorCode::disk_full, "no space is left for the trace"};
        }
        return {};
    }
    std::uint64_t count(EventKind kind) const {
        return static_cast<std::uint64_t>(std::count_if(
            events.begin(), events.end(), [&](const Event& e) { return e.kind == kind; }));
    }
    template <class T>
    std::vector<T> all() const {
        std::vector<T> found;
        for (const Event& event : events) {
            if (event.kind == T::kKind) {
                found.push_back(event.as<T>());
            }
        }
        return found;
    }
    // What the prover would come to at the end of a trace that was closed.
    Ledger proof(bool without_violation_events = false) const {
        Ledger ledger;
        std::uint64_t numbered = 0;
        for (std::size_t i = 0; i < events.size(); ++i) {
            Event event = events[i];
            event.bytes = texts[i];
            if (event.kind != EventKind::violation || !without_violation_events) {
                ledger.apply(event, ++numbered);
            }
        }
        ledger.finish(true);
        return ledger;
    }

    std::vector<Event> events;
    std::vector<std::string> texts;
    TextSink lines;
    LiveLedger live{false};
    std::uint64_t since_commit = 0, commits = 0, fails_at = 0;
};

// An engine over the tiny model, with everything it was given.
struct Run {
    explicit Run(EngineConfig config = {}, FaultPlan faults = {}, Isa isa = Isa::ref,
                 unsigned thread_count = 1, bool checked = false, const Clock* clock = nullptr)
        : threads(thread_count) {
        const TinyModel& tiny = TinyModel::shared();
        RunContext context{.sink = &sink,
                           .faults = faults,
                           .tenant_key = fixed_key,
                           .checked = checked,
                           .clock = clock};
        auto made = Engine::create(tiny.model(), tiny.tokenizer(), *kernels_for(isa), threads,
                                   config, {"tiny", {}}, context);
        REQUIRE_MESSAGE(made, (made ? "" : made.error().message));
        engine = std::move(*made);
    }
    RequestId submit(GenerateRequest request) {
        auto id = engine->submit(std::move(request));
        REQUIRE_MESSAGE(id, (id ? "" : id.error().message));
        return *id;
    }
    // One step, its bytes delivered.
    Result<std::vector<Output>> step() {
        auto outputs = engine->step();
        if (outputs) {
            CHECK(sink.since_commit == 0);  // recorded before it is revealed
            for (const Output& output : *outputs) {
                if (output.id) {
                    ids[number(output.request)].push_back(*output.id);
                }
                if (output.finish) {
                    CHECK_FALSE(ends.contains(number(output.request)));
                    ends[number(output.request)] = *output.finish;
                } else {
                    CHECK_FALSE(ends.contains(number(output.request)));
                }
                text[number(output.request)] += output.bytes;
                if (!output.bytes.empty()) {
                    engine->delivered(output.request, output.bytes);
                }
            }
        }
        return outputs;
    }
    void until_idle() {
        for (int steps = 0; !engine->idle(); ++steps) {
            REQUIRE(steps < 5000);
            const auto outputs = step();
            REQUIRE_MESSAGE(outputs, (outputs ? "" : outputs.error().message));
        }
    }
    void to_the_end() {
        until_idle();
        REQUIRE(engine->finish());
    }

    ThreadPool threads;
    Witnesses sink;
    std::unique_ptr<Engine> engine;
    std::map<std::uint64_t, std::vector<TokenId>> ids;
    std::map<std::uint64_t, std::string> text;
    std::map<std::uint64_t, FinishReason> ends;
};

inline std::vector<TokenId> prompt_of(std::size_t tokens, std::uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::vector<TokenId> ids(tokens);
    for (TokenId& id : ids) {
        id = static_cast<TokenId>(random() % 256);
    }
    return ids;
}

inline GenerateRequest asking(std::size_t prompt, std::optional<std::uint32_t> tokens_max,
                              const std::string& tenant = "acme", std::uint32_t seed = 1) {
    GenerateRequest request;
    request.tenant = tenant;
    request.prompt = "prompt " + std::to_string(seed);
    request.prompt_ids = prompt_of(prompt, seed);
    request.tokens_max = tokens_max;
    request.sampling.seed = seed;
    request.sampling.temperature = seed % 2 == 0 ? 0.9f : 0.0f;
    request.sampling.ignore_eos = true;
    return request;
}

inline std::string first_words(const std::string& lines) {
    std::istringstream in(lines);
    std::string words, line;
    while (std::getline(in, line)) {
        std::string word = line.substr(0, line.find(' '));
        if (word == "text") {
            word += ":" + line.substr(5, line.find(' ', 5) - 5);
        }
        words += (words.empty() ? "" : " ") + word;
    }
    return words;
}

inline void check_clean(const Ledger& ledger) {
    for (const Violation& violation : ledger.violations()) {
        FAIL_CHECK("event " << violation.event << ": " << name_of(violation.kind) << ": "
                            << violation.detail);
    }
    CHECK(ledger.violations().empty());
}

}  // namespace kvw::test
