// A GGUF file (v2, v3) as metadata and tensor views over a mapping.
//
// The file is hostile until parse() has returned: every length goes through one checked-arithmetic
// helper before anything is allocated or looked at, no allocation exceeds the file's size, and no
// value is used before its type was compared. At most 65,536 keys and as many tensors. Source: the
// GGUF specification in the ggml repository.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/base/file.h"
#include "src/base/result.h"

namespace kvw {

enum class GgufType : std::uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12,
};

// An array as it lies in the file; strings are walked once at parse time, and indexed on demand.
struct GgufArray {
    GgufType type = GgufType::u8;
    std::uint64_t count = 0;
    std::span<const std::uint8_t> bytes;  // the elements as stored
};

using GgufValue =
    std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view, GgufArray>;

struct GgufTensor {
    std::string_view name;
    std::vector<std::uint64_t> shape;     // innermost (columns) first, 1 to 4 dimensions, all >= 1
    std::uint32_t type = 0;               // GGUF number; may be one we do not run
    std::span<const std::uint8_t> bytes;  // empty when the type's size is unknown
    std::uint64_t offset = 0;             // of the data, from the start of the file

    std::uint64_t cols() const { return shape.empty() ? 0 : shape[0]; }
    std::uint64_t rows() const;  // product of the other dimensions
};

class Gguf {
  public:
    // Fails: io when the file cannot be read; bad_model, naming key or tensor and the byte offset.
    static Result<Gguf> open(const Path& path);
    // Parses bytes that the caller keeps alive (tests, fuzzing).
    static Result<Gguf> parse(std::span<const std::uint8_t> bytes, const Path& name);

    std::uint32_t version() const { return version_; }
    const Path& path() const { return path_; }
    std::uint64_t file_size() const { return file_size_; }
    const FileIdentity& identity() const { return mapping_.identity(); }
    std::span<const std::uint8_t> file_bytes() const { return bytes_; }
    // Drops the pages of the mapping that were read; views stay valid (reads fault them in again).
    void drop_cached_pages() const;

    const std::map<std::string_view, GgufValue>& metadata() const { return metadata_; }
    const std::vector<GgufTensor>& tensors() const { return tensors_; }
    const GgufTensor* tensor(std::string_view name) const;  // null when absent

    bool has(std::string_view key) const { return metadata_.contains(key); }
    // Typed reads; any integer type serves where it fits. Fail: bad_model, naming the key, when
    // absent or of another type.
    Result<std::uint64_t> unsigned_at(std::string_view key) const;
    Result<double> number_at(std::string_view key) const;
    Result<bool> bool_at(std::string_view key) const;
    Result<std::string_view> string_at(std::string_view key) const;
    Result<std::vector<std::string_view>> strings_at(std::string_view key) const;
    Result<std::vector<float>> floats_at(std::string_view key) const;
    Result<std::vector<std::int32_t>> ints_at(std::string_view key) const;

  private:
    MappedFile mapping_;
    std::span<const std::uint8_t> bytes_;
    Path path_;
    std::uint64_t file_size_ = 0;
    std::uint32_t version_ = 0;
    std::map<std::string_view, GgufValue> metadata_;
    std::vector<GgufTensor> tensors_;
    std::map<std::string_view, std::size_t> tensor_index_;
};

}  // namespace kvw
