#include "src/kv/prefix_tree.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/kv/pool_world.h"

namespace kvw {
namespace {

using namespace test;

using Tokens = std::vector<std::int32_t>;

Owner owner_of(std::uint32_t tenant, std::uint64_t request) {
    return {TenantId{tenant}, RequestId{request}};
}

// Pages whose tokens are all 7 but the first and last, which say which page it is: two bits each.
Tokens prompt_of(const std::vector<std::uint32_t>& pages, std::uint32_t more) {
    Tokens tokens;
    for (const std::uint32_t page : pages) {
        tokens.insert(tokens.end(), kPageTokens, 7);
        tokens[tokens.size() - kPageTokens] = static_cast<std::int32_t>(page & 1);
        tokens.back() = static_cast<std::int32_t>(page >> 1);
    }
    tokens.insert(tokens.end(), more, 9);
    return tokens;
}

std::vector<PrefixDigest> digests_of(const Tokens& tokens) {
    std::vector<PrefixDigest> digests;
    std::uint64_t sum = 1;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        sum = mix64(sum + static_cast<std::uint64_t>(tokens[i]));
        if (i % kPageTokens == kPageTokens - 1) {
            digests.push_back({sum, ~sum});
        }
    }
    return digests;
}

// A pool and its tree, and requests that do all that the tree wants of them.
struct Cache {
    NullSink events;
    std::unique_ptr<PagePool> pool;
    PrefixTree tree;
    explicit Cache(std::uint32_t pages)
        : pool(make_pool(events, std::uint64_t{pages} * kPageTokens)), tree(*pool) {}

