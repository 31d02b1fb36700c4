#include "replay/solo.h"

#include <algorithm>

#include "src/base/witness_mix.h"
#include "src/engine/content.h"
#include "src/kv/page_pool.h"

namespace kvw {

namespace {

constexpr std::uint32_t kSoloRows =
    64;  // tokens per forward pass: whole vocabulary rows for each of them

// One request's forward passes, alone with its pages. The arena of weights is shared, nothing else
// is.
class Alone {
  public:
    static Result<Alone> create(const ReplayModel& model, std::uint64_t rows) {
        Alone alone;
        alone.sink_ = std::make_unique<NullSink>();
        auto pool = PagePool::create({.shape = model.model.config().tile_shape(), .rows_max = rows},
                                     model.kernels, *alone.sink_);
        if (!pool) {
            return pool.error();
        }
        alone.pool_ = std::move(*pool);
        return alone;
    }

    PagePool& pool() { return *pool_; }

  private:
    std::unique_ptr<NullSink> sink_;
    std::unique_ptr<PagePool> pool_;
};

// What one request gave when it ran alone.
struct SoloRun {
    std::vector<TokenId> ids;                                      // re-sampled
    std::vector<std::pair<std::uint64_t, std::uint64_t>> samples;  // position, keyed chain
    std::vector<std::uint64_t> layers_first, layers_finish;        // keyed digests by layer
    std::array<std::uint64_t, 2> logits{};                         // keyed final digest
    std::string rendered;
};

struct Teacher {
    const RecordedRequest& entry;
    Digest256 key;
};

// An answer that an error ended: what was held back then was never handed out.
bool cut_short(const RecordedRequest& entry) {
    return entry.finish &&
           (entry.finish->reason == static_cast<std::uint64_t>(FinishReason::error) ||
            entry.finish->reason == static_cast<std::uint64_t>(FinishReason::violation));
}

bool stopped_by_caller(const RecordedRequest& entry) {
    return entry.finish &&
           (entry.finish->reason == static_cast<std::uint64_t>(FinishReason::cancelled) ||
            entry.finish->reason == static_cast<std::uint64_t>(FinishReason::deadline));
}

class SoloRunner {
  public:
    SoloRunner(const ReplayModel& model) : model_(&model) {}

    // Feeds prompt and recorded ids; `prompt_xor` changes the first prompt id (a control).
    Result<SoloRun> run(const Teacher& teacher, bool change_prompt = false) {
        const RecordedRequest& entry = teacher.entry;
        std::vector<TokenId> tokens = entry.prompt_ids;
        if (change_prompt) {
            tokens.front() = tokens.front() == 0 ? 1 : 0;
        }
        tokens.insert(tokens.end(), entry.ids.begin(), entry.ids.end() - 1);
        const auto prompt = static_cast<std::uint32_t>(entry.prompt_ids.size());
        const auto total = static_cast<std::uint32_t>(tokens.size());

        const Status ready = prepare(total);
        if (!ready) {
            return ready.error();
        }
        auto alone = Alone::create(*model_, total);
        if (!alone) {
            return alone.error();
        }
        PagePool& pool = alone->pool();
        const Owner owner{TenantId{entry.tenant}, RequestId{entry.request}};
        const Status reserved = pool.reserve(owner, (total + kPageTokens - 1) / kPageTokens);
        if (!reserved) {
            return reserved.error();
        }
        pass_->poison();

        SoloRun result;
        Sampler sampler(entry.sampling, model_->kernels, model_->tokenizer);
        Answer answer(model_->tokenizer, entry.sampling.stops);
        for (const TokenId id : entry.prompt_ids) {
            sampler.accept(id);
        }
        const std::uint32_t layers = model_->model.config().layers;
        std::vector<std::uint64_t> first_sums(layers), finish_sums(layers);
        RowDigest running;
        StepOutput out;
        std::uint32_t first = 0;
        while (first < total) {
            // The prompt's last row ends a pass, so that its layer digests can be compared there.
            // So do the rows that were adopted, which no recorded digest covers.
            std::uint32_t end = first < prompt ? std::min(prompt, first + kSoloRows)
                                               : std::min(total, first + kSoloRows);
            for (const std::uint64_t from : {entry.layers_first_from, entry.layers_finish_from}) {
                end = first < from && from < end ? static_cast<std::uint32_t>(from) : end;
            }
            pool.extend(owner, end);
            Lease lease = pool.open(owner, first, end - first);
            const std::uint32_t logits_from =
                end < prompt ? end - first : std::max(first, prompt - 1) - first;
            const SequenceView view = lease.view(0, logits_from);
            StepInput input{.tokens = std::span(tokens).subspan(first, end - first),
                            .sequences = {&view, 1},
                            .memory = pool.memory()};
            pass_->run(input, out);
            pool.settle(std::move(lease));
            for (std::uint32_t layer = 0; layer < layers; ++layer) {
                const std::uint64_t digest = out.layer_digests[layer];
                first_sums[layer] += first >= entry.layers_first_from ? digest : 0;
                finish_sums[layer] += first >= entry.layers_finish_from ? digest : 0;
            }
            if (end == prompt) {
                result.layers_first = keyed_layers(teacher.key, first_sums);
            }
            for (const LogitsRow& row : out.logits) {
                fold_row(running, row.digest, row.position);
                const std::uint64_t position = std::uint64_t{row.position} + 1;
                result.ids.push_back(sampler.sample(row.logits, position));
                result.samples.emplace_back(position, sample_digest(teacher.key, running));
                const TokenId forced = entry.ids[position - prompt];
                sampler.accept(forced);
                answer.push(forced);
            }
            first = end;
        }
        if (!cut_short(entry)) {
            answer.finish();
        }
        result.layers_finish = keyed_layers(teacher.key, finish_sums);
        result.logits = logits_digest(teacher.key, running);
        result.rendered = answer.delivered();
        return result;
    }

