#include "src/text/vocabulary.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "src/base/check.h"
#include "src/base/witness_mix.h"

namespace kvw {

namespace {

// No entry lies further than this from where its hash points: at half load the longest honest run
// is a few dozen, so more means that the file was made to be slow.
constexpr std::size_t kProbesMax = 512;
constexpr std::size_t kAhead = 16;  // lookups in flight: what hides the distance to memory
constexpr std::uint32_t kNoSymbol = ~std::uint32_t{0};
constexpr TokenId kGone = -2;

std::size_t slots_for(std::size_t entries) { return std::bit_ceil(2 * entries + 16); }

std::uint32_t hash_of(std::string_view text) {
    std::uint64_t hash = 0x9e3779b97f4a7c15ull ^ text.size();
    const char* at = text.data();
    std::size_t left = text.size();
    for (; left > 8; left -= 8, at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, at, 8);
        hash = mix64(hash ^ word);
    }
    std::uint64_t word = 0;
    std::memcpy(&word, at, left);
    return static_cast<std::uint32_t>(mix64(hash ^ word) >> 32);
}

std::uint64_t pair_of(TokenId left, TokenId right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 |
           static_cast<std::uint32_t>(right);
}

}  // namespace

tl::expected<void, TokenId> SpellingTable::build(std::span<const std::string_view> spellings) {
    spellings_ = spellings;
    slots_.assign(slots_for(spellings.size()), Slot{});
    const std::size_t mask = slots_.size() - 1;
    std::vector<std::uint32_t> hashes(spellings.size());
    for (std::size_t i = 0; i < spellings.size(); ++i) {
        hashes[i] = hash_of(spellings[i]);
    }
    for (std::size_t i = 0; i < spellings.size(); ++i) {
        __builtin_prefetch(&slots_[hashes[std::min(i + kAhead, spellings.size() - 1)] & mask]);
        const TokenId id = static_cast<TokenId>(i);
        if (spellings[i].empty()) {
            continue;
        }
        const std::uint32_t hash = hashes[i];
        std::size_t probes = 0;
        std::size_t at = hash & mask;
        while (slots_[at].id >= 0) {
            const bool same = slots_[at].hash == hash &&
                              spellings[static_cast<std::size_t>(slots_[at].id)] == spellings[i];
            if (same || ++probes > kProbesMax) {
                return tl::unexpected(id);
            }
            at = (at + 1) & mask;
        }
        slots_[at] = {hash, id};
    }
    return {};
}

TokenId SpellingTable::find(std::string_view spelling) const {
    return find(spelling, hash_of(spelling));
}

TokenId SpellingTable::find(std::string_view spelling, std::uint32_t hash) const {
    if (slots_.empty() || spelling.empty()) {
        return -1;
    }
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = hash & mask;
    for (std::size_t probes = 0; probes <= kProbesMax && slots_[at].id >= 0; ++probes) {
        if (slots_[at].hash == hash &&
            spellings_[static_cast<std::size_t>(slots_[at].id)] == spelling) {
            return slots_[at].id;
        }
        at = (at + 1) & mask;
    }
    return -1;
}

void SpellingTable::find_all(std::span<const std::string_view> spellings,
                             std::span<TokenId> ids) const {
    check(spellings.size() == ids.size(), "one id for each spelling");
    check(!slots_.empty(), "spellings are found after build()");
    const std::size_t mask = slots_.size() - 1;
    std::array<std::uint32_t, kAhead> hashes{};
    for (std::size_t begin = 0; begin < spellings.size(); begin += kAhead) {
        const auto block = spellings.subspan(begin, std::min(kAhead, spellings.size() - begin));
        for (std::size_t i = 0; i < block.size(); ++i) {
            hashes[i] = hash_of(block[i]);
            __builtin_prefetch(&slots_[hashes[i] & mask]);
        }
        const auto first_guess = [&](std::size_t i) -> const std::string_view* {
            const TokenId id = slots_[hashes[i] & mask].id;
            return id < 0 ? nullptr : &spellings_[static_cast<std::size_t>(id)];
        };
        for (std::size_t i = 0; i < block.size(); ++i) {
            __builtin_prefetch(first_guess(i));
        }
        for (std::size_t i = 0; i < block.size(); ++i) {
            const std::string_view* guess = first_guess(i);
            __builtin_prefetch(guess == nullptr ? nullptr : guess->data());
        }
        for (std::size_t i = 0; i < block.size(); ++i) {
            ids[begin + i] = find(block[i], hashes[i]);
        }
    }
}

void MergeTable::reserve(std::size_t merges) { slots_.assign(slots_for(merges), Slot{}); }

bool MergeTable::add(TokenId left, TokenId right, Merge merge) {
    check(!slots_.empty(), "merges are added after reserve()");
    const std::uint64_t pair = pair_of(left, right);
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = mix64(pair) & mask;
    for (std::size_t probes = 0; probes <= kProbesMax; ++probes) {
        if (slots_[at].pair == kEmpty) {
            slots_[at] = {pair, merge};
            return true;
        }
        if (slots_[at].pair == pair) {
            return false;
        }
        at = (at + 1) & mask;
    }
    return false;
}

