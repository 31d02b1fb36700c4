// The chat prompt on a terminal: line editing and history by libedit.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "src/base/file.h"

namespace kvw::cli {

class PromptLine {
  public:
    // `history`: its file, 0600, read now and written after each line; none: nothing is kept.
    explicit PromptLine(const std::optional<Path>& history);
    ~PromptLine();
    PromptLine(const PromptLine&) = delete;
    PromptLine& operator=(const PromptLine&) = delete;

    // The next line without its newline; """ begins a text of several lines that ends with """.
    // None at the end of the input or when a signal came.
    std::optional<std::string> read();

  private:
    std::optional<std::string> read_one(const char* prompt);
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace kvw::cli
