// Queries made ready to be scored against coded keys, one workgroup a query; sketch.wgsl lists what is left of each. Rows that fill
// up the last four of a KV head stay zeros. Twin: qjl::planes::cpu::project.

struct Params {
    view: View,
    group: u32,
    // Heads of all sets of tables that a sequence skips to reach its own: 0 where all share one.
    set_heads: u32,
    // The row that the view's first becomes.
    first_row: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
@group(0) @binding(2) var<storage, read> channels: array<Channel>;
@group(0) @binding(4) var<storage, read_write> sketches: array<u32>;

fn query_number(row: u32, channel: u32) -> f32 {
    let at = view_row(params.view, row) + channel;
    return element(input[word_index(at)], at);
}

fn put(row: u32, at: u32, number: f32) {
    put_word(row, at, bitcast<u32>(number));
}

fn put_word(row: u32, at: u32, word: u32) {
    let queries = params.view.tokens;
    let head = params.first_row / queries + row / queries;
    let fours = (params.group * queries + 3u) / 4u;
    let place = (row % queries) * params.group + head % params.group;
    let index = (((head / params.group) * fours + place / 4u) * SKETCH + at) * 4u + place % 4u;
    if (row < params.view.rows && index < arrayLength(&sketches)) {
        sketches[index] = word;
    }
}

// The sum of a segment of the rotated query.
fn segment_sum(first: u32, count: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var i = lane; i < count; i += WORKGROUP) {
        sum += work[first + i].x;
    }
    return row_sum(vec4<f32>(sum), lane).x;
}

// A segment of the rotated query times 2, in f32; and each group of 32 channels, by one invocation, in whole units of its own.
fn put_segment(row: u32, first: u32, channels: u32, first_group: u32, groups: u32, lane: u32) {
    for (var i = lane; i < 32u * groups; i += WORKGROUP) {
        put(row, 32u * first_group + i, doubled(first, channels, i));
    }
    for (var group = lane; group < groups; group += WORKGROUP) {
        var peak = 0.0;
        for (var i = 0u; i < 32u; i++) {
            peak = max(peak, abs(doubled(first, channels, 32u * group + i)));
        }
        let unit = max(peak, 1e-30) / 127.0;
        var sum = 0.0;
        for (var four = 0u; four < 8u; four++) {
            var word = 0u;
            for (var j = 0u; j < 4u; j++) {
                let number = doubled(first, channels, 32u * group + 4u * four + j);
                let code = clamp(floor(number / unit + 0.5), -127.0, 127.0);
                sum += code;
                word |= (bitcast<u32>(i32(code)) & 0xffu) << (8u * j);
            }
            put_word(row, BYTES_AT + 8u * (first_group + group) + four, word);
        }
        put(row, UNITS_AT + first_group + group, unit);
        put(row, SUMS_AT + first_group + group, sum);
    }
}

// Twice a number of a segment of the rotated query; 0 behind its end.
fn doubled(first: u32, channels: u32, i: u32) -> f32 {
    return select(0.0, 2.0 * work[first + min(i, channels - 1u)].x, i < channels);
}

// The sum over the channels of a pair; the last one has all that do not turn.
fn pair_sum(pair: u32) -> vec2<f32> {
    if (pair < PAIRS - 1u) {
        let a = select(pair, 2u * pair, INTERLEAVED);
        let b = select(pair + PAIRS - 1u, 2u * pair + 1u, INTERLEAVED);
        return work[a] + work[b];
    }
    var sums = vec2<f32>();
    for (var i = 2u * (PAIRS - 1u); i < HEAD_DIM; i++) {
        sums += work[i];
    }
    return sums;
}

// A and B of every pair.
fn put_mean(row: u32, readable: u32, table: u32, finite: bool, lane: u32) {
    workgroupBarrier();
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let at = channels[table + i];
        let number = select(0.0, query_number(readable, at.channel), finite);
        work[at.channel] = number * vec2<f32>(at.mean, at.turned);
    }
    workgroupBarrier();
    for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
        let sums = pair_sum(pair);
        put(row, MEAN_AT + pair, sums.x);
        put(row, MEAN_AT + PAIRS + pair, sums.y);
    }
}

@compute @workgroup_size(WORKGROUP)
fn project(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place);
    let readable = min(row, params.view.rows - 1u);
    let head = readable / params.view.tokens;
    let heads = params.view.heads;
    let table = ((head / heads) * params.set_heads + (head % heads) / params.group) * HEAD_DIM;
    var broken = 0.0;
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let at = view_row(params.view, readable) + i;
        broken = max(broken, select(1.0, 0.0, element_is_finite(input[word_index(at)], at)));
    }
    let finite = row_max(vec4<f32>(broken), lane).x == 0.0;
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let at = channels[table + i];
        work[i] = vec2<f32>(select(0.0, query_number(readable, at.channel) * at.sigma, finite), 0.0);
    }
    workgroupBarrier();
    rotate(0u, FIRST_CHANNELS, FIRST_AT, FIRST_HADAMARD, FIRST_FACTOR, lane);
    if (SECOND_PLANES > 0u) {
        rotate(FIRST_CHANNELS, SECOND_CHANNELS, SECOND_AT, SECOND_HADAMARD, SECOND_FACTOR, lane);
    }
    let first_sum = segment_sum(0u, FIRST_CHANNELS, lane);
    let second_sum = segment_sum(FIRST_CHANNELS, SECOND_CHANNELS, lane);
    put_segment(row, 0u, FIRST_CHANNELS, 0u, FIRST_GROUPS, lane);
    if (SECOND_PLANES > 0u) {
        put_segment(row, FIRST_CHANNELS, SECOND_CHANNELS, FIRST_GROUPS, SECOND_GROUPS, lane);
    }
    if (lane == 0u) {
        put(row, MINUS_AT, f32((1u << FIRST_PLANES) - 1u) * first_sum);
        put(row, MINUS_AT + 1u, f32((1u << SECOND_PLANES) - 1u) * second_sum);
        put(row, FINITE_AT, select(0.0, 1.0, finite));
    }
    if (CENTRING == BLOCK_MEAN) {
        for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
            put(row, MEAN_AT + i, select(0.0, query_number(readable, i), finite));
        }
    } else {
        put_mean(row, readable, table, finite, lane);
    }
}
