// Ids and texts that other tokenizers gave for the public models (tests/data/*.tokenizer.json:
// llama.cpp and the tokenizers library agreed on them).

#include <doctest/doctest.h>

#include "tests/text/model_file.h"

using namespace kvw;

namespace {

void all_cases(const test::LoadedModel& model, const std::string& file) {
    const Tokenizer& tokenizer = *model.tokenizer;
    const nlohmann::json reference = test::reference(file);
    CHECK(reference["cases"].size() == 203);
    for (const nlohmann::json& entry : reference["cases"]) {
        const std::string text = entry["text"];
        INFO(entry["text"].dump());
        // Where the two disagree (`</s>` in a vocabulary that does not mark it), llama.cpp goes by
        // the token's name; the other one and we go by the file.
        const auto wanted = [&](const char* kind) {
            const std::string other = std::string("other_") + kind;
            const std::string own = std::string("ids_") + kind;
            return (entry.contains(other) ? entry[other]
                    : entry.contains(own) ? entry[own]
                                          : entry["ids"])
                .get<std::vector<TokenId>>();
        };
        const auto special = tokenizer.encode(text, SpecialTokens::parse);
        REQUIRE(special);
        CHECK(*special == wanted("special"));
        const auto plain = tokenizer.encode(text, SpecialTokens::as_text);
        REQUIRE(plain);
        CHECK(*plain == wanted("plain"));
        CHECK(tokenizer.decode(*special, true) == entry.value("detok", text));
        CHECK(tokenizer.decode(*plain, true) == text);
    }
    for (const nlohmann::json& entry : reference["invalid_utf8"]) {
        std::string bytes;
        const std::string hex = entry["hex"];
        for (std::size_t i = 0; i < hex.size(); i += 2) {
            bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
        }
        const auto ids = tokenizer.encode(bytes, SpecialTokens::parse);
        REQUIRE_FALSE(ids);
        CHECK(ids.error().code == ErrorCode::bad_input);
    }
}

}  // namespace

TEST_CASE("SmolLM2: every reference text gives the reference ids and comes back") {
    if (const auto model = test::smollm2()) {
        all_cases(*model, "smollm2.tokenizer.json");
        CHECK(model->tokenizer->size() == 49152);
        CHECK(model->tokenizer->pre() == "smollm");
        CHECK(model->tokenizer->bos() == 1);
        CHECK(model->tokenizer->eos() == 2);
        CHECK_FALSE(model->tokenizer->adds_bos());
        CHECK(model->tokenizer->ends_generation(0));
        CHECK(model->tokenizer->ends_generation(2));
        CHECK_FALSE(model->tokenizer->ends_generation(1));
    }
}

TEST_CASE("Qwen2: every reference text gives the reference ids and comes back") {
    if (const auto model = test::qwen2()) {
        all_cases(*model, "qwen2.tokenizer.json");
        CHECK(model->tokenizer->size() == 151936);
        CHECK(model->tokenizer->ends_generation(model->tokenizer->find("<|im_end|>")));
        CHECK_FALSE(model->tokenizer->is_control(model->tokenizer->find("</s>")));
    }
}
