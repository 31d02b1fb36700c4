#include "traces/columns.h"

#include <algorithm>
#include <cstring>

#include "src/base/check.h"

namespace kvw::traces {

namespace {

constexpr std::size_t width_max(FieldCode code) {
    return code == FieldCode::fixed32 ? 4 : code == FieldCode::fixed64 ? 8 : kVarintMax;
}

inline std::uint8_t* put_fixed(std::uint8_t* at, std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) {
        at[i] = static_cast<std::uint8_t>(value >> (8 * i));
    }
    return at + bytes;
}

void append_column(ByteBuffer& out, const void* bytes, std::size_t size) {
    out.set_end(put_varint(out.room(kVarintMax), size));
    out.append(bytes, size);
}

}  // namespace

void ByteBuffer::append(const void* bytes, std::size_t count) {
    if (count > 0) {
        std::uint8_t* at = room(count);
        std::memcpy(at, bytes, count);
        set_end(at + count);
    }
}

void ByteBuffer::grow(std::size_t count) {
    const std::size_t capacity = std::max({size_ + count, capacity_ * 2, std::size_t{4096}});
    std::unique_ptr<std::uint8_t[]> bytes(new std::uint8_t[capacity]);
    if (size_ > 0) {
        std::memcpy(bytes.get(), bytes_.get(), size_);
    }
    bytes_ = std::move(bytes);
    capacity_ = capacity;
}

void LedgerDigest::flush() {
    running_.update(block_.bytes());
    block_.clear();
}

Digest256 LedgerDigest::digest() {
    flush();
    return running_.digest();
}

ColumnWriter::ColumnWriter() {
    framing_ = kVarintMax;
    for (const KindSchema& schema : event_schema()) {
        Kind& kind = kinds_[static_cast<std::uint8_t>(schema.kind)];
        kind.schema = &schema;
        for (const FieldSchema& field : schema.fields) {
            kind.columns.push_back({.code = field.code});
        }
        if (schema.has_bytes) {
            kind.columns.push_back({.code = FieldCode::varint});
        }
        for (const Column& column : kind.columns) {
            kind.entry_max += width_max(column.code);
        }
        framing_ +=
            (kind.columns.size() + 1) * 3;  // column lengths below 2 MiB are three bytes at most
    }
}

void ColumnWriter::grow(Kind& kind) {
    const std::uint32_t capacity = std::max<std::uint32_t>(64, kind.capacity * 2);
    std::unique_ptr<std::uint8_t[]> memory(new std::uint8_t[capacity * kind.entry_max]);
    std::uint8_t* at = memory.get();
    for (Column& column : kind.columns) {
        const auto used = static_cast<std::size_t>(column.end - column.begin);
        if (used > 0) {
            std::memcpy(at, column.begin, used);
        }
        column.begin = at;
        column.end = at + used;
        at += capacity * width_max(column.code);
    }
    kind.memory = std::move(memory);
    kind.capacity = capacity;
}

void ColumnWriter::add(const Event& event) {
    const auto code = static_cast<std::uint8_t>(event.kind);
    Kind& kind = kinds_[code];
    if (kind.count == kind.capacity) [[unlikely]] {
        grow(kind);
    }
    ++kind.count;
    std::uint8_t* order = order_.room(1);
    *order = code;
    order_.set_end(order + 1);

    std::size_t used = 1;
    const std::size_t fields = kind.schema->fields.size();
    Column* column = kind.columns.data();
    for (std::size_t i = 0; i < fields; ++i, ++column) {
        const std::uint64_t value = event.fields[i];
        std::uint8_t* const before = column->end;
        switch (column->code) {
            case FieldCode::varint:
                column->end = put_varint(before, value);
                break;
            case FieldCode::delta:
                column->end = put_varint(before, zigzag(value - column->previous));
                column->previous = value;
                break;
            case FieldCode::fixed32:
                check(value >> 32 == 0, "a fixed32 field of an event has 32 bits");
                column->end = put_fixed(before, value, 4);
                break;
            case FieldCode::fixed64:
                column->end = put_fixed(before, value, 8);
                break;
        }
        used += static_cast<std::size_t>(column->end - before);
    }
    if (kind.schema->has_bytes) {
        std::uint8_t* const before = column->end;
        column->end = put_varint(before, event.bytes.size());
        kind.data += event.bytes;
        used += static_cast<std::size_t>(column->end - before) + event.bytes.size();
    }
    used_ += used;
}

