#include "src/gguf/gguf.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "src/gguf/length.h"
#include "src/gguf/tensor_types.h"
#include "tests/gguf_builder.h"

using namespace kvw;
using kvw::test::GgufBuilder;
using kvw::test::GgufField;

namespace {

using Bytes = std::vector<std::uint8_t>;

Result<Gguf> parsed(const Bytes& bytes) { return Gguf::parse(bytes, "tiny.gguf"); }
Result<Gguf> parsed(const GgufBuilder& builder) {
    static Bytes bytes;
    bytes = builder.bytes();
    return parsed(bytes);
}

// The message of the refusal; fails the test when the file was accepted.
std::string refusal(const GgufBuilder& builder) {
    const auto gguf = parsed(builder);
    REQUIRE_FALSE(gguf);
    CHECK(gguf.error().code == ErrorCode::bad_model);
    return gguf.error().message;
}

bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

const std::vector<float> kEight = {0, 1, 2, 3, 4, 5, 6, 7};

GgufBuilder with_every_type() {
    GgufBuilder builder;
    builder.u8("a.u8", 200).i8("a.i8", -100).u16("a.u16", 60000).i16("a.i16", -30000);
    builder.u32("a.u32", 4000000000u).i32("a.i32", -2000000000).f32("a.f32", 1.5f);
    builder.boolean("a.bool", true).text("a.text", "héllo").u64("a.u64", 1ull << 63);
    builder.i64("a.i64", -1).f64("a.f64", 2.25);
    builder.texts("a.texts", {"", "two", "3"})
        .i32s("a.i32s", {-1, 2, 3})
        .f32s("a.f32s", {0.5f, -2});
    builder.f32_tensor("first.weight", {4, 2}, kEight).f32_tensor("second", {8}, kEight);
    const Bytes block(20, 7);
    builder.tensor("blocks", {32, 1, 1, 1}, 3, block);
    return builder;
}

// Reads everything a caller could read, so that a sanitizer sees any view that is wrong.
std::uint64_t read_all(const Gguf& gguf) {
    std::uint64_t sum = gguf.version() + gguf.file_size();
    for (const auto& [key, value] : gguf.metadata()) {
        sum += key.size() + (gguf.has(key) ? 1 : 0);
        if (const auto texts = gguf.strings_at(key)) {
            for (const std::string_view text : *texts) {
                sum = std::accumulate(text.begin(), text.end(), sum);
            }
        }
        if (const auto text = gguf.string_at(key)) {
            sum = std::accumulate(text->begin(), text->end(), sum);
        }
        sum += gguf.unsigned_at(key) ? 1 : 0;
        sum += gguf.number_at(key) ? 1 : 0;
        sum += gguf.bool_at(key) ? 1 : 0;
        sum += gguf.ints_at(key) ? 1 : 0;
        sum += gguf.floats_at(key) ? 1 : 0;
    }
    for (const GgufTensor& tensor : gguf.tensors()) {
        sum += tensor.cols() * tensor.rows() + tensor.name.size();
        sum = std::accumulate(tensor.bytes.begin(), tensor.bytes.end(), sum);
        CHECK(gguf.tensor(tensor.name) == &tensor);
    }
    return sum;
}

void accepted_or_bad_model(const Bytes& bytes) {
    // A copy of exactly this size, so that one byte too far is seen by the address sanitizer.
    const Bytes exact(bytes.begin(), bytes.end());
    const auto gguf = parsed(exact);
    if (gguf) {
        CHECK(read_all(*gguf) > 0);
    } else {
        CHECK(gguf.error().code == ErrorCode::bad_model);
        CHECK(contains(gguf.error().message, "tiny.gguf: "));
    }
}

Path model_path(const char* variable, const char* file) {
    const char* set = std::getenv(variable);
    return set != nullptr ? Path(set) : Path(KVW_SOURCE_DIR) / "models" / file;
}

}  // namespace

