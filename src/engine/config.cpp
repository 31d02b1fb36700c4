#include <limits>
#include <nlohmann/json.hpp>

#include "src/engine/engine.h"

namespace kvw {

namespace {

using Json = nlohmann::json;

Error malformed(std::string_view what) {
    return Error{ErrorCode::bad_trace, "the engine configuration " + std::string(what)};
}

// Every setting once: visited to write it and to read it.
template <class Config, class Visit>
void visit_settings(Config& config, Visit&& visit) {
    visit("batch_rows", config.batch_rows);
    visit("context", config.context);
    visit("cotenancy", config.cotenancy);
    visit("pool_rows", config.pool_rows);
    visit("prefill_rows", config.prefill_rows);
    visit("queue_max", config.queue_max);
    visit("quota_rows", config.quota_rows);
    visit("scope", config.scope);
    visit("scrub_pages", config.scrub_pages);
    visit("sequences_max", config.sequences_max);
    visit("split", config.split);
    visit("stop_on_violation", config.stop_on_violation);
    visit("tenant_quota_rows", config.tenant_quota_rows);
    visit("transfer_pages", config.transfer_pages);
}

struct Write {
    Json& json;
    template <class T>
    void operator()(const char* name, const T& value) {
        json[name] = value;
    }
    void operator()(const char* name, const CacheScope& value) { json[name] = name_of(value); }
};

struct Read {
    const Json& json;
    Status status{};

    template <class T>
    void operator()(const char* name, T& value) {
        const auto found = json.find(name);
        if (found == json.end() || !take(*found, value)) {
            status = malformed(std::string("has no usable \"") + name + "\"");
        }
    }
    static bool take(const Json& from, bool& value) {
        value = from.is_boolean() && from.get<bool>();
        return from.is_boolean();
    }
    template <class T>
    static bool take(const Json& from, T& value) {
        if (!from.is_number_unsigned() ||
            from.get<std::uint64_t>() > std::numeric_limits<T>::max()) {
            return false;
        }
        value = from.get<T>();
        return true;
    }
    static bool take(const Json& from, CacheScope& value) {
        for (const CacheScope scope :
             {CacheScope::request, CacheScope::session, CacheScope::tenant}) {
            if (from == name_of(scope)) {
                value = scope;
                return true;
            }
        }
        return false;
    }
    static bool take(const Json& from, std::map<std::string, std::uint64_t>& value) {
        if (!from.is_object()) {
            return false;
        }
        for (const auto& [name, rows] : from.items()) {
            if (!take(rows, value[name])) {
                return false;
            }
        }
        return true;
    }
};

}  // namespace

std::string to_json(const EngineConfig& config) {
    Json json = Json::object();
    visit_settings(config, Write{json});
    return json.dump();
}

Result<EngineConfig> engine_config_from_json(std::string_view text) {
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object()) {
        return malformed("is not a JSON object");
    }
    EngineConfig config;
    Read read{json};
    visit_settings(config, read);
    if (!read.status) {
        return read.status.error();
    }
    if (to_json(config) != text) {
        return malformed("holds something that this version does not know");
    }
    return config;
}

}  // namespace kvw
