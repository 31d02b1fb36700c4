#include "src/model/model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "kernels/tile_check.h"
#include "src/base/check.h"
#include "src/base/text.h"
#include "src/gguf/length.h"
#include "src/model/sim.h"
#include "src/model/weights.h"

namespace kvw {

namespace {

// No model has a dimension near this one; products of two stay far below 2^64.
constexpr std::uint64_t kDimensionMax = 1u << 24;
// Layers and KV heads are u16 in a tile header.
constexpr std::uint64_t kTileIndexMax = 65535;

Error refuse(std::string message) { return Error{ErrorCode::bad_model, std::move(message)}; }

std::string in_quotes(std::string_view text) {
    std::string quoted = printable(text);
    quoted.insert(quoted.begin(), '\'');
    quoted.push_back('\'');
    return quoted;
}

// ---- metadata
// --------------------------------------------------------------------------------------

// The key as a number in [1, limit].
Result<std::uint32_t> dimension(const Gguf& gguf, const std::string& key, std::uint64_t limit) {
    const Result<std::uint64_t> value = gguf.unsigned_at(key);
    if (!value) {
        return value.error();
    }
    if (*value == 0 || *value > limit) {
        return refuse("key '" + key + "' is " + std::to_string(*value) + "; supported: 1 to " +
                      std::to_string(limit));
    }
    return static_cast<std::uint32_t>(*value);
}

// The same, or `otherwise` when the key is absent.
Result<std::uint32_t> dimension_or(const Gguf& gguf, const std::string& key, std::uint64_t limit,
                                   std::uint32_t otherwise) {
    return gguf.has(key) ? dimension(gguf, key, limit) : Result<std::uint32_t>(otherwise);
}

// The key as a finite number above zero, or `otherwise` when it is absent.
Result<double> positive_or(const Gguf& gguf, const std::string& key, double otherwise) {
    if (!gguf.has(key)) {
        return otherwise;
    }
    const Result<double> value = gguf.number_at(key);
    if (value && !(std::isfinite(*value) && *value > 0)) {
        return refuse("key '" + key + "' is " + std::to_string(*value) +
                      "; supported: a number above 0");
    }
    return value;
}

// Keys that would change what a llama model computes in ways the forward pass does not know.
constexpr std::string_view kUnsupportedKeys[] = {
    "llama.attention.scale",
    "llama.attention.sliding_window",
    "llama.attention.clamp_kqv",
    "llama.attention.max_alibi_bias",
    "llama.attn_logit_softcapping",
    "llama.final_logit_softcapping",
    "llama.embedding_scale",
    "llama.residual_scale",
    "llama.logit_scale",
    "llama.attention.layer_norm_epsilon",
};

Status refuse_unsupported_keys(const Gguf& gguf) {
    for (const std::string_view key : kUnsupportedKeys) {
        if (gguf.has(key)) {
            return refuse("key '" + std::string(key) +
                          "' changes what the model computes and is not supported");
        }
    }
    if (gguf.has("llama.expert_count")) {
        const Result<std::uint64_t> experts = gguf.unsigned_at("llama.expert_count");
        if (!experts) {
            return experts.error();
        }
        if (*experts != 0) {
            return refuse("key 'llama.expert_count' is " + std::to_string(*experts) +
                          ": mixtures of experts are not supported");
        }
    }
    return {};
}

Status read_rope(const Gguf& gguf, ModelConfig& config) {
    const Result<std::uint32_t> dimensions =
        dimension_or(gguf, "llama.rope.dimension_count", kDimensionMax, config.head_dim);
    const Result<double> base = positive_or(gguf, "llama.rope.freq_base", 10000.0);
    if (!dimensions || !base) {
        return dimensions ? base.error() : dimensions.error();
    }
    if (*dimensions != config.head_dim) {
        return refuse("key 'llama.rope.dimension_count' is " + std::to_string(*dimensions) +
                      " where a head has " + std::to_string(config.head_dim) +
                      " dimensions: rotating a part of a head is not supported");
    }
    if (gguf.tensor("rope_freqs.weight") != nullptr) {
        return refuse(
            "tensor 'rope_freqs.weight' gives each frequency a factor of its own (rope scaling "
            "llama3), which is not supported; supported: none, linear");
    }
    config.rope_base = *base;

    std::string type = "linear";  // what a factor means when nothing else is said
    if (gguf.has("llama.rope.scaling.type")) {
        const Result<std::string_view> stated = gguf.string_at("llama.rope.scaling.type");
        if (!stated) {
            return stated.error();
        }
        type = *stated;
    }
    if (type != "none" && type != "linear") {
        return refuse("rope scaling " + in_quotes(type) +
                      " is not supported; supported: none, linear");
    }
    const bool old_key = !gguf.has("llama.rope.scaling.factor");
    const Result<double> factor =
        positive_or(gguf, old_key ? "llama.rope.scale_linear" : "llama.rope.scaling.factor", 1.0);
    if (!factor) {
        return factor.error();
    }
    config.rope_scale = type == "none" ? 1.0 : *factor;
    return {};
}

Status read_attention(const Gguf& gguf, ModelConfig& config) {
    const Result<std::uint32_t> heads =
        dimension(gguf, "llama.attention.head_count", kDimensionMax);
    if (!heads) {
        return heads.error();
    }
    const Result<std::uint32_t> kv_heads =
        dimension_or(gguf, "llama.attention.head_count_kv", kTileIndexMax, *heads);
    if (!kv_heads) {
        return kv_heads.error();
    }
    config.heads = *heads;
    config.kv_heads = *kv_heads;
    if (config.heads % config.kv_heads != 0 || config.kv_heads > kTileIndexMax) {
        return refuse(std::to_string(config.heads) + " query heads cannot share " +
                      std::to_string(config.kv_heads) + " KV heads evenly");
    }
    const bool stated = gguf.has("llama.attention.key_length");
    if (!stated && config.width % config.heads != 0) {
        return refuse("an embedding of " + std::to_string(config.width) + " does not divide into " +
                      std::to_string(config.heads) +
                      " heads, and key 'llama.attention.key_length' is absent");
    }
    const Result<std::uint32_t> keys = dimension_or(gguf, "llama.attention.key_length",
                                                    kDimensionMax, config.width / config.heads);
    if (!keys) {
        return keys.error();
    }
    const Result<std::uint32_t> values =
        dimension_or(gguf, "llama.attention.value_length", kDimensionMax, *keys);
    if (!values) {
        return values.error();
    }
    if (*keys != *values) {
        return refuse("keys of " + std::to_string(*keys) + " and values of " +
                      std::to_string(*values) + " dimensions: supported are equal ones");
    }
    if (*keys % 16 != 0 || *keys > kHeadDimMax) {
        return refuse("heads of " + std::to_string(*keys) +
                      " dimensions are not supported; supported: multiples of 16 up to " +
                      std::to_string(kHeadDimMax));
    }
    if (std::uint64_t{config.heads} * *keys > kDimensionMax) {
        return refuse(std::to_string(config.heads) + " heads of " + std::to_string(*keys) +
                      " dimensions are more than " + std::to_string(kDimensionMax) + " together");
    }
    config.head_dim = *keys;
    return {};
}

Result<ModelConfig> read_metadata(const Gguf& gguf) {
    const Result<std::string_view> architecture = gguf.string_at("general.architecture");
    if (!architecture) {
        return architecture.error();
    }
    if (*architecture != "llama") {
        return refuse("architecture " + in_quotes(*architecture) +
                      " is not supported; supported: llama");
    }
    if (Status known = refuse_unsupported_keys(gguf); !known) {
        return known.error();
    }

    ModelConfig config;
    config.architecture = *architecture;
    if (const Result<std::string_view> name = gguf.string_at("general.name")) {
        config.name = *name;
    }
    const std::pair<const char*, std::uint32_t*> dimensions[] = {
        {"llama.block_count", &config.layers},
        {"llama.embedding_length", &config.width},
        {"llama.feed_forward_length", &config.ff},
        {"llama.context_length", &config.context},
    };
    for (const auto& [key, field] : dimensions) {
        const Result<std::uint32_t> value =
            dimension(gguf, key, field == &config.layers ? kTileIndexMax : kDimensionMax);
        if (!value) {
            return value.error();
        }
        *field = *value;
    }
    if (Status read = read_attention(gguf, config); !read) {
        return read.error();
    }
    if (Status read = read_rope(gguf, config); !read) {
        return read.error();
    }
    const Result<double> epsilon = gguf.number_at("llama.attention.layer_norm_rms_epsilon");
    if (!epsilon) {
        return epsilon.error();
    }
    if (!(*epsilon >= 0 && *epsilon < 1)) {
        return refuse("key 'llama.attention.layer_norm_rms_epsilon' is " +
                      std::to_string(*epsilon) + "; supported: 0 to 1");
    }
    config.norm_epsilon = static_cast<float>(*epsilon);
    return config;
}

// ---- tensors
// ---------------------------------------------------------------------------------------

// A tensor that is needed, by the end of its name in a layer ("attn_q.weight") or by its whole
// name.
struct Shape {
    std::string name;
    std::uint64_t rows = 1, cols = 0;
    bool norm = false;
};
struct LayerTensor {
    Shape shape;
    const float* LayerWeights::*norm = nullptr;
    PackedMatrix LayerWeights::*matrix = nullptr;
};

std::vector<LayerTensor> layer_tensors(const ModelConfig& c) {
    using W = LayerWeights;
    const std::uint64_t query = std::uint64_t{c.heads} * c.head_dim;
    const std::uint64_t kv = std::uint64_t{c.kv_heads} * c.head_dim;
    return {
        {{"attn_norm.weight", 1, c.width, true}, &W::attention_norm, nullptr},
        {{"attn_q.weight", query, c.width}, nullptr, &W::q},
        {{"attn_k.weight", kv, c.width}, nullptr, &W::k},
        {{"attn_v.weight", kv, c.width}, nullptr, &W::v},
        {{"attn_output.weight", c.width, query}, nullptr, &W::attention_out},
        {{"ffn_norm.weight", 1, c.width, true}, &W::ff_norm, nullptr},
        {{"ffn_gate.weight", c.ff, c.width}, nullptr, &W::gate},
        {{"ffn_up.weight", c.ff, c.width}, nullptr, &W::up},
        {{"ffn_down.weight", c.width, c.ff}, nullptr, &W::down},
    };
}

Shape in_layer(Shape shape, std::uint32_t layer) {
    shape.name = "blk." + std::to_string(layer) + "." + shape.name;
    return shape;
}

Shape embedding_shape(const ModelConfig& c) { return {"token_embd.weight", c.vocab, c.width}; }
Shape final_norm_shape(const ModelConfig& c) { return {"output_norm.weight", 1, c.width, true}; }
Shape output_shape(const ModelConfig& c) { return {"output.weight", c.vocab, c.width}; }

// Fails when the tensor is absent, of another shape, of a type we do not run, or not whole.
Status check_tensor(const Gguf& gguf, const Shape& shape) {
    const std::string named = "tensor '" + shape.name + "'";
    const GgufTensor* const tensor = gguf.tensor(shape.name);
    if (tensor == nullptr) {
        return refuse(named + " is missing");
    }
    if (tensor->cols() != shape.cols || tensor->rows() != shape.rows) {
        return refuse(named + " is " + std::to_string(tensor->cols()) + " x " +
                      std::to_string(tensor->rows()) + " where the configuration needs " +
                      std::to_string(shape.cols) + " x " + std::to_string(shape.rows));
    }
    const std::string type_name = weight_type_name(tensor->type);
    if (!weight_type_supported(tensor->type)) {
        return refuse(
            named + " has type " + type_name +
            ", which is not supported; supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, "
            "Q8_0, Q4_K, Q5_K, Q6_K");
    }
    const auto type = static_cast<WeightType>(tensor->type);
    if (shape.norm && type != WeightType::f32) {
        return refuse(named + " has type " + type_name + "; supported for a norm: F32");
    }
    if (shape.cols % block_columns(type) != 0) {
        return refuse(named + " has rows of " + std::to_string(shape.cols) +
                      " values, which do not divide into " + type_name + " blocks of " +
                      std::to_string(block_columns(type)));
    }
    const Length bytes = Length(shape.cols / block_columns(type)) * block_bytes(type) * shape.rows;
    if (bytes.within(tensor->bytes.size()) != tensor->bytes.size()) {
        return refuse(named + " has " + std::to_string(tensor->bytes.size()) +
                      " bytes, which is not what its shape and type need");
    }
    return {};
}

// All tensors that the configuration needs, and no others: one that was left out would be another
// model.
Status check_tensors(const Gguf& gguf, const ModelConfig& config) {
    std::set<std::string, std::less<>> known;
    const auto require = [&](Shape shape) {
        Status checked = check_tensor(gguf, shape);
        known.insert(std::move(shape.name));
        return checked;
    };
    std::vector<Shape> outside = {embedding_shape(config), final_norm_shape(config)};
    if (!config.tied_output) {
        outside.push_back(output_shape(config));
    }
    for (const Shape& shape : outside) {
        if (Status checked = require(shape); !checked) {
            return checked;
        }
    }
    const std::vector<LayerTensor> tensors = layer_tensors(config);
    for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
        for (const LayerTensor& tensor : tensors) {
            if (Status checked = require(in_layer(tensor.shape, layer)); !checked) {
                return checked;
            }
        }
    }
    for (const GgufTensor& tensor : gguf.tensors()) {
        if (!known.contains(tensor.name)) {
            return refuse("tensor " + in_quotes(tensor.name) +
                          " is not part of architecture llama as supported here, and a model "
                          "without it would be another model");
        }
    }
    return {};
}

Status read_vocabulary(const Gguf& gguf, ModelConfig& config) {
    const GgufTensor* const embedding = gguf.tensor("token_embd.weight");
    if (embedding == nullptr) {
        return refuse("tensor 'token_embd.weight' is missing");
    }
    if (embedding->rows() == 0 || embedding->rows() > kDimensionMax) {
        return refuse("tensor 'token_embd.weight' has " + std::to_string(embedding->rows()) +
                      " rows; supported: 1 to " + std::to_string(kDimensionMax));
    }
    config.vocab = static_cast<std::uint32_t>(embedding->rows());
    config.tied_output = gguf.tensor("output.weight") == nullptr;

    const auto found = gguf.metadata().find("tokenizer.ggml.tokens");
    const GgufArray* const tokens =
        found != gguf.metadata().end() ? std::get_if<GgufArray>(&found->second) : nullptr;
    if (tokens != nullptr && tokens->count != config.vocab) {
        return refuse("the tokenizer has " + std::to_string(tokens->count) +
                      " tokens where tensor 'token_embd.weight' has " +
                      std::to_string(config.vocab) + " rows");
    }
    return {};
}

}  // namespace

