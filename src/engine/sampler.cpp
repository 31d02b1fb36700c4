#include "src/engine/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "src/base/check.h"
#include "src/base/random.h"

namespace kvw {

namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Ranking the whole vocabulary costs milliseconds and is rarely needed: a prefix is ranked first,
// and a longer one only when the answer lies behind it.
constexpr std::size_t kFirstRanked = 64;
constexpr std::size_t kRankedGrowth = 16;
constexpr std::size_t kLanes = 8;

bool before(float logit_a, TokenId id_a, float logit_b, TokenId id_b) {
    return logit_a > logit_b || (logit_a == logit_b && id_a < id_b);
}

Status check_range(const char* name, float value, float least, float most, const char* range) {
    if (value >= least && value <= most) {  // false for NaN
        return {};
    }
    return Error{ErrorCode::usage,
                 std::string(name) + " is " + std::to_string(value) + "; it must be " + range};
}

}  // namespace

Status check_options(const SamplingOptions& options) {
    constexpr float kMost = std::numeric_limits<float>::max();
    struct Range {
        const char* name;
        float value, least, most;
        const char* range;
    };
    const std::array<Range, 6> ranges{{
        {"temperature", options.temperature, 0.0f, kMost, "0 (greedy) or a finite number above"},
        {"top-p", options.top_p, 0.0f, 1.0f, "from 0 to 1"},
        {"min-p", options.min_p, 0.0f, 1.0f, "from 0 to 1"},
        {"repeat-penalty", options.repeat_penalty, std::numeric_limits<float>::min(), kMost,
         "a finite number above 0"},
        {"presence-penalty", options.presence_penalty, -2.0f, 2.0f, "from -2 to 2"},
        {"frequency-penalty", options.frequency_penalty, -2.0f, 2.0f, "from -2 to 2"},
    }};
    for (const Range& r : ranges) {
        if (Status status = check_range(r.name, r.value, r.least, r.most, r.range); !status) {
            return status;
        }
    }
    for (const std::string& stop : options.stops) {
        if (stop.empty()) {
            return Error{ErrorCode::usage,
                         "a stop string is empty; it must have at least one character"};
        }
    }
    return {};
}

Sampler::Sampler(const SamplingOptions& options, const Kernels& kernels, const Tokenizer& tokenizer)
    : options_(options), kernels_(&kernels) {
    if (options_.ignore_eos) {
        for (TokenId id = 0; id < static_cast<TokenId>(tokenizer.size()); ++id) {
            if (tokenizer.ends_generation(id)) {
                excluded_.push_back(id);
            }
        }
    }
}

bool Sampler::penalises() const {
    return options_.penalty_last > 0 &&
           (options_.repeat_penalty != 1.0f || options_.presence_penalty != 0.0f ||
            options_.frequency_penalty != 0.0f);
}

void Sampler::accept(TokenId id) {
    if (!penalises()) {
        return;
    }
    const std::size_t kept = options_.penalty_last;
    if (history_.size() >= 2 * kept + 64) {
        history_.erase(history_.begin(), history_.end() - static_cast<std::ptrdiff_t>(kept));
    }
    history_.push_back(id);
}

std::span<const float> Sampler::adjust(std::span<const float> logits) {
    if (excluded_.empty() && !penalises()) {
        return logits;
    }
    work_.assign(logits.begin(), logits.end());
    if (penalises()) {
        const std::size_t looked_at = std::min<std::size_t>(options_.penalty_last, history_.size());
        std::vector<TokenId> seen(history_.end() - static_cast<std::ptrdiff_t>(looked_at),
                                  history_.end());
        std::sort(seen.begin(), seen.end());
        for (std::size_t i = 0; i < seen.size();) {
            std::size_t next = i;
            while (next < seen.size() && seen[next] == seen[i]) {
                ++next;
            }
            float& logit = work_[static_cast<std::size_t>(seen[i])];
            logit = logit > 0 ? logit / options_.repeat_penalty : logit * options_.repeat_penalty;
            logit -= static_cast<float>(next - i) * options_.frequency_penalty;
            logit -= options_.presence_penalty;
            i = next;
        }
    }
    for (const TokenId id : excluded_) {
        work_[static_cast<std::size_t>(id)] = kExcluded;
    }
    return work_;
}

