// Flags of one command. CLI11 does the parsing; values are read strictly here, the same for a flag,
// for its KVW_* variable and for its key in the configuration file: a number is the whole text and
// in range, or the command ends with usage (2).
//
// Each flag is declared once: the declaration says its variable and its section of the file, and is
// what help, completion, `config show` and `config check` know of it (Setting).
#pragma once

#include <cstdint>
#include <deque>
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
class Option;
}  // namespace CLI

namespace kvw::cli {

// Fail: usage, naming what was wanted.
Result<std::uint64_t> whole_number(std::string_view text, std::uint64_t low, std::uint64_t high);
Result<double> real_number(std::string_view text, double low, double high);
Result<std::uint64_t> byte_size(std::string_view text);        // "5GiB", "300MB", "4096"
Result<std::int64_t> duration_seconds(std::string_view text);  // "14d", "36h", "90m", "30s"
Result<std::int64_t> duration_ms(std::string_view text);       // "500ms", "30s", "5m", "1h"
Result<double> percentage(std::string_view text);              // "1%", "0.5%": 0 to 100
Result<bool> yes_or_no(std::string_view text);                 // "true", "false", "1", "0"
Result<std::vector<std::uint64_t>> whole_numbers(std::string_view text, std::uint64_t low,
                                                 std::uint64_t high);  // "1,2,4"
// "a|b|c"
std::string joined(const std::vector<std::string>& words, std::string_view between);
// [a-z0-9._-]{1,64}
Status check_tenant_name(std::string_view name);
// " Did you mean 'run'?", or nothing when nothing is near.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

// What a value in the configuration file has to be.
enum class ValueType : std::uint8_t { text, whole, real, yes_no, texts, whole_or_text };

// One flag of one command, as declared.
struct Setting {
    const CLI::App* app = nullptr;
    const CLI::Option* option = nullptr;
    std::string names;          // "-n,--tokens"
    std::string key;            // "tokens"
    std::string section;        // "generation"; "" = not in the configuration file
    std::string variable;       // "KVW_TOKENS"; "" = none
    std::string shown_default;  // "" = not set
    ValueType type = ValueType::text;
    // Reads what was given (the last one counts, but for texts) into the target. Fails: usage.
    std::function<Status(const std::vector<std::string>&)> take;
    std::function<void()> reset;  // the target as it was declared
    // Keys of flags of this command that say something else about the same thing: the one from the
    // stronger source counts. Both from the same source is the command's to refuse.
    std::vector<std::string> alternatives;
    // Set when the key may also stand in [tenants.NAME].
    std::function<Status(const std::string& tenant, std::string_view text)> take_for_tenant;
};
using Settings = std::deque<Setting>;  // a setting keeps its place

class Flags {
  public:
    Flags(CLI::App& app, Settings& settings) : app_(&app), settings_(&settings) {}

    // Flags that follow are listed under this title, and are in no section.
    Flags& group(std::string title);
    // Flags that follow are keys of this section of the configuration file; "" = of none.
    Flags& section(std::string name);
    // The flag declared last: see Setting.
    Flags& alternative_to(std::vector<std::string> keys);
    Flags& per_tenant(
        std::function<Status(const std::string& tenant, std::string_view text)> take_for_tenant);

    // "-n,--tokens": the long name also gives the variable, KVW_TOKENS, unless `variable` is off.
    // --flag=false takes back what a variable or the file switched on. A FILE or DIR is not empty.
    Flags& flag(const std::string& names, bool& on, const std::string& help, bool variable = true);
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
        const auto take = [&target, low, high](std::string_view text) -> Status {
            const Result<std::uint64_t> number = whole_number(text, low, high);
            if (!number) {
                return number.error();
            }
            target = static_cast<typename Number<T>::type>(*number);
            return {};
        };
        return value(names, "N", shown, help, take, true, ValueType::whole).resets(target);
    }
    Flags& real(const std::string& names, float& target, double low, double high,
                const std::string& help);

    using Take = std::function<Status(std::string_view)>;
    Flags& value(const std::string& names, const std::string& kind,
                 const std::string& shown_default, const std::string& help, Take take,
                 bool variable = true, ValueType type = ValueType::text);

    // Only optional text may be empty.
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

    using TakeAll = std::function<Status(const std::vector<std::string>&)>;
    Setting& declare(const std::string& names, const std::string& shown_default, ValueType type,
                     bool variable, TakeAll take);
    template <class T>
    Flags& resets(T& target) {
        last_->reset = [&target, initial = target] { target = initial; };
        return *this;
    }

    CLI::App* app_;
    Settings* settings_;
    Setting* last_ = nullptr;
    std::string group_ = "Options";
    std::string section_;
};

}  // namespace kvw::cli
