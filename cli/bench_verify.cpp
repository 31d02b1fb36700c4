// bench verify: events per second of the proof, on a trace that the real pool, kernels, ledger and
// writer made for a model that computes nothing.
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <memory>
#include <optional>

#include "cli/bench_support.h"
#include "cli/commands.h"
#include "cli/recording.h"
#include "cli/signals.h"
#include "kernels/kernels.h"
#include "replay/verify.h"
#include "src/base/check.h"
#include "src/base/witness_mix.h"
#include "src/kv/page_pool.h"
#include "traces/trace.h"

namespace kvw::cli {

namespace {

struct VerifyBenchFlags {
    std::uint64_t events = 4'000'000;
    std::uint32_t repetitions = 3;
    std::uint32_t shared = 0;  // percent of requests that may adopt a page
};

constexpr std::uint32_t kPromptTokens = 24, kAnswerTokens = 72, kTogether = 64, kTenants = 8;
constexpr std::uint32_t kAdoptsMax = 100;  // of one page, before it leaves the tree
constexpr TileShape kShape{.layers = 1, .heads = 1, .head_dim = 16};

// Requests that come, generate and go, kTogether at a time. Their rows go through the pool and
// through the kernels that store and attend; logits, text and digests of content are made up.
class NullModelRun {
  public:
    NullModelRun(EventSink& sink, const Kernels& kernels, std::uint32_t shared_percent)
        : sink_(sink), kernels_(kernels), shared_percent_(shared_percent) {}

    // Fails: out_of_memory, or what the sink's commit fails with.
    Status run(std::uint64_t events_min) {
        set_float_mode();
        note(events::Run{kNumericsVersion, kPageTokens, 1});
        note(events::Model{0, 0, 0, 0, kShape.layers, kShape.heads, kShape.head_dim, 256, 4096, 1},
             "null");
        const std::uint32_t pages = (kPromptTokens + kAnswerTokens + kPageTokens - 1) / kPageTokens;
        Result<std::unique_ptr<PagePool>> pool = PagePool::create(
            {.shape = kShape, .rows_max = std::uint64_t{2} * kTogether * pages * kPageTokens},
            kernels_, noted_);
        if (!pool) {
            return pool.error();
        }
        pool_ = std::move(*pool);
        note(events::Config{1}, "{}");
        for (std::uint32_t tenant = 1; tenant <= kTenants; ++tenant) {
            note(events::Tenant{tenant}, fmt::format("tenant-{}", tenant));
        }
        do {
            while (noted_.count < events_min && active_.size() < kTogether) {
                submit(pages);
            }
            if (const Status done = step(); !done) {
                return done;
            }
            if (stop_signal() != 0) {
                return Error{ErrorCode::cancelled, "stopped by a signal"};
            }
        } while (!active_.empty() || noted_.count < events_min);
        for (std::optional<Shared>& shared : shared_) {
            evict(shared);
        }
        pool_->scrub_drained(pool_->pages_total());
        const PagePool::Counters counters = pool_->counters();
        note(events::RunEnd{requests_, steps_, counters.rows_read, counters.rows_written,
                            counters.scrubs, counters.scrub_witness});
        return sink_.commit();
    }

    std::uint64_t events() const { return noted_.count; }

  private:
    // Of different lengths, so that requests come and go at different steps.
    static std::uint32_t answer_tokens(std::uint64_t request) {
        return kAnswerTokens - static_cast<std::uint32_t>(request * 7 % 48);
    }
    struct Active {
        Owner owner;
        std::uint32_t rows = 0;
        std::uint32_t adopted = 0;
        bool shares = false;
    };
    // The first page of its tenant's prompts, which are all the same.
    struct Shared {
        PageRef page;
        std::uint32_t adopts = 0;
    };
    // Counts what the pool notes, too.
    struct Counting final : EventSink {
        explicit Counting(EventSink& to) : to(to) {}
        void note(const Event& event) override {
            ++count;
            to.note(event);
        }
        void text(const TextRecord& record) override { to.text(record); }
        Status commit() override { return to.commit(); }
        EventSink& to;
        std::uint64_t count = 0;
    };

    template <class T>
    void note(const T& event, std::string_view bytes = {}) {
        noted_.note(Event::of(event, bytes));
    }

