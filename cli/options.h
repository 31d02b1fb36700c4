// Flags of one command. CLI11 does the parsing; values are read strictly here, the same for a flag
// and for its KVW_* variable: a number is the whole text and in range, or the command ends with
// usage (2).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "src/base/result.h"

namespace CLI {
class App;
}

namespace kvw::cli {

// Fail: usage, naming what was wanted.
Result<std::uint64_t> whole_number(std::string_view text, std::uint64_t low, std::uint64_t high);
Result<double> real_number(std::string_view text, double low, double high);
Result<std::uint64_t> byte_size(std::string_view text);        // "5GiB", "300MB", "4096"
Result<std::int64_t> duration_seconds(std::string_view text);  // "14d", "36h", "90m", "30s"
Result<std::vector<std::uint64_t>> whole_numbers(std::string_view text, std::uint64_t low,
                                                 std::uint64_t high);  // "1,2,4"
// "a|b|c"
std::string joined(const std::vector<std::string>& words, std::string_view between);
// [a-z0-9._-]{1,64}
Status check_tenant_name(std::string_view name);

class Flags {
  public:
    explicit Flags(CLI::App& app) : app_(&app) {}

    // Flags that follow are listed under this title.
    Flags& group(std::string title);
    // "-n,--tokens": the long name also gives the variable, KVW_TOKENS, unless `variable` is off.
    Flags& flag(const std::string& names, bool& on, const std::string& help);
    Flags& text(const std::string& names, const std::string& kind, std::string& target,
                const std::string& help, bool variable = true);
    Flags& text(const std::string& names, const std::string& kind,
                std::optional<std::string>& target, const std::string& help, bool variable = true);
    Flags& texts(const std::string& names, const std::string& kind,
                 std::vector<std::string>& target, const std::string& help);
    Flags& choice(const std::string& names, std::string& target,
                  const std::vector<std::string>& choices, const std::string& help);

    // T: an unsigned integer or std::optional of one.
    template <class T>
    Flags& whole(const std::string& names, T& target, std::uint64_t low, std::uint64_t high,
                 const std::string& help) {
        std::string shown;
        if constexpr (std::is_integral_v<T>) {
            shown = std::to_string(target);
        }
        return value(names, "N", shown, help,
                     [&target, low, high](std::string_view text) -> Status {
                         const Result<std::uint64_t> number = whole_number(text, low, high);
                         if (!number) {
                             return number.error();
                         }
                         target = static_cast<typename Number<T>::type>(*number);
                         return {};
                     });
    }
    Flags& real(const std::string& names, float& target, double low, double high,
                const std::string& help);

    using Take = std::function<Status(std::string_view)>;
    Flags& value(const std::string& names, const std::string& kind,
                 const std::string& shown_default, const std::string& help, Take take,
                 bool variable = true);

    Flags& positional(const std::string& name, std::string& target, const std::string& help,
                      bool required);
    Flags& positional(const std::string& name, std::optional<std::string>& target,
                      const std::string& help);
    Flags& positionals(const std::string& name, std::vector<std::string>& target,
                       const std::string& help, bool required = true);

  private:
    template <class T>
    struct Number {
        using type = T;
    };
    template <class T>
    struct Number<std::optional<T>> {
        using type = T;
    };

    CLI::App* app_;
    std::string group_ = "Options";
};

}  // namespace kvw::cli
