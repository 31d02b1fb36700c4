#include "src/kv/prefix_tree.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "src/base/check.h"

namespace kvw {

namespace {

using PageTokens = std::array<std::int32_t, kPageTokens>;

PageTokens tokens_of_page(std::span<const std::int32_t> tokens, std::size_t index) {
    PageTokens page;
    std::copy_n(tokens.begin() + static_cast<std::ptrdiff_t>(index * kPageTokens), kPageTokens,
                page.begin());
    return page;
}

}  // namespace

struct PrefixTree::State {
    // One page of a prefix, or the root of a namespace, which has none.
    struct Node {
        Node* parent = nullptr;  // null: the root
        PrefixNamespace space;
        std::map<PageTokens, Node*> children;
        const PageTokens* tokens = nullptr;  // the key in parent->children
        PageRef entry;
        RequestId writer{};
        std::uint64_t used = 0;  // when, by `clock`
        bool held = false;       // by a table
        bool listed = false;     // in `leaves`
        // Itself if held, and children that are busy. A node that is not busy has nothing held
        // below it, so it can be evicted, after its children.
        std::uint32_t busy = 0;
    };

    PagePool& pool;
    std::map<std::pair<std::uint32_t, std::uint64_t>, Node> roots;  // by tenant and session
    std::vector<std::unique_ptr<Node>> nodes;                       // by page
    std::set<std::pair<std::uint64_t, std::uint32_t>> leaves;       // evictable: (used, page)
    std::uint32_t pages = 0, idle = 0;                              // nodes; of these, not busy
    std::uint64_t clock = 0;

    const Node* root(const PrefixNamespace& space) const {
        const auto found = roots.find({number(space.tenant), space.session});
        return found == roots.end() ? nullptr : &found->second;
    }
    static Node* child(const Node& node, const PageTokens& tokens) {
        const auto found = node.children.find(tokens);
        return found == node.children.end() ? nullptr : found->second;
    }

    // `leaves` has the node exactly when evict() may take it next.
    void list(Node& node) {
        const bool evictable = node.parent != nullptr && node.busy == 0 && node.children.empty();
        if (evictable != node.listed) {
            node.listed = evictable;
            if (evictable) {
                leaves.emplace(node.used, node.entry.page);
            } else {
                leaves.erase({node.used, node.entry.page});
            }
        }
    }
    void touch(Node& node) {
        if (node.listed) {
            leaves.erase({node.used, node.entry.page});
            leaves.emplace(clock, node.entry.page);
        }
        node.used = clock;
    }
    void add_busy(Node* node, bool more) {
        for (; node->parent != nullptr; node = node->parent) {
            node->busy += more ? 1 : -1;
            if (node->busy > (more ? 1u : 0u)) {
                return;  // it was busy before and after
            }
            idle += more ? -1 : 1;
            list(*node);
        }
    }
    void set_held(Node& node, bool held) {
        if (node.held != held) {
            node.held = held;
            add_busy(&node, held);
        }
    }
    // Tables come and go without the tree; the pool says where that made a difference.
    void look_at_holders() {
        for (const std::uint32_t page : pool.take_holder_changes()) {
            if (Node* node = nodes[page].get()) {
                set_held(*node, pool.holders(page) > 0);
            }
        }
    }

