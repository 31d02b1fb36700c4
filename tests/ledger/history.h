// Makes up the events of a run as an engine would emit them, from a model of its own: pages whose
// tiles carry headers, tables and a prefix tree that hold them, kernels that add up what they load
// row by row. Faults are planted by telling it to do something wrong, or by changing `events`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "src/base/witness_mix.h"
#include "src/ledger/ledger.h"
#include "traces/event.h"

namespace kvw {

class History {
  public:
    static constexpr std::uint32_t kLayers = 2, kHeads = 3;

    // decode_pages > 0: split roles, `pages` are those of the prefill pool.
    explicit History(std::uint64_t pages, std::uint64_t decode_pages = 0)
        : pages_(pages + decode_pages), prefill_pages_(pages), split_(decode_pages > 0) {
        add(events::Run{1, kPageTokens, 1});
        add(events::Model{1, 2, 3, 4, kLayers, kHeads, 16, 256, 4096, 1}, "history");
        add(events::Pool{0, 0, 0, pages, pages * kPageTokens});
        if (split_) {
            add(events::Pool{1, 0, pages, decode_pages, decode_pages * kPageTokens});
        }
        add(events::Config{1}, "{}");
        sides_[1].untouched = pages;
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

    // Where a request's prefix comes from and goes to. Prompts of one tenant that have the same
    // `text` begin with the same tokens. session: any number of the test's own; 0 = none.
    struct Sharing {
        std::uint64_t text = 0;
        std::uint64_t session = 0;
        CacheScope scope = CacheScope::tenant;
    };
    std::uint64_t submit(std::uint64_t tenant, std::uint64_t prompt, std::uint64_t tokens_max,
                         Sharing sharing) {
        const std::uint64_t id = requests_.size() + 1;
        std::uint64_t session = 0;
        if (sharing.session != 0) {
            session = sessions_.try_emplace({tenant, sharing.session}, sessions_.size() + 1)
                          .first->second;
        }
        requests_.push_back({.tenant = tenant,
                             .prompt = prompt,
                             .rows_max = prompt + tokens_max,
                             .text = sharing.text,
                             .session = session,
                             .scope = sharing.scope});
        add(events::Submit{id, tenant, prompt, tokens_max, id * 11, id * 13, session,
                           static_cast<std::uint64_t>(sharing.scope)});
        add(events::Sampling{id, 7, 0, 40, 0, 0, 0, 0, 0, 64, 0, 0});
        return id;
    }
    std::uint64_t submit(std::uint64_t tenant, std::uint64_t prompt, std::uint64_t tokens_max) {
        return submit(tenant, prompt, tokens_max, {.text = 1000 + requests_.size()});
    }
    void reject(std::uint64_t id) { add(events::Reject{id, 4, 100, 50, 64}); }
    // Takes what the prefix tree has of its prompt, too.
    void admit(std::uint64_t id) {
        Request& request = requests_[id - 1];
        add(events::Queue{id});
        const auto [first, second] = source(id, request.prompt);
        add(events::Admit{id, request.rows_max, first, second});
        reserve(id);
        for (std::uint64_t index = 0; index < matched(id); ++index) {
            adopt(id, tree_.at(key(request, index)));
        }
    }
    std::uint64_t begin(std::uint64_t tenant, std::uint64_t prompt, std::uint64_t tokens_max = 32) {
        const std::uint64_t id = submit(tenant, prompt, tokens_max);
        admit(id);
        return id;
    }
    std::uint64_t begin(std::uint64_t tenant, std::uint64_t prompt, Sharing sharing) {
        const std::uint64_t id = submit(tenant, prompt, 32, sharing);
        admit(id);
        return id;
    }
    // What the keyed digest of its first tokens would be.
    static std::array<std::uint64_t, 2> source(std::uint64_t id, std::uint64_t positions) {
        return {id * 17 + positions * 1000, id * 19 + positions * 1000};
    }

    // One step: each request goes on by at most `chunk` rows, and samples when all of them are
    // there. Then it shares what is full, if asked to.
    void step(const std::vector<std::uint64_t>& ids, std::uint64_t chunk = 1000) {
        add(events::Step{++steps_, ids.size()});
        for (const std::uint64_t id : ids) {
            Request& request = requests_[id - 1];
            const std::uint64_t count =
                std::min(chunk, request.prompt + request.samples - request.length);
            rows(id, count, request.length + count);
        }
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const std::uint64_t id = ids[i];
            witness(id);
            Request& request = requests_[id - 1];
            if (request.length == request.prompt + request.samples) {
                sample(id, i);
            }
            if (shares) {
                publish(id);
            }
        }
    }

