#include "kernels/simt/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "kernels/simt/cuda.h"
#include "src/base/check.h"
#include "src/base/witness_mix.h"

// Address sanitizer has to be told which stack is in use. Weak: null where it is not linked in.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom,
                                                  std::size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                   std::size_t* bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* begin, std::size_t bytes);

// Saves the registers that a call preserves and the stack pointer, as *from; goes on at `to`.
void kvw_simt_switch(void** from, void* to);
}

asm(R"(
    .text
    .globl kvw_simt_switch
    .type kvw_simt_switch, @function
kvw_simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size kvw_simt_switch, . - kvw_simt_switch
)");

namespace kvw::simt {

namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kStackBytes = 128 * 1024;
constexpr unsigned kResidentMax = 4;

// Stacks for fibers, each behind a page that nothing may touch. Memory is taken when it is used.
class Stacks {
  public:
    ~Stacks() { release(); }
    void reserve(std::size_t count) {
        if (count <= count_) {
            return;
        }
        release();
        void* memory = mmap(nullptr, count * (kGuardBytes + kStackBytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        check(memory != MAP_FAILED, "there is address space for the stacks of a few blocks");
        base_ = static_cast<std::uint8_t*>(memory);
        count_ = count;
        for (std::size_t i = 0; i < count; ++i) {
            check(mprotect(bottom(i) - kGuardBytes, kGuardBytes, PROT_NONE) == 0,
                  "a stack has a guard page");
        }
    }
    std::uint8_t* bottom(std::size_t i) const {
        return base_ + i * (kGuardBytes + kStackBytes) + kGuardBytes;
    }

    // What threads that never returned have left, sanitizers' marks included, is no longer in use.
    void forget() {
        for (std::size_t i = 0; i < count_ && __asan_unpoison_memory_region != nullptr; ++i) {
            __asan_unpoison_memory_region(bottom(i), kStackBytes);
        }
    }

  private:
    void release() {
        if (base_ != nullptr) {
            munmap(base_, count_ * (kGuardBytes + kStackBytes));
        }
        base_ = nullptr;
        count_ = 0;
    }
    std::uint8_t* base_ = nullptr;
    std::size_t count_ = 0;
};

struct Block;

enum class FiberState : std::uint8_t { ready, at_barrier, at_exchange, returned };

struct Fiber {
    Block* block = nullptr;
    unsigned number = 0;  // of the thread in its block, x fastest
    FiberState state = FiberState::ready;
    void* stack_pointer = nullptr;
    std::uint8_t* stack_bottom = nullptr;
    void* fake_stack = nullptr;
    Index3 thread_index;
    unsigned barriers = 0;
    // What it waits for.
    Place place;
    Exchange kind = Exchange::none;
    std::uint32_t mask = 0;
    unsigned operand = 0;
    std::uint64_t value = 0;  // brought, then received
};

struct SharedObject {
    const void* key;
    std::size_t bytes;
    std::unique_ptr<std::uint8_t[]> memory;  // to the byte, so that sanitizers see its ends
};

void poison(std::uint8_t* memory, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) {
        memory[i] = static_cast<std::uint8_t>(kSharedPoison >> (i % 4 * 8));
    }
}

// A block that is under way.
struct Block {
    std::vector<Fiber> fibers;
    Index3 index;
    unsigned unfinished = 0;
    unsigned at_barrier = 0;
    std::vector<SharedObject> objects;
    std::unique_ptr<std::uint8_t[]> dynamic_shared;
};

struct Extent {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    bool holds(std::uintptr_t at, std::size_t count) const {
        return at >= begin && at - begin < bytes && bytes - (at - begin) >= count;
    }
};

bool same_place(const Place& a, const Place& b) {
    return a.line == b.line && std::string_view(a.what) == b.what &&
           std::string_view(a.file) == b.file;
}

std::string shown(const Place& place) {
    const std::string_view file = place.file;
    return std::string(place.what) + " at " + std::string(file.substr(file.rfind('/') + 1)) + ":" +
           std::to_string(place.line);
}

std::string hex(std::uint32_t value) {
    std::string digits;
    for (int shift = 28; shift >= 0; shift -= 4) {
        digits += "0123456789abcdef"[value >> shift & 15];
    }
    return "0x" + digits;
}

Index3 index_of(std::size_t number, const Extent3& extent) {
    return {static_cast<unsigned>(number % extent.x),
            static_cast<unsigned>(number / extent.x % extent.y),
            static_cast<unsigned>(number / extent.x / extent.y)};
}

}  // namespace

struct Machine::State {
    Stacks stacks;
    std::vector<Block> slots;

