// Attention of one layer over a folded pair, from direction and magnitude; nothing is restored. Twin: minicache::cpu::attend.

struct Params {
    attention: Attention,
    // Offset of the first element, then batch, head and token strides.
    query: vec4<u32>,
    keys: Sections,
    values: Sections,
    pages_per_head: u32,
    // Tokens that the store holds, of which `attention.tokens` are alive.
    stored: u32,
    layer: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> queries: array<u32>;
@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<u32>;
@group(0) @binding(4) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> partials: array<vec4<f32>>;

fn page_index(kv_head: u32, token: u32) -> u32 {
    return 3u * (kv_head * params.pages_per_head + token / PAGE);
}

fn rows_of_page(token: u32) -> u32 {
    return min(PAGE, params.stored - (token - token % PAGE));
}

fn key_row(kv_head: u32, token: u32) -> Stored {
    let at = params.keys.pages + page_index(kv_head, token);
    let page = Page(keys[at], keys[at + 1u], keys[at + 2u]);
    return stored_row(page, token % PAGE, rows_of_page(token), params.keys, vec2<u32>(KEY_SLOT_WORDS, KEY_SIDE_WORDS));
}

fn value_row(kv_head: u32, token: u32) -> Stored {
    let at = params.values.pages + page_index(kv_head, token);
    let page = Page(values[at], values[at + 1u], values[at + 2u]);
    return stored_row(page, token % PAGE, rows_of_page(token), params.values, vec2<u32>(VALUE_SLOT_WORDS, VALUE_SIDE_WORDS));
}

fn half_of(word: u32, index: u32) -> f32 {
    let both = unpack2x16float(word);
    return select(both.x, both.y, (index & 1u) == 1u);
}

fn key_scale(row: Stored) -> f32 {
    if (row.magnitude == NOWHERE) {
        return 1.0;
    }
    return half_of(keys[params.keys.magnitudes + (row.magnitude >> 1u)], row.magnitude);
}

// Channels 2 * pair and the next; past a row's end the last again for f32, else the zero that pads its last word.
fn key_pair(row: Stored, pair: u32) -> Pair {
    if (!row.raw && !SLOT_IS_INPUT) {
        return Pair(unpack2x16float(keys[row.word + pair]), true);
    }
    let first = row.word + pair * (2u / ELEMENTS);
    let second = row.word + min(pair * (2u / ELEMENTS) + 1u, HEAD_DIM - 1u);
    return packed_pair(keys[first], keys[select(first, second, ELEMENTS == 1u)]);
}

fn value_pair(row: Stored, pair: u32) -> Pair {
    if (!row.raw && !SLOT_IS_INPUT) {
        return Pair(unpack2x16float(values[row.word + pair]), true);
    }
    let first = row.word + pair * (2u / ELEMENTS);
    let second = row.word + min(pair * (2u / ELEMENTS) + 1u, VALUE_DIM - 1u);
    return packed_pair(values[first], values[select(first, second, ELEMENTS == 1u)]);
}

// Whether the key that this invocation scored last is finite.
var<private> key_is_finite: bool;

fn tile_score(query_row: u32, kv_head: u32, tile: u32, token: u32, lane: u32) -> f32 {
    let row = key_row(kv_head, token);
    var sum = 0.0;
    var finite = true;
    for (var pair = 0u; pair < PAIRS; pair++) {
        let key = key_pair(row, pair);
        finite = finite && key.finite;
        sum += dot(query[pair], key.numbers);
    }
    key_is_finite = finite;
    return key_scale(row) * sum;
}

fn is_masked(kv_head: u32, token: u32) -> bool {
    let row = value_row(kv_head, token);
    var finite = key_is_finite;
    for (var pair = 0u; 2u * pair < VALUE_DIM; pair++) {
        finite = finite && value_pair(row, pair).finite;
    }
    return !finite;
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    let row = value_row(kv_head, token);
    if (row.magnitude == NOWHERE) {
        return 1.0;
    }
    return half_of(values[params.values.magnitudes + (row.magnitude >> 1u)], row.magnitude);
}

fn four_values(kv_head: u32, token: u32, four: u32) -> vec4<f32> {
    let row = value_row(kv_head, token);
    let low = value_pair(row, 2u * four).numbers;
    var high = vec2<f32>();
    if (4u * four + 2u < VALUE_DIM) {
        high = value_pair(row, 2u * four + 1u).numbers;
    }
    return vec4<f32>(low, high);
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
