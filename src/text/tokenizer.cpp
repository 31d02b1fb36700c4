#include "src/text/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <utility>

#include "src/base/check.h"
#include "src/base/text.h"
#include "src/text/byte_level.h"
#include "src/text/pre_tokenizer.h"
#include "src/text/vocabulary.h"

namespace kvw {

namespace {

constexpr std::string_view kTokens = "tokenizer.ggml.tokens";
constexpr std::string_view kTypes = "tokenizer.ggml.token_type";
constexpr std::string_view kMerges = "tokenizer.ggml.merges";
constexpr std::size_t kTextBytesMax = std::size_t{1} << 30;

// What a token is for; the file's token types, folded.
enum class Kind : std::uint8_t {
    text,          // 1 normal, 6 byte
    control,       // 3 control, 2 unknown: never text unless asked for
    user_defined,  // 4: text that is one token wherever it stands
    unused,        // 5: not matched and not shown
};

std::optional<Kind> kind_of(std::int32_t type) {
    switch (type) {
        case 1:
        case 6:
            return Kind::text;
        case 2:
        case 3:
            return Kind::control;
        case 4:
            return Kind::user_defined;
        case 5:
            return Kind::unused;
        default:
            return std::nullopt;
    }
}

// Marks of chat templates. Some files call them user-defined, which would let a user's text end its
// own turn: here they are control tokens whenever the file sets them apart from text at all.
constexpr std::string_view kTurnBegin[] = {"<|im_start|>", "<|start_header_id|>",
                                           "<|end_header_id|>", "<|begin_of_text|>"};
constexpr std::string_view kTurnEnd[] = {"<|im_end|>", "<|endoftext|>",   "<|eot_id|>",
                                         "<|eom_id|>", "<|end_of_text|>", "<|end|>",
                                         "</s>",       "<|end_of_turn|>", "<|endofturn|>"};

}  // namespace

struct Tokenizer::State {
    std::string file;  // as messages name it
    PreTokenizer pre = PreTokenizer::gpt2;
    std::string_view pre_name;
    std::vector<std::string> own_spellings;  // of_bytes(): what `spellings` looks at
    std::vector<std::string_view> spellings;
    std::vector<Kind> kinds;
    SpellingTable ids;
    MergeTable merges;
    std::array<TokenId, 256> byte_ids{};
    std::size_t spelling_bytes_max = 0;
    bool whole_words_first = false;  // a word that is in the vocabulary is taken as it is
    bool any_bytes = false;          // text is a row of bytes, and each byte its own token
    SpecialFinder all_specials;
    SpecialFinder user_defined;  // those that are tokens in plain text, too
    TokenId bos = -1;
    TokenId eos = -1;
    bool adds_bos = false;
    std::vector<TokenId> ends;

    Error error(std::string what) const {
        return Error{ErrorCode::bad_model, file + ": " + std::move(what)};
    }
    bool holds(TokenId id) const {
        return id >= 0 && static_cast<std::size_t>(id) < spellings.size();
    }
    Kind kind(TokenId id) const { return kinds[static_cast<std::size_t>(id)]; }

    Status load(const Gguf& gguf);
    Status load_tokens(const Gguf& gguf);
    Status index_tokens();
    Status load_merges(const Gguf& gguf);
    Status load_named_ids(const Gguf& gguf);
    Result<TokenId> named_id(const Gguf& gguf, std::string_view key) const;
    void load_specials();