    void submit(std::uint32_t pages) {
        const std::uint64_t id = ++requests_;
        const Owner owner{TenantId{static_cast<std::uint32_t>(id % kTenants) + 1}, RequestId{id}};
        const bool shares = id * 37 % 100 < shared_percent_;
        note(events::Submit{
            id, number(owner.tenant), kPromptTokens, answer_tokens(id), mix64(id), mix64(~id), 0,
            static_cast<std::uint64_t>(shares ? CacheScope::tenant : CacheScope::request)});
        note(events::Sampling{.request = id, .seed = id});
        note(events::Admit{id, kPromptTokens + answer_tokens(id), mix64(id + 1), mix64(id + 2)});
        std::optional<Shared>& shared = shared_of(owner);
        const bool adopts = shares && shared.has_value();
        const Status reserved = pool_->reserve(owner, pages - (adopts ? 1 : 0));
        check(reserved.has_value(), "the pool has pages for twice as many requests");
        active_.push_back({.owner = owner, .shares = shares});
        if (adopts) {
            pool_->adopt(owner, shared->page, prefix_of(owner));
            active_.back().rows = active_.back().adopted = kPageTokens;
            if (++shared->adopts == kAdoptsMax) {
                evict(shared);
            }
        }
    }

    std::optional<Shared>& shared_of(const Owner& owner) {
        return shared_[number(owner.tenant) - 1];
    }
    static PrefixDigest prefix_of(const Owner& owner) {
        return {mix64(number(owner.tenant)), mix64(~std::uint64_t{number(owner.tenant)})};
    }
    void evict(std::optional<Shared>& shared) {
        if (shared) {
            pool_->evict(shared->page.page);
            shared.reset();
        }
    }

    Status step() {
        pool_->scrub_drained(pool_->pages_total());
        note(events::Step{++steps_, active_.size()});
        pool_->begin_step(steps_);
        leases_.clear();
        for (Active& active : active_) {
            const std::uint32_t count =
                active.rows < kPromptTokens ? kPromptTokens - active.rows : 1;
            pool_->extend(active.owner, active.rows + count);
            leases_.push_back(pool_->open(active.owner, active.rows, count));
            const SequenceView view = leases_.back().view(0, count - 1);
            kernels_.append(pool_->memory(), view, 0, 0, keys_.data(), keys_.data());
            const AttentionArgs args{
                .memory = pool_->memory(), .query_heads = 1, .q = keys_.data(), .out = out_.data()};
            kernels_.attend(args, {.sequence = &view, .row_end = count});
        }
        for (std::size_t i = 0; i < active_.size(); ++i) {
            check(pool_->settle(std::move(leases_[i])), "a null model reads its own rows only");
            advance(active_[i], i);
        }
        std::erase_if(active_,
                      [](const Active& active) { return number(active.owner.request) == 0; });
        return sink_.commit();
    }

    void advance(Active& active, std::size_t slot) {
        const std::uint64_t id = number(active.owner.request);
        note(events::Slot{id, slot, id, steps_});
        const bool first = active.rows < kPromptTokens;
        if (first) {
            note(events::Sourced{id, kPromptTokens, mix64(id + 1), mix64(id + 2)});
        }
        active.rows = first ? kPromptTokens : active.rows + 1;
        note(events::Sample{id, active.rows, mix64(id ^ active.rows) & 0xffffffff});
        const std::uint32_t samples = active.rows - kPromptTokens + 1;
        if (samples == answer_tokens(id)) {
            const std::uint64_t witness = pool_->running_witness(active.owner);
            note(events::Rendered{id, samples, mix64(id + 3), mix64(id + 4)});
            note(events::Emitted{id, samples, mix64(id + 3), mix64(id + 4)});
            note(events::WitnessSum{id, active.rows, witness});
            note(events::Finish{id, static_cast<std::uint64_t>(FinishReason::length), kPromptTokens,
                                samples, samples, mix64(id + 5), mix64(id + 6), witness,
                                active.adopted});
            pool_->release(active.owner, FreeReason::finished);
            active.owner = {};
        } else if (first && active.shares && active.adopted == 0 && !shared_of(active.owner)) {
            pool_->publish(active.owner, 0, CacheScope::tenant, prefix_of(active.owner));
            shared_of(active.owner) = Shared{pool_->table(active.owner)[0]};
        }
    }

