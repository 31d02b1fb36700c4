#include "cli/config.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>

namespace kvw::cli {

namespace {

ConfigPlace place_of(const toml::source_position& position) {
    return {std::max(position.line, 1u), std::max(position.column, 1u)};
}

const char* name_of(toml::node_type type) {
    switch (type) {
        case toml::node_type::string:
            return "text";
        case toml::node_type::integer:
            return "a whole number";
        case toml::node_type::floating_point:
            return "a decimal number";
        case toml::node_type::boolean:
            return "true or false";
        case toml::node_type::array:
            return "a list";
        case toml::node_type::table:
            return "a table";
        default:
            return "a date or time";
    }
}

ConfigEntry entry_of(const std::string& section, const std::string& tenant, const toml::key& key,
                     const toml::node& node) {
    ConfigEntry entry{section,
                      tenant,
                      std::string(key.str()),
                      ConfigKind::other,
                      {},
                      name_of(node.type()),
                      place_of(key.source().begin),
                      place_of(node.source().begin)};
    if (const auto* text = node.as_string()) {
        entry.kind = ConfigKind::text;
        entry.values = {text->get()};
    } else if (const auto* whole = node.as_integer()) {
        entry.kind = ConfigKind::whole;
        entry.values = {fmt::format("{}", whole->get())};
    } else if (const auto* real = node.as_floating_point()) {
        entry.kind = ConfigKind::real;
        entry.values = {fmt::format("{}", real->get())};
    } else if (const auto* on = node.as_boolean()) {
        entry.kind = ConfigKind::yes_no;
        entry.values = {on->get() ? "true" : "false"};
    } else if (const auto* list = node.as_array()) {
        entry.kind = ConfigKind::texts;
        for (const toml::node& element : *list) {
            if (const auto* text = element.as_string()) {
                entry.values.push_back(text->get());
            } else {
                entry.kind = ConfigKind::other;
                entry.shown = fmt::format("a list with {} in it", name_of(element.type()));
                entry.values.clear();
                break;
            }
        }
    }
    return entry;
}

void flatten_tenants(const toml::table& tenants, ConfigText& into) {
    for (const auto& [name, node] : tenants) {
        const toml::table* table = node.as_table();
        if (table == nullptr) {
            into.entries.push_back(entry_of("tenants", "", name, node));
            continue;
        }
        const std::string tenant(name.str());
        into.sections.push_back({"tenants", tenant, place_of(name.source().begin)});
        for (const auto& [key, value] : *table) {
            into.entries.push_back(entry_of("tenants", tenant, key, value));
        }
    }
}

void flatten(const toml::table& root, ConfigText& into) {
    for (const auto& [name, node] : root) {
        const toml::table* table = node.as_table();
        const std::string section(name.str());
        if (table == nullptr) {
            into.entries.push_back(entry_of("", "", name, node));
        } else if (section == "tenants") {
            flatten_tenants(*table, into);
        } else {
            into.sections.push_back({section, "", place_of(name.source().begin)});
            for (const auto& [key, value] : *table) {
                into.entries.push_back(entry_of(section, "", key, value));
            }
        }
    }
    // The table is ordered by name.
    std::stable_sort(into.sections.begin(), into.sections.end(),
                     [](const auto& a, const auto& b) { return a.at < b.at; });
    std::stable_sort(into.entries.begin(), into.entries.end(),
                     [](const auto& a, const auto& b) { return a.key_at < b.key_at; });
}

}  // namespace

ConfigText read_config(std::string_view bytes) {
    ConfigText text;
    text.problems = scan_config(bytes);
    if (!text.problems.empty()) {
        return text;
    }
    if (bytes.starts_with(kUtf8Bom)) {
        bytes.remove_prefix(kUtf8Bom.size());
    }
    try {
        flatten(toml::parse(bytes), text);
    } catch (const toml::parse_error& problem) {
        text = {};
        text.problems.push_back(
            {place_of(problem.source().begin), std::string(problem.description())});
    }
    return text;
}

}  // namespace kvw::cli
