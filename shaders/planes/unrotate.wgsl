// Combines the splits of coded and raw rows of one query, one workgroup a query: what the coded ones found is turned back by R
// transposed, and both are added on one scale. Leaves one partial result a query for combine.wgsl. Twin: the end of
// qjl::planes::cpu::attend.

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
// VALUE_LANES invocations cover a row of values, four channels each; GROUPS of them take turns at the splits.
const GROUPS: u32 = WORKGROUP / VALUE_LANES;

var<workgroup> weights: array<f32, WORKGROUP>;

// Largest logit among the splits that saw anything.
fn largest_logit(first: u32, lane: u32) -> f32 {
    var largest = -3.402823e38;
    for (var split = lane; split < params.splits; split += WORKGROUP) {
        let base = first + split * STRIDE;
        largest = max(largest, select(largest, partials[base], partials[base + 1u] > 0.0));
    }
    return row_max(vec4<f32>(largest), lane).x;
}

fn four_at(at: u32) -> vec4<f32> {
    return vec4<f32>(partials[at], partials[at + 1u], partials[at + 2u], partials[at + 3u]);
}

// What splits have found, on the scale of `largest`: of a lane's four channels, of coded and of raw rows, by its group; and its part
// of the sums of exponentials.
struct Gathered {
    coded: vec4<f32>,
    raw: vec4<f32>,
    sum: f32,
}

fn gather(first: u32, largest: f32, lane: u32) -> Gathered {
    var gathered = Gathered();
    let four = 2u + 4u * min(lane % VALUE_LANES, VALUE_FOURS - 1u);
    for (var start = 0u; start < params.splits; start += WORKGROUP) {
        let own = first + min(start + lane, params.splits - 1u) * STRIDE;
        let found = start + lane < params.splits && partials[own + 1u] > 0.0;
        let weight = select(0.0, exp(clamp(partials[own] - largest, -200.0, 0.0)), found);
        gathered.sum += weight * partials[own + 1u];
        workgroupBarrier();
        weights[lane] = weight;
        workgroupBarrier();
        let count = min(WORKGROUP, params.splits - start);
        let coded = clamp(params.coded, start, start + count) - start;
        for (var split = lane / VALUE_LANES; split < coded; split += GROUPS) {
            gathered.coded += weights[split] * four_at(first + (start + split) * STRIDE + four);
        }
        for (var split = coded + lane / VALUE_LANES; split < count; split += GROUPS) {
            gathered.raw += weights[split] * four_at(first + (start + split) * STRIDE + four);
        }
    }
    return gathered;
}

// The sum over groups of a lane's four channels.
fn over_groups(four: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier();
    exchange[lane] = four;
    workgroupBarrier();
    var sum = vec4<f32>();
    for (var i = lane % VALUE_LANES; i < WORKGROUP; i += VALUE_LANES) {
        sum += exchange[i];
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
    let first = min(row, params.rows - 1u) * params.splits * STRIDE;
    let largest = largest_logit(first, lane);
    let gathered = gather(first, largest, lane);
    let sum = row_sum(vec4<f32>(gathered.sum), lane).x;
    let coded = over_groups(gathered.coded, lane);
    let raw = over_groups(gathered.raw, lane);
    for (var i = 0u; i < 4u; i++) {
        if (lane < VALUE_LANES && 4u * lane + i < HEAD_DIM) {
            work[4u * lane + i] = vec2<f32>(coded[i], 0.0);
        }
    }
    workgroupBarrier();
    rotate_back(0u, HEAD_DIM, FIRST_AT, FIRST_HADAMARD, FIRST_FACTOR, lane);
    if (row >= params.rows) {
        return;
    }
    for (var i = 0u; i < 4u; i++) {
        if (lane < VALUE_LANES && 4u * lane + i < HEAD_DIM) {
            put(row * STRIDE + 2u + 4u * lane + i, work[4u * lane + i].x + raw[i]);
        }
    }
    if (lane == 0u) {
        put(row * STRIDE, largest);
        put(row * STRIDE + 1u, sum);
    }
}