TEST_CASE("every value type comes back as it was written") {
    const auto gguf = parsed(with_every_type());
    REQUIRE(gguf);
    CHECK(gguf->version() == 3);
    CHECK(gguf->unsigned_at("a.u8") == 200);
    CHECK(gguf->number_at("a.i8") == -100.0);
    CHECK(gguf->unsigned_at("a.u16") == 60000);
    CHECK(gguf->number_at("a.i16") == -30000.0);
    CHECK(gguf->unsigned_at("a.u32") == 4000000000u);
    CHECK(gguf->number_at("a.i32") == -2e9);
    CHECK(gguf->number_at("a.f32") == 1.5);
    CHECK(gguf->bool_at("a.bool") == true);
    CHECK(gguf->string_at("a.text") == "héllo");
    CHECK(gguf->unsigned_at("a.u64") == 1ull << 63);
    CHECK(gguf->number_at("a.i64") == -1.0);
    CHECK(gguf->number_at("a.f64") == 2.25);
    CHECK(gguf->strings_at("a.texts") == std::vector<std::string_view>{"", "two", "3"});
    CHECK(gguf->ints_at("a.i32s") == std::vector<std::int32_t>{-1, 2, 3});
    CHECK(gguf->floats_at("a.f32s") == std::vector<float>{0.5f, -2});
    CHECK(gguf->metadata().size() == 15);
}

TEST_CASE("tensors are views of the bytes in the file") {
    const Bytes bytes = with_every_type().bytes();
    const auto gguf = parsed(bytes);
    REQUIRE(gguf);
    REQUIRE(gguf->tensors().size() == 3);
    const GgufTensor* first = gguf->tensor("first.weight");
    REQUIRE(first != nullptr);
    CHECK(first->cols() == 4);
    CHECK(first->rows() == 2);
    CHECK(first->bytes.size() == 32);
    CHECK(first->bytes.data() == bytes.data() + first->offset);
    CHECK(first->offset % 32 == 0);
    CHECK(std::memcmp(first->bytes.data(), kEight.data(), 32) == 0);
    CHECK(gguf->tensor("blocks")->bytes.size() == 20);
    CHECK(gguf->tensor("blocks")->bytes.front() == 7);
    CHECK(gguf->tensor("third") == nullptr);
}

TEST_CASE("versions 2 and 3 are read, others are refused by number") {
    CHECK(parsed(GgufBuilder(2).u32("a", 1)));
    CHECK(parsed(GgufBuilder(3).u32("a", 1)));
    CHECK(contains(refusal(GgufBuilder(1)), "version 1; 2 and 3 are supported"));
    CHECK(contains(refusal(GgufBuilder(4)), "version 4; 2 and 3 are supported"));
    CHECK(contains(refusal(GgufBuilder(0x03000000)), "big-endian"));
}

TEST_CASE("a typed read names the key that is missing or of another type") {
    const auto gguf = parsed(with_every_type());
    REQUIRE(gguf);
    CHECK(gguf->unsigned_at("no.such").error().message ==
          "tiny.gguf: the key \"no.such\" is missing");
    CHECK(gguf->unsigned_at("a.text").error().message ==
          "tiny.gguf: the key \"a.text\" is not an integer of 0 or more");
    CHECK(gguf->unsigned_at("a.i8").error().code == ErrorCode::bad_model);
    CHECK(gguf->unsigned_at("a.f32").error().code == ErrorCode::bad_model);
    CHECK(gguf->number_at("a.bool").error().code == ErrorCode::bad_model);
    CHECK(gguf->bool_at("a.u8").error().code == ErrorCode::bad_model);
    CHECK(gguf->string_at("a.texts").error().code == ErrorCode::bad_model);
    CHECK(gguf->strings_at("a.i32s").error().code == ErrorCode::bad_model);
    CHECK(gguf->ints_at("a.f32s").error().code == ErrorCode::bad_model);
    CHECK(gguf->ints_at("a.texts").error().code == ErrorCode::bad_model);
    CHECK(gguf->floats_at("a.i32s").error().code == ErrorCode::bad_model);
    CHECK(gguf->strings_at("no.such").error().code == ErrorCode::bad_model);
}

TEST_CASE("an integer array serves as 32-bit integers only where its values fit") {
    const std::vector<std::uint32_t> large = {1, 0x80000000u};
    const auto gguf = parsed(GgufBuilder().u32s("fits", {1, 0x7fffffffu}).u32s("large", large));
    REQUIRE(gguf);
    CHECK(gguf->ints_at("fits") == std::vector<std::int32_t>{1, 0x7fffffff});
    CHECK_FALSE(gguf->ints_at("large"));
}

