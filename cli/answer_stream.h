// An answer on its way out: text as it is generated, one JSON line per token, or nothing until the
// end.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/session.h"
#include "src/engine/engine.h"

namespace kvw::cli {

class AnswerStream {
  public:
    explicit AnswerStream(Session& session);

    // What one step gave. What could not be written is not kept for later: see
    // StandardOutput::broken().
    void take(const Output& output);
    // The last line and, on a terminal, the end of the line the answer stopped in.
    void finish();

    const std::string& text() const { return text_; }
    const std::vector<TokenId>& ids() const { return ids_; }

  private:
    // A token's line waits for the next token, so that bytes held back to the end still get onto
    // one.
    struct Line {
        std::size_t index;
        TokenId id;
        std::string bytes;
    };
    void flush_line();

    Session& session_;
    std::string text_;
    std::vector<TokenId> ids_;
    std::optional<Line> line_;
};

// "text", and "text_b64" beside it when the bytes are not UTF-8.
void put_text(Json& object, const std::string& bytes);

}  // namespace kvw::cli
