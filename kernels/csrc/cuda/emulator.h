// Runs CUDA C++ kernels on the CPU: device.h includes this where the compiler is not nvcc.
//
// Every thread of a block is a fiber; one block runs at a time. Shared arrays, __syncthreads, __syncwarp, shuffles and
// ballots behave as on a device, and what is undefined there is an error here:
//   - a barrier or warp collective that some threads miss, or that threads reach at different lines;
//   - two threads touching one shared element, one of them writing, without a barrier between (the missing barrier);
//   - an index outside of a shared array; reading a shared element that no thread of this block has written;
//   - global memory out of bounds: AddressSanitizer, which the emulated library is compiled with.
// The order of the fibers and of the blocks follows HEADWAY_EMULATOR_SEED (0: as numbered), so that tests can see
// that no result depends on it. Not emulated: atomics (our kernels have none), textures, async copies, matrix units.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define HEADWAY_EMULATOR_ASAN 1
#else
#define HEADWAY_EMULATOR_ASAN 0
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace headway::emulator {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = size_t{128} << 10;

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// ---- fibers: stacks that are switched by hand; ucontext does two system calls a switch, which is most of the time ----

#if defined(__x86_64__)
using Context = void*;  // the stack pointer, below it the registers that a call preserves

// Saves them on this stack, keeps its pointer in *from, and goes on where `to` was left.
[[gnu::naked, gnu::noinline, gnu::no_sanitize_address]] inline void switch_context(Context*, Context) {
    asm volatile(
        "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}

// A context that enters `main` on a new stack when it is first switched to.
inline void make_context(Context& context, char* stack, size_t bytes, void (*main)()) {
    auto top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    auto* slots = reinterpret_cast<void**>(top);
    *--slots = nullptr;  // where main would return to: it does not; also what the ABI's alignment asks for
    *--slots = reinterpret_cast<void*>(main);
    for (int i = 0; i < 6; ++i) *--slots = nullptr;
    context = slots;
}

inline void switch_to(Context& from, Context& to) { switch_context(&from, to); }
#else
using Context = ucontext_t;

inline void make_context(Context& context, char* stack, size_t bytes, void (*main)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, main, 0);
}

inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

enum class State { kReady, kAtBarrier, kAtWarp, kDone };

struct Fiber {
    Context context{};
    char* stack = nullptr;
    State state = State::kReady;
    int line = 0;          // of the barrier or collective that it waits at
    uint64_t rounds = 0;   // warp rendezvous passed; also picks the half of the exchange slots
    void* fake_stack = nullptr;
};

// Who touched a shared element last: enough to order any two accesses of one block.
struct Access {
    int thread = -1;
    uint64_t barriers = 0;
    uint64_t rounds = 0;
};

struct SharedArray {
    std::vector<uint64_t> words;  // 8-byte aligned storage
    size_t bytes = 0;
    std::vector<Access> writer;
    std::vector<std::vector<Access>> readers;  // of each element, two for each warp
};

struct Block {
    dim3 grid, index;
    int num_threads = 0;
    int current = -1;
    uint64_t barriers = 0;
    std::vector<Fiber> fibers;
    std::vector<uint64_t> slots;  // two halves of one value per thread
    std::map<const void*, SharedArray> shared;
    std::function<void()> body;
    std::string fault;
    Context scheduler{};
    void* scheduler_fake_stack = nullptr;
    const void* scheduler_stack = nullptr;
    size_t scheduler_stack_bytes = 0;
};

inline Block*& block() {
    static thread_local Block* current = nullptr;
    return current;
}

inline Fiber& self() { return block()->fibers[static_cast<size_t>(block()->current)]; }

inline void leave(bool for_ever) {
    Block& b = *block();
    Fiber& fiber = self();
#if HEADWAY_EMULATOR_ASAN
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &fiber.fake_stack, b.scheduler_stack, b.scheduler_stack_bytes);
#endif
    switch_to(fiber.context, b.scheduler);
#if HEADWAY_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &b.scheduler_stack, &b.scheduler_stack_bytes);
#else
    (void)for_ever;
#endif
}

// Thrown through a fiber whose block has failed elsewhere, so that its destructors run.
struct Abandoned {};

inline void wait(State state, int line) {
    Fiber& fiber = self();
    fiber.state = state;
    fiber.line = line;
    leave(false);
    if (!block()->fault.empty()) throw Abandoned{};
}

inline void fiber_main() {
    Block& b = *block();
#if HEADWAY_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &b.scheduler_stack, &b.scheduler_stack_bytes);
#endif
    try {
        b.body();
    } catch (const Abandoned&) {
    } catch (const std::exception& error) {
        if (b.fault.empty()) b.fault = "thread " + std::to_string(b.current) + ": " + error.what();
    }
    self().state = State::kDone;
    leave(true);
}

inline void enter(Block& b, int thread) {
    b.current = thread;
    Fiber& fiber = b.fibers[static_cast<size_t>(thread)];
#if HEADWAY_EMULATOR_ASAN
    __sanitizer_start_switch_fiber(&b.scheduler_fake_stack, fiber.stack, kStackBytes);
#endif
    switch_to(b.scheduler, fiber.context);
#if HEADWAY_EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(b.scheduler_fake_stack, nullptr, nullptr);
#endif
}

inline void start_fibers(Block& b) {
    for (Fiber& fiber : b.fibers) {
        fiber.state = State::kReady;
        fiber.rounds = 0;
        fiber.fake_stack = nullptr;
#if HEADWAY_EMULATOR_ASAN
        ASAN_UNPOISON_MEMORY_REGION(fiber.stack, kStackBytes);
#endif
        make_context(fiber.context, fiber.stack, kStackBytes, fiber_main);
    }
    b.barriers = 0;
    b.shared.clear();
}

// Warps whose every thread waits at the same collective go on.
inline bool release_warps(Block& b) {
    bool released = false;
    for (int first = 0; first < b.num_threads; first += kWarp) {
        int waiting = 0, line = 0, end = std::min(first + kWarp, b.num_threads);
        bool same_line = true;
        for (int i = first; i < end; ++i) {
            const Fiber& fiber = b.fibers[static_cast<size_t>(i)];
            if (fiber.state != State::kAtWarp) continue;
            same_line = same_line && (waiting == 0 || fiber.line == line);
            line = fiber.line;
            ++waiting;
        }
        if (waiting != end - first) continue;
        if (!same_line) throw Fault("the lanes of a warp met at different collectives, one at line " + std::to_string(line));
        for (int i = first; i < end; ++i) b.fibers[static_cast<size_t>(i)].state = State::kReady;
        released = true;
    }
    return released;
}

inline bool release_barrier(Block& b) {
    int line = b.fibers[0].line;
    for (const Fiber& fiber : b.fibers) {
        if (fiber.state != State::kAtBarrier) return false;
        if (fiber.line != line)
            throw Fault("divergent barrier: threads met at __syncthreads() of line " + std::to_string(line) + " and of line " +
                        std::to_string(fiber.line));
    }
    for (Fiber& fiber : b.fibers) fiber.state = State::kReady;
    ++b.barriers;
    return true;
}

inline std::string stuck(const Block& b) {
    int done = 0, barrier = 0, warp = 0, line = 0;
    for (const Fiber& fiber : b.fibers) {
        done += fiber.state == State::kDone;
        barrier += fiber.state == State::kAtBarrier;
        warp += fiber.state == State::kAtWarp;
        if (fiber.state == State::kAtBarrier || fiber.state == State::kAtWarp) line = fiber.line;
    }
    return "divergent barrier: " + std::to_string(barrier) + " threads wait at __syncthreads() and " + std::to_string(warp) +
           " at a warp collective (line " + std::to_string(line) + "), " + std::to_string(done) + " have left the kernel";
}

// Runs until every thread has left the kernel.
inline void schedule(Block& b, std::mt19937* random) {
    std::vector<int> order(static_cast<size_t>(b.num_threads));
    for (int i = 0; i < b.num_threads; ++i) order[static_cast<size_t>(i)] = i;
    for (;;) {
        if (random) std::shuffle(order.begin(), order.end(), *random);
        bool ran = false;
        int done = 0;
        for (int thread : order) {
            if (b.fibers[static_cast<size_t>(thread)].state == State::kReady) {
                enter(b, thread);
                ran = true;
                if (!b.fault.empty()) throw Fault(b.fault);
            }
        }
        for (const Fiber& fiber : b.fibers) done += fiber.state == State::kDone;
        if (done == b.num_threads) return;
        if (release_warps(b) || release_barrier(b)) continue;
        if (!ran) throw Fault(stuck(b));
    }
}

// Lets the fibers that still wait unwind: their stacks hold destructors.
inline void abandon(Block& b, const std::string& reason) {
    b.fault = reason;
    for (int i = 0; i < b.num_threads; ++i) {
        State state = b.fibers[static_cast<size_t>(i)].state;
        bool waits = state == State::kAtBarrier || state == State::kAtWarp;
        bool started = waits || b.fibers[static_cast<size_t>(i)].rounds > 0;
        if (state != State::kDone && started) enter(b, i);
    }
}

inline unsigned seed() {
    const char* text = std::getenv("HEADWAY_EMULATOR_SEED");
    return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : 0u;
}

inline std::string& last_fault() {
    static thread_local std::string text;
    return text;
}

// Runs `body` for every thread of every block. A fault ends the launch and is kept in last_fault().
inline void launch(dim3 grid, int num_threads, std::function<void()> body) {
    Block b;
    b.grid = grid;
    b.num_threads = num_threads;
    b.body = std::move(body);
    b.fibers.resize(static_cast<size_t>(num_threads));
    b.slots.resize(2 * static_cast<size_t>(num_threads));
    static thread_local std::vector<std::unique_ptr<char[]>> stacks;  // kept: the pages of new ones would cost more
    while (stacks.size() < static_cast<size_t>(num_threads)) stacks.emplace_back(new char[kStackBytes]);
    for (int i = 0; i < num_threads; ++i) b.fibers[static_cast<size_t>(i)].stack = stacks[static_cast<size_t>(i)].get();
    unsigned chosen = seed();
    std::mt19937 random(chosen);
    std::vector<dim3> order;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) order.push_back(dim3{x, y, z});
    if (chosen) std::shuffle(order.begin(), order.end(), random);
    Block* outer = std::exchange(block(), &b);
    try {
        for (const dim3& index : order) {
            b.index = index;
            start_fibers(b);
            schedule(b, chosen ? &random : nullptr);
        }
    } catch (const Fault& fault) {
        abandon(b, fault.what());
        last_fault() = "block " + std::to_string(b.index.x) + ": " + fault.what();
    }
    block() = outer;
}

