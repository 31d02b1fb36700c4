#include "replay/execute.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace kvw {

namespace {

GenerateRequest request_of(const RecordedRun& recorded, const RecordedRequest& entry) {
    const auto tenant = recorded.tenants.find(entry.tenant);
    GenerateRequest request;
    request.tenant = tenant == recorded.tenants.end() ? std::string() : tenant->second;
    request.prompt = entry.prompt;
    request.prompt_ids = entry.prompt_ids;
    if (entry.submit.tokens_max > 0) {  // 0: left open, and refused
        request.tokens_max = static_cast<std::uint32_t>(entry.submit.tokens_max);
    }
    request.sampling = entry.sampling;
    if (entry.submit.session != 0) {
        request.session = std::to_string(entry.submit.session);
    }
    request.scope = static_cast<CacheScope>(entry.submit.scope);
    return request;
}

// Hands each answer to nobody, up to the bytes that the recorded caller's sink took.
class Deliveries {
  public:
    explicit Deliveries(const RecordedRun& recorded) : recorded_(&recorded) {}

    void take(Engine& engine, const std::vector<Output>& outputs) {
        for (const Output& output : outputs) {
            if (output.bytes.empty()) {
                continue;
            }
            const std::uint64_t request = number(output.request);
            const auto entry = recorded_->requests.find(request);
            std::uint64_t& taken = taken_[request];
            std::uint64_t wanted = output.bytes.size();
            if (entry != recorded_->requests.end() && entry->second.rendered) {
                const std::uint64_t total = entry->second.rendered->bytes_out;
                wanted = std::min<std::uint64_t>(wanted, total > taken ? total - taken : 0);
            }
            taken += wanted;
            engine.delivered(output.request, std::string_view(output.bytes).substr(0, wanted));
        }
    }

  private:
    const RecordedRun* recorded_;
    std::map<std::uint64_t, std::uint64_t> taken_;
};

// A page written by one request and read by another, with headers and table that agree: only the
// shadow table can know. Seen means that the accessor of this run's kernels works.
ControlCount plant_foreign_row(const Kernels& kernels) {
    const TileShape shape{1, 1, 16};
    std::vector<std::uint8_t> memory(shape.page_bytes() + 64);
    std::vector<std::uint64_t> writers(kPageTokens);
    auto* base = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    const KvMemory kv{.base = base, .shape = shape, .pages = 1, .writers = writers.data()};
    std::uint32_t words = 0;
    std::uint32_t mismatches = 0;
    kernels.scrub(kv, 0, Owner{}, 0, &mismatches);
    const Owner writer{TenantId{1}, RequestId{1}};
    const Owner reader{TenantId{1}, RequestId{2}};
    stamp_page(kv, 0, writer, 1, &words);
    const std::vector<PageRef> table{{.page = 0, .generation = 1}};
    const std::vector<float> row(16, 0.5f);
    std::vector<float> out(16);
    SequenceReport report;
    SequenceView view{.reader = writer, .pages = table, .first = 0, .count = 1, .report = &report};
    kernels.append_checked(kv, view, 0, 0, row.data(), row.data());
    tile_header(kv.tile(0, 0, 0))->request = number(reader.request);  // the header lies
    view.reader = reader;
    const AttentionArgs args{
        .memory = kv, .layer = 0, .query_heads = 1, .q = row.data(), .out = out.data()};
    kernels.attend_checked(args, {.sequence = &view, .kv_head = 0, .row_begin = 0, .row_end = 1});
    const bool seen = report.faults > 0 && !report.first_faults.empty() &&
                      report.first_faults.front().from_shadow &&
                      report.first_faults.front().shadow_writer == number(writer.request);
    return {.planted = 1, .caught = seen ? 1u : 0u};
}

Violation divergence_violation(const Divergence& divergence, const RecordedRun& recorded) {
    Violation violation;
    violation.event = divergence.event;
    violation.kind = ViolationKind::bit_divergence;
    violation.layer = ProofLayer::execution;
    violation.reader.request = RequestId{divergence.request};
    const auto entry = recorded.requests.find(divergence.request);
    if (entry != recorded.requests.end()) {
        violation.reader.tenant = TenantId{entry->second.tenant};
    }
    violation.detail = divergence.detail;
    return violation;
}

}  // namespace

