#include <limits>
#include <nlohmann/json.hpp>

#include "src/engine/engine.h"

namespace kvw {

namespace {

using Json = nlohmann::json;

Error malformed(std::string_view what) {
    return Error{ErrorCode::bad_trace, "the engine configuration " + std::string(what)};
}

template <class T>
Status read_number(const Json& json, const char* name, T& into) {
    const auto found = json.find(name);
    if (found == json.end() || !found->is_number_unsigned() ||
        found->get<std::uint64_t>() > std::numeric_limits<T>::max()) {
        return malformed(std::string("has no usable number \"") + name + "\"");
    }
    into = found->get<T>();
    return {};
}

}  // namespace

std::string to_json(const EngineConfig& config) {
    return Json{
        {"batch_rows", config.batch_rows},       {"context", config.context},
        {"pool_rows", config.pool_rows},         {"scrub_pages", config.scrub_pages},
        {"sequences_max", config.sequences_max}, {"stop_on_violation", config.stop_on_violation}}
        .dump();
}

Result<EngineConfig> engine_config_from_json(std::string_view text) {
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object()) {
        return malformed("is not a JSON object");
    }
    EngineConfig config;
    const Status numbers[] = {
        read_number(json, "batch_rows", config.batch_rows),
        read_number(json, "context", config.context),
        read_number(json, "pool_rows", config.pool_rows),
        read_number(json, "scrub_pages", config.scrub_pages),
        read_number(json, "sequences_max", config.sequences_max),
    };
    for (const Status& status : numbers) {
        if (!status) {
            return status.error();
        }
    }
    const auto stop = json.find("stop_on_violation");
    if (stop == json.end() || !stop->is_boolean()) {
        return malformed("does not say \"stop_on_violation\"");
    }
    config.stop_on_violation = stop->get<bool>();
    if (to_json(config) != text) {
        return malformed("holds something that this version does not know");
    }
    return config;
}

}  // namespace kvw
