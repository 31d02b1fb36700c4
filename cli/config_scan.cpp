#include "cli/config_scan.h"

#include <fmt/format.h>

#include "src/base/text.h"

namespace kvw::cli {

namespace {

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }
bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

ConfigPlace place_of(std::string_view bytes, std::size_t offset) {
    ConfigPlace place;
    for (const char c : bytes.substr(0, offset)) {
        if (c == '\n') {
            ++place.line;
            place.column = 1;
        } else {
            place.column += continues_character(c) ? 0 : 1;
        }
    }
    return place;
}

// One pass over text that is UTF-8. It knows of TOML where strings and comments begin and end, and
// for that whether a key or a value may begin: a quote elsewhere is refused, because the TOML
// reader would not take it for a string, and would stumble over what is in it.
class Scan {
  public:
    explicit Scan(std::string_view bytes) : bytes_(bytes) {}

    std::vector<ConfigProblem> problems() {
        while (at_ < bytes_.size() && !gave_up_ && problems_.size() < kConfigProblemsMax) {
            const char c = bytes_[at_];
            if (c == '\n') {
                end_line();
            } else {
                control_character(c);
                inside_ == Inside::nothing ? bare(c) : quoted_or_comment(c);
                place_.column += continues_character(c) ? 0 : 1;
            }
            ++at_;
        }
        end_line();
        return std::move(problems_);
    }

  private:
    enum class Inside { nothing, comment, basic_string, literal_string };

    void report(ConfigPlace at, std::string message) {
        if (problems_.size() < kConfigProblemsMax) {
            problems_.push_back({at, std::move(message)});
        }
    }

    char next() const { return at_ + 1 < bytes_.size() ? bytes_[at_ + 1] : '\0'; }

    void control_character(char c) {
        const bool ends_line = c == '\r' && next() == '\n';
        if ((static_cast<unsigned char>(c) < 0x20 && c != '\t' && !ends_line) || c == 0x7f) {
            report(place_, fmt::format("a control character (0x{:02x})", c));
        }
    }

    void end_line() {
        if (inside_ == Inside::basic_string || inside_ == Inside::literal_string) {
            report(string_began_, "the string that begins here does not end on its line");
        }
        inside_ = Inside::nothing;
        if (open_.empty()) {
            in_value_ = false;
            may_begin_ = true;
        }
        dots_ = 0;
        strange_line_ = false;
        escaped_ = false;
        ++place_.line;
        place_.column = 1;
    }

    void quoted_or_comment(char c) {
        if (escaped_) {
            escaped_ = false;
        } else if (inside_ == Inside::basic_string && c == '\\') {
            escaped_ = true;
        } else if ((inside_ == Inside::basic_string && c == '"') ||
                   (inside_ == Inside::literal_string && c == '\'')) {
            inside_ = Inside::nothing;
        }
    }

    void bare(char c) {
        switch (c) {
            case ' ':
            case '\t':
            case '\r':
                return;
            case '#':
                inside_ = Inside::comment;
                return;
            case '"':
            case '\'':
                begin_string(c);
                break;
            case '[':
            case '{':
                open(c);
                return;
            case ']':
            case '}':
                close();
                break;
            case '=':
                dots_ = 0;
                may_begin_ = !in_value_;
                in_value_ = true;
                return;
            case ',':
                dots_ = 0;
                may_begin_ = !open_.empty();
                in_value_ = open_.ends_with('[');
                return;
            case '.':
                if (++dots_ == kConfigDotsMax + 1) {
                    report(place_, fmt::format("more than {} dots in one key", kConfigDotsMax));
                }
                may_begin_ = !in_value_;
                return;
            default:
                if (!is_ascii(c) && !strange_line_) {
                    strange_line_ = true;  // once a line
                    report(place_,
                           "a character beyond ASCII outside a quoted string and a comment");
                }
        }
        may_begin_ = false;
    }

    // A list, an inline table or, where a key may begin, the name of a section.
    void open(char bracket) {
        if (open_.size() == kConfigNestingMax) {
            report(place_, fmt::format("more than {} brackets open at once", kConfigNestingMax));
            gave_up_ = true;
            return;
        }
        const bool section = bracket == '[' && !in_value_;
        open_ += section ? '(' : bracket;
        in_value_ = bracket == '[' && !section;
        dots_ = 0;
    }

    void close() {
        if (!open_.empty()) {
            in_value_ = !open_.ends_with('(');
            open_.pop_back();
        }
        dots_ = 0;
    }

    void begin_string(char quote) {
        if (bytes_.substr(at_, 3) == std::string(3, quote)) {
            report(place_,
                   "a string of several lines; write it on one line, in single quotes or with \\n");
            gave_up_ = true;  // no telling what is string behind it
            return;
        }
        if (!may_begin_) {
            report(place_, "a quote in the middle of a word");
        }
        inside_ = quote == '"' ? Inside::basic_string : Inside::literal_string;
        string_began_ = place_;
    }

    std::string_view bytes_;
    std::size_t at_ = 0;
    ConfigPlace place_, string_began_;
    Inside inside_ = Inside::nothing;
    std::string open_;       // the brackets around this place; ( is the [ of a section
    bool in_value_ = false;  // else in a key
    bool may_begin_ = true;  // a key, a part of one, or a value
    bool escaped_ = false, strange_line_ = false, gave_up_ = false;
    std::size_t dots_ = 0;
    std::vector<ConfigProblem> problems_;
};

}  // namespace

std::vector<ConfigProblem> scan_config(std::string_view bytes) {
    if (bytes.size() > kConfigBytesMax) {
        return {{{}, fmt::format("more than {} bytes in a configuration file", kConfigBytesMax)}};
    }
    if (bytes.starts_with(kUtf8Bom)) {
        bytes.remove_prefix(kUtf8Bom.size());
    }
    if (const std::optional<std::size_t> bad = first_invalid_utf8(bytes)) {
        return {{place_of(bytes, *bad), "not UTF-8: no character begins with this byte"}};
    }
    return Scan(bytes).problems();
}

}  // namespace kvw::cli