void ColumnWriter::take(ByteBuffer& out) {
    append_column(out, order_.data(), order_.size());
    for (Kind& kind : kinds_) {
        if (kind.count == 0) {
            continue;
        }
        for (Column& column : kind.columns) {
            append_column(out, column.begin, static_cast<std::size_t>(column.end - column.begin));
            column.end = column.begin;
            column.previous = 0;
        }
        if (kind.schema->has_bytes) {
            append_column(out, kind.data.data(), kind.data.size());
            kind.data.clear();
        }
        kind.count = 0;
    }
    order_.clear();
    used_ = 0;
}

namespace {

struct ColumnCursor {
    const std::uint8_t* at = nullptr;
    const std::uint8_t* end = nullptr;
    std::uint64_t previous = 0;
};

inline std::uint64_t get_fixed(const std::uint8_t*& at, int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) {
        value |= std::uint64_t{at[i]} << (8 * i);
    }
    at += bytes;
    return value;
}

// Takes the next `length`-prefixed column of `section`; false when it does not fit.
bool take_column(const std::uint8_t*& at, const std::uint8_t* end, ColumnCursor& column) {
    std::uint64_t size = 0;
    if (at >= end || !get_varint(at, size) || at > end ||
        size > static_cast<std::size_t>(end - at)) {
        return false;
    }
    column = {at, at + size, 0};
    at += size;
    return true;
}

void count_event(std::uint8_t code, const KindPlan& plan, EventCounts& counts) {
    ++counts.kinds[code];
    counts.unknown_critical += plan.critical_unknown;
    counts.unknown_ignorable += plan.ignorable_unknown;
}

constexpr std::size_t kRowFormMax =
    1 + kVarintMax * 33;  // without bytes; a file's kind has at most 32 fields

}  // namespace

const char* read_columns(std::span<const std::uint8_t> section, const Plans& plans,
                         std::uint64_t events, std::uint64_t notes, std::vector<Event>& out,
                         LedgerDigest& digest, EventCounts& counts) {
    const std::uint8_t* at = section.data();
    const std::uint8_t* const end = at + section.size();
    ColumnCursor order;
    if (!take_column(at, end, order) ||
        static_cast<std::uint64_t>(order.end - order.at) != events + notes) {
        return "its kind column does not have one byte per event";
    }
    std::array<std::uint32_t, 256> per_kind{};
    for (const std::uint8_t* code = order.at; code < order.end; ++code) {
        ++per_kind[*code];
    }

    // Find and size every column first, so that the loop below only has to see where each one ends.
    std::array<std::uint32_t, 128> first_column{};
    std::vector<ColumnCursor> columns;
    std::uint64_t numbered = 0;
    std::size_t delivered = 0;
    for (std::size_t code = 0; code < per_kind.size(); ++code) {
        const std::uint64_t count = per_kind[code];
        if (count == 0) {
            continue;
        }
        if (code >= plans.size() || !plans[code].in_file) {
            return "it has an event of a kind that the schema does not name";
        }
        const KindPlan& plan = plans[code];
        numbered += code < 64 ? count : 0;
        delivered += code < 64 || plan.known ? count : 0;
        first_column[code] = static_cast<std::uint32_t>(columns.size());
        for (std::size_t i = 0; i < plan.fields.size() + (plan.has_bytes ? 1 : 0); ++i) {
            ColumnCursor column;
            if (!take_column(at, end, column)) {
                return "a column reaches over its end";
            }
            const FieldCode field =
                i < plan.fields.size() ? plan.fields[i].code : FieldCode::varint;
            const auto size = static_cast<std::uint64_t>(column.end - column.at);
            const bool fixed = field == FieldCode::fixed32 || field == FieldCode::fixed64;
            if (size > count * width_max(field) || size < count * (fixed ? width_max(field) : 1)) {
                return "a column does not have one value per event";
            }
            columns.push_back(column);
        }
        if (plan.has_bytes) {
            ColumnCursor data;
            if (!take_column(at, end, data)) {
                return "a column reaches over its end";
            }
            columns.push_back(data);
        }
    }
    if (at != end) {
        return "it goes on behind its last column";
    }
    if (numbered != events) {
        return "it does not hold as many numbered events as its chunk header says";
    }

    out.resize(delivered);
    Event* event = out.data();
    Event skipped;
    for (const std::uint8_t* place = order.at; place < order.end; ++place) {
        const std::uint8_t code = *place;
        const KindPlan& plan = plans[code];
        const bool is_numbered = code < 64;
        Event& into = is_numbered || plan.known ? *event++ : skipped;
        into.kind = plan.kind;
        into.fields = {};
        into.bytes = {};
        std::uint8_t* row = digest.room(kRowFormMax);
        *row++ = code;
        ColumnCursor* column = columns.data() + first_column[code];
        for (const KindPlan::Field& field : plan.fields) {
            std::uint64_t value = 0;
            if (column->at >= column->end) [[unlikely]] {
                return "a column ends before its last event";
            }
            switch (field.code) {
                case FieldCode::varint:
                    if (!get_varint(column->at, value)) [[unlikely]] {
                        return "a number is not canonical LEB128";
                    }
                    break;
                case FieldCode::delta:
                    if (!get_varint(column->at, value)) [[unlikely]] {
                        return "a number is not canonical LEB128";
                    }
                    value = column->previous += unzigzag(value);
                    break;
                case FieldCode::fixed32:
                    value = get_fixed(column->at, 4);
                    break;
                case FieldCode::fixed64:
                    value = get_fixed(column->at, 8);
                    break;
            }
            ++column;
            if (field.target != KindPlan::kUnknownField) {
                into.fields[field.target] = value;
            }
            if (!field.content) {
                row = put_varint(row, value);
            }
        }
        if (plan.has_bytes) {
            std::uint64_t size = 0;
            if (column->at >= column->end || !get_varint(column->at, size)) {
                return "a length is missing or not canonical LEB128";
            }
            ++column;
            if (size > static_cast<std::uint64_t>(column->end - column->at)) {
                return "the bytes of an event reach over their column";
            }
            const std::string_view bytes(reinterpret_cast<const char*>(column->at), size);
            column->at += size;
            if (plan.known) {
                into.bytes = bytes;
            }
            row = put_varint(row, size);
            if (is_numbered) {
                digest.set_end_with(row, bytes);
            }
        } else if (is_numbered) {
            digest.set_end(row);
        }
    }
    for (const ColumnCursor& column : columns) {
        if (column.at != column.end) {
            return "a column goes on behind its last event";
        }
    }
    for (std::size_t code = 0; code < plans.size(); ++code) {
        counts.kinds[code] += per_kind[code];
        counts.unknown_critical += plans[code].critical_unknown ? per_kind[code] : 0;
        counts.unknown_ignorable += plans[code].ignorable_unknown ? per_kind[code] : 0;
    }
    return nullptr;
}

