#include "runtime.h"

#include <setjmp.h>
#include <stdio.h>
#include <unistd.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif

namespace stand_in {
namespace {

enum class State { Ready, Barrier, Exchange, Done };

struct Fiber {
    State state;
    bool started;
    uint32_t site;
    unsigned flags;
    const void* value;
    void* other;
    size_t size;
    uint32_t mask;
    Place place;
    jmp_buf resume;
    ucontext_t context;
    // Not zeroed: most of it is never touched.
    std::unique_ptr<char[]> stack;
};

const Kernel* kernel;
std::vector<Fiber> fibers;
std::vector<std::vector<char>> buffers, shared;
std::vector<char*> buffer_starts, shared_starts;
Fiber* running;
jmp_buf scheduler;
ucontext_t scheduler_context;

[[noreturn]] void fail(const std::string& what) {
    fprintf(stderr, "%s\n", what.c_str());
    _exit(1);
}

// Back to the scheduler. Contexts cost a system call each time, jumps do not; the sanitizers follow contexts only.
void leave(State state) {
    running->state = state;
#ifdef SANITIZED
    swapcontext(&running->context, &scheduler_context);
#else
    if (!_setjmp(running->resume)) _longjmp(scheduler, 1);
#endif
}

void fiber_main() {
    while (true) {
        kernel->invoke(running->place, buffer_starts.data(), shared_starts.data());
        leave(State::Done);
    }
}

void start(Fiber& fiber) {
    fiber.started = true;
    constexpr size_t size = 256 << 10;
    fiber.stack.reset(new char[size]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = size;
    makecontext(&fiber.context, fiber_main, 0);
}

void run(Fiber& fiber, uint32_t group) {
    running = &fiber;
    race::enter(group, fiber.place.index);
    bool fresh = !fiber.started;
    if (fresh) start(fiber);
#ifdef SANITIZED
    swapcontext(&scheduler_context, &fiber.context);
#else
    if (_setjmp(scheduler)) return;
    if (fresh) setcontext(&fiber.context);
    _longjmp(fiber.resume, 1);
#endif
}

// The order in which threadgroups, simdgroups and invocations take turns: forward, reverse, or shuffled anew each time.
struct Schedule {
    uint32_t number;
    uint64_t state;

    explicit Schedule(uint32_t n) : number(n), state(0x9e3779b97f4a7c15u * (n + 1)) {}

    std::vector<uint32_t> order(uint32_t count) {
        std::vector<uint32_t> order(count);
        for (uint32_t i = 0; i < count; i++) order[i] = i;
        if (number == 1) std::reverse(order.begin(), order.end());
        if (number > 1) {
            for (uint32_t i = count; i > 1; i--) {
                state ^= state << 13, state ^= state >> 7, state ^= state << 17;
                std::swap(order[i - 1], order[state % i]);
            }
        }
        return order;
    }
};

bool together(const Fiber* first, uint32_t count, State state) {
    return std::all_of(first, first + count, [&](const Fiber& f) { return f.state == state && f.site == first->site; });
}

void resolve_exchange(Fiber* lanes, uint32_t width) {
    for (uint32_t lane = 0; lane < width; lane++) {
        uint32_t from = lane ^ lanes[lane].mask;
        if (from >= width) fail("a shuffle reads a lane that its simdgroup does not have");
        memcpy(lanes[lane].other, lanes[from].value, lanes[lane].size);
        lanes[lane].state = State::Ready;
    }
}

// Runs one simdgroup as far as it gets alone, so that the others lag behind by as much as barriers allow.
void run_simdgroup(Fiber* lanes, uint32_t width, uint32_t group, Schedule& schedule) {
    do {
        for (uint32_t lane : schedule.order(width)) {
            if (lanes[lane].state == State::Ready) run(lanes[lane], group);
        }
        if (!together(lanes, width, State::Exchange)) break;
        resolve_exchange(lanes, width);
    } while (true);
    if (std::any_of(lanes, lanes + width, [](const Fiber& f) { return f.state == State::Exchange; }))
        fail("a simdgroup operation that not all lanes of the simdgroup reach");
}

void run_group(const uint32_t (&group)[3], const uint32_t (&groups)[3], Schedule& schedule) {
    for (auto& variable : shared) memset(variable.data(), 0xcd, variable.size());
    uint32_t threads = kernel->threads, index = (group[2] * groups[1] + group[1]) * groups[0] + group[0];
    for (uint32_t i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.state = State::Ready;
        memcpy(fiber.place.group, group, sizeof group);
        memcpy(fiber.place.groups, groups, sizeof groups);
        fiber.place.index = i, fiber.place.simdgroup = i / SIMD_WIDTH, fiber.place.lane = i % SIMD_WIDTH;
    }
    while (true) {
        for (uint32_t simdgroup : schedule.order((threads + SIMD_WIDTH - 1) / SIMD_WIDTH)) {
            uint32_t first = simdgroup * SIMD_WIDTH;
            run_simdgroup(&fibers[first], std::min(SIMD_WIDTH, threads - first), index, schedule);
        }
        auto is = [](State s) { return [s](const Fiber& f) { return f.state == s; }; };
        if (std::all_of(fibers.begin(), fibers.end(), is(State::Done))) return;
        if (!together(fibers.data(), threads, State::Barrier)) {
            auto waiting = std::count_if(fibers.begin(), fibers.end(), is(State::Barrier));
            fail("a barrier that not all invocations reach: " + std::to_string(waiting) + " of " +
                 std::to_string(threads) + " wait at one");
        }
        race::barrier(fibers[0].flags);
        for (auto& fiber : fibers) fiber.state = State::Ready;
    }
}

template <class T> T take() {
    T value;
    if (fread(&value, sizeof value, 1, stdin) != 1) fail("the dispatch is cut short");
    return value;
}

void run_schedule(const uint32_t (&groups)[3], Schedule schedule) {
    race::reset();
    for (auto& buffer : buffers) race::region(buffer.data(), buffer.size(), false);
    for (auto& variable : shared) race::region(variable.data(), variable.size(), true);
    for (uint32_t index : schedule.order(groups[0] * groups[1] * groups[2])) {
        uint32_t group[3] = {index % groups[0], index / groups[0] % groups[1], index / groups[0] / groups[1]};
        run_group(group, groups, schedule);
    }
}
} // namespace

void barrier(unsigned flags, uint32_t site) {
    running->flags = flags, running->site = site;
    leave(State::Barrier);
}

void exchange(const void* value, void* other, size_t size, uint32_t mask, uint32_t site) {
    running->value = value, running->other = other, running->size = size, running->mask = mask, running->site = site;
    leave(State::Exchange);
}

// The input: schedules, threadgroups in x, y and z, number of buffers, then each one's length and bytes; all of 32 bits.
int serve(const Kernel& served) {
    kernel = &served;
    uint32_t schedules = take<uint32_t>();
    uint32_t groups[3] = {take<uint32_t>(), take<uint32_t>(), take<uint32_t>()};
    buffers.resize(take<uint32_t>());
    for (auto& buffer : buffers) {
        buffer.resize(take<uint32_t>());
        if (fread(buffer.data(), 1, buffer.size(), stdin) != buffer.size()) fail("a buffer is cut short");
    }
    for (size_t i = 0; i < served.shared_count; i++) shared.emplace_back(served.shared_sizes[i]);
    for (auto& buffer : buffers) buffer_starts.push_back(buffer.data());
    for (auto& variable : shared) shared_starts.push_back(variable.data());
    fibers = std::vector<Fiber>(served.threads);
    auto given = buffers;
    std::vector<std::vector<char>> first;
    for (uint32_t schedule = 0; schedule < schedules; schedule++) {
        // Into the same memory, whose addresses the fibers and the race checker hold.
        for (size_t i = 0; i < buffers.size(); i++) std::copy(given[i].begin(), given[i].end(), buffers[i].begin());
        run_schedule(groups, Schedule(schedule));
        if (schedule == 0) first = buffers;
        for (size_t i = 0; i < buffers.size(); i++)
            if (buffers[i] != first[i]) fail("schedule " + std::to_string(schedule) + " changes buffer " + std::to_string(i));
    }
    for (auto& buffer : first) fwrite(buffer.data(), 1, buffer.size(), stdout);
    return fflush(stdout) == 0 ? 0 : 1;
}

#ifndef RACE
void atomic_access(const void*) {}
namespace race {
void region(const void*, size_t, bool) {}
void enter(uint32_t, uint32_t) {}
void barrier(unsigned) {}
void reset() {}
} // namespace race
#endif
} // namespace stand_in
