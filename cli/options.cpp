#include "cli/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <span>
#include <utility>

namespace kvw::cli {

namespace {

Error usage(std::string message) { return {ErrorCode::usage, std::move(message)}; }

struct Unit {
    std::string_view name;
    std::uint64_t factor;
};

// A whole number and a unit behind it; the unit "" may be among them.
Result<std::uint64_t> with_unit(std::string_view text, std::span<const Unit> units,
                                const char* wanted) {
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const Result<std::uint64_t> number =
        whole_number(text.substr(0, digits), 0, std::numeric_limits<std::uint64_t>::max());
    const auto unit = std::find_if(units.begin(), units.end(),
                                   [&](const Unit& u) { return u.name == text.substr(digits); });
    std::uint64_t value = 0;
    if (!number || unit == units.end() || __builtin_mul_overflow(*number, unit->factor, &value)) {
        return usage(fmt::format("'{}' is not {}", text, wanted));
    }
    return value;
}

// "top-k" for "-k,--top-k".
std::string key_of(const std::string& names) { return names.substr(names.rfind("--") + 2); }

// "KVW_TOP_K" for "top-k".
std::string variable_of(std::string key) {
    std::transform(key.begin(), key.end(), key.begin(), [](char c) {
        return c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    });
    return "KVW_" + key;
}

// FILE and DIR are places, and no place has an empty name.
Status check_place(std::string_view kind, std::string_view text) {
    return text.empty() && (kind == "FILE" || kind == "DIR") ? Status(usage("the name is empty"))
                                                             : Status{};
}

// A positional that is not free text.
void check_not_empty(const std::string& name, const std::vector<std::string>& words) {
    if (std::count(words.begin(), words.end(), "") > 0) {
        throw CLI::ValidationError(name, "it is empty");
    }
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = std::exchange(row[0], i);
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = std::exchange(row[j], std::min({changed, row[j] + 1, row[j - 1] + 1}));
        }
    }
    return row.back();
}

}  // namespace

Result<std::uint64_t> whole_number(std::string_view text, std::uint64_t low, std::uint64_t high) {
    std::uint64_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size() || value < low || value > high) {
        return usage(
            high == std::numeric_limits<std::uint64_t>::max()
                ? fmt::format("'{}' is not a whole number of at least {}", text, low)
                : fmt::format("'{}' is not a whole number from {} to {}", text, low, high));
    }
    return value;
}

Result<double> real_number(std::string_view text, double low, double high) {
    double value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size() || !std::isfinite(value) ||
        value < low || value > high) {
        return usage(fmt::format("'{}' is not a number from {} to {}", text, low, high));
    }
    return value;
}

Result<std::uint64_t> byte_size(std::string_view text) {
    static constexpr Unit kUnits[] = {{"", 1},
                                      {"B", 1},
                                      {"KiB", 1ull << 10},
                                      {"MiB", 1ull << 20},
                                      {"GiB", 1ull << 30},
                                      {"TiB", 1ull << 40},
                                      {"KB", 1000},
                                      {"MB", 1000000},
                                      {"GB", 1000000000},
                                      {"TB", 1000000000000}};
    return with_unit(text, kUnits, "a size such as 5GiB or 300MB");
}

Result<std::int64_t> duration_seconds(std::string_view text) {
    static constexpr Unit kUnits[] = {
        {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}, {"w", 604800}};
    const Result<std::uint64_t> seconds =
        with_unit(text, kUnits, "a duration such as 14d, 36h or 30m");
    if (!seconds) {
        return seconds.error();
    }
    return static_cast<std::int64_t>(std::min<std::uint64_t>(*seconds, 1ull << 33));  // 270 years
}

