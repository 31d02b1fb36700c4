#include "cli/answer_stream.h"

#include "src/base/text.h"

namespace kvw::cli {

AnswerStream::AnswerStream(Session& session) : session_(session) {}

void AnswerStream::take(const Output& output) {
    text_ += output.bytes;
    if (output.id) {
        ids_.push_back(*output.id);
    }
    if (session_.common.jsonl) {
        if (output.id) {
            flush_line();
            line_ = Line{ids_.size() - 1, *output.id, {}};
        }
        if (line_) {
            line_->bytes += output.bytes;
        }
    } else if (!session_.common.json) {
        session_.out.write(session_.out.is_terminal() ? printable_lines(output.bytes)
                                                      : output.bytes);
    }
}

void AnswerStream::finish() {
    flush_line();
    if (!session_.machine() && session_.out.is_terminal() && !text_.ends_with('\n')) {
        session_.out.write("\n");
    }
}

void AnswerStream::flush_line() {
    if (line_) {
        Json object = object_of("token");
        object["index"] = line_->index;
        object["id"] = line_->id;
        put_text(object, line_->bytes);
        session_.out.record(object);
        line_.reset();
    }
}

void put_text(Json& object, const std::string& bytes) {
    object["text"] = utf8_lossy(bytes);
    if (first_invalid_utf8(bytes)) {
        object["text_b64"] = base64(bytes);
    }
}

}  // namespace kvw::cli