    std::uint32_t begin(Owner owner, const PrefixNamespace& space, const Tokens& tokens) {
        const std::uint32_t matched = tree.match(space, tokens);
        REQUIRE(
            pool->reserve(owner, static_cast<std::uint32_t>((tokens.size() + 15) / 16) - matched));
        const Tokens ids = tree.adopt(owner, space, tokens, matched, digests_of(tokens));
        REQUIRE(ids == Tokens(tokens.begin(), tokens.begin() + matched * kPageTokens));
        return matched;
    }
    void compute_rest(Owner owner, const Tokens& tokens) {
        const auto first = static_cast<std::uint32_t>(pool->rows_held(owner));
        REQUIRE(write(*pool, owner, first, static_cast<std::uint32_t>(tokens.size()) - first));
    }
    void publish(Owner owner, const PrefixNamespace& space, const Tokens& tokens) {
        tree.publish(owner, space, space.session == 0 ? CacheScope::tenant : CacheScope::session,
                     tokens, digests_of(tokens));
    }
    // From the first token to the last; how many pages it adopted.
    std::uint32_t run(Owner owner, const PrefixNamespace& space, const Tokens& tokens) {
        const std::uint32_t matched = begin(owner, space, tokens);
        compute_rest(owner, tokens);
        publish(owner, space, tokens);
        pool->release(owner, FreeReason::finished);
        return matched;
    }
};

TEST_CASE("one tenant twice shares its full pages, two tenants with the same prompt share none") {
    Cache cache(32);
    const Tokens prompt = prompt_of({0, 1, 2}, 5);
    CHECK(cache.run(owner_of(1, 1), {TenantId{1}}, prompt) == 0);
    CHECK(cache.run(owner_of(2, 2), {TenantId{2}}, prompt) == 0);
    CHECK(cache.run(owner_of(1, 3), {TenantId{1}}, prompt) == 3);
    CHECK(cache.run(owner_of(2, 4), {TenantId{2}}, prompt) == 3);
    CHECK(cache.tree.pages() == 6);
}

TEST_CASE("no two namespaces look alike, however their numbers are written side by side") {
    Cache cache(64);
    const Tokens prompt = prompt_of({3, 3}, 1);
    const PrefixNamespace spaces[] = {{TenantId{1}, 23},  {TenantId{12}, 3},
                                      {TenantId{123}, 0}, {TenantId{1}, 0},
                                      {TenantId{12}, 0},  {TenantId{1}, 2},
                                      {TenantId{2}, 1},   {TenantId{1}, std::uint64_t{1} << 32}};
    std::uint64_t request = 0;
    for (const PrefixNamespace& space : spaces) {
        CHECK(cache.run({space.tenant, RequestId{++request}}, space, prompt) == 0);
    }
    for (const PrefixNamespace& space : spaces) {
        CHECK(cache.run({space.tenant, RequestId{++request}}, space, prompt) == 2);
    }
}

TEST_CASE("of n tokens at most floor((n - 1) / 16) pages are adopted") {
    for (const std::uint32_t pages : {0u, 1u, 2u, 3u}) {
        for (std::uint32_t more = 0; more < kPageTokens; ++more) {
            const Tokens prompt = prompt_of(std::vector<std::uint32_t>(pages, 2), more);
            if (prompt.empty()) {
                continue;
            }
            CAPTURE(prompt.size());
            Cache cache(16);
            CHECK(cache.run(owner_of(1, 1), {TenantId{1}}, prompt) == 0);
            CHECK(cache.tree.pages() == prompt.size() / kPageTokens);
            CHECK(cache.run(owner_of(1, 2), {TenantId{1}}, prompt) == (prompt.size() - 1) / 16);
        }
    }
    Cache cache(4);
    CHECK(cache.tree.match({TenantId{1}}, {}) == 0);
}

TEST_CASE("every token of a prefix is compared") {
    Cache cache(8);
    const Tokens prompt = prompt_of({1, 2, 3}, 1);
    cache.run(owner_of(1, 1), {TenantId{1}}, prompt);
    for (std::size_t i = 0; i < prompt.size(); ++i) {
        for (const std::int32_t change : {1, -1, 1 << 16, static_cast<std::int32_t>(1u << 31)}) {
            Tokens other = prompt;
            other[i] ^= change;
            CHECK(cache.tree.match({TenantId{1}}, other) ==
                  std::min<std::size_t>(i / kPageTokens, 3));
        }
    }
}

TEST_CASE("where a page already stands for the same tokens, the second one stays private") {
    Cache cache(16);
    const PrefixNamespace space{TenantId{1}};
    const Tokens shorter = prompt_of({1, 2}, 1), longer = prompt_of({1, 2, 3}, 1);
    const Owner first = owner_of(1, 1), second = owner_of(1, 2);
    cache.begin(first, space, shorter);
    cache.begin(second, space, longer);  // at the same time: there is nothing to adopt yet
    cache.compute_rest(first, shorter);
    cache.compute_rest(second, longer);
    cache.publish(first, space, shorter);
    cache.publish(second, space, longer);
    CHECK(cache.tree.pages() == 3);
    cache.pool->release(second, FreeReason::finished);
    CHECK(cache.pool->pages_draining() == 3);  // its first two pages, and the last, not full

    // The next one reads pages of both, each with its own writer in the header.
    CHECK(cache.begin(owner_of(1, 3), space, longer) == 3);
    cache.compute_rest(owner_of(1, 3), longer);
    const auto table = cache.pool->table(owner_of(1, 3));
    const auto writer = [&](std::uint32_t index) {
        return tile_header(cache.pool->memory().tile(table[index].page, 0, 0))->request;
    };
    CHECK(writer(0) == 1);
    CHECK(writer(1) == 1);
    CHECK(writer(2) == 2);
}

TEST_CASE("the least recently used leaf goes first, and nothing that a table holds") {
    Cache cache(32);
    const PrefixNamespace space{TenantId{1}};
    const Tokens a = prompt_of({0, 1}, 1), b = prompt_of({0, 2}, 1), c = prompt_of({3}, 1);
    cache.run(owner_of(1, 1), space, a);
    cache.run(owner_of(1, 2), space, b);
    cache.run(owner_of(1, 3), space, c);
    CHECK(cache.tree.evictable() == 4);
    CHECK(cache.begin(owner_of(1, 4), space, a) == 2);  // holds pages 0 and 1 of the tree
    CHECK(cache.tree.evictable() == 2);
    CHECK(cache.tree.evict(1) == 1);
    CHECK(cache.tree.match(space, b) == 1);  // its leaf was older than c
    CHECK(cache.tree.match(space, c) == 1);
    CHECK(cache.tree.evict(9) == 1);
    CHECK(cache.tree.match(space, c) == 0);
    CHECK(cache.tree.match(space, a) == 2);
    cache.pool->release(owner_of(1, 4), FreeReason::finished);
    CHECK(cache.tree.evictable() == 2);
    CHECK(cache.tree.evict(1) == 1);  // the leaf, then what it stood on
    CHECK(cache.tree.match(space, a) == 1);
    CHECK(cache.tree.evict(1) == 1);
    CHECK(cache.tree.pages() == 0);
    CHECK(cache.tree.evict(1) == 0);
    CHECK(cache.pool->scrub_drained(99) > 0);
    CHECK(cache.pool->pages_allocatable() == 32);
}

TEST_CASE("a page under a held one's parent waits for it: inner pages leave after their leaves") {
    Cache cache(16);
    const PrefixNamespace space{TenantId{1}};
    const Tokens shorter = prompt_of({1}, 1), longer = prompt_of({1, 2}, 1);
    const Owner first = owner_of(1, 1), second = owner_of(1, 2);
    cache.begin(first, space, shorter);
    cache.begin(second, space, longer);
    cache.compute_rest(first, shorter);
    cache.compute_rest(second, longer);
    cache.publish(first, space, shorter);
    cache.publish(second, space, longer);  // its second page hangs below the first one's
    cache.pool->release(first, FreeReason::finished);
    CHECK(cache.tree.evictable() == 0);  // nobody has the inner page in a table, but below it
    CHECK(cache.tree.evict(1) == 0);
    cache.pool->release(second, FreeReason::finished);
    CHECK(cache.tree.evictable() == 2);
}

TEST_CASE("what an untrusted writer published goes, with all that hangs below it") {
    TextSink events;
    auto pool = make_pool(events, 256);
    PrefixTree tree(*pool);
    const PrefixNamespace space{TenantId{1}};
    const Tokens a = prompt_of({0, 1}, 1), b = prompt_of({0, 1, 2}, 1), c = prompt_of({3}, 1);
    const auto run = [&](Owner owner, const Tokens& tokens) {
        const std::uint32_t matched = tree.match(space, tokens);
        REQUIRE(pool->reserve(owner, 4));
        tree.adopt(owner, space, tokens, matched, digests_of(tokens));
        REQUIRE(write(*pool, owner, matched * kPageTokens,
                      static_cast<std::uint32_t>(tokens.size()) - matched * kPageTokens));
        tree.publish(owner, space, CacheScope::tenant, tokens, digests_of(tokens));
    };
    run(owner_of(1, 1), a);  // pages 0, 1, private 2
    run(owner_of(1, 2), b);  // adopts 0, 1; page 3, private 4
    run(owner_of(1, 3), c);  // page 5, private 6
    pool->release(owner_of(1, 1), FreeReason::finished);
    pool->release(owner_of(1, 3), FreeReason::finished);
    events.clear();
    tree.unpublish(RequestId{1});
    CHECK(events.lines() ==
          "evict page=0 generation=1\nevict page=1 generation=1\nevict page=3 generation=1\n");
    CHECK(tree.pages() == 1);
    CHECK(tree.evictable() == 1);
    CHECK(tree.match(space, b) == 0);
    CHECK(tree.match(space, c) == 1);
    tree.unpublish(RequestId{1});  // there is nothing more
    // The reader's pages below were adopted from a prefix that is gone: it gives none of them on.
    tree.publish(owner_of(1, 2), space, CacheScope::tenant, b, digests_of(b));
    CHECK(tree.pages() == 1);
    events.clear();
    pool->release(owner_of(1, 2), FreeReason::finished);
    CHECK(events.lines().ends_with(
        "quarantine page=0\nquarantine page=1\ndrain page=3\ndrain page=4\n"));
    events.clear();
    tree.clear();
    CHECK(events.lines() == "evict page=5 generation=1\ndrain page=5\n");
    CHECK(tree.pages() == 0);
    CHECK(tree.evictable() == 0);
}

TEST_CASE("the tree refuses to be used for another tenant, scope or prompt") {
    const auto status = [](auto then) {
        return status_of_child([&] {
            Cache cache(16);
            const Tokens prompt = prompt_of({0, 1}, 3);
            cache.run(owner_of(1, 1), {TenantId{1}}, prompt);
            (void)cache.pool->reserve(owner_of(1, 2), 3);
            (void)cache.pool->reserve(owner_of(2, 3), 3);
            then(cache, prompt, digests_of(prompt));
        });
    };
    using Digests = std::vector<PrefixDigest>;
    CHECK(status([](Cache& cache, const Tokens& prompt, const Digests& digests) {
              cache.tree.adopt(owner_of(1, 2), {TenantId{1}}, prompt, 2, digests);
          }) == 0);
    CHECK(status([](Cache& cache, const Tokens& prompt, const Digests& digests) {
              cache.tree.adopt(owner_of(2, 3), {TenantId{1}}, prompt, 2, digests);
          }) == 7);
    CHECK(status([](Cache& cache, const Tokens& prompt, const Digests& digests) {
              cache.tree.adopt(owner_of(1, 2), {TenantId{1}}, prompt, 3, digests);
          }) == 7);
    CHECK(status([](Cache& cache, Tokens prompt, const Digests& digests) {
              prompt[0] += 5;
              cache.tree.adopt(owner_of(1, 2), {TenantId{1}}, prompt, 1, digests);
          }) == 7);
    CHECK(status([](Cache& cache, const Tokens& prompt, const Digests& digests) {
              cache.tree.publish(owner_of(1, 2), {TenantId{1}}, CacheScope::request, prompt,
                                 digests);
          }) == 7);
    CHECK(status([](Cache& cache, const Tokens& prompt, const Digests& digests) {
              cache.tree.publish(owner_of(1, 2), {TenantId{1}}, CacheScope::session, prompt,
                                 digests);
          }) == 7);
}

TEST_CASE("a prefix of thousands of pages, and thousands of prefixes, come and go") {
    Cache cache(9000);
    const PrefixNamespace space{TenantId{1}};
    const Tokens deep = prompt_of(std::vector<std::uint32_t>(50, 1), 1);
    CHECK(cache.run(owner_of(1, 1), space, deep) == 0);
    CHECK(cache.run(owner_of(1, 2), space, deep) == 50);
    for (std::uint32_t i = 0; i < 2000; ++i) {
        Tokens wide = prompt_of({2}, 1);
        wide[3] = static_cast<std::int32_t>(i);
        CHECK(cache.run(owner_of(1, 3 + i), space, wide) == 0);
    }
    CHECK(cache.tree.evictable() == 2050);
    CHECK(cache.tree.evict(2010) == 2010);
    CHECK(cache.tree.match(space, deep) == 0);  // used last before all others
    CHECK(cache.tree.pages() == 40);
    cache.tree.unpublish(RequestId{2002});
    CHECK(cache.tree.pages() == 39);
}

// ---- against a naive model

// Every page that stands in the tree, with all the tokens that lead to it.
struct NaiveTree {
    struct Entry {
        PrefixNamespace space;
        Tokens prefix;
        std::uint32_t page = 0;
        RequestId writer{};
        std::uint64_t used = 0;
    };
    NaivePool& pool;
    std::vector<Entry> entries = {};
    std::uint64_t clock = 0;