Result<std::int64_t> duration_ms(std::string_view text) {
    static constexpr Unit kUnits[] = {{"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}};
    const Result<std::uint64_t> ms = with_unit(text, kUnits, "a duration such as 500ms, 30s or 5m");
    if (!ms) {
        return ms.error();
    }
    return static_cast<std::int64_t>(std::min<std::uint64_t>(*ms, 1ull << 40));  // 34 years
}

Result<double> percentage(std::string_view text) {
    const Result<double> number = text.ends_with('%')
                                      ? real_number(text.substr(0, text.size() - 1), 0, 100)
                                      : Result<double>(usage(""));
    return number ? number
                  : Result<double>(usage(fmt::format("'{}' is not a share from 0% to 100%", text)));
}

Result<bool> yes_or_no(std::string_view text) {
    if (text == "true" || text == "1") {
        return true;
    }
    if (text == "false" || text == "0") {
        return false;
    }
    return usage(fmt::format("'{}' is neither true nor false", text));
}

Result<std::vector<std::uint64_t>> whole_numbers(std::string_view text, std::uint64_t low,
                                                 std::uint64_t high) {
    std::vector<std::uint64_t> values;
    while (true) {
        const std::size_t comma = std::min(text.find(','), text.size());
        const Result<std::uint64_t> value = whole_number(text.substr(0, comma), low, high);
        if (!value) {
            return value.error();
        }
        values.push_back(*value);
        if (comma == text.size()) {
            return values;
        }
        text.remove_prefix(comma + 1);
    }
}

std::string joined(const std::vector<std::string>& words, std::string_view between) {
    std::string out;
    for (const std::string& word : words) {
        out.append(out.empty() ? "" : between).append(word);
    }
    return out;
}

Status check_tenant_name(std::string_view name) {
    const auto allowed = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    };
    if (name.empty() || name.size() > 64 || !std::all_of(name.begin(), name.end(), allowed)) {
        return usage(fmt::format("'{}' is not a tenant: 1 to 64 of a-z 0-9 . _ -", name));
    }
    return {};
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
    const std::string* nearest = nullptr;
    std::size_t best = 3;
    for (const std::string& candidate : candidates) {
        const std::size_t distance =
            word.size() > candidate.size() + best ? best : edit_distance(word, candidate);
        if (distance < best && 2 * distance < candidate.size()) {
            best = distance;
            nearest = &candidate;
        }
    }
    return nearest != nullptr ? fmt::format(" Did you mean '{}'?", *nearest) : "";
}

Flags& Flags::group(std::string title) {
    group_ = std::move(title);
    section_.clear();
    return *this;
}

Flags& Flags::section(std::string name) {
    section_ = std::move(name);
    return *this;
}

Flags& Flags::alternative_to(std::vector<std::string> keys) {
    last_->alternatives = std::move(keys);
    return *this;
}

Flags& Flags::per_tenant(
    std::function<Status(const std::string& tenant, std::string_view text)> take_for_tenant) {
    last_->take_for_tenant = std::move(take_for_tenant);
    return *this;
}

Setting& Flags::declare(const std::string& names, const std::string& shown_default, ValueType type,
                        bool variable, TakeAll take) {
    const std::string key = key_of(names);
    settings_->push_back({.app = app_,
                          .names = names,
                          .key = key,
                          .section = section_,
                          .variable = variable ? variable_of(key) : "",
                          .shown_default = shown_default,
                          .type = type,
                          .take = std::move(take)});
    last_ = &settings_->back();
    return *last_;
}

Flags& Flags::flag(const std::string& names, bool& on, const std::string& help, bool variable) {
    const auto take = [&on](const std::vector<std::string>& given) -> Status {
        const Result<bool> read = yes_or_no(given.back());
        if (!read) {
            return read.error();
        }
        on = *read;
        return {};
    };
    CLI::Option* option = app_->add_flag(names, on, help)->group(group_);
    if (variable) {
        option->check([](const std::string& text) {
            const Result<bool> read = yes_or_no(text);
            return read ? std::string() : read.error().message;
        });
    } else {
        option->disable_flag_override();
    }
    declare(names, on ? "true" : "false", ValueType::yes_no, variable, take).option = option;
    return resets(on);
}

Flags& Flags::value(const std::string& names, const std::string& kind,
                    const std::string& shown_default, const std::string& help, Take take,
                    bool variable, ValueType type) {
    const auto read = [names, take](const CLI::results_t& results) {
        const Status taken = take(results.back());
        if (!taken) {
            throw CLI::ValidationError(names, taken.error().message);
        }
        return true;
    };
    CLI::Option* option = app_->add_option(names, read, help);
    option->group(group_)->type_name(kind)->default_str(shown_default);
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    declare(names, shown_default, type, variable, [take](const std::vector<std::string>& given) {
        return take(given.back());
    }).option = option;
    return *this;
}

Flags& Flags::text(const std::string& names, const std::string& kind, std::string& target,
                   const std::string& help, bool variable) {
    const auto take = [&target, kind](std::string_view text) -> Status {
        if (const Status place = check_place(kind, text); !place) {
            return place;
        }
        target = text;
        return {};
    };
    return value(names, kind, target, help, take, variable).resets(target);
}

Flags& Flags::text(const std::string& names, const std::string& kind,
                   std::optional<std::string>& target, const std::string& help, bool variable) {
    const auto take = [&target, kind](std::string_view text) -> Status {
        if (const Status place = check_place(kind, text); !place) {
            return place;
        }
        target = text;
        return {};
    };
    return value(names, kind, "", help, take, variable).resets(target);
}

Flags& Flags::texts(const std::string& names, const std::string& kind,
                    std::vector<std::string>& target, const std::string& help) {
    const auto take = [&target](const std::vector<std::string>& given) -> Status {
        target = given;
        return {};
    };
    CLI::Option* option = app_->add_option(
        names, [take](const CLI::results_t& results) { return take(results).has_value(); }, help);
    option->group(group_)->type_name(kind)->expected(1, 1);
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    declare(names, "", ValueType::texts, true, take).option = option;
    return resets(target);
}

Flags& Flags::choice(const std::string& names, std::string& target,
                     const std::vector<std::string>& choices, const std::string& help) {
    const std::string listed = joined(choices, "|");
    const auto take = [&target, choices, listed](std::string_view text) -> Status {
        if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
            return usage(fmt::format("'{}' is not one of {}", text, listed));
        }
        target = text;
        return {};
    };
    return value(names, listed, target, help, take).resets(target);
}

