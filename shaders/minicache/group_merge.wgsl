// Folds a group of LAYERS layers into a store: writes the page table, and slots, magnitudes and side rows where it says. One
// invocation per channel pair of a row. Twin: minicache::cpu::group_merge.

struct Params {
    pages: u32,
    pages_per_head: u32,
    tokens: u32,
    padding: u32,
    sections: Sections,
    // Offset of the first element, then layer, head and token strides.
    source: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> layers: array<u32>;
@group(0) @binding(2) var<storage, read> scales: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> pages: array<Page>;
@group(0) @binding(4) var<storage, read_write> store: array<u32>;

fn row_start(layer: u32, head: u32, token: u32) -> u32 {
    return params.source.x + layer * params.source.y + head * params.source.z + token * params.source.w;
}

// Bits of two channels, 0 past the row's end.
fn bits_of(start: u32, pair: u32) -> vec2<u32> {
    let at = start + min(vec2<u32>(2u * pair, 2u * pair + 1u), vec2<u32>(HEAD_DIM - 1u));
    let bits = vec2<u32>(element_bits(layers[word_index(at.x)], at.x), element_bits(layers[word_index(at.y)], at.y));
    return vec2<u32>(bits.x, select(0u, bits.y, 2u * pair + 1u < HEAD_DIM));
}

fn numbers_of(start: u32, pair: u32) -> vec2<f32> {
    let at = start + min(vec2<u32>(2u * pair, 2u * pair + 1u), vec2<u32>(HEAD_DIM - 1u));
    let numbers = vec2<f32>(element(layers[word_index(at.x)], at.x), element(layers[word_index(at.y)], at.y));
    return vec2<f32>(numbers.x, select(0.0, numbers.y, 2u * pair + 1u < HEAD_DIM));
}

// f16 bits of the magnitude at a place of a page's slots, 1 where the row is raw and 0 past the page's end.
fn magnitude_bits(page: Page, place: u32, rows_in_page: u32, first: u32) -> u32 {
    let row = place / MAGNITUDES;
    let layer = place % MAGNITUDES + select(1u, 0u, MODE == SHARED);
    if (row >= rows_in_page) {
        return 0u;
    }
    let norm = scales[(first + row) * LAYERS + layer].x;
    let anchored = norm_ratio(norm, scales[(first + row) * LAYERS].x);
    let magnitude = select(select(anchored, norm, MODE == SHARED), 1.0, is_retained(page, row));
    return pack2x16float(vec2<f32>(clamp(magnitude, 0.0, 65504.0), 0.0)) & 0xffffu;
}

// Two rows of an even number of magnitudes together fill whole words; the even row writes for both.
fn store_magnitudes(page: Page, row: u32, rows_in_page: u32, first: u32) {
    let word = params.sections.magnitudes + (page.slots + row) / 2u * MAGNITUDES;
    for (var i = 0u; i < MAGNITUDES; i++) {
        let place = row * MAGNITUDES + 2u * i;
        let low = magnitude_bits(page, place, rows_in_page, first);
        put(word + i, low | (magnitude_bits(page, place + 1u, rows_in_page, first) << 16u));
    }
}

fn store_slot(page: Page, row: u32, pair: u32, head: u32, token: u32) {
    let slot = page.slots + row;
    if (MODE == ANCHOR) {
        store_raw_slot(slot, pair, bits_of(row_start(0u, head, token), pair));
        return;
    }
    if (is_retained(page, row)) {
        // Where the slot cannot hold the row's type all rows stand in the side, and the slot stays zero.
        if (SIDE_PER_RETAINED < LAYERS) {
            store_raw_slot(slot, pair, bits_of(row_start(LAYERS - 1u, head, token), pair));
        }
        return;
    }
    let at = (head * params.tokens + token) * LAYERS;
    var direction = scales[at].y * numbers_of(row_start(0u, head, token), pair);
    for (var layer = 1u; layer < LAYERS; layer++) {
        direction += scales[at + layer].y * numbers_of(row_start(layer, head, token), pair);
    }
    store_f16_slot(slot, pair, direction);
}

@compute @workgroup_size(WORKGROUP)
fn group_merge(place: Place, id: Invocation) {
    let index = linear_workgroup(place) * WORKGROUP + id.local_index;
    let pair = index % PAIRS;
    let row = (index / PAIRS) % PAGE;
    let page_index = index / PAIRS / PAGE;
    let first_token = (page_index % params.pages_per_head) * PAGE;
    if (page_index >= params.pages || first_token + row >= params.tokens) {
        return;
    }
    let page = pages[page_index];
    if (row == 0u && pair == 0u) {
        put_page(page_index, page);
    }
    let head = page_index / params.pages_per_head;
    let token = first_token + row;
    let rows_in_page = min(PAGE, params.tokens - first_token);
    for (var layer = 0u; layer < LAYERS; layer++) {
        let side = side_row(page, row, rows_in_page, layer);
        store_side(side, pair, bits_of(row_start(layer, head, token), pair));
    }
    if (page.slots == RAW) {
        return;
    }
    store_slot(page, row, pair, head, token);
    if (pair == 0u && row % 2u == 0u) {
        store_magnitudes(page, row, rows_in_page, head * params.tokens + first_token);
    }
}
