// Every event kind and field by name: how it is stored, and what it means to readers who do not
// know it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "traces/event.h"

namespace kvw {

enum class FieldCode : std::uint8_t {
    varint,  // LEB128
    delta,   // zigzag LEB128 of the difference to the same field of the previous event of this kind
             // in the chunk
    fixed32,  // little-endian; for values without structure
    fixed64,
};

struct FieldSchema {
    std::string_view name;
    FieldCode code = FieldCode::varint;
    bool content = false;  // a keyed digest of text: outside digest.ledger
    // The minor version that added it to its kind; 0 in what older traces say of it.
    std::uint8_t since = 0;
};

struct KindSchema {
    EventKind kind{};
    std::string_view name;
    bool critical = true;  // a reader that does not know it must not call the trace proven
    bool has_bytes = false;
    std::span<const FieldSchema> fields;
};

std::span<const KindSchema> event_schema();   // in order of kind
const KindSchema* schema_of(EventKind kind);  // null when unknown
const KindSchema* schema_named(std::string_view name);

// "alloc request=1 group=0 index=0 page=0 generation=1": one line, for people and golden files.
// Every field in schema order; fixed-width ones (sums, digests, float bits) as 0x… hex; bytes
// escaped in quotes.
std::string to_text(const Event& event);

// Appends the row form (FORMAT.md, "Row form"): what digest.ledger hashes. Nothing for notes.
void append_row_form(const Event& event, std::string& out);

}  // namespace kvw
