#include <utility>

#include "src/base/text.h"
#include "src/text/tokenizer.h"

namespace kvw {

std::string Utf8Stream::push(std::string_view bytes) {
    held_ += bytes;
    std::string ready = held_.substr(0, held_.size() - incomplete_utf8_suffix(held_));
    held_.erase(0, ready.size());
    return ready;
}

std::string Utf8Stream::finish() { return std::exchange(held_, {}); }

}  // namespace kvw