TEST_CASE("wrong numbers of dimensions and zero dimensions are refused with the tensor's name") {
    const auto shaped = [](std::vector<std::uint64_t> shape) {
        return refusal(GgufBuilder().f32_tensor("odd", std::move(shape), kEight));
    };
    CHECK(contains(shaped({}), "tensor \"odd\" at byte 35: 0 dimensions; 1 to 4 are allowed"));
    CHECK(contains(shaped({2, 2, 2, 1, 1}), "5 dimensions"));
    CHECK(contains(shaped({8, 0}), "dimension 1 is zero"));
    CHECK(contains(shaped({1ull << 42, 1ull << 22}), "multiply to more than 2^63"));
    CHECK(contains(shaped({(1ull << 42) + 1, 1ull << 22}), "multiply to more than 2^63"));
    CHECK(contains(shaped({1ull << 62}), "runs past the end of the file"));
    CHECK(contains(shaped({9}), "runs past the end of the file"));
}

TEST_CASE("rows that are no whole number of blocks are refused") {
    const Bytes data(64, 0);
    CHECK(contains(refusal(GgufBuilder().tensor("t", {33}, 3, data)),
                   "rows of 33 values are no whole number of Q4_1 blocks (32 values each)"));
}

TEST_CASE("a tensor type without a known size keeps its number and shows no bytes") {
    const Bytes data(64, 0);
    const auto gguf = parsed(GgufBuilder().tensor("future", {32}, 4000000000u, data));
    REQUIRE(gguf);
    CHECK(gguf->tensor("future")->type == 4000000000u);
    CHECK(gguf->tensor("future")->bytes.empty());
}

TEST_CASE("a key or tensor that appears twice is refused") {
    CHECK(contains(refusal(GgufBuilder().u32("same", 1).u32("same", 2)),
                   "key \"same\" at byte 44: it appears twice"));
    CHECK(contains(
        refusal(GgufBuilder().f32_tensor("same", {8}, kEight).f32_tensor("same", {8}, kEight)),
        "tensor \"same\" at byte"));
}

TEST_CASE("names that are empty or too long are refused") {
    CHECK(contains(refusal(GgufBuilder().u32("", 1)), "key 0 at byte 24: a name of 0 bytes"));
    CHECK(parsed(GgufBuilder().u32(std::string(65535, 'k'), 1)));
    CHECK(contains(refusal(GgufBuilder().u32(std::string(65536, 'k'), 1)), "65536 bytes"));
    CHECK(parsed(GgufBuilder().f32_tensor(std::string(64, 't'), {8}, kEight)));
    CHECK(contains(refusal(GgufBuilder().f32_tensor(std::string(65, 't'), {8}, kEight)),
                   "a name of 65 bytes; 1 to 64 are allowed"));
}

TEST_CASE("an odd name is shown with escapes") {
    CHECK(contains(refusal(GgufBuilder().u32("\x1b[31m", 1).u32("\x1b[31m", 1)),
                   "key \"\\x1b[31m\""));
}

TEST_CASE("the alignment is a u32 that is a power of two, and the data obeys it") {
    const auto aligned_to = [](std::uint32_t alignment) {
        return GgufBuilder(3, alignment == 0 ? 32 : alignment)
            .u32("general.alignment", alignment)
            .f32_tensor("a", {8}, kEight)
            .f32_tensor("b", {8}, kEight);
    };
    CHECK(parsed(aligned_to(1)));
    CHECK(parsed(aligned_to(64)));
    CHECK(parsed(aligned_to(4096)));
    CHECK(contains(refusal(aligned_to(0)), "power of two"));
    CHECK(contains(refusal(aligned_to(48)), "power of two"));
    CHECK(contains(refusal(GgufBuilder().u64("general.alignment", 32)), "not a u32"));
    CHECK(contains(refusal(GgufBuilder().text("general.alignment", "32")), "not a u32"));
    // Laid out for 32, but declared 64: the second tensor's offset is no multiple.
    CHECK(contains(refusal(GgufBuilder()
                               .u32("general.alignment", 64)
                               .f32_tensor("a", {8}, kEight)
                               .f32_tensor("b", {8}, kEight)),
                   "tensor \"b\" at byte"));
}