    // Allocates what is missing up to row `end`, and does what a forward pass would.
    void rows(std::uint64_t id, std::uint64_t count, std::uint64_t end) {
        Request& request = requests_[id - 1];
        const std::size_t side = request.moved ? 1 : 0;
        std::vector<std::uint64_t>& table = request.tables[side];
        while (table.size() * kPageTokens < end) {
            alloc(id, take_page(side));
        }
        add(events::Rows{id, count, end, 0, request.version});
        for (std::uint64_t row = end - count; row < end; ++row) {
            access(request, table[row / kPageTokens], AccessKind::write, 1);
            rows_written_ += kLayers * kHeads;
            for (std::uint64_t page = 0; page * kPageTokens <= row; ++page) {
                const std::uint64_t seen =
                    std::min<std::uint64_t>(row + 1 - page * kPageTokens, kPageTokens);
                access(request, table[page], AccessKind::read, seen);
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
    // place: of its rows in the step.
    void sample(std::uint64_t id, std::uint64_t place = 0) {
        Request& request = requests_[id - 1];
        add(events::Slot{id, place, id, steps_});
        if (!request.sourced) {
            const auto [first, second] = source(id, request.length);
            add(events::Sourced{id, request.length, first, second});
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
        memory.holders = 1;
        std::vector<std::uint64_t>& table = request.tables[side_of(page)];
        add(events::PoisonCheck{page, 24, 0});
        add(events::Alloc{id, 0, table.size(), page, ++memory.last_generation});
        memory.header = {request.tenant, id, memory.last_generation, page, false};
        table.push_back(page);
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

    // ---- the prefix tree

    // Its full pages that nobody offers yet.
    void publish(std::uint64_t id) {
        Request& request = requests_[id - 1];
        if (request.scope == CacheScope::request || request.moved) {
            return;
        }
        for (std::uint64_t index = 0; (index + 1) * kPageTokens <= request.length; ++index) {
            const Key at = key(request, index);
            if (!tree_.contains(at)) {
                share(id, index, at);
            }
        }
    }
    void share(std::uint64_t id, std::uint64_t index) {
        share(id, index, key(requests_[id - 1], index));
    }
    void adopt(std::uint64_t id, std::uint64_t page) {
        Request& request = requests_[id - 1];
        const std::uint64_t index = request.tables[0].size();
        const auto [first, second] = digest(request, index);
        add(events::Adopt{id, index, page, pages_[page].header.generation, first, second});
        ++pages_[page].holders;
        request.tables[0].push_back(page);
        request.length += kPageTokens;
        request.adopted += kPageTokens;
        ++request.version;
    }
    // Lets go of the pages that stand in no table, `most` of them.
    void evict(std::size_t most = 1000) {
        std::vector<Key> leaving;
        for (const auto& [at, page] : tree_) {
            if (leaving.size() < most && pages_[page].holders == 1) {
                leaving.push_back(at);
            }
        }
        for (const Key& at : leaving) {
            evict_page(tree_.at(at));
        }
    }
    void evict_page(std::uint64_t page) {
        add(events::Evict{page, pages_[page].header.generation});
        std::erase_if(tree_, [&](const auto& entry) { return entry.second == page; });
        drop(page);
    }
    std::size_t tree_pages() const { return tree_.size(); }
    std::uint64_t matched(std::uint64_t id) const {
        const Request& request = requests_[id - 1];
        std::uint64_t count = 0;
        while (request.scope != CacheScope::request && (count + 1) * kPageTokens < request.prompt &&
               tree_.contains(key(request, count))) {
            ++count;
        }
        return count;
    }

    // ---- split roles

    // Moves up to `pages` pages' worth of rows; true when all are there.
    bool transfer(std::uint64_t id, std::uint64_t pages = 1000) {
        Request& request = requests_[id - 1];
        const std::uint64_t end = std::min(request.length, request.received + pages * kPageTokens);
        while (request.tables[1].size() * kPageTokens < end) {
            alloc(id, take_page(1));
        }
        add(events::Transfer{id, end - request.received, end, request.version});
        for (std::uint64_t row = request.received; row < end; ++row) {
            access(request, request.tables[0][row / kPageTokens], AccessKind::move, 1);
            access(request, request.tables[1][row / kPageTokens], AccessKind::write, 1);
            rows_read_ += kLayers * kHeads;
            rows_written_ += kLayers * kHeads;
        }
        request.received = end;
        witness(id);
        if (end < request.length) {
            return false;
        }
        request.moved = true;
        free_table(id, 0, FreeReason::transferred);
        return true;
    }
    bool can_move(std::uint64_t id) const {
        const Request& request = requests_[id - 1];
        return split_ && !request.moved && request.samples > 0 &&
               request.length + 1 == request.prompt + request.samples;
    }
    bool moving(std::uint64_t id) const {
        return !requests_[id - 1].moved && requests_[id - 1].received > 0;
    }

    // ---- ends

    void let_go(std::uint64_t id, FreeReason reason) {
        free_table(id, 0, reason);
        free_table(id, 1, reason);
    }
    void preempt(std::uint64_t id) {
        Request& request = requests_[id - 1];
        const std::uint64_t positions = request.prompt + request.samples;
        const auto [first, second] = source(id, positions);
        add(events::Preempt{id, positions, first, second});
        let_go(id, FreeReason::preempted);
        request.length = request.received = 0;
        request.sourced = request.moved = false;
        request.waiting = true;
    }
    void resume(std::uint64_t id) {
        requests_[id - 1].waiting = false;
        add(events::Resume{id});
        reserve(id);
    }
    void finish(std::uint64_t id, FinishReason reason = FinishReason::stop) {
        Request& request = requests_[id - 1];
        if (request.samples > 0) {
            if (!request.waiting) {
                add(events::Layer{id, 3, 0, 98});
            }
            add(events::Rendered{id, request.samples * 3, id * 29, id * 31});
            add(events::Emitted{id, request.samples * 3, id * 29, id * 31});
            if (!request.waiting) {
                add(events::WitnessSum{id, request.length, request.witness});
            }
        }
        add(events::Finish{id, static_cast<std::uint64_t>(reason), request.prompt, request.samples,
                           request.samples * 3, 5, 6, request.witness, request.adopted});
        switch (reason) {
            case FinishReason::cancelled:
            case FinishReason::deadline:
                return let_go(id, FreeReason::cancelled);
            case FinishReason::error:
                return let_go(id, FreeReason::error);
            case FinishReason::violation:
                return let_go(id, FreeReason::violation);
            default:
                return let_go(id, FreeReason::finished);
        }
    }
    void clean_pages() {
        for (const std::uint64_t page : draining_) {
            add(events::Drain{page});
            if (scrubs) {
                scrub(page);
            }
            sides_[side_of(page)].free.push_back(page);
        }
        draining_.clear();
    }
    void end() {
        evict();
        clean_pages();
        add(events::RunEnd{requests_.size(), steps_, rows_read_, rows_written_, scrub_count_,
                           scrub_sum_});
    }

    std::uint64_t pages_left(std::size_t side = 0) const {
        const std::uint64_t end = side == 0 ? prefill_pages_ : pages_.size();
        return end - sides_[side].untouched + sides_[side].free.size();
    }
    std::uint64_t pages_needed(std::uint64_t id, std::uint64_t chunk) const {
        const Request& request = requests_[id - 1];
        const std::uint64_t end =
            request.length + std::min(chunk, request.prompt + request.samples - request.length);
        const std::uint64_t pages = (end + kPageTokens - 1) / kPageTokens;
        const std::size_t there = request.tables[request.moved ? 1 : 0].size();
        return pages > there ? pages - there : 0;
    }
    std::size_t side(std::uint64_t id) const { return requests_[id - 1].moved ? 1 : 0; }
    bool full(std::uint64_t id) const {
        return requests_[id - 1].prompt + requests_[id - 1].samples >= requests_[id - 1].rows_max;
    }
    bool waiting(std::uint64_t id) const { return requests_[id - 1].waiting; }
    bool split() const { return split_; }
    std::vector<std::uint64_t>& table(std::uint64_t id, std::size_t side = 0) {
        return requests_[id - 1].tables[side];
    }
    std::uint64_t length(std::uint64_t id) const { return requests_[id - 1].length; }

    std::vector<Event> events;
    bool scrubs = true;
    bool shares = false;                    // step() publishes
    std::vector<std::uint64_t> pages_next;  // what take_page() gives first

  private:
    // tenant, session (0: the tenant's), text, index
    using Key = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
    struct Header {
        std::uint64_t tenant = 0, request = 0, generation = 0, page = 0;
        bool virgin = true;
    };
    struct Page {
        Header header;
        std::uint64_t last_generation = 0;
        std::uint64_t holders = 0;  // tables, and the prefix tree
        bool used = false;
    };
    struct Request {
        std::uint64_t tenant = 0, prompt = 0, rows_max = 0;
        std::uint64_t text = 0, session = 0;
        CacheScope scope{};
        std::uint64_t length = 0, received = 0, samples = 0, version = 0, witness = 0, adopted = 0;
        bool sourced = false, crossed = false, moved = false, waiting = false;
        std::array<std::vector<std::uint64_t>, 2> tables{};
    };
    struct Side {
        std::deque<std::uint64_t> free;
        std::uint64_t untouched = 0;
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
    std::size_t side_of(std::uint64_t page) const { return page < prefill_pages_ ? 0 : 1; }
    std::uint64_t take_page(std::size_t side) {
        std::uint64_t page = 0;
        if (!pages_next.empty()) {
            page = pages_next.front();
            pages_next.erase(pages_next.begin());
        } else if (!sides_[side].free.empty()) {
            page = sides_[side].free.front();
            sides_[side].free.pop_front();
        } else {
            page = sides_[side].untouched++;
        }
        return page;
    }
    void reserve(std::uint64_t id) {
        const Request& request = requests_[id - 1];
        add(events::Reserve{id, 0, (request.rows_max + kPageTokens - 1) / kPageTokens});
        if (split_) {
            add(events::Reserve{id, 1, (request.rows_max + kPageTokens - 1) / kPageTokens});
        }
    }
    // Tokens behind the prompt are nobody else's.
    static Key key(const Request& request, std::uint64_t index) {
        const bool prompt = (index + 1) * kPageTokens <= request.prompt;
        return {request.tenant, request.scope == CacheScope::session ? request.session : 0,
                prompt ? request.text : 1'000'000 + request.text * 1000 + request.prompt, index};
    }
    static std::array<std::uint64_t, 2> digest(const Request& request, std::uint64_t index) {
        const auto [tenant, session, text, at] = key(request, index);
        return {tenant * 1'000'003 + text * 101 + at, mix64(tenant + text * 7 + at * 13)};
    }
    void share(std::uint64_t id, std::uint64_t index, const Key& at) {
        const Request& request = requests_[id - 1];
        const std::uint64_t page = request.tables[0][index];
        if (pages_[page].header.request != id) {
            return;
        }
        const auto [first, second] = digest(request, index);
        add(events::Share{id, index, page, pages_[page].header.generation,
                          static_cast<std::uint64_t>(request.scope), first, second});
        tree_[at] = page;
        ++pages_[page].holders;
    }
    void drop(std::uint64_t page) {
        if (--pages_[page].holders == 0) {
            draining_.push_back(page);
        }
    }
    void free_table(std::uint64_t id, std::size_t side, FreeReason reason) {
        Request& request = requests_[id - 1];
        for (const std::uint64_t page : request.tables[side]) {
            add(events::Free{id, page, static_cast<std::uint64_t>(reason)});
            drop(page);
        }
        request.tables[side].clear();
    }

    std::deque<std::string> names_;
    std::vector<Page> pages_;
    std::vector<Request> requests_;
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> sessions_;
    std::map<Key, std::uint64_t> tree_;
    std::array<Side, 2> sides_;
    std::deque<std::uint64_t> draining_;
    std::uint64_t prefill_pages_ = 0;
    bool split_ = false;
    std::uint64_t steps_ = 0, rows_read_ = 0, rows_written_ = 0, scrub_count_ = 0, scrub_sum_ = 0;
};

inline Ledger fold(const std::vector<Event>& events, bool closed = true,
                   const LedgerOptions& options = {}) {
    Ledger ledger(options);
    std::uint64_t number = 0;
    for (const Event& event : events) {
        ledger.apply(event, event.numbered() ? ++number : 0);
    }
    ledger.finish(closed);
    return ledger;
}

// Several tenants with sessions, chunked prefill, pages used again, cancels, refusals, preemptions;
// with history.shares prefixes in common, and with two pools transfers.
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
            const std::uint64_t session = below(3);
            const CacheScope scope = below(8) == 0                   ? CacheScope::request
                                     : session != 0 && below(3) == 0 ? CacheScope::session
                                                                     : CacheScope::tenant;
            const std::uint64_t id =
                history.submit(known[below(known.size())], 1 + below(90), 1 + below(40),
                               {.text = below(2), .session = session, .scope = scope});
            if (below(8) == 0) {
                history.reject(id);
            } else if (below(12) == 0) {
                history.add(events::Cancel{id, 3});
                history.finish(id, FinishReason::cancelled);
            } else {
                history.admit(id);
                active.push_back(id);
            }
        }
        std::vector<std::uint64_t> batch;
        std::array<std::uint64_t, 2> pages{history.pages_left(0), history.pages_left(1)};
        const std::uint64_t chunk = 1 + below(40);
        for (const std::uint64_t id : active) {
            const std::size_t side = history.side(id);
            if (history.waiting(id)) {
                if (below(3) == 0) {
                    history.resume(id);
                }
            } else if (history.can_move(id)) {
                const std::uint64_t needed = history.length(id) / kPageTokens + 1;
                if (below(3) != 0 && needed <= pages[1]) {
                    history.transfer(id, 1 + below(3));
                    pages[1] -= needed;
                }
            } else if (below(4) != 0 && history.pages_needed(id, chunk) <= pages[side]) {
                pages[side] -= history.pages_needed(id, chunk);
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
            if (!history.waiting(id) && below(30) == 0) {
                history.preempt(id);
            }
            return false;
        });
        if (history.pages_left() < 6 || below(20) == 0) {
            history.evict(1 + below(4));
        }
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