Flags& Flags::real(const std::string& names, float& target, double low, double high,
                   const std::string& help) {
    const auto take = [&target, low, high](std::string_view text) -> Status {
        const Result<double> number = real_number(text, low, high);
        if (!number) {
            return number.error();
        }
        target = static_cast<float>(*number);
        return {};
    };
    return value(names, "X", fmt::format("{}", target), help, take, true, ValueType::real)
        .resets(target);
}

Flags& Flags::positional(const std::string& name, std::string& target, const std::string& help,
                         bool required) {
    app_->add_option(
            name,
            [&target, name](const CLI::results_t& results) {
                check_not_empty(name, results);
                target = results.back();
                return true;
            },
            help)
        ->required(required);
    return *this;
}

Flags& Flags::positional(const std::string& name, std::optional<std::string>& target,
                         const std::string& help) {
    app_->add_option(
        name,
        [&target, name](const CLI::results_t& results) {
            if (name == "FILE") {
                check_not_empty(name, results);
            }
            target = results.back();
            return true;
        },
        help);
    return *this;
}

Flags& Flags::positionals(const std::string& name, std::vector<std::string>& target,
                          const std::string& help, bool required) {
    app_->add_option(
            name,
            [&target, name](const CLI::results_t& results) {
                check_not_empty(name, results);
                target = results;
                return true;
            },
            help)
        ->required(required)
        ->expected(1, CLI::detail::expected_max_vector_size)
        ->allow_extra_args();
    return *this;
}

}  // namespace kvw::cli
