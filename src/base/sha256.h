// SHA-256 and HMAC-SHA-256, done by libcrypto (FIPS 180-4, RFC 2104).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace kvw {

using Digest256 = std::array<std::uint8_t, 32>;

// A running SHA-256. Copyable: a copy goes on from the same state.
class Sha256 {
  public:
    Sha256();
    ~Sha256();
    Sha256(const Sha256& other);
    Sha256& operator=(const Sha256& other);
    Sha256(Sha256&&) noexcept;
    Sha256& operator=(Sha256&&) noexcept;

    void update(std::span<const std::uint8_t> bytes);
    void update(std::string_view bytes);
    // The digest of everything so far; the state stays usable.
    Digest256 digest() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

Digest256 sha256(std::span<const std::uint8_t> bytes);
Digest256 sha256(std::string_view bytes);
Digest256 hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message);

std::string hex(std::span<const std::uint8_t> bytes);
// Empty when `text` is not an even number of hex digits.
std::string unhex(std::string_view text);

}  // namespace kvw
