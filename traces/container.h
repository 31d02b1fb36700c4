// The frames of a trace file as bytes: file header, chunk header, footer, seek table, tail.
// FORMAT.md describes each; this file only turns them from and into structs. Nothing here reads or
// writes files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/result.h"
#include "src/base/sha256.h"
#include "traces/columns.h"
#include "traces/schema.h"
#include "traces/trace.h"

namespace kvw::traces {

using Bytes = std::span<const std::uint8_t>;

inline constexpr std::uint32_t kOwnFrame =
    0x184D2A57;  // skippable frame: header, chunk header, footer
inline constexpr std::uint32_t kSeekFrame = 0x184D2A5E;  // skippable frame: zstd's seek table
inline constexpr std::uint32_t kSeekMagic = 0x8F92EAB1;  // the last four bytes of a closed trace
inline constexpr std::size_t kFrameHead = 8;             // skippable magic and length

inline constexpr std::string_view kHeaderMagic = "kvw:head";
inline constexpr std::string_view kChunkMagic = "kvw:chnk";
inline constexpr std::string_view kFooterMagic = "kvw:foot";
inline constexpr std::string_view kTailMagic = "kvw:tail";

// In a text record's kind: the tenant's next record that is not ids belongs to the same text.
inline constexpr std::uint8_t kGoesOn = 0x80;

// What a writer makes.
inline constexpr std::size_t kChunkRaw = 256 << 10;      // ledger bytes of a chunk, at most
inline constexpr std::size_t kChunkText = 1 << 20;       // text bytes of a chunk, all tenants
inline constexpr std::size_t kTextPiece = 64 << 10;      // longer text records are cut into pieces
inline constexpr std::size_t kRowPayload = 262144;       // a tail row this long is not added to
inline constexpr std::size_t kEventBytesMax = 64 << 10;  // `bytes` of one event
inline constexpr std::size_t kTextMax = 64 << 20;        // one text record
// What a reader accepts.
inline constexpr std::size_t kRawMax = 1 << 20;      // a section, decoded
constexpr std::size_t packed_max(std::size_t raw) {  // the same section, as stored
    return raw + raw / 256 + 128;
}
inline constexpr std::size_t kTextRawMax = 2 << 20;  // text sections of a chunk together, decoded
inline constexpr std::size_t kSectionsMax = 4096;    // text sections of a chunk
inline constexpr std::size_t kSchemaRawMax = 64 << 10;
inline constexpr std::size_t kRowMax = 1 << 20;    // payload of a tail row
inline constexpr std::size_t kFileFieldsMax = 32;  // fields of one kind in a file's schema

void put_u32(std::string& out, std::uint32_t value);
void put_u64(std::string& out, std::uint64_t value);
std::uint32_t get_u32(const std::uint8_t* at);
std::uint64_t get_u64(const std::uint8_t* at);
inline Bytes as_bytes(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}
inline std::string_view as_text(Bytes bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The CRC-32 of zlib and Ethernet (polynomial 0xEDB88320), going on from `crc`.
std::uint32_t crc32(Bytes bytes, std::uint32_t crc = 0);

// Walks untrusted bytes; once something did not fit, everything after is 0 and ok() is false.
class Cursor {
  public:
    explicit Cursor(Bytes bytes) : bytes_(bytes) {}
    std::uint8_t u8();
    std::uint32_t u32();
    std::uint64_t u64();
    std::uint64_t varint();
    Bytes take(std::uint64_t count);
    bool ok() const { return ok_; }
    bool at_end() const { return at_ == bytes_.size(); }
    std::size_t position() const { return at_; }

  private:
    Bytes bytes_;
    std::size_t at_ = 0;
    bool ok_ = true;
};

// One zstd frame with content size and checksum.
std::string pack(Bytes raw, int level);
// Decodes exactly one such frame of exactly `raw_size` bytes into `raw`, which has room for them.
// Fails: bad_trace, also for a window over 8 MiB, a dictionary, or bytes behind the frame.
Status unpack(Bytes packed, std::uint8_t* raw, std::size_t raw_size);

struct FileField {
    std::string name;
    FieldCode code = FieldCode::varint;
    bool content = false;
    bool critical = true;
};
struct FileKind {
    std::uint8_t code = 0;  // 1..127; from 64 on: a note
    std::string name;
    bool critical = true;
    bool has_bytes = false;
    std::vector<FileField> fields;
};

// The schema table as text, one line per kind (FORMAT.md, "Schema").
std::string schema_text(std::span<const FileKind> kinds);
std::vector<FileKind> own_schema();
Result<std::vector<FileKind>> parse_schema(std::string_view text);

// Each frame ends in the SHA-256 of all its bytes before.
std::string file_header_frame(const TraceHeader& header, std::string_view schema);
struct ParsedHeader {
    TraceHeader header;
    std::vector<FileKind> kinds;
};
// Fails: bad_trace. `frame` is the whole frame.
Result<ParsedHeader> parse_file_header(Bytes frame);
inline constexpr std::size_t kFileHeaderFixed = kFrameHead + 48;  // bytes before the packed schema

struct Section {
    std::uint32_t tenant = 0;  // text sections only
    std::uint32_t packed = 0;  // bytes as stored
    std::uint32_t raw = 0;     // bytes decoded
    Digest256 sha{};           // of the bytes as stored
};

struct ChunkHeader {
    RunId run_id{};
    std::uint64_t number = 0;  // from 0
    std::uint64_t first_event = 0;
    std::uint32_t events = 0;  // numbered
    std::uint32_t notes = 0;
    Section ledger;
    std::vector<Section> texts;  // tenants ascending
};
inline constexpr std::size_t kChunkHeaderFixed = kFrameHead + 92;  // bytes before the text sections
inline constexpr std::size_t kSectionEntry = 44;

std::string chunk_header_frame(const ChunkHeader& header);
Result<ChunkHeader> parse_chunk_header(Bytes frame);
// How long a chunk header with so many text sections is, frame head and hash included.
constexpr std::size_t chunk_header_size(std::size_t texts) {
    return kChunkHeaderFixed + texts * kSectionEntry + 32;
}

struct Footer {
    RunId run_id{};
    std::uint64_t chunks = 0, events = 0, notes = 0, leaves = 0;
    Digest256 ledger_digest{}, root{};
    bool clean_end = true;
    std::vector<std::pair<std::uint8_t, std::uint64_t>>
        kinds;  // code, events of it; ascending, none is 0
    friend bool operator==(const Footer&, const Footer&) = default;
};
inline constexpr std::size_t kFooterFixed = kFrameHead + 128;  // bytes before the table of kinds

std::string footer_frame(const Footer& footer);
Result<Footer> parse_footer(Bytes frame);

// The zstd seekable format, version 0.1.0, without checksums: one entry per frame before the table.
class SeekTable {
  public:
    void add(std::uint32_t packed, std::uint32_t raw);
    std::string frame() const;
    std::size_t count() const { return entries_.size() / 8; }

  private:
    std::string entries_;
};
inline constexpr std::size_t kSeekTail = 9;

// RFC 6962, section 2.1, over data that are SHA-256 digests of frames as stored.
class MerkleTree {
  public:
    void add(const Digest256& frame_sha);
    std::uint64_t leaves() const { return leaves_; }
    Digest256 root() const;  // of no leaves: SHA-256 of nothing

  private:
    std::vector<Digest256> subtrees_;  // perfect ones, larger first: the binary digits of leaves_
    std::uint64_t leaves_ = 0;
};

struct TailHead {
    RunId run_id{};
    std::uint64_t chunk = 0;  // the chunk that the rows would have become
    std::uint64_t first_event = 0;
};
inline constexpr std::size_t kTailHead = 44;
inline constexpr std::size_t kRowHead = 16;

std::string tail_head(const TailHead& head);
std::optional<TailHead> parse_tail_head(Bytes bytes);
// Fills in a row's head, which precedes `payload_size` bytes at `row`.
void finish_row(std::uint8_t* row, std::uint32_t payload_size, std::uint64_t event);

Error bad_trace(std::string message);

}  // namespace kvw::traces
