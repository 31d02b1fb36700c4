#include "src/engine/answer.h"

#include <algorithm>

namespace kvw {

namespace {

struct StopMatch {
    std::size_t begin = std::string::npos;
    std::size_t end = std::string::npos;
};

// The stop string that is complete first, of those the one that began first: what a reader who saw
// one byte at a time would have found, so that token boundaries do not matter.
StopMatch first_stop(std::string_view text, const std::vector<std::string>& stops) {
    StopMatch first;
    for (const std::string& stop : stops) {
        const std::size_t begin = text.find(stop);
        if (begin == std::string::npos) {
            continue;
        }
        const std::size_t end = begin + stop.size();
        if (end < first.end || (end == first.end && begin < first.begin)) {
            first = {begin, end};
        }
    }
    return first;
}

// How many bytes at the end of `text` may become a stop string.
std::size_t held_back(std::string_view text, const std::vector<std::string>& stops) {
    std::size_t held = 0;
    for (const std::string& stop : stops) {
        for (std::size_t size = std::min(stop.size() - 1, text.size()); size > held; --size) {
            if (text.ends_with(std::string_view(stop).substr(0, size))) {
                held = size;
                break;
            }
        }
    }
    return held;
}

}  // namespace

Answer::Answer(const Tokenizer& tokenizer, std::vector<std::string> stops)
    : tokenizer_(&tokenizer), stops_(std::move(stops)) {}

Answer::Delta Answer::push(TokenId id) {
    if (stopped_) {
        return {.stopped = true};
    }
    if (tokenizer_->ends_generation(id)) {
        return {.bytes = finish(), .stopped = true};
    }
    held_ += tokenizer_->bytes(id);
    Delta delta;
    if (const StopMatch stop = first_stop(held_, stops_); stop.begin != std::string::npos) {
        held_.resize(stop.begin);
        return {.bytes = finish(), .stopped = true};
    }
    const std::size_t free = held_.size() - held_back(held_, stops_);
    delta.bytes = characters_.push(std::string_view(held_).substr(0, free));
    held_.erase(0, free);
    rendered_ += delta.bytes;
    return delta;
}

std::string Answer::finish() {
    if (stopped_) {
        return {};
    }
    stopped_ = true;
    std::string rest = characters_.push(held_) + characters_.finish();
    held_.clear();
    rendered_ += rest;
    return rest;
}

}  // namespace kvw
