// What a compiler must be able to do.
#include <metal_stdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

static_assert(sizeof(0.5) == 4, "literals are single");
float xy(metal::float4 v) { return v.xy.y + static_cast<float>(metal::half2(v.zw).x); }
