// A whole model in memory: random weights, two layers, the 256 bytes and a few more as its
// vocabulary.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "src/engine/engine.h"
#include "tests/gguf_builder.h"

namespace kvw::test {

inline constexpr std::uint32_t kTinyContext = 320;
inline constexpr TokenId kTinyEnd = 258;     // <|im_end|>, ends a generation
inline constexpr TokenId kTinyBroken = 259;  // its embedding is infinite: the model computes NaN

class TinyModel {
  public:
    static constexpr std::uint32_t kLayers = 2, kWidth = 64, kHeads = 4, kKvHeads = 2, kFf = 96;

    TinyModel() : threads_(2), random_(20261201) {
        GgufBuilder builder;
        builder.text("general.architecture", "llama")
            .u32("llama.block_count", kLayers)
            .u32("llama.embedding_length", kWidth)
            .u32("llama.feed_forward_length", kFf)
            .u32("llama.context_length", kTinyContext)
            .u32("llama.attention.head_count", kHeads)
            .u32("llama.attention.head_count_kv", kKvHeads)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
        const std::size_t vocab =
            add_byte_vocabulary(builder, {.merges = {"h e", "l l"},
                                          .control = {"<|im_end|>", "<|broken|>"},
                                          .eos = "<|im_end|>"})
                .size();
        std::vector<float> embedding = floats(vocab * kWidth, 1.0f);
        for (std::size_t c = 0; c < kWidth; ++c) {
            embedding[kTinyBroken * kWidth + c] = std::numeric_limits<float>::infinity();
        }
        builder.f32_tensor("token_embd.weight", {kWidth, vocab}, embedding);
        builder.f32_tensor("output_norm.weight", {kWidth}, std::vector<float>(kWidth, 1.0f));
        matrix(builder, "output.weight", static_cast<std::uint32_t>(vocab), kWidth);
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::string at = "blk." + std::to_string(layer) + ".";
            const std::vector<float> ones(kWidth, 1.0f);
            builder.f32_tensor(at + "attn_norm.weight", {kWidth}, ones);
            builder.f32_tensor(at + "ffn_norm.weight", {kWidth}, ones);
            matrix(builder, at + "attn_q.weight", kWidth, kWidth);
            matrix(builder, at + "attn_k.weight", kWidth / 2, kWidth);
            matrix(builder, at + "attn_v.weight", kWidth / 2, kWidth);
            matrix(builder, at + "attn_output.weight", kWidth, kWidth);
            matrix(builder, at + "ffn_gate.weight", kFf, kWidth);
            matrix(builder, at + "ffn_up.weight", kFf, kWidth);
            matrix(builder, at + "ffn_down.weight", kWidth, kFf);
        }
        bytes_ = builder.bytes();
        auto gguf = Gguf::parse(bytes_, "tiny.gguf");
        REQUIRE_MESSAGE(gguf, (gguf ? "" : gguf.error().message));
        gguf_ = std::make_unique<Gguf>(std::move(*gguf));
        auto tokenizer = Tokenizer::create(*gguf_);
        REQUIRE_MESSAGE(tokenizer, (tokenizer ? "" : tokenizer.error().message));
        tokenizer_ = std::make_unique<Tokenizer>(std::move(*tokenizer));
        auto model = Model::load(*gguf_, threads_);
        REQUIRE_MESSAGE(model, (model ? "" : model.error().message));
        model_ = std::move(*model);
    }

    const Model& model() const { return *model_; }
    const Tokenizer& tokenizer() const { return *tokenizer_; }
    std::uint32_t vocab() const { return model_->config().vocab; }

    // One for all tests: it is never changed.
    static const TinyModel& shared() {
        static const TinyModel model;
        return model;
    }

  private:
    std::vector<float> floats(std::size_t count, float scale) {
        std::vector<float> values(count);
        for (float& value : values) {
            value = scale * (static_cast<float>(random_() % 2001) / 1000.0f - 1.0f);
        }
        return values;
    }
    // Q8_0: an f16 scale, here 2^-8, and 32 signed bytes.
    void matrix(GgufBuilder& builder, const std::string& name, std::uint32_t rows,
                std::uint32_t cols) {
        std::vector<std::uint8_t> blocks;
        for (std::uint32_t block = 0; block < rows * cols / 32; ++block) {
            blocks.insert(blocks.end(), {0x00, 0x1c});
            for (int i = 0; i < 32; ++i) {
                blocks.push_back(static_cast<std::uint8_t>(random_() % 255 - 127));
            }
        }
        builder.tensor(name, {cols, rows}, 8, blocks);
    }

    ThreadPool threads_;
    std::mt19937 random_;
    std::vector<std::uint8_t> bytes_;
    std::unique_ptr<Gguf> gguf_;
    std::unique_ptr<Tokenizer> tokenizer_;
    std::unique_ptr<Model> model_;
};

inline Digest256 fixed_key(TenantId tenant, const std::string&) {
    Digest256 key{};
    key[0] = static_cast<std::uint8_t>(number(tenant));
    return key;
}

}  // namespace kvw::test