    // Of the launch that is running.
    const Launch* launch = nullptr;
    const std::function<void()>* body = nullptr;
    std::vector<std::size_t> blocks_to_start;  // the last one is next
    std::vector<Fiber*> ready;
    std::uint64_t random = 0;
    Extent last_read;  // where __ldg read last: most loads are near the one before
    Ran ran;
    std::string error;

    Fiber* current = nullptr;
    void* scheduler_stack_pointer = nullptr;
    const void* scheduler_stack_bottom = nullptr;
    std::size_t scheduler_stack_bytes = 0;

    bool drawn_schedule() const { return launch->seed > 1; }
    std::uint64_t draw() { return mix64(random += 0x9e3779b97f4a7c15ull); }

    // Seed 0 runs the lowest thread first, seed 1 the highest: `ready` is taken from its end.
    template <class Do>
    void in_push_order(std::size_t count, Do&& visit) const {
        for (std::size_t i = 0; i < count; ++i) {
            visit(launch->seed == 0 ? count - 1 - i : i);
        }
    }

    void begin(const Launch& what, const std::function<void()>& each_thread) {
        launch = &what;
        body = &each_thread;
        random = mix64(what.seed);
        ran = {};
        last_read = {};
        error.clear();
        ready.clear();
        blocks_to_start.clear();
        in_push_order(what.grid.count(), [&](std::size_t i) { blocks_to_start.push_back(i); });
        for (std::size_t i = blocks_to_start.size(); drawn_schedule() && i > 1; --i) {
            std::swap(blocks_to_start[i - 1], blocks_to_start[draw() % i]);
        }
        const std::size_t residents =
            std::min<std::size_t>(drawn_schedule() ? 1 + draw() % kResidentMax : 1,
                                  std::max<std::size_t>(1, what.grid.count()));
        stacks.reserve(residents * what.block.count());
        slots = std::vector<Block>(residents);
        for (std::size_t i = 0; i < residents; ++i) {
            slots[i].fibers.resize(what.block.count());
            slots[i].dynamic_shared = std::make_unique<std::uint8_t[]>(what.shared_bytes);
            for (std::size_t t = 0; t < what.block.count(); ++t) {
                slots[i].fibers[t].stack_bottom = stacks.bottom(i * what.block.count() + t);
            }
        }
        blockDim = what.block;
        gridDim = what.grid;
    }

    void start(Block& block, std::size_t number);
    bool start_blocks() {
        bool any = false;
        for (Block& block : slots) {
            if (block.unfinished == 0 && !blocks_to_start.empty()) {
                start(block, blocks_to_start.back());
                blocks_to_start.pop_back();
            }
            any = any || block.unfinished != 0;
        }
        return any;
    }

    Fiber& pick() {
        if (drawn_schedule()) {
            std::swap(ready[draw() % ready.size()], ready.back());
        }
        Fiber& fiber = *ready.back();
        ready.pop_back();
        return fiber;
    }

    void go_on(Fiber& fiber) {
        current = &fiber;
        threadIdx = fiber.thread_index;
        blockIdx = fiber.block->index;
        void* fake_stack = nullptr;
        if (__sanitizer_start_switch_fiber != nullptr) {
            __sanitizer_start_switch_fiber(&fake_stack, fiber.stack_bottom, kStackBytes);
        }
        kvw_simt_switch(&scheduler_stack_pointer, fiber.stack_pointer);
        if (__sanitizer_finish_switch_fiber != nullptr) {
            __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
        }
        current = nullptr;
    }