void MergeTable::will_add(TokenId left, TokenId right) const {
    if (!slots_.empty()) {
        __builtin_prefetch(&slots_[mix64(pair_of(left, right)) & (slots_.size() - 1)]);
    }
}

const Merge* MergeTable::find(TokenId left, TokenId right) const {
    if (slots_.empty()) {
        return nullptr;
    }
    const std::uint64_t pair = pair_of(left, right);
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = mix64(pair) & mask;
    for (std::size_t probes = 0; probes <= kProbesMax && slots_[at].pair != kEmpty; ++probes) {
        if (slots_[at].pair == pair) {
            return &slots_[at].merge;
        }
        at = (at + 1) & mask;
    }
    return nullptr;
}

std::optional<std::size_t> PairMerger::append(std::string_view word, std::vector<TokenId>& ids) {
    symbols_.clear();
    heap_.clear();
    check(word.size() < kNoSymbol, "a word's bytes are numbered in 32 bits");
    for (std::uint32_t i = 0; i < word.size(); ++i) {
        const TokenId id = byte_ids_[static_cast<std::uint8_t>(word[i])];
        if (id < 0) {
            return i;
        }
        symbols_.push_back(
            {id, i == 0 ? kNoSymbol : i - 1, i + 1 == word.size() ? kNoSymbol : i + 1});
    }
    // A heap whose top is the lowest rank, and of equal ranks the leftmost.
    const auto later = [](const Candidate& a, const Candidate& b) {
        return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
    };
    for (std::uint32_t i = 0; i + 1 < word.size(); ++i) {
        consider(i);
    }
    std::make_heap(heap_.begin(), heap_.end(), later);
    const auto push = [&](std::uint32_t left) {
        const std::size_t before = heap_.size();
        consider(left);
        if (heap_.size() > before) {
            std::push_heap(heap_.begin(), heap_.end(), later);
        }
    };
    while (!heap_.empty()) {
        std::pop_heap(heap_.begin(), heap_.end(), later);
        const Candidate candidate = heap_.back();
        heap_.pop_back();
        Symbol& left = symbols_[candidate.left];
        if (left.id != candidate.left_id || left.after == kNoSymbol ||
            symbols_[left.after].id != candidate.right_id) {
            continue;
        }
        Symbol& right = symbols_[left.after];
        left.id = candidate.merged;
        left.after = right.after;
        right.id = kGone;
        if (left.after != kNoSymbol) {
            symbols_[left.after].before = candidate.left;
            push(candidate.left);
        }
        if (left.before != kNoSymbol) {
            push(left.before);
        }
    }
    for (std::uint32_t i = 0; !symbols_.empty() && i != kNoSymbol; i = symbols_[i].after) {
        ids.push_back(symbols_[i].id);
    }
    return std::nullopt;
}

void PairMerger::consider(std::uint32_t left) {
    const Symbol& symbol = symbols_[left];
    const TokenId right_id = symbols_[symbol.after].id;
    if (const Merge* merge = merges_.find(symbol.id, right_id); merge != nullptr) {
        heap_.push_back({merge->rank, left, symbol.id, right_id, merge->merged});
    }
}

void SpecialFinder::add(std::string_view spelling, TokenId id) {
    if (!spelling.empty()) {
        entries_.push_back({spelling, id});
        begins_[static_cast<std::uint8_t>(spelling[0])] = true;
    }
}

void SpecialFinder::finish() {
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.spelling < b.spelling; });
}

SpecialFinder::Match SpecialFinder::find(std::string_view text, std::size_t from) const {
    if (entries_.empty()) {
        return {};
    }
    for (std::size_t at = from; at < text.size(); ++at) {
        if (begins_[static_cast<std::uint8_t>(text[at])]) {
            if (const Entry* entry = longest(text.substr(at)); entry != nullptr) {
                return {at, entry->spelling.size(), entry->id};
            }
        }
    }
    return {};
}

const SpecialFinder::Entry* SpecialFinder::longest(std::string_view text) const {
    // Byte by byte, the sorted entries that agree with the text so far are [low, high).
    const Entry* low = entries_.data();
    const Entry* high = low + entries_.size();
    const Entry* best = nullptr;
    for (std::size_t depth = 0; low != high; ++depth) {
        if (low->spelling.size() == depth) {
            best = low++;
        }
        if (depth == text.size()) {
            break;
        }
        const auto byte_of = [&](const Entry& entry) {
            return static_cast<unsigned char>(entry.spelling[depth]);
        };
        const auto wanted = static_cast<unsigned char>(text[depth]);
        low = std::partition_point(low, high, [&](const Entry& e) { return byte_of(e) < wanted; });
        high =
            std::partition_point(low, high, [&](const Entry& e) { return byte_of(e) == wanted; });
    }
    return best;
}

}  // namespace kvw
