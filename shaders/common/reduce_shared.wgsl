// Sums and maxima over the LANES invocations that share a row, through workgroup memory.
// Lanes are combined as a butterfly (1, 2, 4, ...), the order that every variant and the twin keep.

var<workgroup> exchange: array<vec4<f32>, WORKGROUP>;

fn lane_of(id: Invocation) -> u32 {
    return id.local_index;
}

fn row_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var sum = value;
    for (var offset = 1u; offset < LANES; offset <<= 1u) {
        exchange[lane] = sum;
        workgroupBarrier();
        sum += exchange[lane ^ offset];
        workgroupBarrier();
    }
    return sum;
}

fn row_max(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var peak = value;
    for (var offset = 1u; offset < LANES; offset <<= 1u) {
        exchange[lane] = peak;
        workgroupBarrier();
        peak = max(peak, exchange[lane ^ offset]);
        workgroupBarrier();
    }
    return peak;
}

// The value of the lane whose number differs in the bit `offset`.
fn row_exchange(value: vec4<f32>, lane: u32, offset: u32) -> vec4<f32> {
    exchange[lane] = value;
    workgroupBarrier();
    let other = exchange[lane ^ offset];
    workgroupBarrier();
    return other;
}

// Bits that any lane has set.
fn row_or(bits: u32, lane: u32) -> u32 {
    var all = bits;
    for (var offset = 1u; offset < LANES; offset <<= 1u) {
        all |= bitcast<u32>(row_exchange(vec4<f32>(bitcast<f32>(all)), lane, offset).x);
    }
    return all;
}
