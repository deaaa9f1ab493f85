// What the splits of one query row have found, on one scale. A split's part is its largest logit and the sum of its exponentials, in
// one vec4, and its weighted sum of values; one that nobody wrote, or that saw nothing, has a sum of 0. The kernel has a workgroup
// for each row.

struct Params {
    rows: u32,
    // Splits of coded rows, and of raw ones in two buffers.
    coded: u32,
    raw: u32,
    more: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> coded_partials: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> raw_partials: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> more_partials: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> joined: array<vec4<f32>>;

// Where partial results stand.
const CODED: u32 = 0u;
const RAW_FIRST: u32 = 1u;
const RAW_MORE: u32 = 2u;

// Fours of numbers of one partial result: largest logit and sum of exponentials, then the weighted sum of values.
const STRIDE: u32 = 1u + VALUE_FOURS;
// VALUE_LANES invocations cover a row of values, four channels each; GROUPS of them take turns at the splits.
const GROUPS: u32 = WORKGROUP / VALUE_LANES;

var<workgroup> weights: array<f32, WORKGROUP>;

fn partial(kind: u32, at: u32) -> vec4<f32> {
    if (kind == CODED) {
        return coded_partials[at];
    }
    if (kind == RAW_FIRST) {
        return raw_partials[at];
    }
    return more_partials[at];
}

// Largest logit among the splits that saw anything.
fn largest_of(kind: u32, first: u32, splits: u32, lane: u32) -> f32 {
    var largest = -3.402823e38;
    for (var split = lane; split < splits; split += WORKGROUP) {
        let head = partial(kind, first + split * STRIDE);
        largest = max(largest, select(largest, head.x, head.y > 0.0));
    }
    return largest;
}

// Weighted sum of a lane's channels over so many splits, every GROUPS-th of them; four at a time, whose loads overlap.
fn gather_splits(kind: u32, base: u32, count: u32, lane: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    for (var split = lane / VALUE_LANES; split < count; split += 4u * GROUPS) {
        let all = vec4<u32>(split) + GROUPS * vec4<u32>(0u, 1u, 2u, 3u);
        let inside = all < vec4<u32>(count);
        let four = min(all, vec4<u32>(count - 1u));
        let a = partial(kind, base + four.x * STRIDE);
        let b = partial(kind, base + four.y * STRIDE);
        let c = partial(kind, base + four.z * STRIDE);
        let d = partial(kind, base + four.w * STRIDE);
        let weight = select(vec4<f32>(), vec4<f32>(weights[four.x], weights[four.y], weights[four.z], weights[four.w]), inside);
        sum += (weight.x * a + weight.y * b) + (weight.z * c + weight.w * d);
    }
    return sum;
}

// What splits have found, on the scale of `largest`: of a lane's four channels by its group, and its part of the sum of exponentials.
struct Gathered {
    values: vec4<f32>,
    sum: f32,
}

fn gather(kind: u32, first: u32, splits: u32, largest: f32, lane: u32) -> Gathered {
    var gathered = Gathered();
    let channels = 1u + min(lane % VALUE_LANES, VALUE_FOURS - 1u);
    for (var start = 0u; start < splits; start += WORKGROUP) {
        let head = partial(kind, first + min(start + lane, splits - 1u) * STRIDE);
        let found = (start + lane < splits) & (head.y > 0.0);
        let weight = select(0.0, exp(clamp(head.x - largest, -200.0, 0.0)), found);
        gathered.sum += weight * head.y;
        workgroupBarrier();
        weights[lane] = weight;
        workgroupBarrier();
        let base = first + start * STRIDE + channels;
        gathered.values += gather_splits(kind, base, min(WORKGROUP, splits - start), lane);
    }
    return gathered;
}

// What all splits of a row have found: of a lane's four channels, of coded and of raw rows, by its group; their largest logit; and
// the sum of exponentials.
struct Row {
    coded: vec4<f32>,
    raw: vec4<f32>,
    largest: f32,
    sum: f32,
}

fn gather_row(row: u32, lane: u32) -> Row {
    let first = min(row, params.rows - 1u) * vec3<u32>(params.coded, params.raw, params.more) * STRIDE;
    let of_raw = max(largest_of(RAW_FIRST, first.y, params.raw, lane), largest_of(RAW_MORE, first.z, params.more, lane));
    let own = max(largest_of(CODED, first.x, params.coded, lane), of_raw);
    let largest = row_max(vec4<f32>(own), lane).x;
    let coded = gather(CODED, first.x, params.coded, largest, lane);
    let raw = gather(RAW_FIRST, first.y, params.raw, largest, lane);
    let more = gather(RAW_MORE, first.z, params.more, largest, lane);
    let sum = row_sum(vec4<f32>(coded.sum + raw.sum + more.sum), lane).x;
    return Row(coded.values, raw.values + more.values, largest, sum);
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