Result<ModelConfig> read_model_config(const Gguf& gguf) {
    Result<ModelConfig> config = read_metadata(gguf);
    if (!config) {
        return config;
    }
    if (Status read = read_vocabulary(gguf, *config); !read) {
        return read.error();
    }
    if (Status checked = check_tensors(gguf, *config); !checked) {
        return checked.error();
    }
    return config;
}

// ---- loading
// ---------------------------------------------------------------------------------------

namespace {

// Gives every tensor its place in one arena, then packs them all, a few panels at a time.
class Packer {
  public:
    explicit Packer(const Gguf& gguf) : gguf_(gguf) {}

    void add(const Shape& shape, PackedMatrix& matrix) {
        const GgufTensor& tensor = *gguf_.tensor(shape.name);
        matrix = packed_shape(static_cast<WeightType>(tensor.type),
                              static_cast<std::uint32_t>(shape.rows),
                              static_cast<std::uint32_t>(shape.cols));
        // Enough bytes for a part that taking it is cheap beside packing it.
        const std::uint32_t step =
            static_cast<std::uint32_t>(std::max<std::size_t>(1, kPartBytes / matrix.panel_bytes));
        for (std::uint32_t begin = 0; begin < matrix.panels(); begin += step) {
            parts_.push_back({matrices_.size(), begin, std::min(begin + step, matrix.panels())});
        }
        matrices_.push_back({tensor.bytes, &matrix, take(matrix.bytes())});
    }
    void add(const Shape& shape, const float*& norm) {
        const GgufTensor& tensor = *gguf_.tensor(shape.name);
        norms_.push_back({tensor.bytes, &norm, take(tensor.bytes.size())});
    }

