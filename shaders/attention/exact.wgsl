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
@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<u32>;
@group(0) @binding(4) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> partials: array<vec4<f32>>;

fn row_start(view: vec4<u32>, kv_head: u32, token: u32) -> u32 {
    let kv_heads = params.attention.kv_heads;
    return view.x + (kv_head / kv_heads) * view.y + (kv_head % kv_heads) * view.z + token * view.w;
}

fn key_pair(start: u32, channel: u32) -> Pair {
    let first = start + channel;
    if (KEYS_ALIGNED) {
        return packed_pair(keys[word_index(first)], keys[word_index(first + 1u)]);
    }
    let at = vec2<u32>(first, start + min(channel + 1u, HEAD_DIM - 1u));
    return loose_pair(vec2<u32>(keys[word_index(at.x)], keys[word_index(at.y)]), at);
}

fn value_pair(start: u32, channel: u32) -> Pair {
    let first = start + channel;
    if (VALUES_ALIGNED) {
        return packed_pair(values[word_index(first)], values[word_index(first + 1u)]);
    }
    let at = vec2<u32>(first, start + min(channel + 1u, VALUE_DIM - 1u));
    return loose_pair(vec2<u32>(values[word_index(at.x)], values[word_index(at.y)]), at);
}

// Whether the key that this invocation scored last is finite.
var<private> key_is_finite: bool;

fn tile_score(query_row: u32, kv_head: u32, tile: u32, token: u32, lane: u32) -> f32 {
    let start = row_start(params.key, kv_head, token);
    var sum = 0.0;
    var finite = true;
    for (var pair = 0u; pair < PAIRS; pair++) {
        let key = key_pair(start, 2u * pair);
        finite = finite && key.finite;
        sum += dot(query[pair], key.numbers);
    }
    key_is_finite = finite;
    return sum;
}

fn is_masked(kv_head: u32, token: u32) -> bool {
    let start = row_start(params.value, kv_head, token);
    var finite = key_is_finite;
    for (var channel = 0u; channel < VALUE_DIM; channel += 2u) {
        finite = finite && value_pair(start, channel).finite;
    }
    return !finite;
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    return 1.0;
}

fn four_values(kv_head: u32, token: u32, four: u32) -> vec4<f32> {
    let start = row_start(params.value, kv_head, token);
    let low = value_pair(start, 4u * four).numbers;
    var high = vec2<f32>();
    if (4u * four + 2u < VALUE_DIM) {
        high = value_pair(start, 4u * four + 2u).numbers;
    }
    return vec4<f32>(low, high);
}

@compute @workgroup_size(WORKGROUP)
fn exact(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
