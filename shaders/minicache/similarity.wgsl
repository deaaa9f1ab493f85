// The probe: cosine, norms, weights of the shared direction, and what forbids merging, for every row of a pair of layers.
// LANES invocations share a row; WORKGROUP / LANES rows share a workgroup. Twin: minicache::cpu::similarity.

struct Params {
    rows: u32,
    tokens: u32,
    heads: u32,
    t: f32,
    lower: vec4<u32>,
    upper: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lower: array<u32>;
@group(0) @binding(2) var<storage, read> upper: array<u32>;
@group(0) @binding(3) var<storage, read_write> rows: array<Row>;

const STEPS: u32 = (HEAD_DIM + 2u * LANES - 1u) / (2u * LANES);
const F16_MIN_NORMAL: f32 = 6.1035156e-5;
const F16_MAX: f32 = 65504.0;
// Rows whose largest number lies outside stay raw: the inverse of their norm, or a weight, would leave f32's normal range.
const MEASURABLE: vec2<f32> = vec2<f32>(7.888609e-31, 1.2676506e30);
// An Anchor ratio may be rounded up to f16 by this factor's inverse.
const RATIO_HEADROOM: f32 = 1.0 - 1.0 / 2048.0;

// Element index of a row's first channel; a view's offset stands in x, its batch, head and token strides follow.
fn row_start(view: vec4<u32>, row: u32) -> u32 {
    let token = row % params.tokens;
    let head = row / params.tokens;
    return view.x + (head / params.heads) * view.y + (head % params.heads) * view.z + token * view.w;
}

fn lower_pair(start: u32, channel: u32) -> Pair {
    let first = start + channel;
    if (ALIGNED) {
        return packed_pair(lower[word_index(first)], lower[word_index(first + 1u)]);
    }
    let at = vec2<u32>(first, start + min(channel + 1u, HEAD_DIM - 1u));
    var pair = loose_pair(vec2<u32>(lower[word_index(at.x)], lower[word_index(at.y)]), at);
    pair.numbers.y = select(0.0, pair.numbers.y, channel + 1u < HEAD_DIM);
    return pair;
}

fn upper_pair(start: u32, channel: u32) -> Pair {
    let first = start + channel;
    if (ALIGNED) {
        return packed_pair(upper[word_index(first)], upper[word_index(first + 1u)]);
    }
    let at = vec2<u32>(first, start + min(channel + 1u, HEAD_DIM - 1u));
    var pair = loose_pair(vec2<u32>(upper[word_index(at.x)], upper[word_index(at.y)]), at);
    pair.numbers.y = select(0.0, pair.numbers.y, channel + 1u < HEAD_DIM);
    return pair;
}

fn largest(pair: vec2<f32>) -> f32 {
    return max(abs(pair.x), abs(pair.y));
}

fn measurable(peak: f32) -> bool {
    return peak == 0.0 || (peak >= MEASURABLE.x && peak <= MEASURABLE.y);
}

fn storable(magnitude: f32) -> bool {
    return magnitude == 0.0 || (magnitude >= F16_MIN_NORMAL && magnitude <= F16_MAX);
}

fn out_of_range(row: Row, peak_lower: f32, peak_direction: f32) -> bool {
    if (MODE == SHARED) {
        return !storable(row.lower) || !storable(row.upper);
    }
    if (MODE == ANCHOR) {
        let ratio = anchor_ratio(row);
        return !storable(ratio) || ratio * peak_lower > DTYPE_MAX * RATIO_HEADROOM;
    }
    return row.upper * peak_direction > F16_MAX;
}

@compute @workgroup_size(WORKGROUP)
fn similarity(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place) * (WORKGROUP / LANES) + lane / LANES;
    let readable = min(row, params.rows - 1u);
    let lower_start = row_start(params.lower, readable);
    let upper_start = row_start(params.upper, readable);

    var a: array<vec2<f32>, STEPS>;
    var b: array<vec2<f32>, STEPS>;
    var peaks = vec4<f32>();
    for (var step = 0u; step < STEPS; step++) {
        let channel = 2u * (step * LANES + lane % LANES);
        a[step] = vec2<f32>();
        b[step] = vec2<f32>();
        if (channel < HEAD_DIM) {
            let x = lower_pair(lower_start, channel);
            let y = upper_pair(upper_start, channel);
            if (x.finite && y.finite) {
                a[step] = x.numbers;
                b[step] = y.numbers;
                peaks = max(peaks, vec4<f32>(largest(x.numbers), largest(y.numbers), 0.0, 0.0));
            } else {
                peaks.z = 1.0;
            }
        }
    }
    peaks = row_max(peaks, lane);

    // Scaling by the peak before squaring keeps the squares inside f32.
    let scale = vec2<f32>(inverse_or_zero(peaks.x), inverse_or_zero(peaks.y));
    var squares = vec4<f32>();
    for (var step = 0u; step < STEPS; step++) {
        let x = a[step] * scale.x;
        let y = b[step] * scale.y;
        squares += vec4<f32>(x.x * x.x + x.y * x.y, y.x * y.x + y.y * y.y, 0.0, 0.0);
    }
    squares = row_sum(squares, lane);
    let lengths = sqrt(squares.xy);
    let unit = scale * vec2<f32>(inverse_or_zero(lengths.x), inverse_or_zero(lengths.y));

    var products = vec4<f32>();
    for (var step = 0u; step < STEPS; step++) {
        let x = a[step] * unit.x;
        let y = b[step] * unit.y;
        let sum = x + y;
        let difference = x - y;
        products += vec4<f32>(x.x * y.x + x.y * y.y, sum.x * sum.x + sum.y * sum.y,
                              difference.x * difference.x + difference.y * difference.y, 0.0);
    }
    products = row_sum(products, lane);
    let chord = sqrt(products.yz);
    let weights = unit * slerp_weights(peaks.x == 0.0, peaks.y == 0.0, chord.x, chord.y, params.t);

    var peak_direction = 0.0;
    if (MODE == COMPAT) {
        for (var step = 0u; step < STEPS; step++) {
            peak_direction = max(peak_direction, largest(weights.x * a[step] + weights.y * b[step]));
        }
        peak_direction = row_max(vec4<f32>(peak_direction), lane).x;
    }

    var found = Row(clamp(products.x, -1.0, 1.0), peaks.x * lengths.x, peaks.y * lengths.y, weights.x, weights.y, MERGED);
    let unanchored = MODE == ANCHOR && peaks.x == 0.0 && peaks.y > 0.0;
    if (peaks.z > 0.0) {
        found = Row(0.0, 0.0, 0.0, 0.0, 0.0, NON_FINITE);
    } else if (!measurable(peaks.x) || !measurable(peaks.y)) {
        found = Row(0.0, peaks.x, peaks.y, 0.0, 0.0, RANGE);
    } else if ((chord.x < OPPOSITE && !both_zero(found)) || unanchored) {
        found.fault = ANTIPARALLEL;
    } else if (out_of_range(found, peaks.x, peak_direction)) {
        found.fault = RANGE;
    }
    if (row < params.rows && lane % LANES == 0u) {
        rows[row] = found;
    }
}