    // Fails: out_of_memory.
    Result<Arena> pack(ThreadPool& threads, const Model::Progress& progress) {
        const std::optional<std::uint64_t> bytes = bytes_.within(kArenaMax);
        if (!bytes) {
            return Error{ErrorCode::out_of_memory,
                         "the model's weights need more memory than can be addressed"};
        }
        Result<Arena> arena = Arena::create(*bytes, "the model's weights");
        if (!arena) {
            return arena;
        }
        for (const Norm& norm : norms_) {
            std::memcpy(arena->data() + norm.offset, norm.source.data(), norm.source.size());
            *norm.place = reinterpret_cast<const float*>(arena->data() + norm.offset);
        }
        for (const Matrix& matrix : matrices_) {
            matrix.place->data = arena->data() + matrix.offset;
        }
        std::atomic<std::size_t> next{0};
        threads.run([&](unsigned worker) {
            for (std::size_t i = next++; i < parts_.size(); i = next++) {
                if (worker == 0 && progress && i != 0) {
                    progress(static_cast<double>(i) / static_cast<double>(parts_.size()));
                }
                const Part& part = parts_[i];
                const Matrix& matrix = matrices_[part.matrix];
                pack_panels(*matrix.place, matrix.source, arena->data() + matrix.offset, part.begin,
                            part.end);
            }
        });
        if (progress) {
            progress(1.0);
        }
        return arena;
    }