Result<ExecutionResult> execute(const Path& trace, const RecordedRun& recorded,
                                const ReplayModel& model, const ReplayOptions& options) {
    auto cursor = TraceCursor::open(trace);
    if (!cursor) {
        return cursor.error();
    }
    ComparingSink sink(*cursor, options.until);
    RunContext context;
    context.sink = &sink;
    context.checked = true;
    context.tenant_key = [&](TenantId tenant, const std::string&) {
        const auto key = recorded.keys.find(number(tenant));
        return key == recorded.keys.end() ? Digest256{} : key->second;
    };
    EngineConfig config = recorded.config;
    auto engine = Engine::create(model.model, model.tokenizer, model.kernels, model.threads, config,
                                 recorded.model, context);
    if (!engine) {
        return engine.error();
    }
    Deliveries deliveries(recorded);
    const auto past_until = [&] { return options.until && cursor->number() > *options.until; };
    std::uint64_t next_request = 1;
    std::uint64_t progress_at = 0;
    std::uint64_t samples = 0, samples_total = 0;
    for (const auto& [id, entry] : recorded.requests) {
        samples_total += entry.samples.size();
    }
    ExecutionResult result;
    bool finished = false;
    while (!sink.divergence() && !past_until() && !finished) {
        const Event* next = cursor->peek();
        if (next == nullptr) {
            break;
        }
        const std::uint64_t before = sink.compared();
        if (next->kind == EventKind::tenant || next->kind == EventKind::submit) {
            const auto entry = recorded.requests.find(next_request++);
            if (entry == recorded.requests.end()) {
                return Error{ErrorCode::bad_trace,
                             "event " + std::to_string(cursor->number()) +
                                 " submits a request that the trace does not describe"};
            }
            const GenerateRequest request = request_of(recorded, entry->second);
            const auto submitted = entry->second.malformed
                                       ? (*engine)->note_malformed(request.tenant, request.prompt)
                                       : (*engine)->submit(request);
            if (!submitted && !entry->second.rejected && !sink.divergence()) {
                return submitted.error();
            }
        } else if (next->kind == EventKind::cancel) {
            const auto cancel = next->as<events::Cancel>();
            (*engine)->cancel(RequestId{cancel.request}, static_cast<FinishReason>(cancel.reason));
        } else if (!(*engine)->idle()) {
            auto outputs = (*engine)->step();
            if (!outputs) {
                if (sink.divergence()) {
                    break;
                }
                return outputs.error();
            }
            deliveries.take(**engine, *outputs);
            samples += outputs->size();
            if (options.progress && samples >= progress_at) {
                options.progress("execution",
                                 samples_total == 0 ? 1 : double(samples) / double(samples_total));
                progress_at = samples + 16;
            }
        } else {
            const Status ended = (*engine)->finish();
            if (!ended) {
                return ended.error();
            }
            finished = true;
        }
        if (sink.compared() == before && !sink.divergence() && !finished && (*engine)->idle()) {
            break;  // neither side has anything to say
        }
    }
    if (!cursor->status()) {
        return cursor->status().error();
    }
    result.compared = sink.compared();
    result.controls = sink.controls();
    const ControlCount shadow = plant_foreign_row(model.kernels);
    result.controls.planted += shadow.planted;
    result.controls.caught += shadow.caught;
    result.divergence = sink.divergence();
    if (!result.divergence && !past_until() && cursor->peek() != nullptr) {
        result.divergence = Divergence{.event = cursor->number(),
                                       .detail = "re-execution has ended, the record goes on"};
    }
    if (result.divergence) {
        result.violations.push_back(divergence_violation(*result.divergence, recorded));
    }
    result.complete = !result.divergence && !past_until();
    return result;
}

}  // namespace kvw
