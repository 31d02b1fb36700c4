// model tokenize: text to token ids, and what they spell.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "cli/answer_stream.h"
#include "cli/commands.h"
#include "cli/models.h"
#include "cli/places.h"
#include "src/base/text.h"

namespace kvw::cli {

namespace {

constexpr std::uint64_t kTextBytesMax = 64 << 20;

struct TokenizeFlags {
    std::string model;
    std::optional<std::string> text, file;
    bool no_special = false;
};

Result<std::string> read_text(const TokenizeFlags& flags) {
    if (flags.text && flags.file) {
        return Error{ErrorCode::usage, "one text at a time: the argument or -f"};
    }
    if (flags.text && *flags.text != "-") {
        return *flags.text;
    }
    if (flags.file) {
        return read_input(*flags.file, kTextBytesMax);
    }
    if (!flags.text && isatty(STDIN_FILENO) == 1) {
        return Error{ErrorCode::usage, "no text: give it as argument, with -f, or - for stdin"};
    }
    return read_stdin(kTextBytesMax);
}

Result<int> tokenize(const TokenizeFlags& flags, Session& session) {
    const Result<Gguf> gguf = Gguf::open(flags.model);
    if (!gguf) {
        return gguf.error();
    }
    const Result<Tokenizer> tokenizer = Tokenizer::create(*gguf);
    if (!tokenizer) {
        return tokenizer.error();
    }
    const Result<std::string> text = read_text(flags);
    if (!text) {
        return text.error();
    }
    const Result<std::vector<TokenId>> ids =
        tokenizer->encode(*text, flags.no_special ? SpecialTokens::as_text : SpecialTokens::parse);
    if (!ids) {
        return ids.error();
    }
    if (session.common.json) {
        Json object = session.object();
        object["ids"] = *ids;
        put_text(object, tokenizer->decode(*ids, true));
        session.out.object(object);
        return 0;
    }
    std::string lines;
    for (const TokenId id : *ids) {
        lines += fmt::format("{:>8}  {}\n", id, printable(tokenizer->bytes(id, true)));
    }
    session.out.write(lines);
    session.note(fmt::format("{} tokens", ids->size()));
    return 0;
}

}  // namespace

void add_model_tokenize(Commands& commands) {
    const auto flags = std::make_shared<TokenizeFlags>();
    commands
        .add({"model tokenize", "tokens", "text to token ids; adds no BOS",
              "  kvwitness model tokenize model.gguf \"Hello, world\"\n"
              "  kvwitness model tokenize model.gguf -f prompt.txt --json\n"
              "  cat prompt.txt | kvwitness model tokenize model.gguf -"},
             [flags](Session& session) { return tokenize(*flags, session); })
        .positional("FILE", flags->model, "Model file (GGUF)", true)
        .positional("TEXT", flags->text, "The text; - or nothing is stdin")
        .text("-f,--file", "FILE", flags->file, "Read the text from FILE; - is stdin", false)
        .flag("--no-special", flags->no_special, "Markers such as <|im_end|> stay text", false);
}

}  // namespace kvw::cli
