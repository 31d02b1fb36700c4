// Sizes that a file claims. All arithmetic on numbers from a file is done in this type: a sum or
// product that would wrap is "too large" from there on, and within() is the only way out.
#pragma once

#include <cstdint>
#include <optional>

namespace kvw {

class Length {
  public:
    constexpr Length(std::uint64_t value) : value_(value) {}

    friend constexpr Length operator+(Length a, Length b) {
        Length sum(0);
        sum.too_large_ =
            a.too_large_ | b.too_large_ | __builtin_add_overflow(a.value_, b.value_, &sum.value_);
        return sum;
    }
    friend constexpr Length operator*(Length a, Length b) {
        Length product(0);
        product.too_large_ = a.too_large_ | b.too_large_ |
                             __builtin_mul_overflow(a.value_, b.value_, &product.value_);
        return product;
    }
    // Up to the next multiple of `unit`, which is not zero.
    constexpr Length rounded_up(std::uint64_t unit) const {
        const std::uint64_t over = value_ % unit;
        return over == 0 ? *this : *this + Length(unit - over);
    }

    // The number itself, when it was computed without wrapping and is at most `limit`.
    constexpr std::optional<std::uint64_t> within(std::uint64_t limit) const {
        return too_large_ || value_ > limit ? std::nullopt : std::optional(value_);
    }

  private:
    std::uint64_t value_;
    bool too_large_ = false;
};

}  // namespace kvw
