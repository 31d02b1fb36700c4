// Which full pages hold which prefix, for whom: a radix tree over pages of token ids
// (RadixAttention, Zheng et al. 2024, arXiv 2312.07104), one tree per namespace.
//
// A namespace is a typed key: tenant number and session number, each an integer; no name is joined
// with another, so no two namespaces can look alike. A hit is a walk from the root that compares
// every token; there is no hash to collide. Only full pages of a request that wrote them itself are
// published, at most floor((n - 1) / 16) of them are adopted by a prompt of n tokens, so nothing is
// ever appended to a shared page. The pool (page_pool.h) holds the pages and notes the events; the
// tree decides. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/base/ids.h"
#include "src/kv/page_pool.h"

namespace kvw {

// session 0: shared within the tenant.
struct PrefixNamespace {
    TenantId tenant{};
    std::uint64_t session = 0;
    friend bool operator==(const PrefixNamespace&, const PrefixNamespace&) = default;
};

class PrefixTree {
  public:
    explicit PrefixTree(PagePool& pool);
    ~PrefixTree();

    // The longest published prefix of `tokens`, in pages, at most floor((tokens.size() - 1) / 16).
    // Marks nothing as used.
    std::uint32_t match(const PrefixNamespace& space, std::span<const std::int32_t> tokens) const;
    // Gives `owner` the first `pages` pages of that prefix (PagePool::adopt), and makes them the
    // most recently used. digests[i]: of the owner's own tokens [0, 16 (i + 1)). Returns the token
    // ids that the tree keeps for these pages, which is what the adopter's rows were computed from.
    std::vector<std::int32_t> adopt(Owner owner, const PrefixNamespace& space,
                                    std::span<const std::int32_t> tokens, std::uint32_t pages,
                                    std::span<const PrefixDigest> digests);
    // Publishes those of the owner's pages [0, tokens.size() / 16) that are full, written by it and
    // not in the tree; where another page already stands for the same tokens, the owner's own stays
    // private. digests as above, at least tokens.size() / 16 of them.
    void publish(Owner owner, const PrefixNamespace& space, CacheScope scope,
                 std::span<const std::int32_t> tokens, std::span<const PrefixDigest> digests);

    // Evicts up to `pages` pages that no table holds, least recently used leaves first. Returns how
    // many.
    std::uint32_t evict(std::uint32_t pages);
    // How many pages evict() could give back now.
    std::uint32_t evictable() const;
    // Takes everything that `writer` published, and what hangs below it, out of the tree: the
    // writer's own pages into quarantine.
    void unpublish(RequestId writer);
    void clear();  // evicts all
    std::uint32_t pages() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace kvw