TEST_CASE("tensors that overlap are refused, both named") {
    const GgufBuilder builder =
        GgufBuilder().f32_tensor("one", {8}, kEight).f32_tensor("two", {8}, kEight);
    Bytes bytes = builder.bytes();
    const auto fields = builder.fields();
    const auto last_offset = std::find_if(fields.rbegin(), fields.rend(), [](const GgufField& f) {
        return f.kind == GgufField::Kind::offset;
    });
    std::memset(bytes.data() + last_offset->at, 0, 8);
    const auto gguf = parsed(bytes);
    REQUIRE_FALSE(gguf);
    CHECK(contains(gguf.error().message, "tensor \"two\""));
    CHECK(contains(gguf.error().message, "overlaps that of tensor \"one\""));
}

TEST_CASE("value types that do not exist, nested arrays and odd bools are refused") {
    CHECK(contains(refusal(GgufBuilder().raw("k", 13, "xxxxxxxx")), "value type 13"));
    const std::string nested("\x09\0\0\0\x01\0\0\0\0\0\0\0\x04\0\0\0\x01\0\0\0\0\0\0\0abcd", 28);
    CHECK(contains(refusal(GgufBuilder().raw("k", 9, nested)), "an array of arrays"));
    CHECK(contains(refusal(GgufBuilder().raw("k", 7, "\x02")), "a bool of value 2"));
}

TEST_CASE("something else than GGUF is refused as such") {
    const std::string text = "#!/bin/sh\necho this is not a model\n";
    const Bytes bytes(text.begin(), text.end());
    CHECK(contains(parsed(bytes).error().message, "does not begin with GGUF"));
    CHECK(contains(parsed(Bytes{}).error().message, "runs past the end of the file (0 bytes)"));
}

TEST_CASE("counts that cannot fit the file are refused before anything is allocated") {
    Bytes bytes = GgufBuilder().u32("k", 1).bytes();
    std::memset(bytes.data() + 8, 0xff, 8);
    CHECK(contains(parsed(bytes).error().message, "18446744073709551615 tensors in a file of"));
    bytes = GgufBuilder().u32("k", 1).bytes();
    bytes[16] = 200;
    CHECK(contains(parsed(bytes).error().message, "200 keys in a file of"));
}

TEST_CASE("each number of the header set to each hostile value: accepted or bad_model") {
    const GgufBuilder builder = with_every_type();
    const Bytes good = builder.bytes();
    for (const GgufField& field : builder.fields()) {
        for (const std::uint64_t value :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0x7fffffff},
              std::uint64_t{0x80000000}, std::uint64_t{0xffffffff}, std::uint64_t{1} << 63,
              ~std::uint64_t{0}, ~std::uint64_t{0} - 7, std::uint64_t{good.size()},
              std::uint64_t{good.size()} - field.at}) {
            Bytes bytes = good;
            std::memcpy(bytes.data() + field.at, &value, field.width);
            accepted_or_bad_model(bytes);
        }
    }
}

TEST_CASE("each bit of the file flipped: accepted or bad_model") {
    const Bytes good = with_every_type().bytes();
    for (std::size_t at = 0; at < good.size(); ++at) {
        for (const int mask : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
            Bytes bytes = good;
            bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ mask);
            accepted_or_bad_model(bytes);
        }
    }
}

TEST_CASE("a file cut at any byte before the end of its data is refused") {
    GgufBuilder builder;
    add_byte_vocabulary(builder, {.merges = {"h e", "l l"}, .control = {"<|im_end|>"}});
    const std::vector<float> many(14 * 1024, 1.0f);
    builder.f32_tensor("large", {1024, 14}, many);
    const Bytes good = builder.bytes();
    REQUIRE(good.size() % 32 == 0);
    const auto whole = parsed(good);
    REQUIRE(whole);
    const std::size_t end = whole->tensor("large")->offset + many.size() * sizeof(float);
    std::size_t refused = 0;
    for (std::size_t size = 0; size < end; ++size) {
        const auto gguf = Gguf::parse(std::span(good).first(size), "tiny.gguf");
        refused += !gguf && gguf.error().code == ErrorCode::bad_model ? 1 : 0;
    }
    CHECK(refused == end);
}

