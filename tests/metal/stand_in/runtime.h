// Runs a kernel's threadgroups on the CPU: each invocation is a fiber that runs until a barrier or simdgroup operation, in an
// order that a schedule decides.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace stand_in {
constexpr uint32_t SIMD_WIDTH = 32;

// What Metal's attributes tell an invocation.
struct Place {
    uint32_t group[3], groups[3];
    uint32_t index, simdgroup, lane;
};

// A translated kernel: how to call it, its invocations, and the bytes of each of its threadgroup variables.
struct Kernel {
    void (*invoke)(const Place&, char* const* buffers, char* const* shared);
    uint32_t threads;
    const size_t* shared_sizes;
    size_t shared_count;
};

// Called from the kernel. `site` tells the calls in a text apart: all invocations that meet must meet at one.
void barrier(unsigned flags, uint32_t site);
void exchange(const void* value, void* other, size_t size, uint32_t mask, uint32_t site);
void atomic_access(const void* at);

// Reads one dispatch from standard input, runs it under every schedule, and writes the buffers to standard output.
int serve(const Kernel& kernel);

// The race checker (race.cpp); nothing without it.
namespace race {
void region(const void* start, size_t size, bool shared);
void enter(uint32_t group, uint32_t thread);
void barrier(unsigned flags);
void reset();
} // namespace race
} // namespace stand_in
