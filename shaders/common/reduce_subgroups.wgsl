// Sums and maxima over the LANES invocations that share a row, by shuffles as far as the smallest subgroup reaches and
// through workgroup memory beyond. Same butterfly order as reduce_shared.wgsl.

var<workgroup> exchange: array<vec4<f32>, WORKGROUP>;

// Subgroup lanes need not follow local_invocation_index, so a row's lanes are numbered by subgroup. The host takes these texts only
// where no subgroup is larger than WORKGROUP, so that all subgroups are full.
fn lane_of(id: Invocation) -> u32 {
    return id.subgroup * id.subgroup_size + id.subgroup_lane;
}

fn row_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var sum = value;
    for (var offset = 1u; offset < min(LANES, SUBGROUP_MIN); offset <<= 1u) {
        sum += subgroupShuffleXor(sum, offset);
    }
    for (var offset = SUBGROUP_MIN; offset < LANES; offset <<= 1u) {
        exchange[lane] = sum;
        workgroupBarrier();
        sum += exchange[lane ^ offset];
        workgroupBarrier();
    }
    return sum;
}

fn row_max(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var peak = value;
    for (var offset = 1u; offset < min(LANES, SUBGROUP_MIN); offset <<= 1u) {
        peak = max(peak, subgroupShuffleXor(peak, offset));
    }
    for (var offset = SUBGROUP_MIN; offset < LANES; offset <<= 1u) {
        exchange[lane] = peak;
        workgroupBarrier();
        peak = max(peak, exchange[lane ^ offset]);
        workgroupBarrier();
    }
    return peak;
}

// The value of the lane whose number differs in the bit `offset`.
fn row_exchange(value: vec4<f32>, lane: u32, offset: u32) -> vec4<f32> {
    var other = value;
    if (offset < SUBGROUP_MIN) {
        other = subgroupShuffleXor(value, offset);
    } else {
        exchange[lane] = value;
        workgroupBarrier();
        other = exchange[lane ^ offset];
        workgroupBarrier();
    }
    return other;
}

// Bits that any lane has set.
fn row_or(bits: u32, lane: u32) -> u32 {
    var all = bits;
    for (var offset = 1u; offset < min(LANES, SUBGROUP_MIN); offset <<= 1u) {
        all |= subgroupShuffleXor(all, offset);
    }
    for (var offset = SUBGROUP_MIN; offset < LANES; offset <<= 1u) {
        all |= bitcast<u32>(row_exchange(vec4<f32>(bitcast<f32>(all)), lane, offset).x);
    }
    return all;
}
