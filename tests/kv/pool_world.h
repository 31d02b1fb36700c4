// A small pool with real tiles, what a forward pass does with it, and the pool as one would write
// it on a blackboard.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/kv/fault_plan.h"
#include "src/kv/page_pool.h"
#include "traces/schema.h"

namespace kvw::test {

inline constexpr TileShape kShape{.layers = 2, .heads = 1, .head_dim = 16};
inline constexpr Owner kA{TenantId{1}, RequestId{1}};
inline constexpr Owner kB{TenantId{2}, RequestId{2}};
inline constexpr Owner kA3{TenantId{1}, RequestId{3}};  // another request of the first tenant

inline std::unique_ptr<PagePool> make_pool(EventSink& sink, std::uint64_t rows,
                                           const FaultPlan& faults = {},
                                           std::uint64_t prefill_rows = 0) {
    auto pool = PagePool::create(
        {.shape = kShape, .rows_max = rows, .prefill_rows = prefill_rows, .shadow_writers = true},
        *kernels_for(Isa::ref), sink, &faults);
    REQUIRE(pool);
    return std::move(*pool);
}

// The value that a request stores for a position: exact in f16 and different from its neighbours'.
inline float stamp(Owner owner, std::uint32_t position) {
    return static_cast<float>(number(owner.request) % 32 * 64 + position % 64 + 1);
}

// What a forward pass does with a lease: stores a row per new token in every tile, then attends.
// Returns what attention gave, [layer][row][head_dim].
inline std::vector<float> compute(PagePool& pool, Lease& lease, const std::vector<float>& rows,
                                  const Kernels& kernels = *kernels_for(Isa::ref),
                                  bool checked = true) {
    const auto append = checked ? kernels.append_checked : kernels.append;
    const auto attend = checked ? kernels.attend_checked : kernels.attend;
    std::vector<float> all;
    std::vector<float> out(rows.size());
    const SequenceView view = lease.view(0, lease.count());
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        append(pool.memory(), view, layer, 0, rows.data(), rows.data());
        const AttentionArgs args{.memory = pool.memory(),
                                 .layer = layer,
                                 .query_heads = kShape.heads,
                                 .q = rows.data(),
                                 .out = out.data()};
        attend(args, {.sequence = &view, .row_begin = 0, .row_end = lease.count()});
        all.insert(all.end(), out.begin(), out.end());
    }
    return all;
}
inline void compute(PagePool& pool, Lease& lease, const Kernels& kernels = *kernels_for(Isa::ref),
                    bool checked = true) {
    std::vector<float> rows;
    for (std::uint32_t t = 0; t < lease.count(); ++t) {
        rows.insert(rows.end(), kShape.head_dim, stamp(lease.owner(), lease.first() + t));
    }
    compute(pool, lease, rows, kernels, checked);
}

inline bool write(PagePool& pool, Owner owner, std::uint32_t first, std::uint32_t count) {
    pool.extend(owner, first + count);
    Lease lease = pool.open(owner, first, count);
    compute(pool, lease);
    return pool.settle(std::move(lease));
}

inline float stored(const KvMemory& memory, std::uint32_t page, std::uint32_t layer,
                    std::uint32_t row) {
    const std::uint16_t half = tile_keys(memory.tile(page, layer, 0))[5 * kPageTokens + row];
    const int exponent = (half >> 10) & 31;
    return std::ldexp(static_cast<float>((half & 0x3ff) | 0x400), exponent - 25);
}

