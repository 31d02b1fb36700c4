#include "traces/container.h"

#include <zstd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "src/base/check.h"

namespace kvw::traces {

Error bad_trace(std::string message) { return {ErrorCode::bad_trace, std::move(message)}; }

// --- numbers

void put_u32(std::string& out, std::uint32_t value) {
    for (int i = 0; i < 4; ++i) {
        out += static_cast<char>(value >> (8 * i));
    }
}

void put_u64(std::string& out, std::uint64_t value) {
    for (int i = 0; i < 8; ++i) {
        out += static_cast<char>(value >> (8 * i));
    }
}

std::uint32_t get_u32(const std::uint8_t* at) {
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

std::uint64_t get_u64(const std::uint8_t* at) {
    return get_u32(at) | static_cast<std::uint64_t>(get_u32(at + 4)) << 32;
}

namespace {

// table[k][b]: the effect of byte b on the CRC when k more bytes follow.
using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;
constexpr CrcTables crc_tables() {
    CrcTables table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) {
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        }
        table[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 255];
        }
    }
    return table;
}
constexpr CrcTables kCrc = crc_tables();

}  // namespace

std::uint32_t crc32(Bytes bytes, std::uint32_t crc) {
    crc = ~crc;
    const std::uint8_t* at = bytes.data();
    std::size_t left = bytes.size();
    for (; left >= 8; left -= 8, at += 8) {
        const std::uint32_t low = crc ^ get_u32(at);
        const std::uint32_t high = get_u32(at + 4);
        crc = kCrc[7][low & 255] ^ kCrc[6][low >> 8 & 255] ^ kCrc[5][low >> 16 & 255] ^
              kCrc[4][low >> 24] ^ kCrc[3][high & 255] ^ kCrc[2][high >> 8 & 255] ^
              kCrc[1][high >> 16 & 255] ^ kCrc[0][high >> 24];
    }
    for (; left > 0; --left, ++at) {
        crc = crc >> 8 ^ kCrc[0][(crc ^ *at) & 255];
    }
    return ~crc;
}

std::uint8_t Cursor::u8() {
    const Bytes bytes = take(1);
    return ok_ ? bytes[0] : 0;
}

std::uint32_t Cursor::u32() {
    const Bytes bytes = take(4);
    return ok_ ? get_u32(bytes.data()) : 0;
}

std::uint64_t Cursor::u64() {
    const Bytes bytes = take(8);
    return ok_ ? get_u64(bytes.data()) : 0;
}

std::uint64_t Cursor::varint() {
    std::uint8_t padded[kVarintMax + 1] = {};
    const std::size_t left = bytes_.size() - at_;
    if (left > 0) {
        std::memcpy(padded, bytes_.data() + at_, std::min(left, kVarintMax));
    }
    const std::uint8_t* at = padded;
    std::uint64_t value = 0;
    const bool canonical = get_varint(at, value);
    const auto used = static_cast<std::size_t>(at - padded);
    if (!ok_ || !canonical || used > left) {
        ok_ = false;
        return 0;
    }
    at_ += used;
    return value;
}

Bytes Cursor::take(std::uint64_t count) {
    if (!ok_ || count > bytes_.size() - at_) {
        ok_ = false;
        return {};
    }
    const Bytes bytes = bytes_.subspan(at_, static_cast<std::size_t>(count));
    at_ += bytes.size();
    return bytes;
}

// --- zstd

std::string pack(Bytes raw, int level) {
    const std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context(ZSTD_createCCtx(),
                                                                       ZSTD_freeCCtx);
    check(context != nullptr, "zstd has memory to compress");
    ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel, level);
    ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1);
    std::string packed(ZSTD_compressBound(raw.size()), '\0');
    const std::size_t size =
        ZSTD_compress2(context.get(), packed.data(), packed.size(), raw.data(), raw.size());
    check(!ZSTD_isError(size), "zstd compresses into a buffer of its own bound");
    packed.resize(size);
    return packed;
}

namespace {

// RFC 8878, 3.1.1.1: what the frame says of itself, so that nothing is decoded that asks for more.
const char* refuse_frame(Bytes packed) {
    if (packed.size() < 6 || get_u32(packed.data()) != ZSTD_MAGICNUMBER) {
        return "is not a zstd frame";
    }
    const std::uint8_t descriptor = packed[4];
    if ((descriptor & 0x18) != 0) {
        return "has unused bits set in its zstd frame header";
    }
    if ((descriptor & 0x04) == 0) {
        return "has no zstd checksum";
    }
    if ((descriptor & 0x03) != 0) {
        return "asks for a zstd dictionary";
    }
    const bool single_segment = (descriptor & 0x20) != 0;
    if (!single_segment) {
        const unsigned exponent = 10 + (packed[5] >> 3);
        const std::uint64_t window = (1ull << exponent) + (1ull << exponent) / 8 * (packed[5] & 7);
        if (window > 8 << 20) {
            return "asks for a zstd window over 8 MiB";
        }
    }
    return nullptr;
}

}  // namespace