void Sampler::rank(std::span<const float> logits, std::size_t count) {
    const auto ranks_before = [](const Candidate& a, const Candidate& b) {
        return before(a.logit, a.id, b.logit, b.id);
    };
    // One pass in order of id. Whoever is not above the worst of `count` better ones seen so far is
    // out: of equal logits the earlier id ranks first, so a later one never displaces it.
    const std::size_t room = std::min(logits.size(), 2 * count + kFirstRanked);
    ranked_.clear();
    ranked_.reserve(room);
    float floor = kExcluded;
    const auto keep_best = [&] {
        const auto last = ranked_.begin() + static_cast<std::ptrdiff_t>(count - 1);
        std::nth_element(ranked_.begin(), last, ranked_.end(), ranks_before);
        ranked_.resize(count);
        floor = ranked_.back().logit;
    };
    constexpr std::size_t kBlock = 16;
    for (std::size_t begin = 0; begin < logits.size(); begin += kBlock) {
        const std::size_t end = std::min(begin + kBlock, logits.size());
        std::uint32_t above = 0;  // a sum, which needs no branch per logit
        for (std::size_t i = begin; i < end; ++i) {
            above += logits[i] > floor ? 1 : 0;
        }
        for (std::size_t i = begin; above > 0 && i < end; ++i) {
            if (logits[i] > floor) {
                if (ranked_.size() == room && count < room) {
                    keep_best();
                    if (logits[i] <= floor) {
                        continue;
                    }
                }
                ranked_.push_back({logits[i], static_cast<TokenId>(i)});
            }
        }
    }
    if (ranked_.size() > count) {
        keep_best();
    }
    std::sort(ranked_.begin(), ranked_.end(), ranks_before);
}

void Sampler::weigh(float largest, std::size_t begin) {
    scaled_.resize(ranked_.size() - begin);
    for (std::size_t i = begin; i < ranked_.size(); ++i) {
        scaled_[i - begin] = (ranked_[i].logit - largest) / options_.temperature;
    }
    weights_.resize(ranked_.size());
    kernels_->exp_shifted(weights_.data() + begin, scaled_.data(), scaled_.size(), 0.0f);
}

double Sampler::total_weight(std::span<const float> logits, float largest) {
    scaled_.resize(logits.size());
    const std::span<float> scaled = scaled_;
    const float temperature = options_.temperature;  // a copy: no store below can change it
    for (std::size_t i = 0; i < logits.size(); ++i) {
        scaled[i] = (logits[i] - largest) / temperature;
    }
    kernels_->exp_shifted(scaled.data(), scaled.data(), scaled.size(), 0.0f);
    // Lane j adds elements j, j + 8, ...: a fixed order, in any build.
    std::array<double, kLanes> lanes{};
    std::size_t i = 0;
    for (; i + kLanes <= scaled.size(); i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            lanes[lane] += static_cast<double>(scaled[i + lane]);
        }
    }
    for (std::size_t lane = 0; i + lane < scaled.size(); ++lane) {
        lanes[lane] += static_cast<double>(scaled[i + lane]);
    }
    double total = 0;
    for (const double lane : lanes) {
        total += lane;
    }
    return total;
}

TokenId Sampler::sample(std::span<const float> logits, std::uint64_t position) {
    check(!logits.empty(), "there are logits to sample from");
    if (options_.temperature == 0.0f && !penalises()) {
        // Excluded tokens matter only where one of them is the greatest: no copy without them.
        const auto best = static_cast<TokenId>(kernels_->argmax(logits.data(), logits.size()));
        if (std::find(excluded_.begin(), excluded_.end(), best) == excluded_.end()) {
            check(logits[static_cast<std::size_t>(best)] > kExcluded,
                  "at least one token may be sampled");
            return best;
        }
    }
    const std::span<const float> ranked_by = adjust(logits);
    const std::size_t best = kernels_->argmax(ranked_by.data(), ranked_by.size());
    const float largest = ranked_by[best];
    check(largest > kExcluded, "at least one token may be sampled");
    if (options_.temperature == 0.0f) {
        return static_cast<TokenId>(best);
    }

    const bool all = options_.top_k == 0 || options_.top_k >= logits.size();
    const std::size_t limit = all ? logits.size() : options_.top_k;
    const double draw = uniform_draw(options_.seed, position, 0);
    std::size_t count = all ? std::min(limit, kFirstRanked) : limit;
    double total = all ? total_weight(ranked_by, largest) : 0;
    for (;; count = std::min(limit, count * kRankedGrowth)) {
        rank(ranked_by, count);
        weigh(largest, 0);
        const bool complete = count == limit;
        if (!all) {
            total = 0;
            for (const float weight : weights_) {
                total += static_cast<double>(weight);
            }
        }
        // How far top-p and min-p let the ranking go; `cut` when they end it within what is ranked.
        double kept = 0;
        std::size_t length = 0;
        bool cut = false;
        while (length < weights_.size() && !cut) {
            if (length > 0 && weights_[length] < options_.min_p) {
                cut = true;
                break;
            }
            kept += static_cast<double>(weights_[length++]);
            cut = options_.top_p < 1.0f && kept >= static_cast<double>(options_.top_p) * total;
        }
        const double aim = draw * (cut || complete ? kept : total);
        // Without top-p and min-p the draw alone decides how much of the ranking is needed.
        const bool unbounded = options_.top_p == 1.0f && options_.min_p == 0.0f;
        if (!cut && !complete && !(unbounded && aim < kept)) {
            continue;
        }
        double reached = 0;
        for (std::size_t i = 0; i < length; ++i) {
            reached += static_cast<double>(weights_[i]);
            if (reached > aim) {
                return ranked_[i].id;
            }
        }
        return ranked_[length - 1]
            .id;  // rounding: the sum as counted fell short of the sum as aimed at
    }
}

}  // namespace kvw
