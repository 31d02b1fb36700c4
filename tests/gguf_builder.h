// Builds GGUF files in memory: metadata in the order of the calls, then tensors, then their data.
//
//     GgufBuilder model;
//     model.text("general.architecture", "llama").u32("llama.block_count", 2);
//     model.f32_tensor("output_norm.weight", {64}, ones);
//     add_byte_vocabulary(model, {.pre = "smollm", .merges = {"h e", "l l"}, .control =
//     {"<|im_end|>"}}); const std::vector<std::uint8_t> bytes = model.bytes();
//
// Nothing is checked: tests use it to build wrong files too. raw() adds a value of any type number.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvw::test {

// Where a number of the header lies in the built file.
struct GgufField {
    enum class Kind { count, length, dimension, type, offset, value };
    Kind kind;
    std::size_t at;     // byte offset in the file
    std::size_t width;  // bytes, little-endian
};

class GgufBuilder {
  public:
    explicit GgufBuilder(std::uint32_t version = 3, std::uint32_t alignment = 32)
        : version_(version), alignment_(alignment) {}

    GgufBuilder& u8(std::string_view key, std::uint8_t v) { return number(key, 0, v); }
    GgufBuilder& i8(std::string_view key, std::int8_t v) { return number(key, 1, v); }
    GgufBuilder& u16(std::string_view key, std::uint16_t v) { return number(key, 2, v); }
    GgufBuilder& i16(std::string_view key, std::int16_t v) { return number(key, 3, v); }
    GgufBuilder& u32(std::string_view key, std::uint32_t v) { return number(key, 4, v); }
    GgufBuilder& i32(std::string_view key, std::int32_t v) { return number(key, 5, v); }
    GgufBuilder& f32(std::string_view key, float v) { return number(key, 6, v); }
    GgufBuilder& boolean(std::string_view key, bool v) {
        return number(key, 7, static_cast<std::uint8_t>(v));
    }
    GgufBuilder& u64(std::string_view key, std::uint64_t v) { return number(key, 10, v); }
    GgufBuilder& i64(std::string_view key, std::int64_t v) { return number(key, 11, v); }
    GgufBuilder& f64(std::string_view key, double v) { return number(key, 12, v); }

    GgufBuilder& text(std::string_view key, std::string_view v) {
        Part value;
        value.string(v);
        return add(key, 8, std::move(value));
    }
    GgufBuilder& texts(std::string_view key, const std::vector<std::string>& items) {
        Part value;
        value.array(8, items.size());
        for (const std::string& item : items) {
            value.string(item);
        }
        return add(key, 9, std::move(value));
    }
    GgufBuilder& i32s(std::string_view key, const std::vector<std::int32_t>& v) {
        return numbers(key, 5, v);
    }
    GgufBuilder& u32s(std::string_view key, const std::vector<std::uint32_t>& v) {
        return numbers(key, 4, v);
    }
    GgufBuilder& f32s(std::string_view key, const std::vector<float>& v) {
        return numbers(key, 6, v);
    }
    // A value of type number `type`, its bytes as given.
    GgufBuilder& raw(std::string_view key, std::uint32_t type, std::string_view bytes) {
        Part value;
        value.bytes.append(bytes);
        return add(key, type, std::move(value));
    }

    // `shape` innermost first; `type` a GGUF tensor type number; `data` as it shall lie in the
    // file.
    GgufBuilder& tensor(std::string_view name, std::vector<std::uint64_t> shape, std::uint32_t type,
                        std::span<const std::uint8_t> data) {
        tensors_.push_back({std::string(name), std::move(shape), type,
                            std::string(reinterpret_cast<const char*>(data.data()), data.size())});
        return *this;
    }
    GgufBuilder& f32_tensor(std::string_view name, std::vector<std::uint64_t> shape,
                            std::span<const float> data) {
        return tensor(name, std::move(shape), 0,
                      {reinterpret_cast<const std::uint8_t*>(data.data()), data.size_bytes()});
    }

    std::vector<std::uint8_t> bytes() const { return build().first; }
    // The numbers of the header, in file order: what a mutator changes.
    std::vector<GgufField> fields() const { return build().second; }
    void write(const std::filesystem::path& path) const {
        const std::vector<std::uint8_t> all = bytes();
        std::ofstream out(path, std::ios::binary);
        out.write(reinterpret_cast<const char*>(all.data()),
                  static_cast<std::streamsize>(all.size()));
    }

  private:
    using Kind = GgufField::Kind;

    struct Part {
        std::string bytes;
        std::vector<GgufField> fields;

        template <class T>
        void put(T v, Kind kind) {
            fields.push_back({kind, bytes.size(), sizeof v});
            bytes.append(reinterpret_cast<const char*>(&v), sizeof v);
        }
        void string(std::string_view s) {
            put(static_cast<std::uint64_t>(s.size()), Kind::length);
            bytes.append(s);
        }
        void array(std::uint32_t type, std::size_t count) {
            put(type, Kind::type);
            put(static_cast<std::uint64_t>(count), Kind::count);
        }
        void append(const Part& other) {
            for (GgufField field : other.fields) {
                field.at += bytes.size();
                fields.push_back(field);
            }
            bytes.append(other.bytes);
        }
    };
    struct Tensor {
        std::string name;
        std::vector<std::uint64_t> shape;
        std::uint32_t type;
        std::string data;
    };