Status unpack(Bytes packed, std::uint8_t* raw, std::size_t raw_size) {
    if (const char* why = refuse_frame(packed)) {
        return bad_trace(why);
    }
    if (ZSTD_getFrameContentSize(packed.data(), packed.size()) != raw_size) {
        return bad_trace("does not state " + std::to_string(raw_size) + " bytes as its size");
    }
    if (ZSTD_findFrameCompressedSize(packed.data(), packed.size()) != packed.size()) {
        return bad_trace("is not exactly one zstd frame");
    }
    const std::size_t size = ZSTD_decompress(raw, raw_size, packed.data(), packed.size());
    if (ZSTD_isError(size) || size != raw_size) {
        return bad_trace("does not decompress");
    }
    return {};
}

// --- schema

namespace {

constexpr std::string_view kFieldCodes = "vd48";  // in the order of FieldCode

bool is_name(std::string_view name) {
    return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    });
}

// Cuts `text` at the first `separator`, which must be there.
std::optional<std::string_view> cut(std::string_view& text, char separator) {
    const std::size_t at = text.find(separator);
    if (at == text.npos) {
        return std::nullopt;
    }
    const std::string_view piece = text.substr(0, at);
    text.remove_prefix(at + 1);
    return piece;
}

bool drop_suffix(std::string_view& text, char suffix) {
    if (!text.ends_with(suffix)) {
        return false;
    }
    text.remove_suffix(1);
    return true;
}

std::optional<FileField> parse_field(std::string_view word) {
    FileField field;
    field.critical = !drop_suffix(word, '?');
    field.content = drop_suffix(word, '*');
    const std::size_t code = word.empty() ? word.npos : kFieldCodes.find(word.back());
    if (code == word.npos || word.size() < 2 || word[word.size() - 2] != ':') {
        return std::nullopt;
    }
    field.code = static_cast<FieldCode>(code);
    field.name = word.substr(0, word.size() - 2);
    if (!is_name(field.name)) {
        return std::nullopt;
    }
    return field;
}

std::optional<FileKind> parse_kind(std::string_view line) {
    std::vector<std::string_view> words;
    while (const auto word = cut(line, ' ')) {
        words.push_back(*word);
    }
    words.push_back(line);
    if (words.size() < 2 || words.size() > 2 + kFileFieldsMax) {
        return std::nullopt;
    }
    FileKind kind;
    const std::string_view code = words[0];
    const auto parsed = std::from_chars(code.data(), code.data() + code.size(), kind.code);
    if (parsed.ec != std::errc{} || parsed.ptr != code.data() + code.size() ||
        code.front() == '0' || kind.code > 127) {
        return std::nullopt;
    }
    std::string_view name = words[1];
    kind.critical = !drop_suffix(name, '?');
    kind.has_bytes = drop_suffix(name, '$');
    kind.name = name;
    if (!is_name(name)) {
        return std::nullopt;
    }
    for (std::size_t i = 2; i < words.size(); ++i) {
        auto field = parse_field(words[i]);
        if (!field) {
            return std::nullopt;
        }
        for (const FileField& other : kind.fields) {
            if (other.name == field->name) {
                return std::nullopt;
            }
        }
        kind.fields.push_back(std::move(*field));
    }
    return kind;
}

}  // namespace

std::string schema_text(std::span<const FileKind> kinds) {
    std::string text;
    for (const FileKind& kind : kinds) {
        text += std::to_string(kind.code) + ' ' + kind.name;
        text += kind.has_bytes ? "$" : "";
        text += kind.critical ? "" : "?";
        for (const FileField& field : kind.fields) {
            text += ' ' + field.name + ':' + kFieldCodes[static_cast<std::size_t>(field.code)];
            text += field.content ? "*" : "";
            text += field.critical ? "" : "?";
        }
        text += '\n';
    }
    return text;
}

std::vector<FileKind> own_schema() {
    std::vector<FileKind> kinds;
    for (const KindSchema& schema : event_schema()) {
        FileKind kind{.code = static_cast<std::uint8_t>(schema.kind),
                      .name = std::string(schema.name),
                      .critical = schema.critical,
                      .has_bytes = schema.has_bytes,
                      .fields = {}};
        for (const FieldSchema& field : schema.fields) {
            kind.fields.push_back({std::string(field.name), field.code, field.content, true});
        }
        kinds.push_back(std::move(kind));
    }
    return kinds;
}