    Node& attach(Node& parent, const PageTokens& tokens, const PageRef& entry, RequestId writer) {
        std::unique_ptr<Node>& node = nodes[entry.page];
        check(!node, "a page stands in the tree once");
        node.reset(new Node{.parent = &parent,
                            .space = parent.space,
                            .entry = {entry.page, entry.generation},
                            .writer = writer,
                            .used = clock});
        node->tokens = &parent.children.emplace(tokens, node.get()).first->first;
        ++pages;
        ++idle;
        list(parent);
        set_held(*node, pool.holders(entry.page) > 0);
        list(*node);
        return *node;
    }
    // Cuts the node, and what hangs below it, off its parent.
    void detach(Node& node) {
        Node& parent = *node.parent;
        if (node.busy > 0) {
            add_busy(&parent, false);
        }
        parent.children.erase(parent.children.find(*node.tokens));
        list(parent);
        if (parent.parent == nullptr && parent.children.empty()) {
            roots.erase({number(parent.space.tenant), parent.space.session});
        }
    }
    // Forgets a node that is cut off.
    void forget(std::uint32_t page) {
        Node& node = *nodes[page];
        if (node.listed) {
            leaves.erase({node.used, page});
        }
        --pages;
        idle -= node.busy == 0 ? 1 : 0;
        nodes[page].reset();
    }
};

PrefixTree::PrefixTree(PagePool& pool) : state_(new State{.pool = pool}) {
    state_->nodes.resize(pool.pages_total(PoolSide::prefill));
}
PrefixTree::~PrefixTree() = default;

std::uint32_t PrefixTree::match(const PrefixNamespace& space,
                                std::span<const std::int32_t> tokens) const {
    const State::Node* node = state_->root(space);
    // The last token is computed in any case: its logits are wanted.
    const std::size_t most = tokens.empty() ? 0 : (tokens.size() - 1) / kPageTokens;
    std::uint32_t matched = 0;
    while (node != nullptr && matched < most) {
        node = State::child(*node, tokens_of_page(tokens, matched));
        matched += node != nullptr ? 1 : 0;
    }
    return matched;
}

std::vector<std::int32_t> PrefixTree::adopt(Owner owner, const PrefixNamespace& space,
                                            std::span<const std::int32_t> tokens,
                                            std::uint32_t pages,
                                            std::span<const PrefixDigest> digests) {
    State& state = *state_;
    check(space.tenant == owner.tenant, "a request looks among its own tenant's prefixes");
    check(pages == 0 || pages <= (tokens.size() - 1) / kPageTokens,
          "a prompt adopts no page with its last token");
    check(digests.size() >= pages, "each page that is adopted has a digest");
    check(state.pool.table(owner).empty(), "a prefix begins at position 0");
    ++state.clock;
    std::vector<std::int32_t> ids;
    ids.reserve(std::size_t{pages} * kPageTokens);
    const State::Node* node = state.root(space);
    for (std::uint32_t index = 0; index < pages; ++index) {
        State::Node* next =
            node != nullptr ? State::child(*node, tokens_of_page(tokens, index)) : nullptr;
        check(next != nullptr, "what is adopted was matched");
        state.pool.adopt(owner, next->entry, digests[index]);
        state.touch(*next);
        ids.insert(ids.end(), next->tokens->begin(), next->tokens->end());
        node = next;
    }
    return ids;
}

void PrefixTree::publish(Owner owner, const PrefixNamespace& space, CacheScope scope,
                         std::span<const std::int32_t> tokens,
                         std::span<const PrefixDigest> digests) {
    State& state = *state_;
    check(space.tenant == owner.tenant, "a request publishes to its own tenant");
    check(scope != CacheScope::request && (scope == CacheScope::session) == (space.session != 0),
          "the namespace is that of the scope");
    const std::span<const PageRef> table = state.pool.table(owner);
    const std::size_t full = std::min<std::size_t>(
        {tokens.size() / kPageTokens, state.pool.rows_held(owner) / kPageTokens, table.size()});
    check(digests.size() >= full, "each page that is published has a digest");
    // Once its rows were moved, a request has no page left that others could adopt.
    if (full == 0 || table.front().page >= state.nodes.size()) {
        return;
    }
    ++state.clock;
    State::Node* node =
        &state.roots.try_emplace({number(space.tenant), space.session}, State::Node{.space = space})
             .first->second;
    for (std::uint32_t index = 0; index < full; ++index) {
        const PageTokens page = tokens_of_page(tokens, index);
        State::Node* next = State::child(*node, page);
        if (next == nullptr) {
            // Adopted from a prefix that has left the tree since: it is not this request's to give.
            if (table[index].grantor != RequestId{}) {
                break;
            }
            state.pool.publish(owner, index, scope, digests[index]);
            next = &state.attach(*node, page, table[index], owner.request);
        }
        state.touch(*next);
        node = next;
    }
    if (node->parent == nullptr && node->children.empty()) {
        state.roots.erase({number(space.tenant), space.session});
    }
}

std::uint32_t PrefixTree::evict(std::uint32_t pages) {
    State& state = *state_;
    state.look_at_holders();
    std::uint32_t evicted = 0;
    for (; evicted < pages && !state.leaves.empty(); ++evicted) {
        const std::uint32_t page = state.leaves.begin()->second;
        state.detach(*state.nodes[page]);
        state.forget(page);
        state.pool.evict(page);
    }
    return evicted;
}

std::uint32_t PrefixTree::evictable() const {
    state_->look_at_holders();
    return state_->idle;
}

void PrefixTree::unpublish(RequestId writer) {
    State& state = *state_;
    // By page number: no order of token ids shows in the events.
    std::map<std::uint32_t, bool> leaving;  // page → was it the writer's
    for (const auto& top : state.nodes) {
        std::vector<const State::Node*> below;
        if (top && top->writer == writer) {
            below.push_back(top.get());
        }
        while (!below.empty()) {
            const State::Node& node = *below.back();
            below.pop_back();
            if (!leaving.emplace(node.entry.page, node.writer == writer).second) {
                continue;  // seen, with all below it
            }
            for (const auto& [tokens, child] : node.children) {
                below.push_back(child);
            }
        }
    }
    for (const auto& [page, own] : leaving) {
        const State::Node& node = *state.nodes[page];
        if (node.parent->parent == nullptr || !leaving.contains(node.parent->entry.page)) {
            state.detach(*state.nodes[page]);
        }
    }
    for (const auto& [page, own] : leaving) {
        state.forget(page);
        state.pool.evict(page, own);
    }
}

void PrefixTree::clear() {
    State& state = *state_;
    for (std::uint32_t page = 0; page < state.nodes.size(); ++page) {
        if (state.nodes[page]) {
            state.nodes[page].reset();
            state.pool.evict(page);
        }
    }
    state.roots.clear();
    state.leaves.clear();
    state.pages = state.idle = 0;
}

std::uint32_t PrefixTree::pages() const { return state_->pages; }

}  // namespace kvw
