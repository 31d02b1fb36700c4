#include "cli/prompt_line.h"

#include <histedit.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cwchar>

#include "cli/signals.h"

namespace kvw::cli {

struct PromptLine::State {
    EditLine* line = nullptr;
    History* history = nullptr;
    std::optional<Path> file;
    const char* prompt = "";
};

namespace {

constexpr int kHistoryLines = 1000;

// One character from the terminal. libedit's own reader goes on after a signal; a prompt has to
// end.
int read_character(EditLine*, wchar_t* character) {
    std::mbstate_t state{};
    while (true) {
        char byte = 0;
        const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
        if (n < 0 && errno == EINTR && stop_signal() == 0) {
            continue;
        }
        if (n <= 0) {
            return n == 0 ? 0 : -1;
        }
        const std::size_t used = std::mbrtowc(character, &byte, 1, &state);
        if (used == static_cast<std::size_t>(-1)) {
            state = {};
            continue;  // a byte that begins no character is not text
        }
        if (used != static_cast<std::size_t>(-2)) {
            return 1;
        }
    }
}

char* prompt_of(EditLine* line) {
    void* data = nullptr;
    el_get(line, EL_CLIENTDATA, &data);
    return *static_cast<char**>(data);
}

std::string without_newline(std::string text) {
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) {
        text.pop_back();
    }
    return text;
}

}  // namespace

PromptLine::PromptLine(const std::optional<Path>& history) : state_(std::make_unique<State>()) {
    std::setlocale(LC_CTYPE, "");
    state_->line = el_init("kvwitness", stdin, stderr, stderr);
    state_->history = history_init();
    el_set(state_->line, EL_CLIENTDATA, &state_->prompt);
    el_set(state_->line, EL_PROMPT, prompt_of);
    el_set(state_->line, EL_EDITOR, "emacs");
    el_set(state_->line, EL_GETCFN, read_character);
    el_set(state_->line, EL_HIST, ::history, state_->history);
    HistEvent event{};
    ::history(state_->history, &event, H_SETSIZE, kHistoryLines);
    ::history(state_->history, &event, H_SETUNIQUE, 1);
    if (history && make_folders(history->parent_path())) {
        state_->file = history;
        ::history(state_->history, &event, H_LOAD, history->c_str());
    }
}

PromptLine::~PromptLine() {
    el_end(state_->line);
    history_end(state_->history);
}

std::optional<std::string> PromptLine::read() {
    constexpr std::string_view kQuotes = "\"\"\"";
    std::optional<std::string> text = read_one(">>> ");
    if (!text || !text->starts_with(kQuotes)) {
        return text;
    }
    text->erase(0, kQuotes.size());
    while (!text->ends_with(kQuotes)) {
        const std::optional<std::string> more = read_one("... ");
        if (!more) {
            return std::nullopt;
        }
        *text += "\n" + *more;
    }
    text->resize(text->size() - kQuotes.size());
    return text;
}

std::optional<std::string> PromptLine::read_one(const char* prompt) {
    state_->prompt = prompt;
    int count = 0;
    const char* line = el_gets(state_->line, &count);
    if (line == nullptr || count <= 0 || stop_signal() != 0) {
        return std::nullopt;
    }
    std::string text = without_newline(line);
    if (!text.empty()) {
        HistEvent event{};
        ::history(state_->history, &event, H_ENTER, text.c_str());
        if (state_->file) {
            const mode_t before = umask(077);
            ::history(state_->history, &event, H_SAVE, state_->file->c_str());
            umask(before);
        }
    }
    return text;
}

}  // namespace kvw::cli