Result<std::vector<FileKind>> parse_schema(std::string_view text) {
    std::vector<FileKind> kinds;
    while (!text.empty()) {
        const auto line = cut(text, '\n');
        auto kind = line ? parse_kind(*line) : std::nullopt;
        if (!kind) {
            return bad_trace("line " + std::to_string(kinds.size() + 1) +
                             " of the schema is malformed");
        }
        for (const FileKind& other : kinds) {
            if (other.name == kind->name) {
                return bad_trace("the schema names " + kind->name + " twice");
            }
        }
        if (!kinds.empty() && kinds.back().code >= kind->code) {
            return bad_trace("the schema is not in order at " + kind->name);
        }
        kinds.push_back(std::move(*kind));
    }
    return kinds;
}

// --- frames

namespace {

std::string begin_frame(std::uint32_t magic, std::string_view own_magic) {
    std::string frame;
    put_u32(frame, magic);
    put_u32(frame, 0);
    frame += own_magic;
    return frame;
}

void put_digest(std::string& out, const Digest256& digest) {
    out.append(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::string end_frame(std::string frame) {
    const auto length = static_cast<std::uint32_t>(frame.size() + 32 - kFrameHead);
    for (int i = 0; i < 4; ++i) {
        frame[4 + i] = static_cast<char>(length >> (8 * i));
    }
    put_digest(frame, sha256(frame));
    return frame;
}

template <std::size_t n>
std::array<std::uint8_t, n> take_array(Cursor& cursor) {
    std::array<std::uint8_t, n> out{};
    const Bytes bytes = cursor.take(n);
    std::copy(bytes.begin(), bytes.end(), out.begin());
    return out;
}

// Checks frame head and closing hash; returns what stands between, without the own magic.
Result<Bytes> frame_body(Bytes frame, std::string_view own_magic, std::string_view name) {
    constexpr std::size_t kAround = kFrameHead + 8 + 32;
    const std::string what(name);
    if (frame.size() < kAround || get_u32(frame.data()) != kOwnFrame ||
        get_u32(frame.data() + 4) != frame.size() - kFrameHead ||
        as_text(frame.subspan(kFrameHead, 8)) != own_magic) {
        return bad_trace("there is no " + what + " here");
    }
    const Digest256 sha = sha256(frame.first(frame.size() - 32));
    if (!std::equal(sha.begin(), sha.end(), frame.end() - 32)) {
        return bad_trace("the " + what + " does not match its SHA-256");
    }
    return frame.subspan(kFrameHead + 8, frame.size() - kAround);
}

void put_section(std::string& out, const Section& section) {
    put_u32(out, section.packed);
    put_u32(out, section.raw);
    put_digest(out, section.sha);
}

Section take_section(Cursor& cursor) {
    Section section;
    section.packed = cursor.u32();
    section.raw = cursor.u32();
    section.sha = take_array<32>(cursor);
    return section;
}

// What zstd makes of bytes that it cannot compress, and a little: so that the decoded size bounds
// the stored one.
bool within_limits(const Section& section) {
    return section.raw >= 1 && section.raw <= kRawMax && section.packed >= 1 &&
           section.packed <= packed_max(section.raw);
}

}  // namespace

std::string file_header_frame(const TraceHeader& header, std::string_view schema) {
    const std::string packed = pack(as_bytes(schema), 19);
    std::string frame = begin_frame(kOwnFrame, kHeaderMagic);
    put_u32(frame, header.minor << 16 | header.major);
    put_u32(frame, static_cast<std::uint32_t>(header.text) | (header.imported ? 1u << 8 : 0));
    frame.append(reinterpret_cast<const char*>(header.run_id.data()), header.run_id.size());
    put_u64(frame, static_cast<std::uint64_t>(header.created_ns));
    put_u32(frame, static_cast<std::uint32_t>(packed.size()));
    put_u32(frame, static_cast<std::uint32_t>(schema.size()));
    check(frame.size() == kFileHeaderFixed, "the file header is as long as FORMAT.md says");
    frame += packed;
    return end_frame(std::move(frame));
}

Result<ParsedHeader> parse_file_header(Bytes frame) {
    ParsedHeader parsed;
    if (frame.size() > kFrameHead + 12 && as_text(frame.subspan(kFrameHead, 8)) == kHeaderMagic) {
        const std::uint32_t major = get_u32(frame.data() + kFrameHead + 8) & 0xffff;
        if (major != kTraceMajor) {
            return bad_trace("it is in version " + std::to_string(major) +
                             " of the format; this reader knows " + std::to_string(kTraceMajor));
        }
    }
    const auto body = frame_body(frame, kHeaderMagic, "file header");
    if (!body) {
        return body.error();
    }
    Cursor cursor(*body);
    const std::uint32_t version = cursor.u32();
    const std::uint32_t flags = cursor.u32();
    parsed.header.major = version & 0xffff;
    parsed.header.minor = version >> 16;
    parsed.header.imported = (flags >> 8 & 1) != 0;
    parsed.header.text = static_cast<TextMode>(flags & 0xff);
    parsed.header.run_id = take_array<16>(cursor);
    parsed.header.created_ns = static_cast<std::int64_t>(cursor.u64());
    const std::uint32_t packed_size = cursor.u32();
    const std::uint32_t raw_size = cursor.u32();
    const Bytes packed = cursor.take(packed_size);
    if (!cursor.ok() || !cursor.at_end() || raw_size > kSchemaRawMax) {
        return bad_trace("the file header is malformed");
    }
    if ((flags & ~0x1ffu) != 0) {
        return bad_trace("the file header has unused bits set");
    }
    if (parsed.header.text != TextMode::none && parsed.header.text != TextMode::plain) {
        return bad_trace("its text mode is " + std::to_string(flags & 0xff) +
                         "; this reader knows 0 (none) and 1 (plain)");
    }
    std::vector<std::uint8_t> raw(raw_size);
    const Status unpacked = unpack(packed, raw.data(), raw_size);
    if (!unpacked) {
        return bad_trace("the schema " + unpacked.error().message);
    }
    auto kinds = parse_schema(as_text(raw));
    if (!kinds) {
        return kinds.error();
    }
    parsed.kinds = std::move(*kinds);
    return parsed;
}

std::string chunk_header_frame(const ChunkHeader& header) {
    std::string frame = begin_frame(kOwnFrame, kChunkMagic);
    frame.append(reinterpret_cast<const char*>(header.run_id.data()), header.run_id.size());
    put_u64(frame, header.number);
    put_u64(frame, header.first_event);
    put_u32(frame, header.events);
    put_u32(frame, header.notes);
    put_section(frame, header.ledger);
    put_u32(frame, static_cast<std::uint32_t>(header.texts.size()));
    check(frame.size() == kChunkHeaderFixed, "the chunk header is as long as FORMAT.md says");
    for (const Section& text : header.texts) {
        put_u32(frame, text.tenant);
        put_section(frame, text);
    }
    return end_frame(std::move(frame));
}

Result<ChunkHeader> parse_chunk_header(Bytes frame) {
    const auto body = frame_body(frame, kChunkMagic, "chunk header");
    if (!body) {
        return body.error();
    }
    Cursor cursor(*body);
    ChunkHeader header;
    header.run_id = take_array<16>(cursor);
    header.number = cursor.u64();
    header.first_event = cursor.u64();
    header.events = cursor.u32();
    header.notes = cursor.u32();
    header.ledger = take_section(cursor);
    const std::uint32_t texts = cursor.u32();
    if (!cursor.ok() || texts > kSectionsMax ||
        body->size() != cursor.position() + texts * kSectionEntry) {
        return bad_trace("the chunk header is malformed");
    }
    std::uint64_t text_raw = 0;
    bool fits = within_limits(header.ledger);
    for (std::uint32_t i = 0; i < texts; ++i) {
        const std::uint32_t tenant = cursor.u32();
        Section text = take_section(cursor);
        text.tenant = tenant;
        fits = fits && within_limits(text);
        text_raw += text.raw;
        if (!header.texts.empty() && header.texts.back().tenant >= tenant) {
            return bad_trace("the chunk header's text sections are not in order of tenants");
        }
        header.texts.push_back(text);
    }
    if (!fits || text_raw > kTextRawMax ||
        std::uint64_t{header.events} + header.notes > header.ledger.raw) {
        return bad_trace("the chunk header asks for more than a chunk may hold");
    }
    return header;
}

std::string footer_frame(const Footer& footer) {
    std::string frame = begin_frame(kOwnFrame, kFooterMagic);
    frame.append(reinterpret_cast<const char*>(footer.run_id.data()), footer.run_id.size());
    put_u64(frame, footer.chunks);
    put_u64(frame, footer.events);
    put_u64(frame, footer.notes);
    put_u64(frame, footer.leaves);
    put_digest(frame, footer.ledger_digest);
    put_digest(frame, footer.root);
    put_u32(frame, footer.clean_end ? 1 : 0);
    std::string table;
    for (const auto& [code, count] : footer.kinds) {
        std::uint8_t entry[1 + kVarintMax] = {code};
        const std::uint8_t* end = put_varint(entry + 1, count);
        table.append(reinterpret_cast<const char*>(entry), static_cast<std::size_t>(end - entry));
    }
    put_u32(frame, static_cast<std::uint32_t>(footer.kinds.size()));
    check(frame.size() == kFooterFixed, "the footer is as long as FORMAT.md says");
    frame += table;
    return end_frame(std::move(frame));
}

Result<Footer> parse_footer(Bytes frame) {
    const auto body = frame_body(frame, kFooterMagic, "footer");
    if (!body) {
        return body.error();
    }
    Cursor cursor(*body);
    Footer footer;
    footer.run_id = take_array<16>(cursor);
    footer.chunks = cursor.u64();
    footer.events = cursor.u64();
    footer.notes = cursor.u64();
    footer.leaves = cursor.u64();
    footer.ledger_digest = take_array<32>(cursor);
    footer.root = take_array<32>(cursor);
    const std::uint32_t flags = cursor.u32();
    const std::uint32_t kinds = cursor.u32();
    footer.clean_end = (flags & 1) != 0;
    for (std::uint32_t i = 0; i < kinds && cursor.ok(); ++i) {
        const std::uint8_t code = cursor.u8();
        footer.kinds.emplace_back(code, cursor.varint());
    }
    if (!cursor.ok() || !cursor.at_end()) {
        return bad_trace("the footer is malformed");
    }
    if ((flags & ~1u) != 0) {
        return bad_trace("the footer has unused bits set");
    }
    return footer;
}

void SeekTable::add(std::uint32_t packed, std::uint32_t raw) {
    put_u32(entries_, packed);
    put_u32(entries_, raw);
}

std::string SeekTable::frame() const {
    std::string frame;
    put_u32(frame, kSeekFrame);
    put_u32(frame, static_cast<std::uint32_t>(entries_.size() + kSeekTail));
    frame += entries_;
    put_u32(frame, static_cast<std::uint32_t>(count()));
    frame += '\0';  // descriptor: no checksums
    put_u32(frame, kSeekMagic);
    return frame;
}

// --- Merkle tree

namespace {

Digest256 join(const Digest256& left, const Digest256& right) {
    std::array<std::uint8_t, 65> node{0x01};
    std::copy(left.begin(), left.end(), node.begin() + 1);
    std::copy(right.begin(), right.end(), node.begin() + 33);
    return sha256(Bytes(node));
}

}  // namespace

void MerkleTree::add(const Digest256& frame_sha) {
    std::array<std::uint8_t, 33> leaf{0x00};
    std::copy(frame_sha.begin(), frame_sha.end(), leaf.begin() + 1);
    Digest256 tree = sha256(Bytes(leaf));
    for (std::uint64_t full = leaves_; full & 1; full >>= 1) {
        tree = join(subtrees_.back(), tree);
        subtrees_.pop_back();
    }
    subtrees_.push_back(tree);
    ++leaves_;
}

Digest256 MerkleTree::root() const {
    if (subtrees_.empty()) {
        return sha256(std::string_view{});
    }
    Digest256 tree = subtrees_.back();
    for (std::size_t i = subtrees_.size() - 1; i-- > 0;) {
        tree = join(subtrees_[i], tree);
    }
    return tree;
}

// --- tail

std::string tail_head(const TailHead& head) {
    std::string bytes(kTailMagic);
    bytes.append(reinterpret_cast<const char*>(head.run_id.data()), head.run_id.size());
    put_u64(bytes, head.chunk);
    put_u64(bytes, head.first_event);
    put_u32(bytes, crc32(as_bytes(bytes)));
    return bytes;
}

std::optional<TailHead> parse_tail_head(Bytes bytes) {
    if (bytes.size() != kTailHead || as_text(bytes.first(8)) != kTailMagic ||
        crc32(bytes.first(kTailHead - 4)) != get_u32(bytes.data() + kTailHead - 4)) {
        return std::nullopt;
    }
    Cursor cursor(bytes.subspan(8));
    TailHead head;
    head.run_id = take_array<16>(cursor);
    head.chunk = cursor.u64();
    head.first_event = cursor.u64();
    return head;
}

void finish_row(std::uint8_t* row, std::uint32_t payload_size, std::uint64_t event) {
    std::string head;
    put_u32(head, payload_size);
    put_u64(head, event);
    const std::uint32_t crc = crc32({row + kRowHead, payload_size}, crc32(as_bytes(head)));
    put_u32(head, crc);
    std::memcpy(row, head.data(), kRowHead);
}

}  // namespace kvw::traces