    // Back to the scheduler. `for_good`: this stack is done with.
    void leave(bool for_good) {
        Fiber& fiber = *current;
        if (__sanitizer_start_switch_fiber != nullptr) {
            __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack,
                                           scheduler_stack_bottom, scheduler_stack_bytes);
        }
        kvw_simt_switch(&fiber.stack_pointer, scheduler_stack_pointer);
        arrived_on_fiber(fiber.fake_stack);
    }
    void arrived_on_fiber(void* fake_stack) {
        if (__sanitizer_finish_switch_fiber != nullptr) {
            __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack_bottom,
                                            &scheduler_stack_bytes);
        }
    }

    void wake(Fiber& fiber) {
        fiber.state = FiberState::ready;
        ready.push_back(&fiber);
    }

    // Ends the launch: what the current thread did cannot be. It calls abandon() next, when nothing
    // is left on its stack that would have to be freed.
    void fail(const std::string& what) {
        error = where(*current->block) + ": thread " + std::to_string(current->number) + " " + what;
    }
    [[noreturn]] void abandon() {
        leave(true);
        __builtin_unreachable();
    }

    void arrive_at_barrier(Block& block) {
        block.at_barrier += 1;
        if (block.at_barrier != block.fibers.size()) {
            return;
        }
        for (const Fiber& fiber : block.fibers) {
            if (!same_place(fiber.place, block.fibers[0].place)) {
                return;
            }
        }
        block.at_barrier = 0;
        in_push_order(block.fibers.size(), [&](std::size_t i) { wake(block.fibers[i]); });
    }

    void arrive_at_exchange(Fiber& fiber) {
        Fiber* warp = fiber.block->fibers.data() + fiber.number / kWarpLanes * kWarpLanes;
        const std::size_t lanes = std::min<std::size_t>(
            kWarpLanes, fiber.block->fibers.data() + fiber.block->fibers.size() - warp);
        if (lanes < kWarpLanes && fiber.mask >> lanes != 0) {
            return;  // it names lanes that are not there: nobody will come
        }
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const Fiber& other = warp[lane];
            const bool meets = other.state == FiberState::at_exchange && other.mask == fiber.mask &&
                               same_place(other.place, fiber.place);
            if ((fiber.mask >> lane & 1) != 0 && !meets) {
                return;
            }
        }
        std::uint64_t brought[kWarpLanes] = {};
        std::uint64_t ballot = 0;
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            brought[lane] = warp[lane].value;
            ballot |= std::uint64_t{(fiber.mask >> lane & 1) != 0 && brought[lane] != 0} << lane;
        }
        in_push_order(lanes, [&](std::size_t lane) {
            Fiber& other = warp[lane];
            if ((fiber.mask >> lane & 1) != 0) {
                other.value = other.kind == Exchange::ballot      ? ballot
                              : other.kind == Exchange::from_lane ? brought[other.operand]
                              : other.kind == Exchange::from_xor  ? brought[lane ^ other.operand]
                                                                  : 0;
                wake(other);
            }
        });
    }

    std::string where(const Block& block) const {
        return launch->kernel + ", block (" + std::to_string(block.index.x) + ", " +
               std::to_string(block.index.y) + ", " + std::to_string(block.index.z) + ")";
    }

    // Nobody can go on: where everybody of the first unfinished block waits.
    std::string stuck() const {
        const Block& block =
            *std::find_if(slots.begin(), slots.end(), [](const Block& b) { return b.unfinished; });
        struct Group {
            const Fiber* first;
            unsigned count;
        };
        std::vector<Group> groups;
        bool barriers = false, exchanges = false;
        for (const Fiber& fiber : block.fibers) {
            barriers = barriers || fiber.state == FiberState::at_barrier;
            exchanges = exchanges || fiber.state == FiberState::at_exchange;
            const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
                return g.first->state == fiber.state &&
                       (fiber.state == FiberState::returned ||
                        (same_place(g.first->place, fiber.place) && g.first->mask == fiber.mask));
            });
            if (group == groups.end()) {
                groups.push_back({&fiber, 1});
            } else {
                group->count += 1;
            }
        }
        std::string text = where(block) + ": " +
                           (barriers && exchanges ? "deadlock"
                            : barriers            ? "divergent barrier"
                                                  : "lanes that do not meet");
        for (const Group& group : groups) {
            const Fiber& fiber = *group.first;
            text +=
                (&group == groups.data() ? ": " : "; ") + std::to_string(group.count) +
                (group.count == 1 ? " thread " : " threads ") +
                (fiber.state == FiberState::returned ? "returned" : shown(fiber.place)) +
                (fiber.state == FiberState::at_exchange ? " for lanes " + hex(fiber.mask) : "") +
                " (the first: " + std::to_string(fiber.number) + ")";
        }
        return text;
    }
};

namespace {

// The machine that runs on this thread: how an intrinsic finds it.
constinit thread_local Machine::State* running = nullptr;

Machine::State& machine() {
    check(running != nullptr, "a kernel is called through simt::Machine");
    return *running;
}

void fiber_main() {
    machine().arrived_on_fiber(nullptr);
    (*machine().body)();
    Machine::State& state = machine();
    state.current->state = FiberState::returned;
    state.current->block->unfinished -= 1;
    state.ran.barriers = std::max(state.ran.barriers, state.current->barriers);
    state.leave(true);
}

}  // namespace

