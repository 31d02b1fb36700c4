#include "replay/comparing_sink.h"

#include "traces/schema.h"

namespace kvw {

Result<TraceCursor> TraceCursor::open(const Path& path) {
    auto reader = TraceReader::open(path, {.texts = false});
    if (!reader) {
        return reader.error();
    }
    return TraceCursor(std::move(*reader));
}

const Event* TraceCursor::peek() {
    while (!ended_) {
        while (index_ < chunk_.events.size() && !chunk_.events[index_].numbered()) {
            ++index_;
        }
        if (index_ < chunk_.events.size()) {
            return &chunk_.events[index_];
        }
        index_ = 0;
        const auto more = reader_.next(chunk_);
        if (!more) {
            status_ = more.error();
        }
        if (!more || !*more) {
            chunk_.events.clear();
            ended_ = true;
        }
    }
    return nullptr;
}

void TraceCursor::advance() {
    ++index_;
    ++number_;
}

namespace {

// Which field of an event is its request, if any.
std::optional<std::uint64_t> field_named(const Event& event, std::string_view name) {
    const KindSchema* schema = schema_of(event.kind);
    for (std::size_t i = 0; schema != nullptr && i < schema->fields.size(); ++i) {
        if (schema->fields[i].name == name) {
            return event.fields[i];
        }
    }
    return std::nullopt;
}

// Events without the values that are content digests: safe to print, and of no use to a guesser.
std::string without_content(const Event& event) {
    Event shown = event;
    const KindSchema* schema = schema_of(event.kind);
    for (std::size_t i = 0; schema != nullptr && i < schema->fields.size(); ++i) {
        if (schema->fields[i].content) {
            shown.fields[i] = 0;
        }
    }
    return to_text(shown);
}

}  // namespace

std::optional<Divergence> compare(const Event* recorded, const Event& executed,
                                  std::uint64_t number) {
    if (recorded != nullptr && recorded->kind == executed.kind &&
        recorded->fields == executed.fields && recorded->bytes == executed.bytes) {
        return std::nullopt;
    }
    Divergence divergence{.event = number};
    divergence.request = field_named(executed, "request").value_or(0);
    if (executed.kind == EventKind::layer) {
        divergence.layer = executed.as<events::Layer>().layer;
    } else if (executed.kind == EventKind::sample) {
        divergence.token = executed.as<events::Sample>().position;
    }
    divergence.detail =
        recorded == nullptr
            ? "the record ends, re-execution goes on with: " + without_content(executed)
            : "recorded: " + without_content(*recorded) +
                  "; re-executed: " + without_content(executed) +
                  (recorded->kind == executed.kind ? " (content digests differ or are not shown)"
                                                   : "");
    return divergence;
}

ComparingSink::ComparingSink(TraceCursor& cursor, std::optional<std::uint64_t> until)
    : cursor_(&cursor), until_(until) {}

void ComparingSink::note(const Event& event) {
    if (!event.numbered() || divergence_) {
        return;
    }
    const Event* recorded = cursor_->peek();
    const std::uint64_t number = cursor_->number();
    if (until_ && number > *until_) {
        return;
    }
    divergence_ = compare(recorded, event, number);
    if (divergence_) {
        if (event.kind == EventKind::loaded) {
            loaded_ = event.as<events::Loaded>();
        }
        return;
    }
    if (event.kind == EventKind::sample && controls_.planted == 0) {
        Event changed = *recorded;
        changed.fields[2] ^= 1;
        const auto sample = event.as<events::Sample>();
        const std::optional<Divergence> seen = compare(&changed, event, number);
        ++controls_.planted;
        controls_.caught += seen && seen->event == number && seen->request == sample.request &&
                                    seen->token == sample.position
                                ? 1
                                : 0;
    }
    ++compared_;
    cursor_->advance();
}

}  // namespace kvw