  private:
    static constexpr std::size_t kPartBytes = 256 * 1024;
    static constexpr std::uint64_t kArenaMax = std::uint64_t{1} << 46;

    struct Matrix {
        std::span<const std::uint8_t> source;
        PackedMatrix* place;
        std::size_t offset;
    };
    struct Norm {
        std::span<const std::uint8_t> source;
        const float** place;
        std::size_t offset;
    };
    struct Part {
        std::size_t matrix;
        std::uint32_t begin, end;
    };

    std::size_t take(std::size_t bytes) {
        const std::size_t offset = bytes_.within(kArenaMax).value_or(0);
        bytes_ = (bytes_ + Length(bytes)).rounded_up(64);
        return offset;
    }

    const Gguf& gguf_;
    Length bytes_ = 0;
    std::vector<Matrix> matrices_;
    std::vector<Norm> norms_;
    std::vector<Part> parts_;
};

}  // namespace

Model::Model() : weights_(std::make_unique<Weights>()) {}
Model::~Model() = default;

std::unique_ptr<Model> Model::sim() {
    std::unique_ptr<Model> model(new Model());
    model->config_ = sim_config();
    model->sim_ = true;
    return model;
}

Digest256 sim_sha256() {
    Sha256 sha;
    sha.update("kvwitness sim 1");
    return sha.digest();
}

