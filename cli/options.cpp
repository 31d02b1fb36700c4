#include "cli/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <span>

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

// "KVW_TOP_K" for "-k,--top-k".
std::string variable_of(const std::string& names) {
    std::string name = names.substr(names.rfind("--") + 2);
    std::transform(name.begin(), name.end(), name.begin(), [](char c) {
        return c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    });
    return "KVW_" + name;
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

Flags& Flags::group(std::string title) {
    group_ = std::move(title);
    return *this;
}

Flags& Flags::flag(const std::string& names, bool& on, const std::string& help) {
    app_->add_flag(names, on, help)->group(group_)->disable_flag_override();
    return *this;
}

Flags& Flags::value(const std::string& names, const std::string& kind,
                    const std::string& shown_default, const std::string& help, Take take,
                    bool variable) {
    const std::string name = variable ? variable_of(names) : "";
    const auto read = [names, name, take](const CLI::results_t& results) {
        const Status taken = take(results.back());
        if (!taken) {
            const char* set = name.empty() ? nullptr : std::getenv(name.c_str());
            const bool from_variable = set != nullptr && results.back() == set;
            throw CLI::ValidationError(names + (from_variable ? " (" + name + ")" : ""),
                                       taken.error().message);
        }
        return true;
    };
    CLI::Option* option = app_->add_option(names, read, help);
    option->group(group_)->type_name(kind)->default_str(shown_default);
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    if (variable) {
        option->envname(name);
    }
    return *this;
}

Flags& Flags::text(const std::string& names, const std::string& kind, std::string& target,
                   const std::string& help, bool variable) {
    const auto take = [&target](std::string_view text) -> Status {
        target = text;
        return {};
    };
    return value(names, kind, target, help, take, variable);
}

Flags& Flags::text(const std::string& names, const std::string& kind,
                   std::optional<std::string>& target, const std::string& help, bool variable) {
    const auto take = [&target](std::string_view text) -> Status {
        target = text;
        return {};
    };
    return value(names, kind, "", help, take, variable);
}

Flags& Flags::texts(const std::string& names, const std::string& kind,
                    std::vector<std::string>& target, const std::string& help) {
    app_->add_option(
            names,
            [&target](const CLI::results_t& results) {
                target = results;
                return true;
            },
            help)
        ->group(group_)
        ->type_name(kind)
        ->expected(1, 1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    return *this;
}

Flags& Flags::choice(const std::string& names, std::string& target,
                     const std::vector<std::string>& choices, const std::string& help) {
    const std::string listed = joined(choices, "|");
    return value(names, listed, target, help,
                 [&target, choices, listed](std::string_view text) -> Status {
                     if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
                         return usage(fmt::format("'{}' is not one of {}", text, listed));
                     }
                     target = text;
                     return {};
                 });
}

Flags& Flags::real(const std::string& names, float& target, double low, double high,
                   const std::string& help) {
    return value(names, "X", fmt::format("{}", target), help,
                 [&target, low, high](std::string_view text) -> Status {
                     const Result<double> number = real_number(text, low, high);
                     if (!number) {
                         return number.error();
                     }
                     target = static_cast<float>(*number);
                     return {};
                 });
}

Flags& Flags::positional(const std::string& name, std::string& target, const std::string& help,
                         bool required) {
    app_->add_option(
            name,
            [&target](const CLI::results_t& results) {
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
        [&target](const CLI::results_t& results) {
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
            [&target](const CLI::results_t& results) {
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