    // The ids of a stretch of text without special tokens. Fails: the position of a byte that the
    // vocabulary cannot spell.
    std::optional<std::size_t> encode_text(std::string_view text, PairMerger& merger,
                                           std::vector<TokenId>& out) const;
};

Status Tokenizer::State::load(const Gguf& gguf) {
    file = printable(gguf.path().string());
    const auto model = gguf.string_at("tokenizer.ggml.model");
    if (!model) {
        return model.error();
    }
    if (*model != "gpt2") {
        return error("tokenizer model \"" + printable(*model) +
                     "\" is not supported; supported: gpt2");
    }
    const auto name = gguf.string_at("tokenizer.ggml.pre");
    if (!name) {
        return name.error();
    }
    const auto known = pre_tokenizer_named(*name);
    if (!known) {
        return error("pre-tokenizer \"" + printable(*name) +
                     "\" is not supported; supported: gpt-2, smollm, llama-bpe, qwen2");
    }
    pre = *known;
    pre_name = *name;
    whole_words_first = pre == PreTokenizer::llama_bpe;
    if (Status loaded = load_tokens(gguf); !loaded) {
        return loaded;
    }
    load_specials();
    if (Status loaded = load_merges(gguf); !loaded) {
        return loaded;
    }
    return load_named_ids(gguf);
}

Status Tokenizer::State::load_tokens(const Gguf& gguf) {
    auto tokens = gguf.strings_at(kTokens);
    if (!tokens) {
        return tokens.error();
    }
    if (tokens->empty() || tokens->size() > INT32_MAX) {
        return error(std::string(kTokens) + " has " + std::to_string(tokens->size()) + " tokens");
    }
    spellings = std::move(*tokens);
    kinds.assign(spellings.size(), Kind::text);
    if (gguf.has(kTypes)) {
        const auto types = gguf.ints_at(kTypes);
        if (!types) {
            return types.error();
        }
        if (types->size() != spellings.size()) {
            return error(std::string(kTypes) + " has " + std::to_string(types->size()) +
                         " entries for " + std::to_string(spellings.size()) + " tokens");
        }
        for (std::size_t i = 0; i < types->size(); ++i) {
            const auto kind = kind_of((*types)[i]);
            if (!kind) {
                return error(std::string(kTypes) + " gives token " + std::to_string(i) + " type " +
                             std::to_string((*types)[i]) + "; 1 to 6 are known");
            }
            kinds[i] = *kind;
        }
    }
    return index_tokens();
}

Status Tokenizer::State::index_tokens() {
    for (const std::string_view spelling : spellings) {
        spelling_bytes_max = std::max(spelling_bytes_max, spelling.size());
    }
    if (const auto built = ids.build(spellings); !built) {
        return error("token " + std::to_string(built.error()) +
                     " has the spelling of an earlier one, or collides with too many");
    }
    for (unsigned byte = 0; byte < 256; ++byte) {
        const TokenId id = ids.find(spelling_of(static_cast<std::uint8_t>(byte)));
        byte_ids[byte] = id >= 0 && kind(id) == Kind::text ? id : -1;
    }
    return {};
}

Status Tokenizer::State::load_merges(const Gguf& gguf) {
    const auto rules = gguf.strings_at(kMerges);
    if (!rules) {
        return rules.error();
    }
    merges.reserve(rules->size());
    // In blocks, so that the lookups of many rules wait for memory at the same time.
    constexpr std::size_t kBlock = 64;
    std::array<std::string_view, 3 * kBlock> names;  // left, right and both together, rule by rule
    std::array<TokenId, 3 * kBlock> found{};
    std::string joined;
    for (std::size_t begin = 0; begin < rules->size(); begin += kBlock) {
        const std::size_t count = std::min(kBlock, rules->size() - begin);
        joined.clear();
        for (std::size_t i = 0; i < count; ++i) {
            const std::string_view rule = (*rules)[begin + i];
            const std::size_t space = rule.find(' ');
            if (space == std::string_view::npos) {
                return error("merge " + std::to_string(begin + i) +
                             " is not two spellings and a space");
            }
            names[3 * i] = rule.substr(0, space);
            names[3 * i + 1] = rule.substr(space + 1);
            joined.append(names[3 * i]).append(names[3 * i + 1]);
        }
        std::size_t at = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t size = names[3 * i].size() + names[3 * i + 1].size();
            names[3 * i + 2] = std::string_view(joined).substr(at, size);
            at += size;
        }
        ids.find_all(std::span(names).first(3 * count), std::span(found).first(3 * count));
        for (std::size_t i = 0; i < count; ++i) {
            merges.will_add(found[3 * i], found[3 * i + 1]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const TokenId left = found[3 * i];
            const TokenId right = found[3 * i + 1];
            const TokenId merged = found[3 * i + 2];
            const std::size_t rank = begin + i;
            if (left < 0 || right < 0 || merged < 0) {
                return error("merge " + std::to_string(rank) +
                             " names or makes a token that is not in the vocabulary");
            }
            if (kind(merged) == Kind::control) {
                continue;  // text never becomes a control token: only its spelling, asked for, is
                           // one
            }
            if (!merges.add(left, right, {static_cast<std::uint32_t>(rank), merged})) {
                return error("merge " + std::to_string(rank) +
                             " repeats an earlier one, or collides with too many");
            }
        }
    }
    return {};
}

void Tokenizer::State::load_specials() {
    const auto set_apart = [&](std::string_view spelling) {
        const TokenId id = ids.find(spelling);
        if (id < 0 || (kind(id) != Kind::user_defined && kind(id) != Kind::control)) {
            return TokenId{-1};
        }
        kinds[static_cast<std::size_t>(id)] = Kind::control;
        return id;
    };
    for (const std::string_view spelling : kTurnBegin) {
        set_apart(spelling);
    }
    for (const std::string_view spelling : kTurnEnd) {
        if (const TokenId id = set_apart(spelling); id >= 0) {
            ends.push_back(id);
        }
    }
    for (std::size_t i = 0; i < spellings.size(); ++i) {
        const TokenId id = static_cast<TokenId>(i);
        if (kinds[i] == Kind::control || kinds[i] == Kind::user_defined) {
            all_specials.add(spellings[i], id);
        }
        if (kinds[i] == Kind::user_defined) {
            user_defined.add(spellings[i], id);
        }
    }
    all_specials.finish();
    user_defined.finish();
}

Result<TokenId> Tokenizer::State::named_id(const Gguf& gguf, std::string_view key) const {
    if (!gguf.has(key)) {
        return TokenId{-1};
    }
    const auto id = gguf.unsigned_at(key);
    if (!id) {
        return id.error();
    }
    if (*id >= spellings.size()) {
        return error(std::string(key) + " is " + std::to_string(*id) + " in a vocabulary of " +
                     std::to_string(spellings.size()));
    }
    return static_cast<TokenId>(*id);
}

Status Tokenizer::State::load_named_ids(const Gguf& gguf) {
    const std::pair<std::string_view, TokenId*> keys[] = {
        {"tokenizer.ggml.bos_token_id", &bos},
        {"tokenizer.ggml.eos_token_id", &eos},
        {"tokenizer.ggml.eot_token_id", nullptr},
        {"tokenizer.ggml.eom_token_id", nullptr},
    };
    for (const auto& [key, place] : keys) {
        const auto id = named_id(gguf, key);
        if (!id) {
            return id.error();
        }
        if (place != nullptr) {
            *place = *id;
        }
        if (place != &bos && *id >= 0) {
            ends.push_back(*id);
        }
    }
    adds_bos = pre == PreTokenizer::llama_bpe;  // what its files mean when they are silent
    if (gguf.has("tokenizer.ggml.add_bos_token")) {
        const auto says = gguf.bool_at("tokenizer.ggml.add_bos_token");
        if (!says) {
            return says.error();
        }
        adds_bos = *says;
    }
    adds_bos = adds_bos && bos >= 0;
    return {};
}

std::optional<std::size_t> Tokenizer::State::encode_text(std::string_view text, PairMerger& merger,
                                                         std::vector<TokenId>& out) const {
    if (any_bytes) {
        for (const char c : text) {
            out.push_back(byte_ids[static_cast<std::uint8_t>(c)]);
        }
        return std::nullopt;
    }
    WordScanner words(pre, text);
    std::string spelled;
    for (std::string_view word = words.next(); !word.empty(); word = words.next()) {
        if (whole_words_first && word.size() <= spelling_bytes_max) {
            spelled.clear();
            for (const char c : word) {
                spelled += spelling_of(static_cast<std::uint8_t>(c));
            }
            if (const TokenId id = ids.find(spelled); id >= 0 && kind(id) == Kind::text) {
                out.push_back(id);
                continue;
            }
        }
        if (const auto unspelled = merger.append(word, out); unspelled) {
            return static_cast<std::size_t>(word.data() - text.data()) + *unspelled;
        }
    }
    return std::nullopt;
}

Tokenizer Tokenizer::of_bytes() {
    auto state = std::make_unique<State>();
    state->file = "sim";
    state->pre_name = "gpt-2";
    state->any_bytes = true;
    for (unsigned byte = 0; byte < 256; ++byte) {
        state->own_spellings.emplace_back(spelling_of(static_cast<std::uint8_t>(byte)));
    }
    state->kinds.assign(256, Kind::text);
    for (const char* special : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
        state->own_spellings.emplace_back(special);
        state->kinds.push_back(Kind::control);
    }
    state->spellings.assign(state->own_spellings.begin(), state->own_spellings.end());
    const Status indexed = state->index_tokens();
    check(indexed.has_value(), "256 bytes have 256 spellings");
    state->load_specials();
    state->eos = static_cast<TokenId>(state->spellings.size() - 1);
    return Tokenizer(std::move(state));
}

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::create(const Gguf& gguf) {
    auto state = std::make_unique<State>();
    if (Status loaded = state->load(gguf); !loaded) {
        return loaded.error();
    }
    return Tokenizer(std::move(state));
}

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
    if (text.size() > kTextBytesMax) {
        return Error{ErrorCode::bad_input, "the text has " + std::to_string(text.size()) +
                                               " bytes; at most " + std::to_string(kTextBytesMax) +
                                               " are tokenized"};
    }
    if (const auto at = first_invalid_utf8(text); at && !state_->any_bytes) {
        return Error{ErrorCode::bad_input,
                     "the text is not UTF-8 at byte offset " + std::to_string(*at)};
    }
    const SpecialFinder& specials =
        special == SpecialTokens::parse ? state_->all_specials : state_->user_defined;
    std::vector<TokenId> out;
    out.reserve(text.size() / 3 + 1);
    PairMerger merger(state_->merges, state_->byte_ids);
    std::size_t at = 0;
    while (at < text.size()) {
        const SpecialFinder::Match match = specials.find(text, at);
        const std::size_t end = match.size > 0 ? match.at : text.size();
        if (const auto bad = state_->encode_text(text.substr(at, end - at), merger, out)) {
            char byte[8];
            std::snprintf(byte, sizeof byte, "0x%02x", static_cast<unsigned char>(text[at + *bad]));
            return Error{ErrorCode::bad_input, "the model's vocabulary has no token for byte " +
                                                   std::string(byte) + ", at byte offset " +
                                                   std::to_string(at + *bad)};
        }
        if (match.size > 0) {
            out.push_back(match.id);
        }
        at = end + match.size;
    }
    return out;
}

