// Makes up the events of a run as an engine would emit them, from a model of its own: pages whose
// tiles carry headers, kernels that add up what they load row by row. Faults are planted by telling
// it to do something wrong, or by changing `events`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "src/base/witness_mix.h"
#include "src/ledger/ledger.h"
#include "traces/event.h"

namespace kvw {

class History {
  public:
    static constexpr std::uint32_t kLayers = 2, kHeads = 3;

    explicit History(std::uint64_t pages) : pages_(pages) {
        add(events::Run{1, kPageTokens, 1});
        add(events::Model{1, 2, 3, 4, kLayers, kHeads, 16, 256, 4096, 0}, "history");
        add(events::Pool{0, 0, 0, pages, pages * kPageTokens});
        add(events::Config{1}, "{}");
    }

    template <class T>
    void add(const T& typed, std::string_view bytes = {}) {
        events.push_back(Event::of(typed, bytes));
    }

    std::uint64_t tenant(std::string name) {
        names_.push_back(std::move(name));
        add(events::Tenant{names_.size()}, names_.back());
        return names_.size();
    }

    std::uint64_t submit(std::uint64_t tenant, std::uint64_t prompt, std::uint64_t tokens_max) {
        const std::uint64_t id = requests_.size() + 1;
        requests_.push_back({.tenant = tenant, .prompt = prompt, .rows_max = prompt + tokens_max});
        add(events::Submit{id, tenant, prompt, tokens_max, id * 11, id * 13});
        add(events::Sampling{id, 7, 0, 40, 0, 0, 0, 0, 0, 64, 0, 0});
        return id;
    }
    void reject(std::uint64_t id) { add(events::Reject{id, 4, 100, 50, 64}); }
    void admit(std::uint64_t id) {
        const Request& request = requests_[id - 1];
        add(events::Queue{id});
        add(events::Admit{id, request.rows_max, id * 17, id * 19});
        add(events::Reserve{id, 0, (request.rows_max + kPageTokens - 1) / kPageTokens});
    }
    std::uint64_t begin(std::uint64_t tenant, std::uint64_t prompt, std::uint64_t tokens_max = 32) {
        const std::uint64_t id = submit(tenant, prompt, tokens_max);
        admit(id);
        return id;
    }

    // One step: each request goes on by at most `chunk` rows, and samples when all of them are
    // there.
    void step(const std::vector<std::uint64_t>& ids, std::uint64_t chunk = 1000) {
        add(events::Step{++steps_, ids.size()});
        std::vector<std::uint64_t> counts;
        for (const std::uint64_t id : ids) {
            Request& request = requests_[id - 1];
            const std::uint64_t count =
                std::min(chunk, request.prompt + request.samples - request.length);
            counts.push_back(count);
            rows(id, count, request.length + count);
        }
        for (const std::uint64_t id : ids) {
            witness(id);
            Request& request = requests_[id - 1];
            if (request.length == request.prompt + request.samples) {
                sample(id);
            }
        }
    }

