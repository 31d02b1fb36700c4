#include "traces/sink.h"

#include "traces/schema.h"

namespace kvw {

void TeeSink::note(const Event& event) {
    for (EventSink* sink : sinks_) {
        sink->note(event);
    }
}

void TeeSink::text(const TextRecord& record) {
    for (EventSink* sink : sinks_) {
        sink->text(record);
    }
}

Status TeeSink::commit() {
    Status first;
    for (EventSink* sink : sinks_) {
        Status status = sink->commit();  // every sink commits, also after one failed: each keeps
                                         // its own evidence
        if (!status && first) {
            first = std::move(status);
        }
    }
    return first;
}

void TextSink::note(const Event& event) { lines_ += to_text(event) + "\n"; }

void TextSink::text(const TextRecord& record) {
    lines_ += "text " + std::string(name_of(record.kind)) +
              " tenant=" + std::to_string(number(record.tenant)) +
              " request=" + std::to_string(number(record.request)) +
              " bytes=" + std::to_string(record.bytes.size()) + "\n";
}

}  // namespace kvw