    Entry* find(const PrefixNamespace& space, const Tokens& tokens, std::size_t pages) {
        for (Entry& entry : entries) {
            if (entry.space == space && entry.prefix.size() == pages * kPageTokens &&
                std::equal(entry.prefix.begin(), entry.prefix.end(), tokens.begin())) {
                return &entry;
            }
        }
        return nullptr;
    }
    static bool below(const Entry& entry, const Entry& other) {
        return entry.space == other.space && entry.prefix.size() >= other.prefix.size() &&
               std::equal(other.prefix.begin(), other.prefix.end(), entry.prefix.begin());
    }
    std::uint32_t match(const PrefixNamespace& space, const Tokens& tokens) {
        std::uint32_t pages = 0;
        while ((pages + 1) * kPageTokens < tokens.size() && find(space, tokens, pages + 1)) {
            ++pages;
        }
        return pages;
    }
    void adopt(Owner owner, const PrefixNamespace& space, const Tokens& tokens,
               std::uint32_t pages) {
        ++clock;
        for (std::uint32_t i = 0; i < pages; ++i) {
            Entry& entry = *find(space, tokens, i + 1);
            entry.used = clock;
            pool.adopt(owner, entry.page, digests_of(tokens)[i]);
        }
    }
    void publish(Owner owner, const PrefixNamespace& space, const Tokens& tokens) {
        const NaivePool::Request& request = pool.of(owner);
        ++clock;
        for (std::uint32_t i = 0; (i + 1) * kPageTokens <= tokens.size() &&
                                  (i + 1) * kPageTokens <= request.rows && request.side == 0;
             ++i) {
            if (find(space, tokens, i + 1) == nullptr) {
                if (pool.pages[request.table[0][i]].owner != owner) {
                    return;
                }
                entries.push_back({space,
                                   Tokens(tokens.begin(), tokens.begin() + (i + 1) * kPageTokens),
                                   request.table[0][i], owner.request, 0});
                pool.publish(owner, i,
                             space.session == 0 ? CacheScope::tenant : CacheScope::session,
                             digests_of(tokens)[i]);
            }
            find(space, tokens, i + 1)->used = clock;
        }
    }
    bool can_go(const Entry& entry, const std::vector<std::uint32_t>& holders) const {
        return std::none_of(entries.begin(), entries.end(), [&](const Entry& other) {
            return holders[other.page] > 0 && below(other, entry);
        });
    }
    std::uint32_t evictable() const {
        const std::vector<std::uint32_t> holders = pool.holders();
        return static_cast<std::uint32_t>(
            std::count_if(entries.begin(), entries.end(),
                          [&](const Entry& entry) { return can_go(entry, holders); }));
    }
    std::uint32_t evict(std::uint32_t most) {
        std::uint32_t evicted = 0;
        for (; evicted < most; ++evicted) {
            const std::vector<std::uint32_t> holders = pool.holders();
            auto oldest = entries.end();
            for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
                const bool leaf =
                    1 == std::count_if(entries.begin(), entries.end(),
                                       [&](const Entry& e) { return below(e, *entry); });
                if (leaf && can_go(*entry, holders) &&
                    (oldest == entries.end() || entry->used < oldest->used)) {
                    oldest = entry;
                }
            }
            if (oldest == entries.end()) {
                return evicted;
            }
            const std::uint32_t page = oldest->page;
            entries.erase(oldest);
            pool.evict(page, false);
        }
        return evicted;
    }
    void unpublish(RequestId writer) {
        std::map<std::uint32_t, bool> leaving;
        for (const Entry& top : entries) {
            for (const Entry& entry : entries) {
                if (top.writer == writer && below(entry, top)) {
                    leaving[entry.page] = entry.writer == writer;
                }
            }
        }
        std::erase_if(entries, [&](const Entry& entry) { return leaving.contains(entry.page); });
        for (const auto& [page, own] : leaving) {
            pool.evict(page, own);
        }
    }
    void clear() {
        std::set<std::uint32_t> pages;
        for (const Entry& entry : entries) {
            pages.insert(entry.page);
        }
        entries.clear();
        for (const std::uint32_t page : pages) {
            pool.evict(page, false);
        }
    }
};