// ---- shared memory ----

// Whether the two accesses may happen at the same time on a device.
inline bool concurrent(const Access& earlier, const Access& now) {
    if (earlier.thread < 0 || earlier.thread == now.thread || earlier.barriers != now.barriers) return false;
    bool same_warp = earlier.thread / kWarp == now.thread / kWarp;
    return !(same_warp && earlier.rounds < now.rounds);
}

inline void race(const char* name, size_t index, const Access& earlier, const Access& now, const char* what) {
    throw Fault(std::string("missing barrier: ") + what + " of shared " + name + "[" + std::to_string(index) + "] by threads " +
                std::to_string(earlier.thread) + " and " + std::to_string(now.thread));
}

inline Access access_now() { return Access{block()->current, block()->barriers, self().rounds}; }

template <class T>
class SharedElement {
  public:
    SharedElement(SharedArray& array, const char* name, size_t index) : array_(array), name_(name), index_(index) {}
    SharedElement(const SharedElement&) = default;

    operator T() const {  // NOLINT: reads like the element it stands for
        Access now = access_now();
        const Access& writer = array_.writer[index_];
        if (writer.thread < 0)
            throw Fault(std::string("shared ") + name_ + "[" + std::to_string(index_) + "] is read before it is written");
        if (concurrent(writer, now)) race(name_, index_, writer, now, "a write and a read");
        note_reader(now);
        T value;
        std::memcpy(&value, address(), sizeof(T));
        return value;
    }

