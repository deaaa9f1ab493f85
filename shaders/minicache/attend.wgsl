// Attention of one layer over a folded pair, from direction and magnitude; nothing is restored. rows_whole.wgsl and
// rows_coded.wgsl say how rows are read. Twin: minicache::cpu::attend.

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
    // Fours of query rows.
    units: u32,
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

// Words of a row that hold numbers of this type: two a word, or one.
fn key_words(word: u32, first: u32, wide: bool) -> vec4<u32> {
    let last = select((KEY_DIM + 1u) / 2u, KEY_DIM, wide) - 1u;
    let at = first + vec4<u32>(0u, 1u, 2u, 3u);
    let inside = word + min(at, vec4<u32>(last));
    return select(vec4<u32>(), vec4<u32>(keys[inside.x], keys[inside.y], keys[inside.z], keys[inside.w]), at <= vec4<u32>(last));
}

fn value_words(word: u32, first: u32, wide: bool) -> vec4<u32> {
    let last = select((VALUE_DIM + 1u) / 2u, VALUE_DIM, wide) - 1u;
    let at = first + vec4<u32>(0u, 1u, 2u, 3u);
    let inside = word + min(at, vec4<u32>(last));
    return select(vec4<u32>(), vec4<u32>(values[inside.x], values[inside.y], values[inside.z], values[inside.w]), at <= vec4<u32>(last));
}

fn key_scale(kv_head: u32, token: u32) -> f32 {
    let row = key_row(kv_head, token);
    let nowhere = row.magnitude == NOWHERE;
    let index = select(row.magnitude, 0u, nowhere);
    return select(half_of(keys[params.keys.magnitudes + (index >> 1u)], index), 1.0, nowhere);
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    let row = value_row(kv_head, token);
    let nowhere = row.magnitude == NOWHERE;
    let index = select(row.magnitude, 0u, nowhere);
    return select(half_of(values[params.values.magnitudes + (index >> 1u)], index), 1.0, nowhere);
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
