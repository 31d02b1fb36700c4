// model info, model check: what a GGUF file is, and whether this program can run it.
#include <fmt/format.h>

#include <map>
#include <memory>

#include "cli/commands.h"
#include "cli/models.h"
#include "cli/places.h"
#include "kernels/weights.h"
#include "src/base/text.h"
#include "src/gguf/tensor_types.h"
#include "src/text/chat.h"

namespace kvw::cli {

namespace {

struct InfoFlags {
    std::optional<std::string> file;
    ModelFlags model;
};

Result<std::string> named_file(const InfoFlags& flags) {
    return flags.file ? Result<std::string>(*flags.file) : model_path(flags.model.model);
}

std::string type_name(std::uint32_t number) {
    const TensorType* type = tensor_type(number);
    return type != nullptr ? std::string(type->name) : fmt::format("type {}", number);
}

struct TypeTotals {
    std::uint64_t tensors = 0, bytes = 0;
    bool supported = false;
};

Json types_json(const Gguf& gguf) {
    std::map<std::uint32_t, TypeTotals> totals;
    for (const GgufTensor& tensor : gguf.tensors()) {
        TypeTotals& of = totals[tensor.type];
        ++of.tensors;
        of.bytes += tensor.bytes.size();
        of.supported = weight_type_supported(tensor.type);
    }
    Json types = Json::array();
    for (const auto& [number, of] : totals) {
        types.push_back({{"type", type_name(number)},
                         {"tensors", of.tensors},
                         {"bytes", of.bytes},
                         {"supported", of.supported}});
    }
    return types;
}

std::string text_at(const Gguf& gguf, std::string_view key) {
    const Result<std::string_view> value = gguf.string_at(key);
    return value ? utf8_lossy(*value) : "";
}

// Numbers under the architecture's own prefix, as the file gives them; absent ones are left out.
void put_shape(Json& object, const Gguf& gguf) {
    const std::string prefix = text_at(gguf, "general.architecture") + ".";
    static constexpr std::pair<const char*, const char*> kKeys[] = {
        {"layers", "block_count"},         {"width", "embedding_length"},
        {"heads", "attention.head_count"}, {"kv_heads", "attention.head_count_kv"},
        {"ff", "feed_forward_length"},     {"context", "context_length"},
        {"vocab", "vocab_size"},
    };
    for (const auto& [name, key] : kKeys) {
        if (const Result<std::uint64_t> value = gguf.unsigned_at(prefix + key)) {
            object[name] = *value;
        }
    }
}

Json tokenizer_json(const Gguf& gguf) {
    Json object{{"model", text_at(gguf, "tokenizer.ggml.model")},
                {"pre", text_at(gguf, "tokenizer.ggml.pre")}};
    const Result<Tokenizer> tokenizer = Tokenizer::create(gguf);
    object["supported"] = tokenizer.has_value();
    if (!tokenizer) {
        object["why"] = printable(tokenizer.error().message);
        return object;
    }
    object["vocab"] = tokenizer->size();
    object["bos"] = tokenizer->bos();
    object["eos"] = tokenizer->eos();
    object["adds_bos"] = tokenizer->adds_bos();
    return object;
}

Json template_json(const Gguf& gguf) {
    const Result<ChatTemplate> known = ChatTemplate::of_model(gguf);
    return Json{{"in_file", gguf.has("tokenizer.chat_template")},
                {"known", known.has_value()},
                {"name", known ? Json(known->name()) : Json(nullptr)}};
}

Json kv_json(const ModelConfig& config) {
    const std::uint64_t per_token = config.kv_bytes_per_token();
    const std::uint64_t memory = memory_available();
    return Json{{"bytes_per_token", per_token},
                {"page_bytes", config.tile_shape().page_bytes()},
                {"tokens",
                 {{"context", config.context},
                  {"default_pool", config.context},
                  {"memory", memory / per_token}}},
                {"memory_available", memory}};
}

// Why it cannot be run; nothing when it can.
std::optional<Error> obstacle(const Gguf& gguf, const Result<ModelConfig>& config) {
    if (!config) {
        return config.error();
    }
    const Result<Tokenizer> tokenizer = Tokenizer::create(gguf);
    return tokenizer ? std::nullopt : std::optional(tokenizer.error());
}

Json info_json(const Session& session, const Gguf& gguf, bool rehash) {
    Json object = session.object();
    object["path"] = gguf.path().string();
    object["name"] = text_at(gguf, "general.name");
    object["architecture"] = text_at(gguf, "general.architecture");
    object["gguf_version"] = gguf.version();
    object["bytes"] = gguf.file_size();
    const std::optional<Digest256> known =
        rehash ? std::nullopt : remembered_sha256(gguf.identity());
    const Digest256 digest = known ? *known : sha256(gguf.file_bytes());
    if (!known) {
        remember_sha256(gguf.identity(), digest, session.clock.wall_ns());
    }
    object["sha256"] = hex(digest);
    put_shape(object, gguf);
    const Result<ModelConfig> config = read_model_config(gguf);
    if (config) {
        object["head_dim"] = config->head_dim;
        object["vocab"] = config->vocab;
        object["rope_base"] = config->rope_base;
        object["kv"] = kv_json(*config);
    }
    object["tensors"] = gguf.tensors().size();
    object["types"] = types_json(gguf);
    object["tokenizer"] = tokenizer_json(gguf);
    object["chat_template"] = template_json(gguf);
    const std::optional<Error> problem = obstacle(gguf, config);
    object["supported"] = !problem;
    object["why"] = problem ? Json(printable(problem->message)) : Json(nullptr);
    return object;
}

std::string shown(const Json& value) {
    return printable(value.is_string() ? value.get<std::string>() : value.dump());
}

std::string info_text(const Json& object) {
    std::string out;
    for (const char* key : {"path", "name", "architecture", "gguf_version", "sha256", "layers",
                            "width", "heads", "kv_heads", "head_dim", "ff", "vocab", "context"}) {
        if (object.contains(key)) {
            out += fmt::format("{:<16} {}\n", key, shown(object[key]));
        }
    }
    out += fmt::format("{:<16} {}, {} tensors\n", "size",
                       human_bytes(object["bytes"].get<std::uint64_t>()),
                       object["tensors"].get<std::uint64_t>());
    for (const Json& type : object["types"]) {
        out += fmt::format("  {:<14} {:>5} tensors {:>12}{}\n", shown(type["type"]),
                           type["tensors"].get<std::uint64_t>(),
                           human_bytes(type["bytes"].get<std::uint64_t>()),
                           type["supported"].get<bool>() ? "" : "  not supported");
    }
    const Json& tokenizer = object["tokenizer"];
    out += fmt::format(
        "{:<16} {} {}{}\n", "tokenizer", shown(tokenizer["model"]), shown(tokenizer["pre"]),
        tokenizer["supported"].get<bool>() ? "" : "  not supported: " + shown(tokenizer["why"]));
    const Json& chat = object["chat_template"];
    out += fmt::format("{:<16} {}\n", "chat template",
                       chat["known"].get<bool>()     ? shown(chat["name"])
                       : chat["in_file"].get<bool>() ? "in the file, not a known one: --raw"
                                                     : "none");
    if (object.contains("kv")) {
        const Json& kv = object["kv"];
        out += fmt::format(
            "{:<16} {} per token; {} tokens of context and pool take {}; memory has room for {} "
            "tokens\n",
            "KV cache", human_bytes(kv["bytes_per_token"].get<std::uint64_t>()),
            kv["tokens"]["context"].get<std::uint64_t>(),
            human_bytes(kv["bytes_per_token"].get<std::uint64_t>() *
                        kv["tokens"]["context"].get<std::uint64_t>()),
            kv["tokens"]["memory"].get<std::uint64_t>());
    }
    out += fmt::format("{:<16} {}\n", "supported",
                       object["supported"].get<bool>() ? "yes" : "no: " + shown(object["why"]));
    return out;
}

Result<int> info(const InfoFlags& flags, Session& session) {
    const Result<std::string> path = named_file(flags);
    if (!path) {
        return path.error();
    }
    const Result<Gguf> gguf = Gguf::open(*path);
    if (!gguf) {
        return gguf.error();
    }
    const Json object = info_json(session, *gguf, flags.model.rehash);
    if (session.common.json) {
        session.out.object(object);
    } else {
        session.out.write(info_text(object));
    }
    return 0;
}

// Everything `run` would do with the file, weights packed included.
Result<int> check_model(const InfoFlags& flags, Session& session) {
    ModelFlags model = flags.model;
    model.model = flags.file ? flags.file : model.model;
    Progress progress(session);
    const Result<LoadedModel> loaded = load_model(model, progress);
    if (!loaded) {
        return loaded.error();
    }
    if (session.common.json) {
        Json object = session.object();
        object["path"] = loaded->gguf->path().string();
        object["name"] = loaded->identity.name;
        object["sha256"] = hex(loaded->identity.sha256);
        object["supported"] = true;
        session.out.object(object);
    } else {
        session.out.write(fmt::format("{}: good, {}\n", printable(loaded->gguf->path().string()),
                                      hex(loaded->identity.sha256)));
    }
    return 0;
}

}  // namespace

void add_model_info(Commands& commands) {
    const auto described = std::make_shared<InfoFlags>();
    Flags info_flags =
        commands.add({"model info", "model", "describe a model file",
                      "  kvwitness model info model.gguf\n"
                      "  kvwitness model info model.gguf --json"},
                     [described](Session& session) { return info(*described, session); });
    info_flags.positional("FILE", described->file, "Model file (GGUF)")
        .section("engine")
        .flag("--rehash", described->model.rehash,
              "Compute the SHA-256 again instead of trusting the cache");
    add_model_flag(info_flags, described->model);

    const auto checked = std::make_shared<InfoFlags>();
    Flags check_flags = commands.add(
        {"model check", "model", "open and load a model file; exit 3 says what is wrong",
         "  kvwitness model check model.gguf"},
        [checked](Session& session) { return check_model(*checked, session); });
    check_flags.positional("FILE", checked->file, "Model file (GGUF)");
    add_model_flags(check_flags, checked->model);
}

}  // namespace kvw::cli