TEST_CASE("random damage, several bytes at a time: accepted or bad_model") {
    const GgufBuilder builder = with_every_type();
    const Bytes good = builder.bytes();
    std::uint64_t state = 1;
    const auto next = [&] {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return state >> 33;
    };
    for (int round = 0; round < 3000; ++round) {
        Bytes bytes = good;
        for (std::uint64_t changes = 1 + next() % 6; changes > 0; --changes) {
            bytes[next() % bytes.size()] = static_cast<std::uint8_t>(next());
        }
        if (next() % 4 == 0) {
            bytes.resize(next() % bytes.size());
        }
        accepted_or_bad_model(bytes);
    }
}

TEST_CASE("open() reads a file, and tells a missing one from a truncated one") {
    const Path folder = std::filesystem::temp_directory_path();
    const Path path = folder / ("kvw-gguf-test-" + std::to_string(::getpid()) + ".gguf");
    with_every_type().write(path);
    {
        const auto gguf = Gguf::open(path);
        REQUIRE(gguf);
        CHECK(gguf->identity().size == gguf->file_size());
        CHECK(gguf->path() == path);
        gguf->drop_cached_pages();
        CHECK(gguf->tensor("first.weight")->bytes.size() == 32);
        CHECK(gguf->string_at("a.text") == "héllo");
    }
    std::filesystem::resize_file(path, 300);
    CHECK(Gguf::open(path).error().code == ErrorCode::bad_model);
    std::filesystem::resize_file(path, 0);
    CHECK(Gguf::open(path).error().code == ErrorCode::bad_model);
    std::filesystem::remove(path);
    CHECK(Gguf::open(path).error().code == ErrorCode::io);
}

TEST_CASE("a moved Gguf keeps its views") {
    auto gguf = parsed(with_every_type());
    REQUIRE(gguf);
    const Gguf moved = std::move(*gguf);
    CHECK(moved.string_at("a.text") == "héllo");
    CHECK(moved.tensor("second")->bytes.size() == 32);
}

TEST_CASE("a length that would wrap never comes within a limit again") {
    CHECK((Length(3) * 4 + 5).within(17) == 17);
    CHECK_FALSE((Length(3) * 4 + 5).within(16));
    CHECK_FALSE((Length(~0ull) + 1).within(~0ull));
    CHECK_FALSE(((Length(1ull << 63) * 2) + 7).within(~0ull));
    CHECK(Length(33).rounded_up(32).within(64) == 64);
    CHECK(Length(32).rounded_up(32).within(64) == 32);
    CHECK_FALSE(Length(~0ull - 3).rounded_up(32).within(~0ull));
}

TEST_CASE("block sizes are those of ggml") {
    CHECK(tensor_type(3)->block_bytes == 20);
    CHECK(tensor_type(14)->block_bytes == 210);
    CHECK(tensor_type(14)->name == "Q6_K");
    CHECK(tensor_type(4) == nullptr);
    CHECK(tensor_type(1000) == nullptr);
}

TEST_CASE("the default model's header is read") {
    const Path path = model_path("KVW_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf");
    if (!std::filesystem::exists(path)) {
        MESSAGE("skipped: no model at " << path.string() << " (set KVW_MODEL)");
        return;
    }
    const auto gguf = Gguf::open(path);
    REQUIRE(gguf);
    CHECK(gguf->string_at("general.architecture") == "llama");
    CHECK(gguf->unsigned_at("llama.embedding_length") == 576);
    CHECK(gguf->strings_at("tokenizer.ggml.tokens")->size() == 49152);
    CHECK(gguf->tensors().size() == 272);
    const GgufTensor* embedding = gguf->tensor("token_embd.weight");
    REQUIRE(embedding != nullptr);
    CHECK(embedding->cols() == 576);
    CHECK(embedding->rows() == 49152);
    CHECK(embedding->bytes.size() == 576 / 32 * 34 * 49152ull);
}
