#include "replay/recorded_run.h"

#include <bit>
#include <cstring>

#include "traces/trace.h"

namespace kvw {

namespace {

float as_float(std::uint64_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
}

SamplingOptions sampling_of(const events::Sampling& s) {
    SamplingOptions options;
    options.temperature = as_float(s.temperature);
    options.top_k = static_cast<std::uint32_t>(s.top_k);
    options.top_p = as_float(s.top_p);
    options.min_p = as_float(s.min_p);
    options.repeat_penalty = as_float(s.repeat);
    options.presence_penalty = as_float(s.presence);
    options.frequency_penalty = as_float(s.frequency);
    options.penalty_last = static_cast<std::uint32_t>(s.penalty_last);
    options.seed = s.seed;
    options.ignore_eos = (s.flags & 1) != 0;
    return options;
}

Digest256 digest_of(const events::Model& m) {
    Digest256 digest{};
    const std::uint64_t words[] = {m.sha0, m.sha1, m.sha2, m.sha3};
    for (int word = 0; word < 4; ++word) {
        for (int byte = 0; byte < 8; ++byte) {
            digest[word * 8 + byte] = static_cast<std::uint8_t>(words[word] >> (56 - 8 * byte));
        }
    }
    return digest;
}

// Ids as unsigned LEB128; false when the bytes do not end where an id ends.
bool append_ids(std::string_view bytes, std::vector<TokenId>& ids) {
    std::uint64_t value = 0;
    int shift = 0;
    for (const char c : bytes) {
        const auto byte = static_cast<std::uint8_t>(c);
        value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
        shift += 7;
        if ((byte & 0x80) == 0) {
            if (value > INT32_MAX) {
                return false;
            }
            ids.push_back(static_cast<TokenId>(value));
            value = 0;
            shift = 0;
        } else if (shift > 28) {
            return false;
        }
    }
    return shift == 0;
}

// Folds one event into what is known about the run.
Status fold(RecordedRun& run, const Event& event, std::uint64_t number) {
    const auto request = [&](std::uint64_t id) -> RecordedRequest& {
        RecordedRequest& entry = run.requests[id];
        entry.request = id;
        return entry;
    };
    switch (event.kind) {
        case EventKind::model:
            run.model = {std::string(event.bytes), digest_of(event.as<events::Model>())};
            break;
        case EventKind::config: {
            auto config = engine_config_from_json(event.bytes);
            if (!config) {
                return config.error();
            }
            run.config = *config;
            break;
        }
        case EventKind::tenant:
            run.tenants[static_cast<std::uint32_t>(event.as<events::Tenant>().tenant)] =
                event.bytes;
            break;
        case EventKind::submit: {
            const auto submit = event.as<events::Submit>();
            RecordedRequest& entry = request(submit.request);
            entry.submit = submit;
            entry.submit_event = number;
            entry.tenant = static_cast<std::uint32_t>(submit.tenant);
            break;
        }
        case EventKind::sampling: {
            const auto sampling = event.as<events::Sampling>();
            SamplingOptions options = sampling_of(sampling);
            options.stops = std::move(request(sampling.request).sampling.stops);
            request(sampling.request).sampling = std::move(options);
            break;
        }
        case EventKind::reject: {
            const auto reject = event.as<events::Reject>();
            request(reject.request).rejected = true;
            request(reject.request).malformed =
                reject.reason == static_cast<std::uint64_t>(RejectReason::malformed);
            break;
        }
        case EventKind::adopt: {
            RecordedRequest& entry = request(event.as<events::Adopt>().request);
            entry.layers_finish_from += kPageTokens;
            break;
        }
        case EventKind::preempt: {
            RecordedRequest& entry = request(event.as<events::Preempt>().request);
            entry.layers_finish_from = 0;
            entry.preempted = true;
            break;
        }
        case EventKind::layer: {
            const auto layer = event.as<events::Layer>();
            RecordedRequest& entry = request(layer.request);
            if (layer.checkpoint == static_cast<std::uint64_t>(Checkpoint::first_sample)) {
                entry.layers_first_from = entry.layers_finish_from;
            }
            (layer.checkpoint == static_cast<std::uint64_t>(Checkpoint::first_sample)
                 ? entry.layers_first
                 : entry.layers_finish)[layer.layer] = layer.digest;
            break;
        }
        case EventKind::sample: {
            const auto sample = event.as<events::Sample>();
            request(sample.request).samples[sample.position] = sample.logits;
            request(sample.request).sample_events[sample.position] = number;
            break;
        }
        case EventKind::rendered:
            request(event.as<events::Rendered>().request).rendered = event.as<events::Rendered>();
            break;
        case EventKind::finish:
            request(event.as<events::Finish>().request).finish = event.as<events::Finish>();
            break;
        default:
            break;
    }
    return {};
}

Status fold(RecordedRun& run, const TextRecord& text) {
    run.has_text = true;
    if (text.kind == TextKind::key) {
        if (text.bytes.size() != sizeof(Digest256)) {
            return Error{ErrorCode::bad_trace,
                         "the key of tenant " + std::to_string(number(text.tenant)) + " has " +
                             std::to_string(text.bytes.size()) + " bytes instead of 32"};
        }
        std::memcpy(run.keys[number(text.tenant)].data(), text.bytes.data(), sizeof(Digest256));
        return {};
    }
    RecordedRequest& entry = run.requests[number(text.request)];
    entry.request = number(text.request);
    if (entry.tenant != number(text.tenant)) {  // its submit stands before its text
        run.misplaced_texts.emplace(entry.request, number(text.tenant));
    }
    switch (text.kind) {
        case TextKind::prompt:
            entry.prompt += text.bytes;
            break;
        case TextKind::prompt_ids:
            for (std::size_t at = 0; at + 4 <= text.bytes.size(); at += 4) {
                TokenId id = 0;
                std::memcpy(&id, text.bytes.data() + at, 4);
                entry.prompt_ids.push_back(id);
            }
            break;
        case TextKind::stop:
            entry.sampling.stops.emplace_back(text.bytes);
            break;
        case TextKind::ids:
            if (!append_ids(text.bytes, entry.ids)) {
                return Error{ErrorCode::bad_trace, "request " + std::to_string(entry.request) +
                                                       " has sampled ids that are not ids"};
            }
            break;
        case TextKind::key:
            break;
    }
    return {};
}

}  // namespace

Status fold_into(RecordedRun& run, const Event& event, std::uint64_t number) {
    return fold(run, event, number);
}

Status fold_into(RecordedRun& run, const TextRecord& text) { return fold(run, text); }

Result<RecordedRun> read_recorded_run(const Path& trace) {
    auto reader = TraceReader::open(trace);
    if (!reader) {
        return reader.error();
    }
    RecordedRun run;
    TraceChunk chunk;
    std::uint64_t last_event = 0;
    for (;;) {
        const auto more = reader->next(chunk);
        if (!more) {
            return more.error();
        }
        if (!*more) {
            return run;
        }
        for (const Event& event : chunk.events) {
            last_event += event.numbered() ? 1 : 0;
            const Status folded = fold(run, event, last_event);
            if (!folded) {
                return folded.error();
            }
        }
        for (const TextRecord& text : chunk.texts) {
            const Status folded = fold(run, text);
            if (!folded) {
                return folded.error();
            }
        }
    }
}

}  // namespace kvw
