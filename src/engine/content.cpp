#include "src/engine/content.h"

#include <string>

namespace kvw {

namespace {

void append_word(std::string& bytes, std::uint64_t word, int size = 8) {
    for (int i = 0; i < size; ++i) {
        bytes.push_back(static_cast<char>(word >> (8 * i)));
    }
}

}  // namespace

std::array<std::uint64_t, 2> keyed_digest(const Digest256& key, std::string_view domain,
                                          std::string_view content) {
    std::string message(domain);
    message.push_back('\0');
    message += content;
    const Digest256 mac =
        hmac_sha256(key, {reinterpret_cast<const std::uint8_t*>(message.data()), message.size()});
    std::array<std::uint64_t, 2> words{};
    for (int i = 0; i < 16; ++i) {
        words[i / 8] = words[i / 8] << 8 | mac[i];
    }
    return words;
}

std::array<std::uint64_t, 2> logits_digest(const Digest256& key, const RowDigest& running) {
    std::string content;
    append_word(content, running.a);
    append_word(content, running.b);
    return keyed_digest(key, "logits", content);
}

std::uint64_t sample_digest(const Digest256& key, const RowDigest& running) {
    return logits_digest(key, running)[1] & 0xffffffff;
}

std::uint64_t layer_digest(const Digest256& key, std::uint32_t layer, std::uint64_t running) {
    std::string content;
    append_word(content, layer, 4);
    append_word(content, running);
    return keyed_digest(key, "layer", content)[0];
}

void PositionDigest::add(std::uint64_t position, TokenId id) {
    std::string entry;
    append_word(entry, position);
    append_word(entry, static_cast<std::uint32_t>(id), 4);
    running_.update(entry);
    ++positions_;
}

std::array<std::uint64_t, 2> PositionDigest::digest(const Digest256& key) const {
    const Digest256 plain = running_.digest();
    return keyed_digest(key, "positions",
                        {reinterpret_cast<const char*>(plain.data()), plain.size()});
}

}  // namespace kvw