  private:
    Status prepare(std::uint32_t total) {
        if (pass_ && context_ >= total) {
            return {};
        }
        context_ = std::max(total, context_);
        auto pass = ForwardPass::create(model_->model, model_->kernels, model_->threads, kSoloRows,
                                        kSoloRows, context_);
        if (!pass) {
            return pass.error();
        }
        pass_ = std::move(*pass);
        return {};
    }

    static std::vector<std::uint64_t> keyed_layers(const Digest256& key,
                                                   const std::vector<std::uint64_t>& sums) {
        std::vector<std::uint64_t> keyed;
        for (std::uint32_t layer = 0; layer < sums.size(); ++layer) {
            keyed.push_back(layer_digest(key, layer, sums[layer]));
        }
        return keyed;
    }

    const ReplayModel* model_;
    std::unique_ptr<ForwardPass> pass_;
    std::uint32_t context_ = 0;
};

std::optional<std::uint64_t> first_difference(
    const std::map<std::uint64_t, std::uint64_t>& recorded,
    const std::vector<std::uint64_t>& alone) {
    for (const auto& [layer, digest] : recorded) {
        if (layer >= alone.size() || alone[layer] != digest) {
            return layer;
        }
    }
    return std::nullopt;
}

// What is different, in words; empty when nothing is. `position` gets the first token that differs.
std::string difference(const RecordedRequest& entry, const Digest256& key, const SoloRun& alone,
                       std::optional<std::uint64_t>& position) {
    for (const auto& [at, digest] : alone.samples) {
        const auto recorded = entry.samples.find(at);
        if (recorded == entry.samples.end() || recorded->second != digest) {
            position = at;
            return "logits digest differs";
        }
    }
    if (alone.samples.size() != entry.samples.size()) {
        return std::to_string(entry.samples.size()) + " tokens were recorded, " +
               std::to_string(alone.samples.size()) + " ids are in the text";
    }
    for (std::size_t i = 0; i < alone.ids.size(); ++i) {
        if (alone.ids[i] != entry.ids[i]) {
            position = entry.prompt_ids.size() + i;
            return "the sampled id is not the one that its logits, seed and options give";
        }
    }
    if (const auto layer = first_difference(entry.layers_first, alone.layers_first)) {
        return "layer " + std::to_string(*layer) + " differs at the first token";
    }
    // Cancelled while it computed all anew, its last digest covers less than it had sampled from.
    const bool interrupted = entry.preempted && stopped_by_caller(entry);
    if (const auto layer = first_difference(entry.layers_finish, alone.layers_finish);
        layer && !interrupted) {
        return "layer " + std::to_string(*layer) + " differs at the end";
    }
    if (entry.finish &&
        (entry.finish->logits0 != alone.logits[0] || entry.finish->logits1 != alone.logits[1])) {
        return "the final logits digest differs";
    }
    if (entry.rendered) {
        const std::uint64_t bytes = entry.rendered->bytes_out;
        const auto digest =
            keyed_digest(key, "bytes", std::string_view(alone.rendered).substr(0, bytes));
        if (bytes > alone.rendered.size() || digest[0] != entry.rendered->digest0 ||
            digest[1] != entry.rendered->digest1) {
            return "the delivered bytes are not what the ids render to";
        }
    }
    return {};
}

bool sampled_anything(const RecordedRequest& entry) {
    return !entry.rejected && !entry.samples.empty();
}

Violation solo_violation(const RecordedRequest& entry, std::optional<std::uint64_t> position,
                         const std::string& what) {
    Violation violation;
    violation.kind = ViolationKind::solo_divergence;
    violation.layer = ProofLayer::solo;
    violation.reader = {TenantId{entry.tenant}, RequestId{entry.request}};
    violation.event = entry.submit_event;
    if (position) {
        const auto event = entry.sample_events.find(*position);
        violation.event = event == entry.sample_events.end() ? entry.submit_event : event->second;
        for (const auto& [at, ignored] : entry.samples) {
            violation.emitted_after += at >= *position ? 1 : 0;
        }
    }
    violation.detail = "request " + std::to_string(entry.request) + " alone" +
                       (position ? ", token " + std::to_string(*position) : std::string()) + ": " +
                       what;
    return violation;
}

Digest256 key_of(const RecordedRun& recorded, const RecordedRequest& entry) {
    const auto key = recorded.keys.find(entry.tenant);
    return key == recorded.keys.end() ? Digest256{} : key->second;
}

// Text that does not fit the events is not an assumption to compute with.
std::string text_mismatch(const RecordedRequest& entry) {
    if (entry.prompt_ids.size() != entry.submit.prompt_tokens || entry.prompt_ids.empty()) {
        return std::to_string(entry.submit.prompt_tokens) +
               " prompt tokens were submitted, the text has " +
               std::to_string(entry.prompt_ids.size());
    }
    if (entry.ids.size() != entry.samples.size()) {
        return std::to_string(entry.samples.size()) + " tokens were sampled, the text has " +
               std::to_string(entry.ids.size());
    }
    return {};
}

}  // namespace

bool chosen(const SoloChoice& choice, std::uint64_t request) {
    if (choice.request) {
        return *choice.request == request;
    }
    return choice.percent >= 100.0 ||
           static_cast<double>(mix64(request) % 1'000'000) < choice.percent * 10'000.0;
}

Status check_choice(const RecordedRun& recorded, const SoloChoice& choice) {
    if (!choice.on || !choice.request) {
        return {};
    }
    const std::string name = "request " + std::to_string(*choice.request);
    const auto found = recorded.requests.find(*choice.request);
    if (found == recorded.requests.end()) {
        return Error{ErrorCode::usage, name + " is not among the " +
                                           std::to_string(recorded.requests.size()) +
                                           " of this trace"};
    }
    if (!sampled_anything(found->second)) {
        return Error{ErrorCode::usage, name + " sampled nothing, so there is nothing to run alone"};
    }
    return {};
}

Result<SoloResult> run_solo(const RecordedRun& recorded, const ReplayModel& model,
                            const ReplayOptions& options) {
    SoloResult result;
    SoloRunner runner(model);
    const RecordedRequest* shortest = nullptr;
    std::size_t done = 0;
    for (const auto& [id, entry] : recorded.requests) {
        ++done;
        if (!sampled_anything(entry)) {
            continue;
        }
        if (!chosen(options.solo, id)) {
            result.sampled = true;
            continue;
        }
        const std::string mismatch = text_mismatch(entry);
        if (!mismatch.empty()) {
            result.violations.push_back(solo_violation(entry, std::nullopt, mismatch));
            continue;
        }
        const Digest256 key = key_of(recorded, entry);
        const auto alone = runner.run({entry, key});
        if (!alone) {
            return alone.error();
        }
        std::optional<std::uint64_t> position;
        const std::string what = difference(entry, key, *alone, position);
        if (!what.empty()) {
            result.violations.push_back(solo_violation(entry, position, what));
        }
        ++result.requests;
        result.tokens += entry.prompt_ids.size() + entry.ids.size();
        if (shortest == nullptr || entry.prompt_ids.size() + entry.ids.size() <
                                       shortest->prompt_ids.size() + shortest->ids.size()) {
            shortest = &entry;
        }
        if (options.progress) {
            options.progress("solo", double(done) / double(recorded.requests.size()));
        }
    }
    if (shortest != nullptr && options.solo.controls) {
        // Controls: another prompt token must change the logits; another sampled id must be
        // noticed.
        const Digest256 key = key_of(recorded, *shortest);
        const auto changed = runner.run({*shortest, key}, true);
        if (!changed) {
            return changed.error();
        }
        std::optional<std::uint64_t> position;
        result.controls.planted = 2;
        result.controls.caught += difference(*shortest, key, *changed, position).empty() ? 0 : 1;
        RecordedRequest swapped = *shortest;
        swapped.ids.back() =
            swapped.ids.back() == 0 ? 1 : 0;  // the last id is not fed, only re-sampled
        const auto again = runner.run({swapped, key});
        if (!again) {
            return again.error();
        }
        result.controls.caught += difference(swapped, key, *again, position).empty() ? 0 : 1;
    }
    return result;
}

Result<std::optional<std::uint64_t>> first_differing_layer(const RecordedRun& recorded,
                                                           const ReplayModel& model,
                                                           std::uint64_t request) {
    const auto found = recorded.requests.find(request);
    if (found == recorded.requests.end() || !sampled_anything(found->second) ||
        !text_mismatch(found->second).empty()) {
        return std::optional<std::uint64_t>();
    }
    SoloRunner runner(model);
    const auto alone = runner.run({found->second, key_of(recorded, found->second)});
    if (!alone) {
        return alone.error();
    }
    auto layer = first_difference(found->second.layers_first, alone->layers_first);
    return layer ? layer : first_difference(found->second.layers_finish, alone->layers_finish);
}

}  // namespace kvw
