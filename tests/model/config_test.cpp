#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "src/model/model.h"
#include "tests/model/tiny_model.h"

using namespace kvw;
using namespace kvw::test;

namespace {

Result<ModelConfig> config_of(const TinyShape& shape) {
    const std::vector<std::uint8_t> file = TinyModel(shape).file();
    const Result<Gguf> gguf = Gguf::parse(file, "tiny.gguf");
    if (!gguf) {
        return gguf.error();
    }
    return read_model_config(*gguf);
}

// The message of the refusal, which must be bad_model and the same when loading.
std::string refusal(const TinyShape& shape) {
    const Result<ModelConfig> config = config_of(shape);
    REQUIRE_FALSE(config.has_value());
    CHECK(config.error().code == ErrorCode::bad_model);
    return config.error().message;
}

bool names(const std::string& message, const std::string& part) {
    CAPTURE(message);
    const bool found = message.find(part) != std::string::npos;
    CHECK_MESSAGE(found, part);
    return found;
}

template <class Edit>
TinyShape edited(const Edit& edit) {
    TinyShape shape;
    edit(shape);
    return shape;
}

TinyShape with_number(const std::string& key, std::uint64_t value) {
    return edited([&](TinyShape& shape) { shape.numbers[key] = value; });
}

}  // namespace

TEST_CASE("a configuration holds what the file says") {
    const Result<ModelConfig> config = config_of({});

    REQUIRE(config.has_value());
    CHECK(config->architecture == "llama");
    CHECK(config->name == "tiny");
    CHECK(config->layers == 2);
    CHECK(config->width == 64);
    CHECK(config->heads == 4);
    CHECK(config->kv_heads == 2);
    CHECK(config->head_dim == 16);
    CHECK(config->ff == 96);
    CHECK(config->vocab == 259);
    CHECK(config->context == 1024);
    CHECK(config->rope_base == 10000.0);
    CHECK(config->rope_scale == 1.0);
    CHECK(config->norm_epsilon == 1e-5f);
    CHECK(config->tied_output);
    CHECK(config->kv_bytes_per_token() == (64 + 2 * 16 * 16 * 2) * 4 / 16);
}

TEST_CASE("linear rope scaling and an output matrix of its own are read") {
    const Result<ModelConfig> config = config_of(edited([](TinyShape& shape) {
        shape.rope_scale = 4.0;
        shape.tied = false;
    }));

    REQUIRE(config.has_value());
    CHECK(config->rope_scale == 4.0);
    CHECK_FALSE(config->tied_output);
}

TEST_CASE("architectures but llama are refused by name") {
    const auto shape = edited([](TinyShape& s) { s.architecture = "qwen2"; });
    CHECK(refusal(shape) == "architecture 'qwen2' is not supported; supported: llama");
    const auto hostile = edited([](TinyShape& s) { s.architecture = "\x1b[2J"; });
    CHECK(refusal(hostile).find('\x1b') == std::string::npos);
}

TEST_CASE("a tensor that is missing, wrong or unknown is refused by name") {
    names(refusal(edited([](TinyShape& s) { s.absent = {"blk.1.ffn_up.weight"}; })),
          "tensor 'blk.1.ffn_up.weight' is missing");
    names(refusal(edited([](TinyShape& s) { s.absent = {"token_embd.weight"}; })),
          "tensor 'token_embd.weight' is missing");
    names(refusal(with_number("llama.feed_forward_length", 128)),
          "tensor 'blk.0.ffn_gate.weight' is 64 x 96 where the configuration needs 64 x 128");
    // I8, which has the bytes of nothing we run.
    const std::string type = refusal(edited([](TinyShape& s) {
        s.type = WeightType::f32;
        s.types["blk.0.attn_v.weight"] = 24;
    }));
    names(type, "tensor 'blk.0.attn_v.weight'");
    names(type, "I8");
    names(refusal(edited([](TinyShape& s) { s.types["blk.0.attn_norm.weight"] = 1; })),
          "tensor 'blk.0.attn_norm.weight'");
    names(refusal(edited([](TinyShape& s) { s.extra = {"blk.0.attn_q.bias"}; })),
          "tensor 'blk.0.attn_q.bias'");
}

TEST_CASE("rotations that we do not compute are refused by name") {
    names(refusal(edited([](TinyShape& s) { s.extra = {"rope_freqs.weight"}; })),
          "tensor 'rope_freqs.weight'");
    names(refusal(edited([](TinyShape& s) { s.texts["llama.rope.scaling.type"] = "yarn"; })),
          "rope scaling 'yarn' is not supported; supported: none, linear");
    names(refusal(with_number("llama.rope.dimension_count", 8)), "llama.rope.dimension_count");
}

TEST_CASE("numbers that no model has are refused before anything is allocated") {
    for (const char* key :
         {"llama.block_count", "llama.embedding_length", "llama.attention.head_count",
          "llama.attention.head_count_kv", "llama.attention.key_length", "llama.context_length",
          "llama.feed_forward_length"}) {
        for (const std::uint64_t value :
             {std::uint64_t{0}, std::uint64_t{1} << 32, ~std::uint64_t{0}}) {
            CAPTURE(value);
            names(refusal(with_number(key, value)), key);
        }
        for (const std::uint64_t value : {1u, 3u, 65535u, 1u << 24}) {
            if (const auto config = config_of(with_number(key, value)); !config) {
                CHECK(config.error().code == ErrorCode::bad_model);
            }
        }
    }
    names(refusal(with_number("llama.block_count", 3)),
          "tensor 'blk.2.attn_norm.weight' is missing");
    names(refusal(with_number("llama.attention.head_count", 5)), "5 query heads");
    names(refusal(with_number("llama.attention.value_length", 32)), "values of 32");
    names(refusal(edited([](TinyShape& s) {
              s.head_dim = 8;
              s.heads = 8;
          })),
          "heads of 8 dimensions");
    names(refusal(with_number("llama.expert_count", 8)), "llama.expert_count");
}

TEST_CASE("loading reports its progress and how much it holds") {
    const std::vector<std::uint8_t> file = TinyModel({}).file();
    const Result<Gguf> gguf = Gguf::parse(file, "tiny.gguf");
    ThreadPool threads(2);
    double last = 0;
    const auto model = Model::load(*gguf, threads, [&](double fraction) {
        CHECK(fraction > last);
        CHECK(fraction <= 1.0);
        last = fraction;
    });

    REQUIRE(model.has_value());
    CHECK(last == 1.0);
    CHECK((*model)->weight_bytes() > 50000);
    CHECK((*model)->weight_bytes_per_token() == (*model)->weight_bytes());
    CHECK((*model)->config().layers == 2);
}