std::string Tokenizer::bytes(TokenId id, bool show_control) const {
    if (!state_->holds(id)) {
        return {};
    }
    const std::string_view spelling = state_->spellings[static_cast<std::size_t>(id)];
    switch (state_->kind(id)) {
        case Kind::text:
            return bytes_of_spelling(spelling);
        case Kind::user_defined:
            return std::string(spelling);
        case Kind::control:
        case Kind::unused:
            break;
    }
    return show_control ? std::string(spelling) : std::string();
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool show_control) const {
    std::string text;
    for (const TokenId id : ids) {
        text += bytes(id, show_control);
    }
    return text;
}

std::uint32_t Tokenizer::size() const {
    return static_cast<std::uint32_t>(state_->spellings.size());
}
std::string_view Tokenizer::model() const { return "gpt2"; }
std::string_view Tokenizer::pre() const { return state_->pre_name; }
TokenId Tokenizer::bos() const { return state_->bos; }
TokenId Tokenizer::eos() const { return state_->eos; }
bool Tokenizer::adds_bos() const { return state_->adds_bos; }

bool Tokenizer::is_control(TokenId id) const {
    return state_->holds(id) && state_->kind(id) == Kind::control;
}

bool Tokenizer::ends_generation(TokenId id) const {
    return std::find(state_->ends.begin(), state_->ends.end(), id) != state_->ends.end();
}

TokenId Tokenizer::find(std::string_view spelling) const { return state_->ids.find(spelling); }

}  // namespace kvw
