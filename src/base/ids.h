// The numbers that must not be mixed up, each a type of its own.
#pragma once

#include <cstdint>

namespace kvw {

enum class TenantId : std::uint32_t {};   // numbered per trace in submit order, from 1; 0 = nobody
enum class RequestId : std::uint64_t {};  // numbered per run in submit order, from 1; 0 = nobody
enum class PageId : std::uint32_t {};     // one numbering for all pools, from 0

constexpr std::uint32_t number(TenantId id) { return static_cast<std::uint32_t>(id); }
constexpr std::uint64_t number(RequestId id) { return static_cast<std::uint64_t>(id); }
constexpr std::uint32_t number(PageId id) { return static_cast<std::uint32_t>(id); }

// Consecutive token positions of one request that one page holds.
inline constexpr std::uint32_t kPageTokens = 16;

// Who data belongs to. The admission record is its only source.
struct Owner {
    TenantId tenant{};
    RequestId request{};
    friend bool operator==(const Owner&, const Owner&) = default;
};

}  // namespace kvw