    EventSink& sink_;
    const Kernels& kernels_;
    const std::uint32_t shared_percent_;
    Counting noted_{sink_};
    std::unique_ptr<PagePool> pool_;
    std::vector<Active> active_;
    std::array<std::optional<Shared>, kTenants> shared_;
    std::vector<Lease> leases_;
    std::vector<float> keys_ = std::vector<float>(kPromptTokens * kShape.head_dim, 0.25f);
    std::vector<float> out_ = std::vector<float>(kPromptTokens * kShape.head_dim);
    std::uint64_t requests_ = 0, steps_ = 0;
};

Result<int> bench_verify(const VerifyBenchFlags& flags, Session& session) {
    finish_steps_on_signal(true);
    const Result<TemporaryFolder> folder = TemporaryFolder::create();
    if (!folder) {
        return folder.error();
    }
    Progress progress(session);
    const Path path = folder->path() / "bench.kvw.zst";
    Result<std::unique_ptr<Recording>> recording =
        Recording::create({.path = path, .run_id = new_run_id()}, session);
    if (!recording) {
        return recording.error();
    }
    progress.show("recording");
    NullModelRun run((*recording)->sink(), best_kernels(), flags.shared);
    const auto start = std::chrono::steady_clock::now();
    if (const Status ran = run.run(flags.events); !ran) {
        return ran.error();
    }
    const Result<TraceTotals> totals = (*recording)->close();
    if (!totals) {
        return totals.error();
    }
    const double record_seconds = seconds_since(start);

    std::vector<double> rates;
    Result<Certificate> certificate = Certificate{};
    for (std::uint32_t i = 0; i < flags.repetitions; ++i) {
        progress.show("verifying", static_cast<double>(i) / flags.repetitions);
        const auto begun = std::chrono::steady_clock::now();
        certificate = verify(path);
        if (!certificate) {
            return certificate.error();
        }
        rates.push_back(static_cast<double>(totals->events) / seconds_since(begun));
        if (stop_signal() != 0) {
            return Error{ErrorCode::cancelled, "stopped by a signal"};
        }
    }
    progress.clear();
    Json object = session.object();
    object["events"] = totals->events;
    object["requests"] = certificate->counts.requests;
    object["adopts"] = certificate->counts.shares;
    object["trace_bytes"] = totals->bytes;
    object["bytes_per_event"] =
        rounded(static_cast<double>(totals->bytes) / static_cast<double>(totals->events), 3);
    object["record_events_per_second"] =
        std::round(static_cast<double>(totals->events) / record_seconds);
    object["median_events_per_second"] = std::round(median(rates));
    object["samples"] = Json::array();
    for (const double rate : rates) {
        object["samples"].push_back(std::round(rate));
    }
    object["verdict"] = name_of(certificate->verdict);
    object["level"] = name_of(certificate->level);
    if (session.common.json) {
        session.out.object(object);
    } else {
        session.out.write(fmt::format(
            "{} events, {:.2f} bytes each; recorded at {:.2f} million events/s (pool, kernels, "
            "ledger, writer)\n"
            "verified at {:.2f} million events/s, controls on (median of {}): {} at level {}\n",
            totals->events, object["bytes_per_event"].get<double>(),
            object["record_events_per_second"].get<double>() / 1e6, median(rates) / 1e6,
            rates.size(), name_of(certificate->verdict), name_of(certificate->level)));
    }
    return certificate->verdict == Verdict::proven ? 0 : 7;
}

}  // namespace

void add_bench_verify(Commands& commands) {
    const auto flags = std::make_shared<VerifyBenchFlags>();
    commands
        .add({"bench verify", "bench_verify", "measure the proof: events per second of verify",
              "  kvwitness bench verify\n"
              "  kvwitness bench verify --events 20000000 --json\n"
              "  kvwitness bench verify --shared 50"},
             [flags](Session& session) { return bench_verify(*flags, session); })
        .whole("--events", flags->events, 1000, 1ull << 32, "Events to record, at least")
        .whole("--shared", flags->shared, 0, 100,
               "Percent of requests that adopt a page where there is one")
        .whole("-r,--repetitions", flags->repetitions, 1, 100, "Times to verify");
}

}  // namespace kvw::cli