const char* read_row_item(const std::uint8_t*& at, const std::uint8_t* end, const Plans& plans,
                          std::vector<Event>& out, LedgerDigest& digest, EventCounts& counts) {
    const std::uint8_t* const begin = at;
    const std::uint8_t code = *at++;
    if (code >= plans.size() || !plans[code].in_file) {
        return "it has an event of a kind that the schema does not name";
    }
    const KindPlan& plan = plans[code];
    Event event;
    event.kind = plan.kind;
    std::string_view bytes;
    const auto number = [&](std::uint64_t& value) {
        return at < end && get_varint(at, value) && at <= end;
    };
    const auto read_fields = [&](bool content) {
        for (const KindPlan::Field& field : plan.fields) {
            std::uint64_t value = 0;
            if (field.content != content) {
                continue;
            }
            if (!number(value) || (field.code == FieldCode::fixed32 && value >> 32 != 0)) {
                return false;
            }
            if (field.target != KindPlan::kUnknownField) {
                event.fields[field.target] = value;
            }
        }
        return true;
    };
    if (!read_fields(false)) {
        return "a number is missing or not canonical LEB128";
    }
    if (plan.has_bytes) {
        std::uint64_t size = 0;
        if (!number(size) || size > static_cast<std::size_t>(end - at)) {
            return "the bytes of an event reach over their row";
        }
        bytes = {reinterpret_cast<const char*>(at), size};
        at += size;
    }
    const std::string_view row_form(reinterpret_cast<const char*>(begin),
                                    static_cast<std::size_t>(at - begin));
    if (!read_fields(true)) {
        return "a number is missing or not canonical LEB128";
    }
    event.bytes = plan.known ? bytes : std::string_view{};
    if (code < 64) {
        digest.append(row_form);
    }
    if (code < 64 || plan.known) {
        out.push_back(event);
    }
    count_event(code, plan, counts);
    return nullptr;
}

}  // namespace kvw::traces
