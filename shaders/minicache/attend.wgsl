// Attention of one layer over a folded pair, from direction and magnitude; nothing is restored. rows_whole.wgsl and
// rows_coded.wgsl say what rows are, store_words.wgsl and store_vectors.wgsl how they are read. Twin: minicache::cpu::attend.

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
    let page = Page(key_word(at), key_word(at + 1u), key_word(at + 2u));
    return stored_row(page, token % PAGE, rows_of_page(token), params.keys, vec2<u32>(KEY_SLOT_WORDS, KEY_SIDE_WORDS));
}

fn value_row(kv_head: u32, token: u32) -> Stored {
    let at = params.values.pages + page_index(kv_head, token);
    let page = Page(value_word(at), value_word(at + 1u), value_word(at + 2u));
    return stored_row(page, token % PAGE, rows_of_page(token), params.values, vec2<u32>(VALUE_SLOT_WORDS, VALUE_SIDE_WORDS));
}

fn half_of(word: u32, index: u32) -> f32 {
    let both = unpack2x16float(word);
    return select(both.x, both.y, (index & 1u) == 1u);
}

fn key_scale(kv_head: u32, token: u32) -> f32 {
    let row = key_row(kv_head, token);
    let nowhere = row.magnitude == NOWHERE;
    let index = select(row.magnitude, 0u, nowhere);
    return select(half_of(key_word(params.keys.magnitudes + (index >> 1u)), index), 1.0, nowhere);
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    let row = value_row(kv_head, token);
    let nowhere = row.magnitude == NOWHERE;
    let index = select(row.magnitude, 0u, nowhere);
    return select(half_of(value_word(params.values.magnitudes + (index >> 1u)), index), 1.0, nowhere);
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
