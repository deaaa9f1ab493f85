// What the splits of one query row have found, on one scale. A split's part is its largest logit and the sum of its exponentials, in
// one vec4, and its weighted sum of values; one that nobody wrote, or that saw nothing, has a sum of 0. The kernel has a workgroup
// for each row.

struct Params {
    rows: u32,
    // Splits in all, and how many of them, from the first on, are of coded rows.
    splits: u32,
    coded: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partials: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> joined: array<vec4<f32>>;

// Fours of numbers of one partial result: largest logit and sum of exponentials, then the weighted sum of values.
const STRIDE: u32 = 1u + VALUE_FOURS;
// VALUE_LANES invocations cover a row of values, four channels each; GROUPS of them take turns at the splits.
const GROUPS: u32 = WORKGROUP / VALUE_LANES;

var<workgroup> weights: array<f32, WORKGROUP>;

// Largest logit among the splits that saw anything.
fn largest_logit(first: u32, lane: u32) -> f32 {
    var largest = -3.402823e38;
    for (var split = lane; split < params.splits; split += WORKGROUP) {
        let head = partials[first + split * STRIDE];
        largest = max(largest, select(largest, head.x, head.y > 0.0));
    }
    return row_max(vec4<f32>(largest), lane).x;
}

// What splits have found, on the scale of `largest`: of a lane's four channels, of coded and of raw rows, by its group; and its part
// of the sums of exponentials.
struct Gathered {
    coded: vec4<f32>,
    raw: vec4<f32>,
    sum: f32,
}

// Weighted sum of a lane's channels over splits of this chunk, every GROUPS-th of them; four at a time, whose loads overlap.
fn gather_splits(base: u32, splits: vec2<u32>, lane: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    let last = max(splits.y, 1u) - 1u;
    for (var split = splits.x + lane / VALUE_LANES; split < splits.y; split += 4u * GROUPS) {
        let four = min(vec4<u32>(split) + GROUPS * vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last));
        let inside = vec4<u32>(split) + GROUPS * vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(splits.y);
        let weight = select(vec4<f32>(), vec4<f32>(weights[four.x], weights[four.y], weights[four.z], weights[four.w]), inside);
        sum += weight.x * partials[base + four.x * STRIDE] + weight.y * partials[base + four.y * STRIDE];
        sum += weight.z * partials[base + four.z * STRIDE] + weight.w * partials[base + four.w * STRIDE];
    }
    return sum;
}

fn gather(first: u32, largest: f32, lane: u32) -> Gathered {
    var gathered = Gathered();
    let channels = 1u + min(lane % VALUE_LANES, VALUE_FOURS - 1u);
    for (var start = 0u; start < params.splits; start += WORKGROUP) {
        let head = partials[first + min(start + lane, params.splits - 1u) * STRIDE];
        let found = start + lane < params.splits && head.y > 0.0;
        let weight = select(0.0, exp(clamp(head.x - largest, -200.0, 0.0)), found);
        gathered.sum += weight * head.y;
        workgroupBarrier();
        weights[lane] = weight;
        workgroupBarrier();
        let count = min(WORKGROUP, params.splits - start);
        let coded = clamp(params.coded, start, start + count) - start;
        let base = first + start * STRIDE + channels;
        gathered.coded += gather_splits(base, vec2<u32>(0u, coded), lane);
        gathered.raw += gather_splits(base, vec2<u32>(coded, count), lane);
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

fn put(at: u32, four: vec4<f32>) {
    if (at < arrayLength(&joined)) {
        joined[at] = four;
    }
}

// Leaves one partial result of a row.
fn put_row(row: u32, largest: f32, sum: f32, values: vec4<f32>, lane: u32) {
    if (row < params.rows && lane < VALUE_FOURS) {
        put(row * STRIDE + 1u + lane, values);
    }
    if (row < params.rows && lane == 0u) {
        put(row * STRIDE, vec4<f32>(largest, sum, 0.0, 0.0));
    }
}