// Exit status of a child process that runs `body`: 7 when a check failed.
template <class Body>
int status_of_child(Body body) {
    const pid_t child = fork();
    if (child == 0) {
        std::fclose(stderr);
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Keeps events as they are.
class Recording final : public EventSink {
  public:
    void note(const Event& event) override { events.push_back(event); }
    void text(const TextRecord&) override {}
    Status commit() override { return {}; }
    std::vector<Event> events;
};

// ---- a naive model

// Lists of pages, tables of requests, and the value of each row. Everything that can be counted is
// counted when it is asked for.
struct NaivePool {
    enum class Where { virgin, free, used, draining, lost };
    struct Page {
        Where where = Where::virgin;
        Owner owner;
        std::uint32_t generation = 0;
        std::vector<float> rows;
        bool published = false, quarantined = false;
    };
    struct Request {
        Owner owner;
        std::array<std::uint32_t, 2> reserved{};
        std::array<std::vector<std::uint32_t>, 2> table;
        std::size_t side = 0;  // whose table is read
        std::uint32_t rows = 0, received = 0, adopted = 0;
        std::uint64_t version = 0, witness = 0;
    };
    std::array<std::uint32_t, 3> first{};  // pages of side s: [first[s], first[s + 1])
    std::vector<Page> pages;
    std::array<std::deque<std::uint32_t>, 2> free;  // in the order in which they are handed out
    std::deque<std::uint32_t> draining;
    std::map<std::uint64_t, Request> requests;
    std::uint64_t rows_read = 0, rows_written = 0, scrubs = 0, scrub_witness = 0;
    std::vector<Event> events;

    explicit NaivePool(const PagePool& pool) {
        first[1] = pool.pages_total(PoolSide::prefill);
        first[2] = first[1] + pool.pages_total(PoolSide::decode);
        pages.resize(first[2]);
    }

    Request& of(Owner owner) { return requests[number(owner.request)]; }
    template <class T>
    void note(const T& event) {
        events.push_back(Event::of(event));
    }

    std::uint32_t allocatable(std::size_t side) const {
        std::uint32_t count = 0;
        for (std::uint32_t page = first[side]; page < first[side + 1]; ++page) {
            count += pages[page].where == Where::virgin || pages[page].where == Where::free;
        }
        for (const auto& [id, request] : requests) {
            count -= request.reserved[side];
        }
        return count;
    }
    // Of each page, how many tables it stands in.
    std::vector<std::uint32_t> holders() const {
        std::vector<std::uint32_t> counts(pages.size());
        for (const auto& [id, request] : requests) {
            for (const auto& table : request.table) {
                for (const std::uint32_t page : table) {
                    ++counts[page];
                }
            }
        }
        return counts;
    }
    std::size_t quarantined() const {
        return static_cast<std::size_t>(std::count_if(
            pages.begin(), pages.end(), [](const Page& page) { return page.quarantined; }));
    }
    std::uint64_t mix(std::uint32_t page) const {
        return page_mix(number(pages[page].owner.tenant), number(pages[page].owner.request),
                        pages[page].generation, page);
    }
    // Of `rows` rows in every tile of a page.
    std::uint64_t witness(std::uint32_t page, AccessKind kind, std::uint64_t rows) const {
        std::uint64_t sum = 0;
        for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
            sum += mix(page) * access_factor(layer, 0, kind) * rows;
        }
        return sum;
    }

    void reserve(Owner owner, std::uint32_t count, std::size_t side) {
        of(owner).owner = owner;
        of(owner).reserved[side] += count;
        note(events::Reserve{number(owner.request), side, count});
    }
    void scrub(std::uint32_t page) {
        std::uint64_t sum = witness(page, AccessKind::scrub, kPageTokens);
        if (pages[page].where == Where::virgin) {  // its headers are all zero, layer too
            sum = page_mix(0, 0, 0, 0) * access_factor(0, 0, AccessKind::scrub) * kPageTokens *
                  kShape.layers;
        }
        ++scrubs;
        scrub_witness += sum;
        note(events::Scrub{page, sum & 0xffffffff});
        pages[page].where = Where::free;
        pages[page].rows.clear();
        pages[page].owner = {};
    }
    void allocate(Request& request, std::size_t side) {
        std::uint32_t page = first[side];
        if (!free[side].empty()) {
            page = free[side].front();
            free[side].pop_front();
        } else {
            while (pages[page].where != Where::virgin) {
                ++page;
            }
            scrub(page);
        }
        --request.reserved[side];
        pages[page] = {
            .where = Where::used, .owner = request.owner, .generation = pages[page].generation + 1};
        note(events::PoisonCheck{page, 4 * kShape.layers, 0});
        note(events::Alloc{number(request.owner.request), 0, request.table[side].size(), page,
                           pages[page].generation});
        request.table[side].push_back(page);
        ++request.version;
    }
    void write(Owner owner, std::uint32_t count) {
        Request& request = of(owner);
        std::vector<std::uint32_t>& table = request.table[request.side];
        while (table.size() * kPageTokens < request.rows + count) {
            allocate(request, request.side);
        }
        const std::uint32_t before = request.rows;
        note(events::Rows{number(owner.request), count, before + count, 0, request.version});
        for (; request.rows < before + count; ++request.rows) {
            const std::uint32_t own = request.rows / kPageTokens;
            pages[table[own]].rows.push_back(stamp(owner, request.rows));
            request.witness += witness(table[own], AccessKind::write, 1);
            rows_written += kShape.layers;
            for (std::uint32_t index = 0; index <= own; ++index) {
                const std::uint32_t seen =
                    index < own ? kPageTokens : request.rows % kPageTokens + 1;
                request.witness += witness(table[index], AccessKind::read, seen);
                rows_read += kShape.layers * seen;
            }
        }
        note(events::Witness{number(owner.request), request.witness & 0xffffffff});
        if (before / kWitnessInterval != request.rows / kWitnessInterval) {
            note(events::WitnessSum{number(owner.request), request.rows, request.witness});
        }
    }
    void publish(Owner owner, std::uint32_t index, CacheScope scope, PrefixDigest digest) {
        const std::uint32_t page = of(owner).table[0][index];
        pages[page].published = true;
        note(events::Share{number(owner.request), index, page, pages[page].generation,
                           static_cast<std::uint64_t>(scope), digest[0], digest[1]});
    }
    void adopt(Owner owner, std::uint32_t page, PrefixDigest digest) {
        Request& request = of(owner);
        note(events::Adopt{number(owner.request), request.table[0].size(), page,
                           pages[page].generation, digest[0], digest[1]});
        request.table[0].push_back(page);
        request.rows += kPageTokens;
        ++request.adopted;
        ++request.version;
    }
    void put_away_if_unheld(std::uint32_t number_of_page) {
        Page& page = pages[number_of_page];
        if (page.where != Where::used || page.published || holders()[number_of_page] > 0) {
            return;
        }
        if (page.quarantined) {
            page.where = Where::lost;
            note(events::Quarantine{number_of_page});
        } else {
            page.where = Where::draining;
            draining.push_back(number_of_page);
            note(events::Drain{number_of_page});
        }
    }
    void evict(std::uint32_t page, bool quarantine) {
        pages[page].published = false;
        pages[page].quarantined |= quarantine;
        note(events::Evict{page, pages[page].generation});
        put_away_if_unheld(page);
    }
    void note_frees(const Request& request, std::size_t side, FreeReason reason) {
        for (const std::uint32_t page : request.table[side]) {
            note(events::Free{number(request.owner.request), page,
                              static_cast<std::uint64_t>(reason)});
        }
    }
    void drop(Request& request, std::size_t side) {
        request.reserved[side] = 0;
        while (!request.table[side].empty()) {
            const std::uint32_t page = request.table[side].front();
            request.table[side].erase(request.table[side].begin());
            put_away_if_unheld(page);
        }
    }
    void let_go(Owner owner, FreeReason reason, bool quarantine) {
        Request& request = of(owner);
        note_frees(request, 0, reason);
        note_frees(request, 1, reason);
        for (std::uint32_t page = 0; quarantine && page < pages.size(); ++page) {
            if (pages[page].where == Where::used && pages[page].owner == owner) {
                pages[page].quarantined = true;
                if (pages[page].published) {
                    evict(page, true);
                }
            }
        }
        drop(request, 0);
        drop(request, 1);
        if (reason == FreeReason::preempted) {
            request = {.owner = owner, .version = request.version, .witness = request.witness};
        } else {
            requests.erase(number(owner.request));
        }
    }
    void transfer(Owner owner, std::uint32_t pages_max) {
        Request& request = of(owner);
        const std::uint32_t begin = request.received;
        request.received = std::min(request.rows, begin + pages_max * kPageTokens);
        while (request.table[1].size() * kPageTokens < request.received) {
            allocate(request, 1);
        }
        note(events::Transfer{number(owner.request), request.received - begin, request.received,
                              request.version});
        for (std::uint32_t position = begin; position < request.received; ++position) {
            const std::uint32_t from = request.table[0][position / kPageTokens];
            const std::uint32_t to = request.table[1][position / kPageTokens];
            pages[to].rows.push_back(pages[from].rows[position % kPageTokens]);
            request.witness += witness(from, AccessKind::move, 1);
            request.witness += witness(to, AccessKind::write, 1);
            rows_read += kShape.layers;
            rows_written += kShape.layers;
        }
        note(events::Witness{number(owner.request), request.witness & 0xffffffff});
        if (request.received == request.rows) {
            request.side = 1;
            note_frees(request, 0, FreeReason::transferred);
            drop(request, 0);
        }
    }
    void scrub_drained(std::uint32_t most) {
        for (; most > 0 && !draining.empty(); --most) {
            const std::uint32_t page = draining.front();
            draining.pop_front();
            scrub(page);
            free[page < first[1] ? 0 : 1].push_back(page);
        }
    }
};

// What the two have in common with each other and with memory; "" when it is everything.
inline std::string difference(const PagePool& pool, const NaivePool& naive) {
    for (const std::size_t side : {0, 1}) {
        if (pool.pages_allocatable(PoolSide(side)) != naive.allocatable(side)) {
            return "allocatable pages of side " + std::to_string(side);
        }
    }
    if (pool.pages_draining() != naive.draining.size()) {
        return "draining pages";
    }
    const PagePool::Counters counters = pool.counters();
    if (counters.rows_read != naive.rows_read || counters.rows_written != naive.rows_written ||
        counters.scrubs != naive.scrubs || counters.scrub_witness != naive.scrub_witness) {
        return "counters";
    }
    for (const auto& [id, request] : naive.requests) {
        const std::string who = " of request " + std::to_string(id);
        const Owner owner = request.owner;
        const auto table = pool.table(owner);
        const auto& expected = request.table[request.side];
        if (!std::equal(table.begin(), table.end(), expected.begin(), expected.end(),
                        [&](const PageRef& entry, std::uint32_t page) {
                            return entry.page == page &&
                                   entry.generation == naive.pages[page].generation &&
                                   entry.writer(owner.request) == naive.pages[page].owner.request;
                        })) {
            return "table" + who;
        }
        if (pool.rows_held(owner) != request.rows) {
            return "rows" + who;
        }
        if (pool.running_witness(owner) != request.witness) {
            return "witness" + who;
        }
        if (pool.reserved(owner, PoolSide::prefill) != request.reserved[0] ||
            pool.reserved(owner, PoolSide::decode) != request.reserved[1]) {
            return "reservation" + who;
        }
        if (pool.finding(owner) != nullptr) {
            return "finding" + who;
        }
    }
    const KvMemory memory = pool.memory();
    const std::vector<std::uint32_t> holders = naive.holders();
    for (std::uint32_t number_of_page = 0; number_of_page < memory.pages; ++number_of_page) {
        const NaivePool::Page& page = naive.pages[number_of_page];
        const std::string what = " of page " + std::to_string(number_of_page);
        if (pool.holders(number_of_page) != holders[number_of_page]) {
            return "holders" + what;
        }
        if (page.where == NaivePool::Where::virgin) {
            continue;
        }
        for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
            const TileHeader& header = *tile_header(memory.tile(number_of_page, layer, 0));
            const bool freed = page.where == NaivePool::Where::free;
            if (header.request != number(page.owner.request) ||
                header.tenant != number(page.owner.tenant) ||
                header.generation != page.generation || header.rows_written != page.rows.size() ||
                header.state != (freed ? TileState::freed : TileState::owned)) {
                return "header" + what;
            }
            for (std::uint32_t row = 0; row < kPageTokens; ++row) {
                const std::uint64_t writer =
                    memory.writers[memory.tile_index(number_of_page, layer, 0) * kPageTokens + row];
                if (row < page.rows.size()) {
                    if (stored(memory, number_of_page, layer, row) != page.rows[row] ||
                        writer != number(page.owner.request)) {
                        return "row " + std::to_string(row) + what;
                    }
                } else if (writer != 0 ||
                           tile_keys(memory.tile(number_of_page, layer,
                                                 0))[5 * kPageTokens + row] != kPoisonHalf ||
                           tile_values(memory.tile(number_of_page, layer, 0),
                                       kShape)[row * kShape.head_dim + 7] != kPoisonHalf) {
                    return "poison in row " + std::to_string(row) + what;
                }
            }
        }
    }
    return "";
}

