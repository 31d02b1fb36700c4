#include "src/gguf/gguf.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "src/base/text.h"
#include "src/gguf/length.h"
#include "src/gguf/tensor_types.h"

namespace kvw {

namespace {

constexpr std::uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kKeyBytesMax = 65535;      // the specification's limit
constexpr std::uint64_t kTensorNameBytesMax = 64;  // the specification's limit
constexpr std::uint64_t kEntriesMax = 65536;       // keys, and tensors; real files have hundreds
constexpr std::uint64_t kKeyBytesMin = 8 + 1 + 4 + 1;  // length, name, type, value
constexpr std::uint64_t kTensorBytesMin = 8 + 1 + 4 + 8 + 4 + 8;
constexpr std::string_view kAlignmentKey = "general.alignment";

// Bytes of one element in the file; 0 for strings, arrays and numbers that are no type.
std::uint64_t width_of(GgufType type) {
    switch (type) {
        case GgufType::u8:
        case GgufType::i8:
        case GgufType::boolean:
            return 1;
        case GgufType::u16:
        case GgufType::i16:
            return 2;
        case GgufType::u32:
        case GgufType::i32:
        case GgufType::f32:
            return 4;
        case GgufType::u64:
        case GgufType::i64:
        case GgufType::f64:
            return 8;
        case GgufType::string:
        case GgufType::array:
            return 0;
    }
    return 0;
}

template <class T>
T load(const std::uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// One number of type `type`; not for strings and arrays.
GgufValue number_from(GgufType type, const std::uint8_t* from) {
    switch (type) {
        case GgufType::u8:
            return std::uint64_t{load<std::uint8_t>(from)};
        case GgufType::i8:
            return std::int64_t{load<std::int8_t>(from)};
        case GgufType::u16:
            return std::uint64_t{load<std::uint16_t>(from)};
        case GgufType::i16:
            return std::int64_t{load<std::int16_t>(from)};
        case GgufType::u32:
            return std::uint64_t{load<std::uint32_t>(from)};
        case GgufType::i32:
            return std::int64_t{load<std::int32_t>(from)};
        case GgufType::u64:
            return load<std::uint64_t>(from);
        case GgufType::i64:
            return load<std::int64_t>(from);
        case GgufType::f32:
            return double{load<float>(from)};
        case GgufType::f64:
            return load<double>(from);
        case GgufType::boolean:
            return *from != 0;
        case GgufType::string:
        case GgufType::array:
            break;
    }
    return std::uint64_t{0};
}

std::string quoted(std::string_view name) {
    return std::string("\"").append(printable(name)) + '"';
}

// Walks the header. Every step says where it is, so that a message can name key and offset.
class Cursor {
  public:
    Cursor(std::span<const std::uint8_t> bytes, const Path& file)
        : bytes_(bytes), file_(printable(file.string())), subject_("the header") {}

    std::uint64_t at() const { return at_; }
    std::uint64_t left() const { return bytes_.size() - at_; }
    // What errors speak of from here on: a key or a tensor.
    void speak_of(std::string subject) { subject_ = std::move(subject); }

    Error error(std::string_view what, std::uint64_t at) const {
        return Error{ErrorCode::bad_model, file_ + ": " + subject_ + " at byte " +
                                               std::to_string(at) + ": " + std::string(what)};
    }
    Error error(std::string_view what) const { return error(what, at_); }

    Result<std::span<const std::uint8_t>> take(Length length, std::string_view what) {
        const auto size = length.within(left());
        if (!size) {
            return error(std::string(what) + " runs past the end of the file (" +
                         std::to_string(bytes_.size()) + " bytes); is it truncated?");
        }
        const auto taken = bytes_.subspan(at_, *size);
        at_ += *size;
        return taken;
    }

    template <class T>
    Result<T> take_number(std::string_view what) {
        const auto bytes = take(sizeof(T), what);
        if (!bytes) {
            return bytes.error();
        }
        return load<T>(bytes->data());
    }

    Result<std::string_view> take_string(std::string_view what) {
        const auto length = take_number<std::uint64_t>("the length of " + std::string(what));
        if (!length) {
            return length.error();
        }
        const auto bytes = take(*length, what);
        if (!bytes) {
            return bytes.error();
        }
        return std::string_view(reinterpret_cast<const char*>(bytes->data()), bytes->size());
    }

    // Steps over `count` strings without keeping them.
    Status skip_strings(std::uint64_t count) {
        for (std::uint64_t i = 0; i < count; ++i) {
            if (left() < sizeof(std::uint64_t)) {
                return error("string " + std::to_string(i) + " of " + std::to_string(count) +
                             " runs past the end of the file; is it truncated?");
            }
            const std::uint64_t length = load<std::uint64_t>(bytes_.data() + at_);
            const auto end = (Length(at_) + sizeof length + length).within(bytes_.size());
            if (!end) {
                return error("string " + std::to_string(i) + " of " + std::to_string(count) +
                             " claims " + std::to_string(length) +
                             " bytes and runs past the end of the file");
            }
            at_ = *end;
        }
        return {};
    }

  private:
    std::span<const std::uint8_t> bytes_;
    std::string file_;
    std::string subject_;
    std::uint64_t at_ = 0;
};

Result<GgufType> take_type(Cursor& cursor) {
    const std::uint64_t at = cursor.at();
    const auto number = cursor.take_number<std::uint32_t>("the value type");
    if (!number) {
        return number.error();
    }
    if (*number > static_cast<std::uint32_t>(GgufType::f64)) {
        return cursor.error("value type " + std::to_string(*number) + " is not one of 0 to 12", at);
    }
    return static_cast<GgufType>(*number);
}

Result<GgufValue> take_array(Cursor& cursor) {
    const std::uint64_t at = cursor.at();
    const auto type = take_type(cursor);
    if (!type) {
        return type.error();
    }
    if (*type == GgufType::array) {
        return cursor.error("an array of arrays is not supported", at);
    }
    const auto count = cursor.take_number<std::uint64_t>("the array's length");
    if (!count) {
        return count.error();
    }
    GgufArray array{*type, *count, {}};
    if (*type != GgufType::string) {
        const auto bytes = cursor.take(Length(*count) * width_of(*type),
                                       "an array of " + std::to_string(*count) + " elements");
        if (!bytes) {
            return bytes.error();
        }
        array.bytes = *bytes;
        return GgufValue(array);
    }
    if (!(Length(*count) * sizeof(std::uint64_t)).within(cursor.left())) {
        return cursor.error("an array of " + std::to_string(*count) +
                            " strings runs past the end of the file; is it truncated?");
    }
    Cursor ahead = cursor;
    if (Status walked = ahead.skip_strings(*count); !walked) {
        return walked.error();
    }
    array.bytes = *cursor.take(ahead.at() - cursor.at(), "the strings");
    return GgufValue(array);
}

Result<GgufValue> take_value(Cursor& cursor) {
    const auto type = take_type(cursor);
    if (!type) {
        return type.error();
    }
    if (*type == GgufType::array) {
        return take_array(cursor);
    }
    if (*type == GgufType::string) {
        const auto text = cursor.take_string("the text");
        if (!text) {
            return text.error();
        }
        return GgufValue(*text);
    }
    const auto bytes = cursor.take(width_of(*type), "the value");
    if (!bytes) {
        return bytes.error();
    }
    if (*type == GgufType::boolean && bytes->front() > 1) {
        return cursor.error("a bool of value " + std::to_string(bytes->front()), cursor.at() - 1);
    }
    return number_from(*type, bytes->data());
}

struct Counts {
    std::uint32_t version;
    std::uint64_t tensors;
    std::uint64_t keys;
};

Result<Counts> take_counts(Cursor& cursor) {
    const auto magic = cursor.take_number<std::uint32_t>("the magic number");
    if (!magic) {
        return magic.error();
    }
    if (*magic != kMagic) {
        return cursor.error("the file does not begin with GGUF: not a GGUF model", 0);
    }
    const auto version = cursor.take_number<std::uint32_t>("the version");
    if (!version) {
        return version.error();
    }
    if (*version != 0 && (*version & 0xffff) == 0) {
        return cursor.error("a big-endian file; only little-endian ones are supported", 4);
    }
    if (*version != 2 && *version != 3) {
        return cursor.error("version " + std::to_string(*version) + "; 2 and 3 are supported", 4);
    }
    const auto tensors = cursor.take_number<std::uint64_t>("the number of tensors");
    if (!tensors) {
        return tensors.error();
    }
    const auto keys = cursor.take_number<std::uint64_t>("the number of keys");
    if (!keys) {
        return keys.error();
    }
    const auto refuse = [&](std::uint64_t count, const char* of, std::uint64_t at) {
        return cursor.error(std::to_string(count) + of + " in a file of " +
                                std::to_string(cursor.at() + cursor.left()) + " bytes (at most " +
                                std::to_string(kEntriesMax) + " are read)",
                            at);
    };
    if (*tensors > kEntriesMax || !(Length(*tensors) * kTensorBytesMin).within(cursor.left())) {
        return refuse(*tensors, " tensors", 8);
    }
    if (*keys > kEntriesMax || !(Length(*keys) * kKeyBytesMin).within(cursor.left())) {
        return refuse(*keys, " keys", 16);
    }
    return Counts{*version, *tensors, *keys};
}

// A name that is not empty and not over `bytes_max`; the cursor speaks of it from here on.
Result<std::string_view> take_name(Cursor& cursor, const char* kind, std::uint64_t number,
                                   std::uint64_t bytes_max) {
    cursor.speak_of(std::string(kind) + " " + std::to_string(number));
    const std::uint64_t at = cursor.at();
    const auto name = cursor.take_string("the name");
    if (!name) {
        return name.error();
    }
    if (name->empty() || name->size() > bytes_max) {
        return cursor.error("a name of " + std::to_string(name->size()) + " bytes; 1 to " +
                                std::to_string(bytes_max) + " are allowed",
                            at);
    }
    cursor.speak_of(std::string(kind) + " " + quoted(*name));
    return name;
}

// Name, shape, type and relative offset; `bytes` stays empty and `offset` relative to the data.
Result<GgufTensor> take_tensor(Cursor& cursor, std::uint64_t number) {
    const auto name = take_name(cursor, "tensor", number, kTensorNameBytesMax);
    if (!name) {
        return name.error();
    }
    GgufTensor tensor;
    tensor.name = *name;
    const std::uint64_t at = cursor.at();
    const auto dimensions = cursor.take_number<std::uint32_t>("the number of dimensions");
    if (!dimensions) {
        return dimensions.error();
    }
    if (*dimensions < 1 || *dimensions > 4) {
        return cursor.error(std::to_string(*dimensions) + " dimensions; 1 to 4 are allowed", at);
    }
    Length values(1);
    for (std::uint32_t i = 0; i < *dimensions; ++i) {
        const auto dimension = cursor.take_number<std::uint64_t>("a dimension");
        if (!dimension) {
            return dimension.error();
        }
        if (*dimension == 0) {
            return cursor.error("dimension " + std::to_string(i) + " is zero", cursor.at() - 8);
        }
        values = values * *dimension;
        tensor.shape.push_back(*dimension);
    }
    if (!values.within(INT64_MAX)) {
        return cursor.error("its dimensions multiply to more than 2^63 values", at);
    }
    const auto type = cursor.take_number<std::uint32_t>("the tensor type");
    if (!type) {
        return type.error();
    }
    tensor.type = *type;
    const auto offset = cursor.take_number<std::uint64_t>("the data offset");
    if (!offset) {
        return offset.error();
    }
    tensor.offset = *offset;
    return tensor;
}

// Puts the tensor's data into place: inside the file, aligned, whole blocks.
Status place(GgufTensor& tensor, std::span<const std::uint8_t> file, std::uint64_t data_begin,
             std::uint64_t alignment, Cursor& cursor) {
    cursor.speak_of("tensor " + quoted(tensor.name));
    if (tensor.offset % alignment != 0) {
        return cursor.error("data offset " + std::to_string(tensor.offset) +
                            " is not a multiple of the alignment " + std::to_string(alignment));
    }
    const auto begin = (Length(data_begin) + tensor.offset).within(file.size());
    if (!begin) {
        return cursor.error("data offset " + std::to_string(tensor.offset) +
                            " is past the end of the file (" + std::to_string(file.size()) +
                            " bytes); is it truncated?");
    }
    tensor.offset = *begin;
    const TensorType* type = tensor_type(tensor.type);
    if (type == nullptr) {
        return {};
    }
    if (tensor.cols() % type->block_values != 0) {
        return cursor.error("rows of " + std::to_string(tensor.cols()) +
                                " values are no whole number of " + std::string(type->name) +
                                " blocks (" + std::to_string(type->block_values) + " values each)",
                            tensor.offset);
    }
    const Length size =
        Length(tensor.cols() / type->block_values) * type->block_bytes * tensor.rows();
    const auto bytes = size.within(file.size() - tensor.offset);
    if (!bytes) {
        return cursor.error("its data runs past the end of the file (" +
                                std::to_string(file.size()) + " bytes); is it truncated?",
                            tensor.offset);
    }
    tensor.bytes = file.subspan(tensor.offset, *bytes);
    return {};
}

// No byte of the file may belong to two tensors.
Status apart(const std::vector<GgufTensor>& tensors, Cursor& cursor) {
    std::vector<const GgufTensor*> order;
    for (const GgufTensor& tensor : tensors) {
        order.push_back(&tensor);
    }
    std::sort(order.begin(), order.end(), [](const GgufTensor* a, const GgufTensor* b) {
        return std::pair(a->offset, a->bytes.size()) < std::pair(b->offset, b->bytes.size());
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
        const GgufTensor& before = *order[i - 1];
        if (before.offset + before.bytes.size() > order[i]->offset) {
            cursor.speak_of("tensor " + quoted(order[i]->name));
            return cursor.error("its data overlaps that of tensor " + quoted(before.name),
                                order[i]->offset);
        }
    }
    return {};
}

Error missing(const Path& path, std::string_view key) {
    return Error{ErrorCode::bad_model,
                 printable(path.string()) + ": the key " + quoted(key) + " is missing"};
}

Error mistyped(const Path& path, std::string_view key, std::string_view wanted) {
    return Error{ErrorCode::bad_model, printable(path.string()) + ": the key " + quoted(key) +
                                           " is not " + std::string(wanted)};
}

}  // namespace

std::uint64_t GgufTensor::rows() const {
    std::uint64_t rows = 1;
    for (std::size_t i = 1; i < shape.size(); ++i) {
        rows *= shape[i];
    }
    return rows;
}

Result<Gguf> Gguf::open(const Path& path) {
    auto mapping = MappedFile::map(path);
    if (!mapping) {
        return mapping.error();
    }
    auto gguf = parse(mapping->bytes(), path);
    if (gguf) {
        gguf->mapping_ = std::move(*mapping);
    }
    return gguf;
}

Result<Gguf> Gguf::parse(std::span<const std::uint8_t> bytes, const Path& name) {
    Gguf gguf;
    gguf.bytes_ = bytes;
    gguf.path_ = name;
    gguf.file_size_ = bytes.size();
    Cursor cursor(bytes, name);
    const auto counts = take_counts(cursor);
    if (!counts) {
        return counts.error();
    }
    gguf.version_ = counts->version;

    std::uint64_t alignment = kDefaultAlignment;
    for (std::uint64_t i = 0; i < counts->keys; ++i) {
        const std::uint64_t at = cursor.at();
        const auto key = take_name(cursor, "key", i, kKeyBytesMax);
        if (!key) {
            return key.error();
        }
        const std::uint64_t type_at = cursor.at();
        auto value = take_value(cursor);
        if (!value) {
            return value.error();
        }
        if (!gguf.metadata_.emplace(*key, *value).second) {
            return cursor.error("it appears twice", at);
        }
        if (*key == kAlignmentKey) {
            const bool is_u32 =
                load<std::uint32_t>(bytes.data() + type_at) == std::uint32_t(GgufType::u32);
            alignment = is_u32 ? std::get<std::uint64_t>(*value) : 0;
            if (!std::has_single_bit(alignment)) {
                return cursor.error("not a u32 that is a power of two", type_at);
            }
        }
    }

    gguf.tensors_.reserve(counts->tensors);
    for (std::uint64_t i = 0; i < counts->tensors; ++i) {
        const std::uint64_t at = cursor.at();
        auto tensor = take_tensor(cursor, i);
        if (!tensor) {
            return tensor.error();
        }
        if (!gguf.tensor_index_.emplace(tensor->name, gguf.tensors_.size()).second) {
            return cursor.error("it appears twice", at);
        }
        gguf.tensors_.push_back(std::move(*tensor));
    }
    if (gguf.tensors_.empty()) {
        return gguf;
    }

    cursor.speak_of("the tensor data");
    const auto data_begin = Length(cursor.at()).rounded_up(alignment).within(bytes.size());
    if (!data_begin) {
        return cursor.error("the file ends before it (" + std::to_string(bytes.size()) +
                            " bytes); is it truncated?");
    }
    for (GgufTensor& tensor : gguf.tensors_) {
        if (Status placed = place(tensor, bytes, *data_begin, alignment, cursor); !placed) {
            return placed.error();
        }
    }
    if (Status separate = apart(gguf.tensors_, cursor); !separate) {
        return separate.error();
    }
    return gguf;
}

void Gguf::drop_cached_pages() const {
    const std::span<const std::uint8_t> mapped = mapping_.bytes();
    if (!mapped.empty()) {
        ::madvise(const_cast<std::uint8_t*>(mapped.data()), mapped.size(), MADV_DONTNEED);
    }
}

const GgufTensor* Gguf::tensor(std::string_view name) const {
    const auto found = tensor_index_.find(name);
    return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

Result<std::uint64_t> Gguf::unsigned_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    if (const auto* value = std::get_if<std::uint64_t>(&found->second)) {
        return *value;
    }
    if (const auto* value = std::get_if<std::int64_t>(&found->second); value && *value >= 0) {
        return static_cast<std::uint64_t>(*value);
    }
    return mistyped(path_, key, "an integer of 0 or more");
}

Result<double> Gguf::number_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    if (const auto* value = std::get_if<double>(&found->second)) {
        return *value;
    }
    if (const auto* value = std::get_if<std::uint64_t>(&found->second)) {
        return static_cast<double>(*value);
    }
    if (const auto* value = std::get_if<std::int64_t>(&found->second)) {
        return static_cast<double>(*value);
    }
    return mistyped(path_, key, "a number");
}

Result<bool> Gguf::bool_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    if (const auto* value = std::get_if<bool>(&found->second)) {
        return *value;
    }
    return mistyped(path_, key, "true or false");
}

Result<std::string_view> Gguf::string_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    if (const auto* value = std::get_if<std::string_view>(&found->second)) {
        return *value;
    }
    return mistyped(path_, key, "a text");
}