    // Allocates what is missing up to row `end`, and does what a forward pass would.
    void rows(std::uint64_t id, std::uint64_t count, std::uint64_t end) {
        Request& request = requests_[id - 1];
        while (request.table.size() * kPageTokens < end) {
            alloc(id, take_page());
        }
        add(events::Rows{id, count, end, 0, request.version});
        for (std::uint64_t row = end - count; row < end; ++row) {
            access(request, request.table[row / kPageTokens], AccessKind::write, 1);
            rows_written_ += kLayers * kHeads;
            for (std::uint64_t page = 0; page * kPageTokens <= row; ++page) {
                const std::uint64_t seen =
                    std::min<std::uint64_t>(row + 1 - page * kPageTokens, kPageTokens);
                access(request, request.table[page], AccessKind::read, seen);
                rows_read_ += kLayers * kHeads * seen;
            }
        }
        request.crossed |= end / kWitnessInterval != request.length / kWitnessInterval;
        request.length = end;
    }
    void witness(std::uint64_t id) {
        Request& request = requests_[id - 1];
        add(events::Witness{id, request.witness & 0xffffffff});
        if (request.crossed) {
            add(events::WitnessSum{id, request.length, request.witness});
            request.crossed = false;
        }
    }
    void sample(std::uint64_t id) {
        Request& request = requests_[id - 1];
        if (!request.sourced) {
            add(events::Sourced{id, request.length, request.samples == 0 ? id * 17 : id,
                                request.samples == 0 ? id * 19 : id});
            add(events::Layer{id, 1, 0, 99});
            request.sourced = true;
        }
        add(events::Sample{id, request.prompt + request.samples, id * 23 % 1000});
        ++request.samples;
    }
    // A page of this request's table becomes what the pool has next.
    void alloc(std::uint64_t id, std::uint64_t page) {
        Request& request = requests_[id - 1];
        Page& memory = pages_[page];
        if (!memory.used && scrubs) {
            scrub(page);
        }
        memory.used = true;
        add(events::PoisonCheck{page, 24, 0});
        add(events::Alloc{id, 0, request.table.size(), page, ++memory.last_generation});
        memory.header = {request.tenant, id, memory.last_generation, page, false};
        request.table.push_back(page);
        ++request.version;
    }
    void scrub(std::uint64_t page) {
        Header& header = pages_[page].header;
        std::uint64_t sum = 0;
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
            for (std::uint32_t head = 0; head < kHeads; ++head) {
                sum += mix(header) *
                       access_factor(header.virgin ? 0 : layer, header.virgin ? 0 : head,
                                     AccessKind::scrub) *
                       kPageTokens;
            }
        }
        ++scrub_count_;
        scrub_sum_ += sum;
        add(events::Scrub{page, sum & 0xffffffff});
    }
    void let_go(std::uint64_t id, FreeReason reason) {
        Request& request = requests_[id - 1];
        for (const std::uint64_t page : request.table) {
            add(events::Free{id, page, static_cast<std::uint64_t>(reason)});
            draining_.push_back(page);
        }
        if (reason == FreeReason::preempted) {
            request.table.clear();
            request.length = 0;
            request.sourced = false;
        }
    }
    void preempt(std::uint64_t id) { let_go(id, FreeReason::preempted); }
    void finish(std::uint64_t id, FinishReason reason = FinishReason::stop) {
        Request& request = requests_[id - 1];
        if (request.samples > 0) {
            add(events::Layer{id, 3, 0, 98});
            add(events::Rendered{id, request.samples * 3, id * 29, id * 31});
            add(events::Emitted{id, request.samples * 3, id * 29, id * 31});
            add(events::WitnessSum{id, request.length, request.witness});
        }
        add(events::Finish{id, static_cast<std::uint64_t>(reason), request.prompt, request.samples,
                           request.samples * 3, 5, 6, request.witness});
        let_go(id, FreeReason::finished);
        request.table.clear();
    }
    void clean_pages() {
        for (const std::uint64_t page : draining_) {
            add(events::Drain{page});
            if (scrubs) {
                scrub(page);
            }
            free_.push_back(page);
        }
        draining_.clear();
    }
    void end() {
        clean_pages();
        add(events::RunEnd{requests_.size(), steps_, rows_read_, rows_written_, scrub_count_,
                           scrub_sum_});
    }

    std::uint64_t pages_left() const { return pages_.size() - untouched_ + free_.size(); }
    std::uint64_t pages_needed(std::uint64_t id, std::uint64_t chunk) const {
        const Request& request = requests_[id - 1];
        const std::uint64_t end =
            request.length + std::min(chunk, request.prompt + request.samples - request.length);
        return (end + kPageTokens - 1) / kPageTokens - request.table.size();
    }
    bool full(std::uint64_t id) const {
        return requests_[id - 1].prompt + requests_[id - 1].samples >= requests_[id - 1].rows_max;
    }
    std::vector<std::uint64_t>& table(std::uint64_t id) { return requests_[id - 1].table; }

    std::vector<Event> events;
    bool scrubs = true;
    std::vector<std::uint64_t> pages_next;  // what take_page() gives first