    T operator=(T value) {
        Access now = access_now();
        if (concurrent(array_.writer[index_], now)) race(name_, index_, array_.writer[index_], now, "two writes");
        for (const Access& reader : array_.readers[index_])
            if (concurrent(reader, now)) race(name_, index_, reader, now, "a read and a write");
        array_.writer[index_] = now;
        std::memcpy(address(), &value, sizeof(T));
        return value;
    }

    T operator=(const SharedElement& other) { return *this = static_cast<T>(other); }
    T operator+=(T value) { return *this = static_cast<T>(*this) + value; }

  private:
    // Of each warp the latest readers are kept, two of different threads: a later write must be ordered after every
    // reader, earlier ones of the warp are ordered before these, and whoever writes, one of two is another thread.
    void note_reader(const Access& now) const {
        std::vector<Access>& all = array_.readers[index_];
        if (all.empty()) all.resize(2 * static_cast<size_t>((block()->num_threads + kWarp - 1) / kWarp));
        Access* of_warp = &all[2 * static_cast<size_t>(now.thread / kWarp)];
        bool is_latest = of_warp[0].thread >= 0 && of_warp[0].barriers == now.barriers && of_warp[0].rounds == now.rounds;
        if (!is_latest) {
            of_warp[0] = now;
            of_warp[1] = Access{};
        } else if (of_warp[0].thread != now.thread) {
            of_warp[1] = now;
        }
    }

