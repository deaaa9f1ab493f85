// Combines the splits of coded and raw rows of one query: what the coded ones found is turned back by R transposed, and both are
// added on one scale. Leaves one partial result a query for combine.wgsl. Twin: the end of qjl::planes::cpu::attend.

struct Params {
    rows: u32,
    // Splits in all, and how many of them, from the first on, are of coded rows.
    splits: u32,
    coded: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partials: array<f32>;
@group(0) @binding(2) var<storage, read_write> joined: array<f32>;

// Numbers of one partial result: largest logit, sum of exponentials, weighted sum of values.
const STRIDE: u32 = 2u + 4u * VALUE_FOURS;

// Weighted sum over splits `from` to `to` of one number of their partial results.
fn gathered_number(first: u32, range: vec2<u32>, largest: f32, at: u32) -> f32 {
    var sum = 0.0;
    for (var split = range.x; split < range.y; split++) {
        let base = first + split * STRIDE;
        let weight = select(0.0, exp(clamp(partials[base] - largest, -200.0, 0.0)), partials[base + 1u] > 0.0);
        sum += weight * partials[base + at];
    }
    return sum;
}

fn put(at: u32, number: f32) {
    if (at < arrayLength(&joined)) {
        joined[at] = number;
    }
}

@compute @workgroup_size(WORKGROUP)
fn unrotate(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place);
    let readable = min(row, params.rows - 1u);
    let first = readable * params.splits * STRIDE;
    var largest = -3.402823e38;
    for (var split = 0u; split < params.splits; split++) {
        let base = first + split * STRIDE;
        largest = max(largest, select(largest, partials[base], partials[base + 1u] > 0.0));
    }
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        work[i] = vec2<f32>(gathered_number(first, vec2<u32>(0u, params.coded), largest, 2u + i), 0.0);
    }
    workgroupBarrier();
    rotate_back(0u, HEAD_DIM, FIRST_AT, FIRST_HADAMARD, FIRST_FACTOR, lane);
    if (row >= params.rows) {
        return;
    }
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let raw = gathered_number(first, vec2<u32>(params.coded, params.splits), largest, 2u + i);
        put(row * STRIDE + 2u + i, work[i].x + raw);
    }
    if (lane == 0u) {
        put(row * STRIDE, largest);
        put(row * STRIDE + 1u, gathered_number(first, vec2<u32>(0u, params.splits), largest, 1u));
    }
}