    template <class T>
    GgufBuilder& number(std::string_view key, std::uint32_t type, T v) {
        Part value;
        value.put(v, Kind::value);
        return add(key, type, std::move(value));
    }
    template <class T>
    GgufBuilder& numbers(std::string_view key, std::uint32_t type, const std::vector<T>& items) {
        Part value;
        value.array(type, items.size());
        value.bytes.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
        return add(key, 9, std::move(value));
    }
    GgufBuilder& add(std::string_view key, std::uint32_t type, Part value) {
        metadata_.string(key);
        metadata_.put(type, Kind::type);
        metadata_.append(value);
        ++keys_;
        return *this;
    }

    std::size_t aligned(std::size_t size) const {
        return (size + alignment_ - 1) / alignment_ * alignment_;
    }

    std::pair<std::vector<std::uint8_t>, std::vector<GgufField>> build() const {
        Part file;
        file.bytes = "GGUF";
        file.put(version_, Kind::value);
        file.put(static_cast<std::uint64_t>(tensors_.size()), Kind::count);
        file.put(keys_, Kind::count);
        file.append(metadata_);
        std::size_t offset = 0;
        for (const Tensor& tensor : tensors_) {
            file.string(tensor.name);
            file.put(static_cast<std::uint32_t>(tensor.shape.size()), Kind::count);
            for (const std::uint64_t dimension : tensor.shape) {
                file.put(dimension, Kind::dimension);
            }
            file.put(tensor.type, Kind::type);
            file.put(static_cast<std::uint64_t>(offset), Kind::offset);
            offset += aligned(tensor.data.size());
        }
        for (const Tensor& tensor : tensors_) {
            file.bytes.resize(aligned(file.bytes.size()), '\0');
            file.bytes.append(tensor.data);
        }
        file.bytes.resize(aligned(file.bytes.size()), '\0');
        return {std::vector<std::uint8_t>(file.bytes.begin(), file.bytes.end()), file.fields};
    }

    std::uint32_t version_;
    std::uint32_t alignment_;  // what the data is laid out for; the key is the caller's to set
    std::uint64_t keys_ = 0;
    Part metadata_;
    std::vector<Tensor> tensors_;
};

// How GPT-2 spells each byte in a vocabulary: 0x41 is "A", a space is "Ġ".
inline std::string byte_spelling(std::uint8_t byte) {
    const auto plain = [](unsigned b) {
        return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    };
    unsigned point = byte;
    if (!plain(byte)) {
        point = 0x100;
        for (unsigned b = 0; b < byte; ++b) {
            point += plain(b) ? 0 : 1;
        }
    }
    if (point < 0x80) {
        return std::string(1, static_cast<char>(point));
    }
    return {static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 0x3f))};
}

inline std::string byte_spelling(std::string_view text) {
    std::string spelled;
    for (const char c : text) {
        spelled += byte_spelling(static_cast<std::uint8_t>(c));
    }
    return spelled;
}

struct ByteVocabulary {
    std::string pre = "gpt-2";
    std::vector<std::string> merges;        // "left right", in the spelling of byte_spelling()
    std::vector<std::string> words;         // tokens beyond the merges, in that spelling
    std::vector<std::string> control;       // token type 3
    std::vector<std::string> user_defined;  // token type 4
    std::string eos;                        // one of the above; empty: none
};

// A `gpt2` vocabulary: ids 0..255 are the bytes, then one token per merge, then words, control and
// user-defined tokens, in that order. Returns the spellings by id.
inline std::vector<std::string> add_byte_vocabulary(GgufBuilder& builder,
                                                    const ByteVocabulary& vocabulary) {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 256; ++byte) {
        tokens.push_back(byte_spelling(static_cast<std::uint8_t>(byte)));
    }
    for (const std::string& merge : vocabulary.merges) {
        const std::size_t space = merge.find(' ');
        tokens.push_back(merge.substr(0, space) + merge.substr(space + 1));
    }
    tokens.insert(tokens.end(), vocabulary.words.begin(), vocabulary.words.end());
    std::vector<std::int32_t> types(tokens.size(), 1);
    for (const std::string& token : vocabulary.control) {
        tokens.push_back(token);
        types.push_back(3);
    }
    for (const std::string& token : vocabulary.user_defined) {
        tokens.push_back(token);
        types.push_back(4);
    }
    builder.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", vocabulary.pre);
    builder.texts("tokenizer.ggml.tokens", tokens).i32s("tokenizer.ggml.token_type", types);
    builder.texts("tokenizer.ggml.merges", vocabulary.merges);
    for (std::size_t id = 0; id < tokens.size(); ++id) {
        if (!vocabulary.eos.empty() && tokens[id] == vocabulary.eos) {
            builder.u32("tokenizer.ggml.eos_token_id", static_cast<std::uint32_t>(id));
        }
    }
    return tokens;
}

}  // namespace kvw::test
