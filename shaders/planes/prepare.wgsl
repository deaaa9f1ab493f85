// Putting a query that is made ready where attention reads it (sketch.wgsl). The kernel or a module of it declares `work`, one
// vec2 a channel, and the kernel `part_of_row(row, i)`, number i of what it has put.

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

// Where number `at` of a row stands.
fn place_of_row(row: u32, at: u32) -> u32 {
    let queries = params.view.tokens;
    let head = params.first_row / queries + row / queries;
    let fours = (params.group * queries + 3u) / 4u;
    let place = (row % queries) * params.group + head % params.group;
    return (((head / params.group) * fours + place / 4u) * SKETCH + at) * 4u + place % 4u;
}

fn put_word(row: u32, at: u32, word: u32) {
    let index = place_of_row(row, at);
    if (row < params.view.rows && index < arrayLength(&sketches)) {
        sketches[index] = word;
    }
}

// The numbers of a row's sketch in whole units, of which each group of 32 has its own: a number an invocation. The first of each
// four puts their codes, and the first of a group the unit and the sum.
fn put_groups(row: u32, groups: u32, lane: u32) {
    for (var first = 0u; first < 32u * groups; first += WORKGROUP) {
        let i = min(first + lane, 32u * groups - 1u);
        let number = part_of_row(row, i);
        var peak = abs(number);
        for (var offset = 1u; offset < 32u; offset <<= 1u) {
            peak = max(peak, row_exchange(vec4<f32>(peak), lane, offset).x);
        }
        let unit = max(peak, 1e-30) / 127.0;
        let code = clamp(floor(number / unit + 0.5), -127.0, 127.0);
        let next = row_exchange(vec4<f32>(code), lane, 1u).x;
        let other = row_exchange(vec4<f32>(code, next, 0.0, 0.0), lane, 2u);
        // All are whole, so that their order does not matter.
        var sum = (code + next) + (other.x + other.y);
        for (var offset = 4u; offset < 32u; offset <<= 1u) {
            sum += row_exchange(vec4<f32>(sum), lane, offset).x;
        }
        let is_own = first + lane == i;
        if (is_own && i % 4u == 0u) {
            let codes = vec4<u32>(vec4<i32>(vec4<f32>(code, next, other.x, other.y))) & vec4<u32>(0xffu);
            let bytes = codes << vec4<u32>(0u, 8u, 16u, 24u);
            put_word(row, BYTES_AT + i / 4u, (bytes.x | bytes.y) | (bytes.z | bytes.w));
        }
        if (is_own && i % 32u == 0u) {
            put(row, UNITS_AT + i / 32u, unit);
            put(row, SUMS_AT + i / 32u, sum);
        }
    }
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

// What the mean of keys needs: A and B of every pair, or the query itself.
fn put_mean(row: u32, readable: u32, table: u32, finite: bool, lane: u32) {
    if (CENTRING == BLOCK_MEAN) {
        for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
            put(row, MEAN_AT + i, select(0.0, query_number(readable, i), finite));
        }
    } else {
        put_pairs(row, readable, table, finite, lane);
    }
}

// A and B of every pair.
fn put_pairs(row: u32, readable: u32, table: u32, finite: bool, lane: u32) {
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

// Where the channels of a row's KV head begin.
fn table_of(readable: u32) -> u32 {
    let head = readable / params.view.tokens;
    let heads = params.view.heads;
    return ((head / heads) * params.set_heads + (head % heads) / params.group) * HEAD_DIM;
}
