// The real model files that some tests compare with, where this machine has them.
#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "src/gguf/gguf.h"
#include "src/text/tokenizer.h"

namespace kvw::test {

struct LoadedModel {
    std::unique_ptr<Gguf> gguf;  // its address is what the tokenizer keeps
    std::unique_ptr<Tokenizer> tokenizer;
};

// From the environment variable, else models/FILE; says so and gives none when there is no file.
inline std::optional<LoadedModel> load_model(const char* variable, const char* file) {
    const char* set = std::getenv(variable);
    const Path path = set != nullptr ? Path(set) : Path(KVW_SOURCE_DIR) / "models" / file;
    if (!std::filesystem::exists(path)) {
        MESSAGE("skipped: no model at " << path.string() << " (set " << variable << ")");
        return std::nullopt;
    }
    auto gguf = Gguf::open(path);
    REQUIRE(gguf);
    LoadedModel model;
    model.gguf = std::make_unique<Gguf>(std::move(*gguf));
    auto tokenizer = Tokenizer::create(*model.gguf);
    REQUIRE_MESSAGE(tokenizer, (tokenizer ? "" : tokenizer.error().message));
    model.tokenizer = std::make_unique<Tokenizer>(std::move(*tokenizer));
    return model;
}

inline std::optional<LoadedModel> smollm2() {
    return load_model("KVW_MODEL", "SmolLM2-135M-Instruct.Q4_1.gguf");
}
inline std::optional<LoadedModel> qwen2() {
    return load_model("KVW_QWEN_MODEL", "qwen2.5-0.5b.gguf");
}

inline nlohmann::json reference(const std::string& file) {
    std::ifstream in(Path(KVW_SOURCE_DIR) / "tests" / "data" / file);
    REQUIRE(in.good());
    return nlohmann::json::parse(in);
}

}  // namespace kvw::test