void random_life(bool split, std::uint32_t seed, int steps) {
    CAPTURE(seed);
    CAPTURE(split);
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
    Recording noted;
    auto pool = make_pool(noted, 24 * kPageTokens, {}, split ? 20 * kPageTokens : 0);
    noted.events.clear();
    NaivePool naive_pool(*pool);
    PrefixTree tree(*pool);
    NaiveTree naive{naive_pool};
    PageRules rules;

    struct Job {
        Owner owner;
        PrefixNamespace space;
        Tokens tokens;
    };
    std::map<std::uint64_t, Job> jobs;
    std::uint64_t last_request = 0, adopted = 0, evicted = 0;
    const auto any_prompt = [&] {
        std::vector<std::uint32_t> pages(below(5));
        for (std::uint32_t& page : pages) {
            page = below(3) == 0 ? below(4) : 0;  // the same beginnings again and again
        }
        return prompt_of(pages, below(3) == 0 ? 0 : 1 + below(15));
    };
    const auto any_space = [&] {
        return PrefixNamespace{TenantId{1 + below(2)}, below(3) == 0 ? 1 + below(2) : 0};
    };
    const auto begin = [&](const Job& job) {
        const std::uint32_t matched = tree.match(job.space, job.tokens);
        REQUIRE(matched == naive.match(job.space, job.tokens));
        const std::uint32_t taken = below(4) == 0 ? below(matched + 1) : matched;
        const auto pages = static_cast<std::uint32_t>((job.tokens.size() + 15) / 16);
        if (pages - taken > naive_pool.allocatable(0) ||
            (split && pages > naive_pool.allocatable(1))) {
            return;
        }
        REQUIRE(pool->reserve(job.owner, pages - taken));
        naive_pool.reserve(job.owner, pages - taken, 0);
        if (split) {
            REQUIRE(pool->reserve(job.owner, pages, PoolSide::decode));
            naive_pool.reserve(job.owner, pages, 1);
        }
        const Tokens ids =
            tree.adopt(job.owner, job.space, job.tokens, taken, digests_of(job.tokens));
        naive.adopt(job.owner, job.space, job.tokens, taken);
        REQUIRE(ids == Tokens(job.tokens.begin(), job.tokens.begin() + taken * kPageTokens));
        jobs[number(job.owner.request)] = job;
        adopted += taken;
    };

    for (int step = 0; step < steps; ++step) {
        const std::uint32_t choice = below(100);
        const Job* job = nullptr;
        if (!jobs.empty()) {
            job = &std::next(jobs.begin(), below(jobs.size()))->second;
        }
        NaivePool::Request* request = job != nullptr ? &naive_pool.of(job->owner) : nullptr;
        if (choice < 20) {
            const PrefixNamespace space = any_space();
            Job next{{space.tenant, RequestId{++last_request}}, space, any_prompt()};
            if (!next.tokens.empty()) {
                begin(next);
            }
        } else if (choice < 45 && job != nullptr) {
            const bool moving = request->side == 0 && request->received > 0;
            const bool begun = request->rows + request->reserved[0] + request->reserved[1] > 0;
            const auto left = static_cast<std::uint32_t>(job->tokens.size()) - request->rows;
            if (left > 0 && begun && !moving && request->side == 0) {
                const std::uint32_t first = request->rows;
                const std::uint32_t count = below(2) == 0 ? left : 1 + below(left);
                REQUIRE(write(*pool, job->owner, first, count));
                naive_pool.write(job->owner, count);
            } else if (!begun) {
                begin(Job(*job));  // preempted before; it may be given what it published itself
            }
        } else if (choice < 60 && job != nullptr) {
            tree.publish(job->owner, job->space,
                         job->space.session == 0 ? CacheScope::tenant : CacheScope::session,
                         job->tokens, digests_of(job->tokens));
            naive.publish(job->owner, job->space, job->tokens);
        } else if (choice < 66 && split && job != nullptr) {
            if (request->side == 0 && request->rows == job->tokens.size()) {
                pool->transfer(job->owner, 2);
                naive_pool.transfer(job->owner, 2);
            }
        } else if (choice < 78 && job != nullptr) {
            const FreeReason reason = below(4) == 0 ? FreeReason::preempted : FreeReason::finished;
            const Owner owner = job->owner;
            pool->release(owner, reason);
            naive_pool.let_go(owner, reason, false);
            if (reason != FreeReason::preempted) {
                jobs.erase(number(owner.request));
            }
        } else if (choice < 86) {
            const std::uint32_t most = below(4);
            const std::uint32_t gone = tree.evict(most);
            REQUIRE(gone == naive.evict(most));
            evicted += gone;
        } else if (choice < 87 && naive_pool.quarantined() < 4 && last_request > 0) {
            const RequestId writer{1 + below(last_request)};
            tree.unpublish(writer);
            naive.unpublish(writer);
            if (jobs.contains(number(writer))) {
                const Owner owner = jobs[number(writer)].owner;
                pool->quarantine(owner, FreeReason::violation);
                naive_pool.let_go(owner, FreeReason::violation, true);
                jobs.erase(number(writer));
            }
        } else if (choice == 87 && below(4) == 0) {
            tree.clear();
            naive.clear();
        } else {
            pool->scrub_drained(3);
            naive_pool.scrub_drained(3);
        }
        for (const Event& event : noted.events) {
            REQUIRE(rules.apply(event) == "");
        }
        REQUIRE(difference_of_events(noted, naive_pool) == "");
        REQUIRE(difference(*pool, naive_pool) == "");
        REQUIRE(tree.pages() == naive.entries.size());
        REQUIRE(tree.evictable() == naive.evictable());
        const PrefixNamespace space = any_space();
        const Tokens prompt = any_prompt();
        REQUIRE(tree.match(space, prompt) == naive.match(space, prompt));
    }
    CHECK(adopted > 50);
    CHECK(evicted > 50);
}

TEST_CASE("the tree does what a naive model does, at each of 48,000 random steps") {
    for (std::uint32_t seed = 1; seed <= 6; ++seed) {
        random_life(false, seed, 4000);
        random_life(true, seed + 100, 4000);
    }
}

}  // namespace
}  // namespace kvw
