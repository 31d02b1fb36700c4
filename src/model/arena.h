// One block of anonymous memory that many arrays are carved from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "src/base/result.h"

namespace kvw {

// Mapped, zero until written, on huge pages where there are any, not in core dumps; the destructor
// unmaps it.
class Arena {
  public:
    // Fails: out_of_memory, with `what` and how many bytes it wanted.
    static Result<Arena> create(std::size_t bytes, std::string_view what);
    Arena() = default;
    Arena(Arena&& other) noexcept;
    Arena& operator=(Arena&& other) noexcept;
    ~Arena();

    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace kvw