  private:
    struct Header {
        std::uint64_t tenant = 0, request = 0, generation = 0, page = 0;
        bool virgin = true;
    };
    struct Page {
        Header header;
        std::uint64_t last_generation = 0;
        bool used = false;
    };
    struct Request {
        std::uint64_t tenant = 0, prompt = 0, rows_max = 0;
        std::uint64_t length = 0, samples = 0, version = 0, witness = 0;
        bool sourced = false, crossed = false;
        std::vector<std::uint64_t> table;
    };

    static std::uint64_t mix(const Header& header) {
        return page_mix(static_cast<std::uint32_t>(header.tenant), header.request,
                        static_cast<std::uint32_t>(header.generation),
                        static_cast<std::uint32_t>(header.page));
    }
    void access(Request& request, std::uint64_t page, AccessKind kind, std::uint64_t rows) {
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
            for (std::uint32_t head = 0; head < kHeads; ++head) {
                request.witness +=
                    mix(pages_[page].header) * access_factor(layer, head, kind) * rows;
            }
        }
    }
    std::uint64_t take_page() {
        std::uint64_t page = 0;
        if (!pages_next.empty()) {
            page = pages_next.front();
            pages_next.erase(pages_next.begin());
        } else if (!free_.empty()) {
            page = free_.front();
            free_.pop_front();
        } else {
            page = untouched_++;
        }
        return page;
    }

    std::deque<std::string> names_;
    std::vector<Page> pages_;
    std::vector<Request> requests_;
    std::deque<std::uint64_t> free_, draining_;
    std::uint64_t untouched_ = 0;
    std::uint64_t steps_ = 0, rows_read_ = 0, rows_written_ = 0, scrub_count_ = 0, scrub_sum_ = 0;
};

inline Ledger fold(const std::vector<Event>& events, bool closed = true) {
    Ledger ledger;
    std::uint64_t number = 0;
    for (const Event& event : events) {
        ledger.apply(event, event.numbered() ? ++number : 0);
    }
    ledger.finish(closed);
    return ledger;
}

// Several tenants, chunked prefill, pages used again, cancels, refusals, preemptions.
inline void random_history(History& history, std::uint32_t seed, std::size_t steps,
                           std::size_t tenants) {
    std::mt19937 random(seed);
    const auto below = [&](std::uint64_t n) { return random() % n; };
    std::vector<std::uint64_t> known, active;
    for (std::size_t i = 0; i < steps; ++i) {
        if (known.size() < tenants && (known.empty() || below(4) == 0)) {
            known.push_back(history.tenant("tenant-" + std::to_string(known.size())));
        }
        if (active.size() < 6 && below(2) == 0) {
            const std::uint64_t id =
                history.submit(known[below(known.size())], 1 + below(70), 1 + below(40));
            if (below(8) == 0) {
                history.reject(id);
            } else if (below(12) == 0) {
                history.add(events::Cancel{id, 1});
                history.finish(id, FinishReason::cancelled);
            } else {
                history.admit(id);
                active.push_back(id);
            }
        }
        std::vector<std::uint64_t> batch;
        std::uint64_t pages = history.pages_left();
        const std::uint64_t chunk = 1 + below(40);
        for (const std::uint64_t id : active) {
            if (below(4) != 0 && history.pages_needed(id, chunk) <= pages) {
                pages -= history.pages_needed(id, chunk);
                batch.push_back(id);
            }
        }
        if (!batch.empty()) {
            history.step(batch, chunk);
        }
        std::erase_if(active, [&](std::uint64_t id) {
            if (history.full(id) || below(40) == 0) {
                history.finish(id,
                               history.full(id) ? FinishReason::length : FinishReason::cancelled);
                return true;
            }
            if (below(30) == 0) {
                history.preempt(id);
            }
            return false;
        });
        if (below(3) == 0) {
            history.clean_pages();
        }
    }
    for (const std::uint64_t id : active) {
        history.finish(id, FinishReason::cancelled);
    }
    history.end();
}

}  // namespace kvw
