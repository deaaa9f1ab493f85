// Finds races between barriers. The kernel is compiled with -fsanitize=thread, whose calls end here instead of in its
// runtime: every word of a buffer or threadgroup variable knows who wrote it, who read it and who changed it atomically.
// Two invocations race on a word when one of them writes and no barrier for its kind of memory stands between; between
// threadgroups of a dispatch none ever does. Of a word's readers the last two are remembered.
#include "runtime.h"

#include <stdio.h>
#include <unistd.h>
#include <algorithm>
#include <vector>

namespace stand_in::race {
namespace {
struct Access {
    uint32_t group, thread, epoch;
    bool made;
};

struct Word {
    Access write, atomic, read[2];
};

struct Region {
    const char* start;
    size_t size;
    bool shared;
    std::vector<Word> words;
};

std::vector<Region> regions;
const char *lowest, *highest;
uint32_t group, thread, epochs[2];

bool same(const Access& a, const Access& b) { return a.group == b.group && a.thread == b.thread; }

bool races(const Access& before, const Access& now, bool shared) {
    if (!before.made || same(before, now)) return false;
    // A threadgroup's variables are its own: what another one left there is no matter.
    return before.group == now.group ? before.epoch == now.epoch : !shared;
}

enum Kind { Read, Write, Atomic };

[[noreturn]] void fail(const Region& region, size_t at, const Access& before, const Access& now) {
    fprintf(stderr, "race on word %zu of %s %zu: invocation %u of threadgroup %u and invocation %u of threadgroup %u\n", at,
            region.shared ? "threadgroup variable" : "buffer", static_cast<size_t>(&region - regions.data()), before.thread,
            before.group, now.thread, now.group);
    _exit(1);
}

void check(Region& region, size_t at, Kind kind) {
    Word& word = region.words[at];
    Access now = {group, thread, epochs[region.shared], true};
    auto against = [&](const Access& before) {
        if (races(before, now, region.shared)) fail(region, at, before, now);
    };
    against(word.write);
    if (kind != Atomic) against(word.atomic);
    if (kind != Read) against(word.read[0]), against(word.read[1]);
    if (kind == Write) word.write = now;
    if (kind == Atomic) word.atomic = now;
    if (kind == Read) {
        if (!same(word.read[0], now)) word.read[1] = word.read[0];
        word.read[0] = now;
    }
}

void access(const void* at, size_t size, Kind kind) {
    auto* start = static_cast<const char*>(at);
    // Most accesses are to an invocation's own stack.
    if (start < lowest || start >= highest) return;
    for (Region& region : regions) {
        if (start < region.start || start >= region.start + region.size) continue;
        size_t first = static_cast<size_t>(start - region.start) / 4;
        for (size_t i = 0; i < (size + 3) / 4; i++) check(region, first + i, kind);
        return;
    }
}
} // namespace

void region(const void* at, size_t size, bool shared) {
    auto* start = static_cast<const char*>(at);
    lowest = regions.empty() ? start : std::min(lowest, start);
    highest = regions.empty() ? start + size : std::max(highest, start + size);
    regions.push_back({start, size, shared, std::vector<Word>(size / 4 + 1)});
}

void enter(uint32_t g, uint32_t t) { group = g, thread = t; }

void barrier(unsigned flags) {
    epochs[0] += flags & 1;
    epochs[1] += flags >> 1 & 1;
}

void reset() { regions.clear(); }
} // namespace stand_in::race

void stand_in::atomic_access(const void* at) { race::access(at, 4, race::Atomic); }

using stand_in::race::access;
using stand_in::race::Read;
using stand_in::race::Write;

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define HOOKS(n)                                                                                                       \
    void __tsan_read##n(void* at) { access(at, n, Read); }                                                             \
    void __tsan_write##n(void* at) { access(at, n, Write); }                                                           \
    void __tsan_unaligned_read##n(void* at) { access(at, n, Read); }                                                   \
    void __tsan_unaligned_write##n(void* at) { access(at, n, Write); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void* __tsan_memset(void* at, int value, size_t size) {
    access(at, size, Write);
    return __builtin_memset(at, value, size);
}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
    access(from, size, Read), access(to, size, Write);
    return __builtin_memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
    access(from, size, Read), access(to, size, Write);
    return __builtin_memmove(to, from, size);
}
}
