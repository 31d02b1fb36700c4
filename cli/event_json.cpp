#include "cli/event_json.h"

#include <fmt/format.h>

#include <bit>
#include <optional>
#include <vector>

#include "cli/answer_stream.h"
#include "src/base/sha256.h"
#include "src/base/witness_mix.h"
#include "traces/schema.h"

namespace kvw::cli {

namespace {

const char* access_name(std::uint64_t access) {
    switch (static_cast<AccessKind>(access)) {
        case AccessKind::read:
            return "read";
        case AccessKind::write:
            return "write";
        case AccessKind::move:
            return "move";
        case AccessKind::scrub:
            return "scrub";
    }
    return "unknown";
}

const char* checkpoint_name(std::uint64_t checkpoint) {
    switch (static_cast<Checkpoint>(checkpoint)) {
        case Checkpoint::first_sample:
            return "first_sample";
        case Checkpoint::interval:
            return "interval";
        case Checkpoint::finish:
            return "finish";
    }
    return "unknown";
}

Json reason_name(EventKind kind, std::uint64_t reason) {
    switch (kind) {
        case EventKind::reject:
            return name_of(static_cast<RejectReason>(reason));
        case EventKind::cancel:
        case EventKind::finish:
            return name_of(static_cast<FinishReason>(reason));
        case EventKind::free:
            return name_of(static_cast<FreeReason>(reason));
        default:
            return reason;
    }
}

bool is_float(EventKind kind, const FieldSchema& field) {
    return kind == EventKind::sampling && field.code == FieldCode::fixed32;
}

Json field_json(const Event& event, const FieldSchema& field, std::uint64_t value) {
    if (field.name == "request" || field.name == "writer_request" ||
        field.name == "request_loaded" || field.name == "stamped_request" || field.name == "seed") {
        return std::to_string(value);
    }
    if (field.name == "reason") {
        return reason_name(event.kind, value);
    }
    if (field.name == "access") {
        return access_name(value);
    }
    if (field.name == "scope") {
        return name_of(static_cast<CacheScope>(value));
    }
    if (field.name == "checkpoint") {
        return checkpoint_name(value);
    }
    if (field.name == "class") {
        return value == 1 ? Json("P") : Json(value);
    }
    if (is_float(event.kind, field)) {
        return std::bit_cast<float>(static_cast<std::uint32_t>(value));
    }
    switch (field.code) {
        case FieldCode::fixed32:
            return fmt::format("{:08x}", value);
        case FieldCode::fixed64:
            return fmt::format("{:016x}", value);
        default:
            break;
    }
    // Above 2^53 a number would not survive most readers.
    return value < (1ull << 53) ? Json(value) : Json(std::to_string(value));
}

// What the event's bytes are called.
const char* bytes_name(EventKind kind) {
    switch (kind) {
        case EventKind::config:
            return "config";
        case EventKind::violation:
            return "kind";
        case EventKind::note_host:
            return "host";
        default:
            return "name";
    }
}

std::string_view without_digit(std::string_view name) {
    return name.substr(0, name.find_last_not_of("0123456789") + 1);
}

// Words of one digest stand side by side, numbered from 0: how many there are from field `i` on.
std::size_t words_of_digest(std::span<const FieldSchema> fields, std::size_t i) {
    std::size_t words = 0;
    while (i + words < fields.size() && fields[i + words].code == FieldCode::fixed64 &&
           fields[i + words].name == fmt::format("{}{}", without_digit(fields[i].name), words)) {
        ++words;
    }
    return words;
}

std::optional<std::vector<std::int64_t>> ids_of(const TextRecord& record) {
    std::vector<std::int64_t> ids;
    const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(record.bytes[i]); };
    if (record.kind == TextKind::prompt_ids) {
        for (std::size_t i = 0; i + 4 <= record.bytes.size(); i += 4) {
            ids.push_back(static_cast<std::int32_t>(byte(i) | byte(i + 1) << 8 | byte(i + 2) << 16 |
                                                    static_cast<std::uint32_t>(byte(i + 3)) << 24));
        }
        return ids;
    }
    std::uint64_t value = 0;
    int shift = 0;
    for (std::size_t i = 0; i < record.bytes.size(); ++i) {
        value |= static_cast<std::uint64_t>(byte(i) & 0x7f) << shift;
        shift += 7;
        if (byte(i) < 0x80) {
            ids.push_back(static_cast<std::int64_t>(value));
            value = 0;
            shift = 0;
        } else if (shift > 56) {
            return std::nullopt;
        }
    }
    return ids;
}

std::string tenant_name(std::uint64_t number, const std::map<std::uint64_t, std::string>& tenants) {
    const auto found = tenants.find(number);
    return found != tenants.end() ? found->second : std::to_string(number);
}

}  // namespace

Json event_json(const Event& event, std::uint64_t event_number,
                const std::map<std::uint64_t, std::string>& tenants) {
    Json object = object_of("event");
    object["event"] = event.numbered() ? Json(event_number) : Json(nullptr);
    const KindSchema* schema = schema_of(event.kind);
    if (schema == nullptr) {
        object["type"] = fmt::format("unknown_{}", static_cast<int>(event.kind));
        return object;
    }
    object["type"] = schema->name;
    const std::span<const FieldSchema> fields = schema->fields;
    for (std::size_t i = 0; i < fields.size(); ++i) {
        const std::size_t words = words_of_digest(fields, i);
        if (words > 1) {
            std::string digest;
            for (std::size_t w = 0; w < words; ++w) {
                digest += fmt::format("{:016x}", event.fields[i + w]);
            }
            object[words == 4 ? "sha256" : std::string(without_digit(fields[i].name))] = digest;
            i += words - 1;
        } else {
            object[std::string(fields[i].name)] = field_json(event, fields[i], event.fields[i]);
        }
    }
    if (event.kind == EventKind::submit) {
        const std::uint64_t number = event.as<events::Submit>().tenant;
        object["tenant"] = tenant_name(number, tenants);
        object["tenant_number"] = number;
    }
    if (schema->has_bytes) {
        object[bytes_name(event.kind)] = std::string(event.bytes);
    }
    return object;
}

Json text_json(const TextRecord& record, const std::map<std::uint64_t, std::string>& tenants) {
    Json object = object_of("text");
    object["type"] = "text";
    object["tenant"] = tenant_name(number(record.tenant), tenants);
    if (number(record.request) != 0) {
        object["request"] = std::to_string(number(record.request));
    }
    switch (record.kind) {
        case TextKind::key:
            object["kind"] = "key";
            object["key"] = hex(
                {reinterpret_cast<const std::uint8_t*>(record.bytes.data()), record.bytes.size()});
            return object;
        case TextKind::prompt:
            object["kind"] = "prompt";
            break;
        case TextKind::stop:
            object["kind"] = "stop";
            break;
        case TextKind::prompt_ids:
            object["kind"] = "prompt_ids";
            break;
        case TextKind::ids:
            object["kind"] = "ids";
            break;
    }
    if (record.kind == TextKind::prompt || record.kind == TextKind::stop) {
        put_text(object, std::string(record.bytes));
    } else if (const auto ids = ids_of(record)) {
        object["ids"] = *ids;
    }
    return object;
}

}  // namespace kvw::cli