    char* address() const { return reinterpret_cast<char*>(array_.words.data()) + index_ * sizeof(T); }

    SharedArray& array_;
    const char* name_;
    size_t index_;
};

template <class T>
class Shared {
  public:
    Shared(const void* site, const char* name, size_t count) : array_(block()->shared[site]), name_(name), count_(count) {
        if (array_.bytes) return;
        array_.bytes = count * sizeof(T);
        array_.words.resize((array_.bytes + 7) / 8);
        array_.writer.resize(count);
        array_.readers.resize(count);
    }

    SharedElement<T> operator[](int64_t index) const {
        if (index < 0 || static_cast<size_t>(index) >= count_)
            throw Fault(std::string("shared ") + name_ + "[" + std::to_string(index) + "] is out of bounds, size " +
                        std::to_string(count_));
        return SharedElement<T>(array_, name_, static_cast<size_t>(index));
    }

  private:
    SharedArray& array_;
    const char* name_;
    size_t count_;
};

// ---- warp collectives ----

// Every lane offers a value; returns the half of the slots that holds the warp's values.
template <class T>
uint64_t* offer(T value, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    Block& b = *block();
    uint64_t* half = b.slots.data() + (self().rounds & 1u) * static_cast<size_t>(b.num_threads);
    uint64_t raw = 0;
    std::memcpy(&raw, &value, sizeof(T));
    half[b.current] = raw;
    wait(State::kAtWarp, line);
    ++self().rounds;
    return half + (b.current & ~(kWarp - 1));
}

inline int lane() { return block()->current & (kWarp - 1); }

inline int warp_size_now() {
    int first = block()->current & ~(kWarp - 1);
    return std::min(kWarp, block()->num_threads - first);
}

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu || warp_size_now() != kWarp)
        throw Fault("warp collectives of the emulator take whole warps: mask 0xffffffff, a multiple of 32 threads");
}

template <class T>
T exchange(unsigned mask, T value, int source, int line) {
    check_mask(mask);
    const uint64_t* values = offer(value, line);
    if (source < 0 || source >= kWarp) return value;
    T out;
    std::memcpy(&out, values + source, sizeof(T));
    return out;
}

}  // namespace headway::emulator

// CUDA counts threads, blocks and sizes from these names; our blocks have one dimension.
#define threadIdx (dim3{static_cast<unsigned>(headway::emulator::block()->current), 0, 0})
#define blockIdx (headway::emulator::block()->index)
#define blockDim (dim3{static_cast<unsigned>(headway::emulator::block()->num_threads), 1, 1})
#define gridDim (headway::emulator::block()->grid)

inline void emulator_sync_threads(int line) { headway::emulator::wait(headway::emulator::State::kAtBarrier, line); }
#define __syncthreads() emulator_sync_threads(__LINE__)

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    headway::emulator::exchange(mask, 0, 0, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
    return headway::emulator::exchange(mask, value, source & 31, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int line = __builtin_LINE()) {
    return headway::emulator::exchange(mask, value, headway::emulator::lane() ^ bits, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
    return headway::emulator::exchange(mask, value, headway::emulator::lane() - static_cast<int>(delta), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
    return headway::emulator::exchange(mask, value, headway::emulator::lane() + static_cast<int>(delta), line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    headway::emulator::check_mask(mask);
    const uint64_t* values = headway::emulator::offer<uint64_t>(predicate != 0, line);
    unsigned bits = 0;
    for (int i = 0; i < headway::emulator::kWarp; ++i) bits |= static_cast<unsigned>(values[i]) << i;
    return bits;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
    headway::emulator::check_mask(mask);
    uint64_t mine = 0;
    std::memcpy(&mine, &value, sizeof(T));
    const uint64_t* values = headway::emulator::offer(value, line);
    unsigned bits = 0;
    for (int i = 0; i < headway::emulator::kWarp; ++i) bits |= (values[i] == mine ? 1u : 0u) << i;
    return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