void Machine::State::start(Block& block, std::size_t number) {
    block.index = index_of(number, launch->grid);
    block.unfinished = static_cast<unsigned>(block.fibers.size());
    block.at_barrier = 0;
    poison(block.dynamic_shared.get(), launch->shared_bytes);
    for (const SharedObject& object : block.objects) {
        poison(object.memory.get(), object.bytes);
    }
    for (std::size_t t = 0; t < block.fibers.size(); ++t) {
        Fiber& fiber = block.fibers[t];
        fiber = {.block = &block,
                 .number = static_cast<unsigned>(t),
                 .stack_bottom = fiber.stack_bottom,
                 .thread_index = index_of(t, launch->block)};
        // As kvw_simt_switch leaves a stack: six registers and where to return to, which is entered
        // like a function that was called, from nowhere.
        void* frame[8] = {};
        frame[6] = reinterpret_cast<void*>(fiber_main);
        fiber.stack_pointer = fiber.stack_bottom + kStackBytes - sizeof frame;
        std::memcpy(fiber.stack_pointer, frame, sizeof frame);
    }
    in_push_order(block.fibers.size(), [&](std::size_t i) { ready.push_back(&block.fibers[i]); });
}

Machine::Machine() : state_(std::make_unique<State>()) {}
Machine::~Machine() = default;

Result<Ran> Machine::run(const Launch& launch, const std::function<void()>& body) {
    check(running == nullptr, "a kernel launches no kernel");
    check(launch.block.count() >= 1 && launch.block.count() <= kBlockThreadsMax,
          "a block has 1 to 1024 threads");
    State& state = *state_;
    state.begin(launch, body);
    running = &state;
    while (state.error.empty() && state.start_blocks()) {
        if (state.ready.empty()) {
            state.error = state.stuck();
        } else {
            state.go_on(state.pick());
        }
    }
    running = nullptr;
    if (!state.error.empty()) {
        state.stacks.forget();
        return Error{ErrorCode::invariant, state.error};
    }
    return state.ran;
}

void barrier(const Place& place) {
    Machine::State& state = machine();
    Fiber& fiber = *state.current;
    const unsigned number = fiber.barriers++;
    const std::optional<LeftOut>& left_out = state.launch->left_out;
    if (left_out && left_out->barrier == number &&
        left_out->thread.value_or(fiber.number) == fiber.number) {
        return;
    }
    fiber.place = place;
    fiber.mask = 0;
    fiber.state = FiberState::at_barrier;
    state.arrive_at_barrier(*fiber.block);
    state.leave(false);
}

std::uint64_t exchange(Exchange kind, std::uint32_t mask, std::uint64_t value, unsigned operand,
                       const Place& place) {
    Machine::State& state = machine();
    Fiber& fiber = *state.current;
    const unsigned lane = fiber.number % kWarpLanes;
    if ((mask >> lane & 1) == 0) {
        state.fail("does " + shown(place) + " for lanes " + hex(mask) + ", which are not its own");
        state.abandon();
    }
    const unsigned source = kind == Exchange::from_lane  ? operand
                            : kind == Exchange::from_xor ? lane ^ operand
                                                         : lane;
    if (source >= kWarpLanes || (mask >> source & 1) == 0) {
        state.fail("does " + shown(place) + " for lanes " + hex(mask) + " and reads lane " +
                   std::to_string(source) + ", which is none of them");
        state.abandon();
    }
    fiber.place = place;
    fiber.kind = kind;
    fiber.mask = mask;
    fiber.value = value;
    fiber.operand = operand;
    fiber.state = FiberState::at_exchange;
    state.arrive_at_exchange(fiber);
    state.leave(false);
    return fiber.value;
}

void preempt() {
    Machine::State& state = machine();
    if (state.drawn_schedule() && state.draw() % 2 == 0) {
        state.wake(*state.current);
        state.leave(false);
    }
}

void* shared_object(const void* key, std::size_t bytes) {
    Block& block = *machine().current->block;
    for (const SharedObject& object : block.objects) {
        if (object.key == key) {
            return object.memory.get();
        }
    }
    block.objects.push_back({key, bytes, std::make_unique<std::uint8_t[]>(bytes)});
    poison(block.objects.back().memory.get(), bytes);
    return block.objects.back().memory.get();
}

void* dynamic_shared_memory() { return machine().current->block->dynamic_shared.get(); }

void check_read(const void* address, std::size_t bytes, const Place& place) {
    Machine::State& state = machine();
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const bool aligned = begin % bytes == 0;
    if (aligned && state.last_read.holds(begin, bytes)) {
        return;
    }
    for (const std::span<const std::uint8_t>& memory : state.launch->readable) {
        state.last_read = {reinterpret_cast<std::uintptr_t>(memory.data()), memory.size()};
        if (aligned && state.last_read.holds(begin, bytes)) {
            return;
        }
    }
    state.fail("does " + shown(place) + " of " + std::to_string(bytes) + " bytes " +
               (aligned ? "outside the memory that the launch was given"
                        : "at an address that is not a multiple of that"));
    state.abandon();
}

}  // namespace kvw::simt