// The events of both since the last call, which are then forgotten.
inline std::string difference_of_events(Recording& noted, NaivePool& naive) {
    std::string found;
    for (std::size_t i = 0; i < std::max(noted.events.size(), naive.events.size()); ++i) {
        const std::string is = i < noted.events.size() ? to_text(noted.events[i]) : "nothing";
        const std::string expected = i < naive.events.size() ? to_text(naive.events[i]) : "nothing";
        if (is != expected) {
            found = "noted " + is + ", expected " + expected;
            break;
        }
    }
    noted.events.clear();
    naive.events.clear();
    return found;
}

// ---- what any stream of page events must keep to, known from the events alone

class PageRules {
  public:
    // "" when the event may follow those before it.
    std::string apply(const Event& event) {
        switch (event.kind) {
            case EventKind::alloc: {
                const auto alloc = event.as<events::Alloc>();
                Page& page = pages_[alloc.page];
                const bool right = page.state == State::scrubbed && page.looked_at &&
                                   alloc.generation == page.generation + 1;
                page = {.state = State::used,
                        .owner = alloc.request,
                        .generation = alloc.generation,
                        .tables = 1};
                ++versions_[alloc.request];
                return right ? "" : "alloc of a page that is not clean";
            }
            case EventKind::poison_check:
                pages_[event.fields[0]].looked_at = true;
                return event.fields[2] == 0 ? "" : "poison is gone";
            case EventKind::share: {
                const auto share = event.as<events::Share>();
                Page& page = pages_[share.page];
                const bool right = page.state == State::used && page.owner == share.request &&
                                   page.generation == share.generation && !page.shared;
                page.shared = true;
                return right ? "" : "share of a page that is not the request's own";
            }
            case EventKind::adopt: {
                const auto adopt = event.as<events::Adopt>();
                Page& page = pages_[adopt.page];
                ++page.tables;
                ++versions_[adopt.request];
                return page.shared && page.generation == adopt.generation
                           ? ""
                           : "adopt of a page that is not shared";
            }
            case EventKind::evict: {
                Page& page = pages_[event.fields[0]];
                const bool right = page.shared && page.generation == event.fields[1];
                page.shared = false;
                return right ? "" : "evict of a page that is not shared";
            }
            case EventKind::free: {
                Page& page = pages_[event.fields[1]];
                return page.tables-- > 0 ? "" : "free of a page in no table";
            }
            case EventKind::drain:
            case EventKind::quarantine: {
                Page& page = pages_[event.fields[0]];
                const bool right = page.state == State::used && page.tables == 0 && !page.shared;
                page.state = event.kind == EventKind::drain ? State::drained : State::lost;
                return right ? "" : "a page that somebody holds is put away";
            }
            case EventKind::scrub: {
                Page& page = pages_[event.fields[0]];
                const bool right = page.state == State::virgin || page.state == State::drained;
                page.state = State::scrubbed;
                return right ? "" : "scrub of a page that is in use";
            }
            case EventKind::rows:
                return event.fields[4] == versions_[event.fields[0]] ? "" : "rows of a wrong table";
            case EventKind::transfer:
                return event.fields[3] == versions_[event.fields[0]] ? ""
                                                                     : "transfer of a wrong table";
            default:
                return "";
        }
    }

  private:
    enum class State { virgin, scrubbed, used, drained, lost };
    struct Page {
        State state = State::virgin;
        std::uint64_t owner = 0, generation = 0;
        int tables = 0;
        bool shared = false, looked_at = false;
    };
    std::map<std::uint64_t, Page> pages_;
    std::map<std::uint64_t, std::uint64_t> versions_;  // by request: changes of its tables
};

}  // namespace kvw::test
