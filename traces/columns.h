// Numbers as bytes, and the ledger section as columns (FORMAT.md, "Ledger section").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/sha256.h"
#include "traces/event.h"
#include "traces/schema.h"

namespace kvw::traces {

inline constexpr std::size_t kVarintMax = 10;  // bytes

// Writes LEB128 at `at`, at most kVarintMax bytes; returns the end.
inline std::uint8_t* put_varint(std::uint8_t* at, std::uint64_t value) {
    while (value >= 0x80) {
        *at++ = static_cast<std::uint8_t>(value) | 0x80;
        value >>= 7;
    }
    *at++ = static_cast<std::uint8_t>(value);
    return at;
}

// Reads one canonical LEB128 number and moves `at` behind it; false (at somewhere within the next
// kVarintMax bytes) when it is longer than needed or than 64 bits. Those bytes must be readable.
inline bool get_varint(const std::uint8_t*& at, std::uint64_t& value) {
    std::uint64_t byte = *at++;
    value = byte & 0x7f;
    if (byte < 0x80) [[likely]] {
        return true;
    }
    for (unsigned shift = 7; shift < 70; shift += 7) {
        byte = *at++;
        value |= (byte & 0x7f) << shift;
        if (byte < 0x80) {
            return byte != 0 && (shift < 63 || byte == 1);
        }
    }
    return false;
}

constexpr std::uint64_t zigzag(std::uint64_t difference) {
    return (difference << 1) ^ (0 - (difference >> 63));
}
constexpr std::uint64_t unzigzag(std::uint64_t value) { return (value >> 1) ^ (0 - (value & 1)); }

// Bytes that grow at the end without being filled first.
class ByteBuffer {
  public:
    // Room for `count` more bytes; what is written there is kept by set_end().
    std::uint8_t* room(std::size_t count) {
        if (capacity_ - size_ < count) [[unlikely]] {
            grow(count);
        }
        return bytes_.get() + size_;
    }
    void set_end(const std::uint8_t* end) { size_ = static_cast<std::size_t>(end - bytes_.get()); }
    void append(const void* bytes, std::size_t count);
    void append(std::string_view bytes) { append(bytes.data(), bytes.size()); }
    void clear() { size_ = 0; }
    std::size_t size() const { return size_; }
    std::uint8_t* data() { return bytes_.get(); }
    const std::uint8_t* data() const { return bytes_.get(); }
    std::span<const std::uint8_t> bytes() const { return {bytes_.get(), size_}; }

  private:
    void grow(std::size_t count);
    std::unique_ptr<std::uint8_t[]> bytes_;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

// digest.ledger: SHA-256 over row forms, hashed in blocks because one call per event would cost
// more than the event.
class LedgerDigest {
  public:
    std::uint8_t* room(std::size_t count) { return block_.room(count); }
    void set_end(const std::uint8_t* end) {
        block_.set_end(end);
        if (block_.size() >= kBlock) [[unlikely]] {
            flush();
        }
    }
    // The same, with `bytes` behind.
    void set_end_with(const std::uint8_t* end, std::string_view bytes) {
        block_.set_end(end);
        append(bytes);
    }
    // The same from memory that is readable in blocks of 16 to behind its end: no call for a few
    // bytes.
    void append_short(const std::uint8_t* row_form, std::size_t size) {
        std::uint8_t* const to = block_.room(size + 16);
        for (std::size_t i = 0; i < size; i += 16) {
            std::memcpy(to + i, row_form + i, 16);
        }
        set_end(to + size);
    }
    void append(std::string_view row_form) {
        block_.append(row_form);
        if (block_.size() >= kBlock) {
            flush();
        }
    }
    Digest256 digest();

  private:
    static constexpr std::size_t kBlock = 32768;
    void flush();
    ByteBuffer block_;
    Sha256 running_;
};

// Collects events and gives them back as one raw ledger section. The kinds and codes are
// event_schema()'s.
class ColumnWriter {
  public:
    ColumnWriter();
    // As schema_of(), without a call.
    const KindSchema* schema(EventKind kind) const {
        const auto code = static_cast<std::uint8_t>(kind);
        return code < kinds_.size() ? kinds_[code].schema : nullptr;
    }
    // At most `bytes_max(event)` is what the section grows by. The event's kind is known, its
    // fixed32 fields fit.
    void add(const Event& event);
    std::size_t bytes_max(const Event& event) const {
        return 1 + kinds_[static_cast<std::uint8_t>(event.kind)].entry_max + event.bytes.size();
    }
    // An upper bound of what take() will return.
    std::size_t size() const { return used_ + framing_; }
    std::size_t count() const { return order_.size(); }
    // Appends the section to `out` and starts anew; deltas begin at 0 again.
    void take(ByteBuffer& out);

  private:
    struct Column {
        FieldCode code{};
        std::uint64_t previous = 0;
        std::uint8_t* begin = nullptr;
        std::uint8_t* end = nullptr;
    };
    struct Kind {
        const KindSchema* schema = nullptr;
        std::size_t entry_max = 0;  // bytes that one event adds to the columns, without its `bytes`
        std::uint32_t count = 0;
        std::uint32_t capacity = 0;   // entries that every column has room for
        std::vector<Column> columns;  // the lengths of `bytes` last, where there are any
        std::unique_ptr<std::uint8_t[]> memory;
        std::string data;
    };
    static void grow(Kind& kind);
    std::array<Kind, 128> kinds_;
    ByteBuffer order_;  // one kind byte per event
    std::size_t used_ = 0;
    std::size_t framing_ = 0;
};

// How one kind of a file's schema becomes an Event of ours.
struct KindPlan {
    static constexpr std::uint8_t kUnknownField = 0xff;
    struct Field {
        FieldCode code{};
        bool content = false;
        std::uint8_t target = kUnknownField;  // index in Event::fields
    };
    bool in_file = false;
    bool known = false;
    bool has_bytes = false;
    bool critical_unknown = false;   // its events count as unknown_critical
    bool ignorable_unknown = false;  // or as unknown_ignorable
    EventKind kind{};                // 0 when not known
    std::vector<Field> fields;       // in the file's order
};
using Plans = std::array<KindPlan, 128>;  // by the file's kind code

struct EventCounts {
    std::uint64_t unknown_critical = 0, unknown_ignorable = 0;
    std::array<std::uint64_t, 128> kinds{};  // by the file's kind code
};

// Decodes one raw ledger section of `events` numbered events and `notes` notes into `out`, and adds
// what it finds to digest and counts. `section` borrows from bytes that are followed by kVarintMax
// readable ones. Event::bytes point into it. Returns what is wrong with it, or null.
const char* read_columns(std::span<const std::uint8_t> section, const Plans& plans,
                         std::uint64_t events, std::uint64_t notes, std::vector<Event>& out,
                         LedgerDigest& digest, EventCounts& counts);

// Decodes one event item of a tail row and moves `at` behind it; null when all is well. Bytes
// behind `end` as above.
const char* read_row_item(const std::uint8_t*& at, const std::uint8_t* end, const Plans& plans,
                          std::vector<Event>& out, LedgerDigest& digest, EventCounts& counts);

}  // namespace kvw::traces