Result<std::vector<std::string_view>> Gguf::strings_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    const auto* array = std::get_if<GgufArray>(&found->second);
    if (array == nullptr || array->type != GgufType::string) {
        return mistyped(path_, key, "an array of texts");
    }
    // parse() walked these lengths, so each is within the array, and count * 8 within the file.
    std::vector<std::string_view> strings;
    strings.reserve(array->count);
    const std::uint8_t* at = array->bytes.data();
    for (std::uint64_t i = 0; i < array->count; ++i) {
        const std::uint64_t length = load<std::uint64_t>(at);
        strings.emplace_back(reinterpret_cast<const char*>(at + sizeof length), length);
        at += sizeof length + length;
    }
    return strings;
}

Result<std::vector<float>> Gguf::floats_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    const auto* array = std::get_if<GgufArray>(&found->second);
    if (array == nullptr || array->type != GgufType::f32) {
        return mistyped(path_, key, "an array of f32");
    }
    std::vector<float> values(array->count);
    if (!values.empty()) {
        std::memcpy(values.data(), array->bytes.data(), array->bytes.size());
    }
    return values;
}

Result<std::vector<std::int32_t>> Gguf::ints_at(std::string_view key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
        return missing(path_, key);
    }
    const auto* array = std::get_if<GgufArray>(&found->second);
    const std::uint64_t width = array == nullptr ? 0 : width_of(array->type);
    if (width == 0) {
        return mistyped(path_, key, "an array of integers");
    }
    // Widening can ask for four times the bytes in the file; only vocabularies come here.
    std::vector<std::int32_t> values(array->count);
    for (std::uint64_t i = 0; i < array->count; ++i) {
        const GgufValue value = number_from(array->type, array->bytes.data() + i * width);
        std::int64_t whole = -1;
        if (const auto* u = std::get_if<std::uint64_t>(&value); u && *u <= INT32_MAX) {
            whole = static_cast<std::int64_t>(*u);
        } else if (const auto* s = std::get_if<std::int64_t>(&value);
                   s && *s >= INT32_MIN && *s <= INT32_MAX) {
            whole = *s;
        } else {
            return mistyped(path_, key, "an array of 32-bit integers");
        }
        values[i] = static_cast<std::int32_t>(whole);
    }
    return values;
}

}  // namespace kvw
