// Exact attention over raw rows: the baseline, and how a cache attends to the rows that it has not folded.
// Twin: attention::cpu::exact.

struct Params {
    attention: Attention,
    // Offset of the first element, then batch, head and token strides.
    query: vec4<u32>,
    key: vec4<u32>,
    value: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> queries: array<u32>;
@group(0) @binding(2) var<storage, read> keys: array<Word>;
@group(0) @binding(3) var<storage, read> values: array<Word>;
@group(0) @binding(4) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> partials: array<f32>;

const PAIRS: u32 = (HEAD_DIM + 1u) / 2u;

var<workgroup> query: array<vec2<f32>, PAIRS>;

fn query_number(query_row: u32, channel: u32) -> f32 {
    let head = query_row / params.attention.queries;
    let at = params.query.x + (head / params.attention.query_heads) * params.query.y
        + (head % params.attention.query_heads) * params.query.z
        + (query_row % params.attention.queries) * params.query.w + channel;
    if (QUERY_DTYPE == 2u) {
        return bitcast<f32>(queries[at]);
    }
    let word = queries[at >> 1u];
    let odd = (at & 1u) == 1u;
    if (QUERY_DTYPE == 1u) {
        return bitcast<f32>(select(word << 16u, word & 0xffff0000u, odd));
    }
    let both = unpack2x16float(word);
    return select(both.x, both.y, odd);
}

// Zeros where a number is not finite: such a query sees nothing, and no product may turn NaN.
fn load_query(query_row: u32, lane: u32) {
    for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
        let even = query_number(query_row, 2u * pair);
        let odd = select(0.0, query_number(query_row, min(2u * pair + 1u, HEAD_DIM - 1u)), 2u * pair + 1u < HEAD_DIM);
        query[pair] = select(vec2<f32>(), vec2<f32>(even, odd), vec2<bool>(is_finite(even), is_finite(odd)));
    }
}

fn query_is_finite(query_row: u32) -> bool {
    var finite = true;
    for (var channel = 0u; channel < HEAD_DIM; channel++) {
        finite = finite && is_finite(query_number(query_row, channel));
    }
    return finite;
}

fn row_start(view: vec4<u32>, kv_head: u32, token: u32) -> u32 {
    let kv_heads = params.attention.kv_heads;
    return view.x + (kv_head / kv_heads) * view.y + (kv_head % kv_heads) * view.z + token * view.w;
}

fn key_pair(start: u32, channel: u32) -> vec2<f32> {
    let first = start + channel;
    if (KEYS_ALIGNED) {
        return unpack_pair(keys[word_index(first)], keys[word_index(first + 1u)]);
    }
    let second = start + min(channel + 1u, HEAD_DIM - 1u);
    return vec2<f32>(element(keys[word_index(first)], first), element(keys[word_index(second)], second));
}

fn value_pair(start: u32, channel: u32) -> vec2<f32> {
    let first = start + channel;
    if (VALUES_ALIGNED) {
        return unpack_pair(values[word_index(first)], values[word_index(first + 1u)]);
    }
    let second = start + min(channel + 1u, VALUE_DIM - 1u);
    return vec2<f32>(element(values[word_index(first)], first), element(values[word_index(second)], second));
}

// Whether the key that this invocation scored last is finite: tested on bits, since fast math may fold 0 * infinity away.
var<private> key_is_finite: bool;

fn tile_score(query_row: u32, kv_head: u32, tile: u32, token: u32, lane: u32) -> f32 {
    let start = row_start(params.key, kv_head, token);
    var sum = 0.0;
    var finite = true;
    for (var pair = 0u; pair < PAIRS; pair++) {
        let key = key_pair(start, 2u * pair);
        finite = finite && is_finite(key.x) && is_finite(key.y);
        sum += dot(query[pair], key);
    }
    key_is_finite = finite;
    return sum;
}

fn is_masked(kv_head: u32, token: u32) -> bool {
    let start = row_start(params.value, kv_head, token);
    var finite = key_is_finite;
    for (var channel = 0u; channel < VALUE_DIM; channel += 2u) {
        let pair = value_pair(start, channel);
        finite = finite && is_finite(pair.x) && is_finite(pair.y);
    }
    return !finite;
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    return 1.0;
}

fn four_values(kv_head: u32, token: u32, four: u32) -> vec4<f32> {
    let start = row_start(params.value, kv_head, token);
    let low = value_pair(start, 4u * four);
    var high = vec2<f32>();
    if (4u * four + 2u < VALUE_DIM) {
        high = value_pair(start, 4u * four + 2u);
    }
    return vec4<f32>(low, high);
}

@compute @workgroup_size(WORKGROUP)
fn exact(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
