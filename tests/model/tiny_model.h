// Small llama models with random weights: as a GGUF file, and as the doubles that file stands for.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/weights.h"
#include "tests/gguf_builder.h"

namespace kvw::test {

struct TinyShape {
    WeightType type = WeightType::q4_1;            // of the matrices
    WeightType embedding_type = WeightType::q8_0;  // and of the output matrix
    bool tied = true;
    std::uint32_t layers = 2, width = 64, heads = 4, kv_heads = 2, head_dim = 16, ff = 96;
    std::uint32_t vocab = 259;  // no multiple of a panel
    double rope_base = 10000.0, rope_scale = 1.0;
    std::uint32_t seed = 1;
    // For files that are wrong: numbers that replace those of the metadata, tensors that are left
    // out or have another type, and texts that are added.
    std::string architecture = "llama";
    std::map<std::string, std::uint64_t> numbers;
    std::map<std::string, std::string> texts;
    std::set<std::string> absent;
    std::map<std::string, std::uint32_t> types;
    std::vector<std::string> extra;
};

// Row-major, exactly the values of the file.
struct Matrix {
    std::size_t rows = 0, cols = 0;
    std::vector<double> values;
    const double* row(std::size_t r) const { return &values[r * cols]; }
};

inline std::uint16_t half_bits(double value) {  // of a normal number, rounded towards zero
    if (value == 0) {
        return 0;
    }
    int exponent = 0;
    const double fraction = std::frexp(std::fabs(value), &exponent);  // [0.5, 1)
    const auto mantissa = static_cast<unsigned>((fraction * 2 - 1) * 1024);
    const int biased = exponent - 1 + 15;
    const unsigned magnitude = biased <= 0 ? 0 : static_cast<unsigned>(biased) << 10 | mantissa;
    return static_cast<std::uint16_t>(magnitude | (value < 0 ? 0x8000u : 0u));
}
inline double half_value(std::uint16_t bits) {  // of a normal number or zero
    const int exponent = bits >> 10 & 31;
    const double magnitude = exponent == 0 ? 0 : std::ldexp(1024 + (bits & 1023), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

class TinyModel {
  public:
    explicit TinyModel(const TinyShape& shape) : shape_(shape), random_(shape.seed) {
        metadata();
        const std::uint64_t query = std::uint64_t{shape.heads} * shape.head_dim;
        const std::uint64_t kv = std::uint64_t{shape.kv_heads} * shape.head_dim;
        matrix("token_embd.weight", shape.vocab, shape.width, shape.embedding_type);
        for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
            const std::string at = "blk." + std::to_string(layer) + ".";
            norm(at + "attn_norm.weight");
            matrix(at + "attn_q.weight", query, shape.width, shape.type);
            matrix(at + "attn_k.weight", kv, shape.width, shape.type);
            matrix(at + "attn_v.weight", kv, shape.width, shape.type);
            matrix(at + "attn_output.weight", shape.width, query, shape.type);
            norm(at + "ffn_norm.weight");
            matrix(at + "ffn_gate.weight", shape.ff, shape.width, shape.type);
            matrix(at + "ffn_up.weight", shape.ff, shape.width, shape.type);
            matrix(at + "ffn_down.weight", shape.width, shape.ff, shape.type);
        }
        norm("output_norm.weight");
        if (!shape.tied) {
            matrix("output.weight", shape.vocab, shape.width, shape.embedding_type);
        }
        for (const std::string& name : shape.extra) {
            norm(name);
        }
    }
    const TinyShape& shape() const { return shape_; }
    std::vector<std::uint8_t> file() const { return builder_.bytes(); }
    const Matrix& at(const std::string& name) const { return matrices_.at(name); }
    const Matrix& output() const { return at(shape_.tied ? "token_embd.weight" : "output.weight"); }

  private:
    void number(const std::string& key, std::uint64_t value) {
        const auto other = shape_.numbers.find(key);
        builder_.u64(key, other == shape_.numbers.end() ? value : other->second);
    }
    void metadata() {
        builder_.text("general.architecture", shape_.architecture).text("general.name", "tiny");
        number("llama.block_count", shape_.layers);
        number("llama.embedding_length", shape_.width);
        number("llama.feed_forward_length", shape_.ff);
        number("llama.context_length", 1024);
        number("llama.attention.head_count", shape_.heads);
        number("llama.attention.head_count_kv", shape_.kv_heads);
        number("llama.attention.key_length", shape_.head_dim);
        number("llama.attention.value_length", shape_.head_dim);
        number("llama.rope.dimension_count", shape_.head_dim);
        builder_.f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
        builder_.f32("llama.rope.freq_base", static_cast<float>(shape_.rope_base));
        if (shape_.rope_scale != 1.0) {
            builder_.text("llama.rope.scaling.type", "linear");
            builder_.f32("llama.rope.scaling.factor", static_cast<float>(shape_.rope_scale));
        }
        for (const auto& [key, value] : shape_.texts) {
            builder_.text(key, value);
        }
        if (shape_.numbers.contains("llama.expert_count")) {
            number("llama.expert_count", 0);
        }
    }

    double uniform(double limit) {
        return (static_cast<double>(random_() >> 8) / 8388608.0 - 1.0) * limit;
    }
    void put_half(std::vector<std::uint8_t>& bytes, std::uint16_t half) {
        bytes.push_back(static_cast<std::uint8_t>(half));
        bytes.push_back(static_cast<std::uint8_t>(half >> 8));
    }
    void norm(const std::string& name) {
        Matrix m{1, shape_.width, {}};
        std::vector<float> floats;
        for (std::size_t i = 0; i < shape_.width; ++i) {
            floats.push_back(static_cast<float>(1.0 + uniform(0.5)));
            m.values.push_back(floats.back());
        }
        add(name, std::move(m), 0,
            {reinterpret_cast<const std::uint8_t*>(floats.data()),
             reinterpret_cast<const std::uint8_t*>(floats.data() + floats.size())});
    }
    // Weights whose products keep about the size of what goes in.
    void matrix(const std::string& name, std::size_t rows, std::size_t cols, WeightType type) {
        Matrix m{rows, cols, std::vector<double>(rows * cols)};
        std::vector<std::uint8_t> bytes;
        const double limit = std::sqrt(3.0 / static_cast<double>(cols)) * 1.5;
        for (std::size_t i = 0; i < rows * cols;) {
            double* const to = &m.values[i];
            i += block_columns(type);
            switch (type) {
                case WeightType::f32: {
                    const auto value = static_cast<float>(uniform(limit));
                    *to = value;
                    const auto* raw = reinterpret_cast<const std::uint8_t*>(&value);
                    bytes.insert(bytes.end(), raw, raw + 4);
                    break;
                }
                case WeightType::f16: {
                    const std::uint16_t half = half_bits(uniform(limit));
                    *to = half_value(half);
                    put_half(bytes, half);
                    break;
                }
                case WeightType::q8_0: {
                    const std::uint16_t scale = half_bits(limit / 127 * (1 + uniform(0.3)));
                    put_half(bytes, scale);
                    for (int c = 0; c < 32; ++c) {
                        const int code = static_cast<int>(random_() % 255) - 127;
                        bytes.push_back(static_cast<std::uint8_t>(code));
                        to[c] = code * half_value(scale);
                    }
                    break;
                }
                default: {  // Q4_1
                    const std::uint16_t scale = half_bits(limit / 7.5 * (1 + uniform(0.3)));
                    const std::uint16_t minimum = half_bits(-limit * (1 + uniform(0.1)));
                    put_half(bytes, scale);
                    put_half(bytes, minimum);
                    for (int c = 0; c < 16; ++c) {
                        const unsigned low = random_() >> 9 & 15, high = random_() >> 9 & 15;
                        bytes.push_back(static_cast<std::uint8_t>(low | high << 4));
                        to[c] = low * half_value(scale) + half_value(minimum);
                        to[c + 16] = high * half_value(scale) + half_value(minimum);
                    }
                }
            }
        }
        add(name, std::move(m), static_cast<std::uint32_t>(type), bytes);
    }
    void add(const std::string& name, Matrix m, std::uint32_t type,
             const std::vector<std::uint8_t>& bytes) {
        if (shape_.absent.contains(name)) {
            return;
        }
        const auto other = shape_.types.find(name);
        builder_.tensor(name, {m.cols, m.rows}, other == shape_.types.end() ? type : other->second,
                        bytes);
        matrices_[name] = std::move(m);
    }

    TinyShape shape_;
    std::mt19937 random_;
    GgufBuilder builder_;
    std::map<std::string, Matrix> matrices_;
};

// Logits of every position, by the formulas of the papers in double: no blocks, no cache, no
// rounding of activations or keys.
inline std::vector<std::vector<double>> reference_logits(const TinyModel& model,
                                                         const std::vector<std::int32_t>& tokens) {
    using Vector = std::vector<double>;
    const TinyShape& s = model.shape();
    const auto times = [](const Matrix& w, const Vector& x) {
        Vector out(w.rows);
        for (std::size_t r = 0; r < w.rows; ++r) {
            for (std::size_t c = 0; c < w.cols; ++c) {
                out[r] += w.row(r)[c] * x[c];
            }
        }
        return out;
    };
    const auto normalised = [](const Matrix& weight, const Vector& x) {
        double sum = 0;
        for (const double v : x) {
            sum += v * v;
        }
        Vector out(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) {
            out[i] =
                x[i] / std::sqrt(sum / static_cast<double>(x.size()) + 1e-5f) * weight.values[i];
        }
        return out;
    };
    const auto rotate = [&](Vector& x, std::size_t heads, std::size_t position) {
        for (std::size_t h = 0; h < heads; ++h) {
            for (std::size_t i = 0; i < s.head_dim / 2; ++i) {
                const double angle =
                    static_cast<double>(position) / s.rope_scale *
                    std::pow(s.rope_base, -2.0 * static_cast<double>(i) / s.head_dim);
                double& a = x[h * s.head_dim + 2 * i];
                double& b = x[h * s.head_dim + 2 * i + 1];
                const double turned = a * std::cos(angle) - b * std::sin(angle);
                b = a * std::sin(angle) + b * std::cos(angle);
                a = turned;
            }
        }
    };
    std::vector<std::vector<Vector>> keys(s.layers), values(s.layers);
    std::vector<Vector> logits;
    for (std::size_t position = 0; position < tokens.size(); ++position) {
        const double* row =
            model.at("token_embd.weight").row(static_cast<std::size_t>(tokens[position]));
        Vector x(row, row + s.width);
        for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
            const std::string at = "blk." + std::to_string(layer) + ".";
            const Vector n = normalised(model.at(at + "attn_norm.weight"), x);
            Vector q = times(model.at(at + "attn_q.weight"), n);
            Vector k = times(model.at(at + "attn_k.weight"), n);
            rotate(q, s.heads, position);
            rotate(k, s.kv_heads, position);
            keys[layer].push_back(k);
            values[layer].push_back(times(model.at(at + "attn_v.weight"), n));
            Vector attended(q.size());
            for (std::size_t h = 0; h < s.heads; ++h) {
                const std::size_t kv = h / (s.heads / s.kv_heads) * s.head_dim;
                Vector weights(position + 1);
                double sum = 0;
                for (std::size_t t = 0; t <= position; ++t) {
                    double score = 0;
                    for (std::size_t d = 0; d < s.head_dim; ++d) {
                        score += q[h * s.head_dim + d] * keys[layer][t][kv + d];
                    }
                    weights[t] = std::exp(score / std::sqrt(s.head_dim));
                    sum += weights[t];
                }
                for (std::size_t t = 0; t <= position; ++t) {
                    for (std::size_t d = 0; d < s.head_dim; ++d) {
                        attended[h * s.head_dim + d] += weights[t] / sum * values[layer][t][kv + d];
                    }
                }
            }
            const Vector back = times(model.at(at + "attn_output.weight"), attended);
            for (std::size_t i = 0; i < x.size(); ++i) {
                x[i] += back[i];
            }
            const Vector m = normalised(model.at(at + "ffn_norm.weight"), x);
            Vector gate = times(model.at(at + "ffn_gate.weight"), m);
            const Vector up = times(model.at(at + "ffn_up.weight"), m);
            for (std::size_t i = 0; i < gate.size(); ++i) {
                gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
            }
            const Vector down = times(model.at(at + "ffn_down.weight"), gate);
            for (std::size_t i = 0; i < x.size(); ++i) {
                x[i] += down[i];
            }
        }
        logits.push_back(times(model.output(), normalised(model.at("output_norm.weight"), x)));
    }
    return logits;
}

}  // namespace kvw::test
