#include "src/base/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "src/base/check.h"

namespace kvw {

struct Sha256::State {
    EVP_MD_CTX* context = EVP_MD_CTX_new();
    ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
    check(state_->context != nullptr, "libcrypto has memory for a digest");
    check(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1, "libcrypto has SHA-256");
}

Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

Sha256::Sha256(const Sha256& other) : state_(std::make_unique<State>()) {
    check(EVP_MD_CTX_copy_ex(state_->context, other.state_->context) == 1, "a digest copies");
}

Sha256& Sha256::operator=(const Sha256& other) {
    if (this != &other) {
        check(EVP_MD_CTX_copy_ex(state_->context, other.state_->context) == 1, "a digest copies");
    }
    return *this;
}

void Sha256::update(std::span<const std::uint8_t> bytes) {
    check(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1, "a digest updates");
}

void Sha256::update(std::string_view bytes) {
    update({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
}

Digest256 Sha256::digest() const {
    State copy;
    Digest256 out{};
    unsigned length = 0;
    check(EVP_MD_CTX_copy_ex(copy.context, state_->context) == 1 &&
              EVP_DigestFinal_ex(copy.context, out.data(), &length) == 1 && length == out.size(),
          "a digest ends in 32 bytes");
    return out;
}

Digest256 sha256(std::span<const std::uint8_t> bytes) {
    Sha256 running;
    running.update(bytes);
    return running.digest();
}

Digest256 sha256(std::string_view bytes) {
    Sha256 running;
    running.update(bytes);
    return running.digest();
}

Digest256 hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message) {
    Digest256 out{};
    unsigned length = 0;
    check(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), message.data(),
               message.size(), out.data(), &length) != nullptr &&
              length == out.size(),
          "libcrypto has HMAC");
    return out;
}

std::string hex(std::span<const std::uint8_t> bytes) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    text.reserve(bytes.size() * 2);
    for (const std::uint8_t byte : bytes) {
        text.push_back(kDigits[byte >> 4]);
        text.push_back(kDigits[byte & 15]);
    }
    return text;
}

std::string unhex(std::string_view text) {
    const auto digit = [](char c) {
        if (c >= '0' && c <= '9') return c - '0';
        if (c >= 'a' && c <= 'f') return c - 'a' + 10;
        if (c >= 'A' && c <= 'F') return c - 'A' + 10;
        return -1;
    };
    std::string bytes;
    if (text.size() % 2 != 0) {
        return bytes;
    }
    for (std::size_t i = 0; i < text.size(); i += 2) {
        const int high = digit(text[i]);
        const int low = digit(text[i + 1]);
        if (high < 0 || low < 0) {
            return {};
        }
        bytes.push_back(static_cast<char>(high * 16 + low));
    }
    return bytes;
}

}  // namespace kvw
