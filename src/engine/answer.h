// From sampled ids to the bytes a caller gets: detokenising, stop strings with hold-back, whole
// characters.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/sha256.h"
#include "src/text/tokenizer.h"

namespace kvw {

// One answer being made. The same code renders in serving and in replay.
class Answer {
  public:
    Answer(const Tokenizer& tokenizer, std::vector<std::string> stops);
    struct Delta {
        std::string bytes;     // what may be delivered now; whole UTF-8 characters
        bool stopped = false;  // an end-of-generation token or a stop string ended the answer
    };
    Delta push(TokenId id);
    // The end (length, cancel): what was held back and is not part of a stop string.
    std::string finish();
    const std::string& delivered() const { return rendered_; }  // everything handed out so far

  private:
    const Tokenizer* tokenizer_;
    std::vector<std::string> stops_;
    Utf8Stream characters_;
    std::string held_, rendered_;
    bool stopped_ = false;
};

}  // namespace kvw