Result<std::unique_ptr<Model>> Model::load(const Gguf& gguf, ThreadPool& threads,
                                           const Progress& progress) {
    Result<ModelConfig> config = read_model_config(gguf);
    if (!config) {
        return config.error();
    }
    std::unique_ptr<Model> model(new Model);
    model->config_ = *std::move(config);
    const ModelConfig& c = model->config_;
    Weights& weights = *model->weights_;
    weights.layers.resize(c.layers);

    Packer packer(gguf);
    packer.add(embedding_shape(c), weights.embedding);
    const std::vector<LayerTensor> tensors = layer_tensors(c);
    for (std::uint32_t layer = 0; layer < c.layers; ++layer) {
        for (const LayerTensor& tensor : tensors) {
            const Shape shape = in_layer(tensor.shape, layer);
            if (tensor.norm != nullptr) {
                packer.add(shape, weights.layers[layer].*tensor.norm);
            } else {
                packer.add(shape, weights.layers[layer].*tensor.matrix);
            }
        }
    }
    packer.add(final_norm_shape(c), weights.final_norm);
    if (!c.tied_output) {
        packer.add(output_shape(c), weights.output);
    }
    Result<Arena> arena = packer.pack(threads, progress);
    if (!arena) {
        return arena.error();
    }
    weights.arena = *std::move(arena);
    if (c.tied_output) {
        weights.output = weights.embedding;
    }
    return model;
}

std::size_t Model::weight_bytes() const { return weights_->arena.size(); }

// All but the rows of an embedding of its own that no token asks for.
std::size_t Model::weight_bytes_per_token() const {
    const PackedMatrix& embedding = weights_->embedding;
    const std::size_t unread = config_.tied_output ? 0 : embedding.bytes();
    return weight_bytes() - unread;
}

}  // namespace kvw
