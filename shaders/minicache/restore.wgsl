// Restores one layer of a folded pair: raw rows bit for bit, merged rows as magnitude times direction. One invocation per
// 32-bit word of the output. Twin: minicache::cpu::restore.

struct Params {
    view: Output,
    sections: Sections,
    pages_per_head: u32,
    // Tokens that the store holds, of which the first are restored.
    stored: u32,
    layer: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> store: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<u32>;

fn page_at(index: u32) -> Page {
    let entry = params.sections.pages + 3u * index;
    return Page(store[entry], store[entry + 1u], store[entry + 2u]);
}

fn half_magnitude(index: u32) -> f32 {
    let both = unpack2x16float(store[params.sections.magnitudes + (index >> 1u)]);
    return select(both.x, both.y, (index & 1u) == 1u);
}

fn slot_number(row: u32, channel: u32) -> f32 {
    if (SLOT_IS_INPUT) {
        return element(store[row + channel / ELEMENTS], channel);
    }
    let both = unpack2x16float(store[row + channel / 2u]);
    return select(both.x, both.y, (channel & 1u) == 1u);
}

fn row_bits(row: u32, channel: u32) -> u32 {
    let head = row / params.view.tokens;
    let token = row % params.view.tokens;
    let page = page_at(head * params.pages_per_head + token / PAGE);
    let local = token % PAGE;
    let rows_in_page = min(PAGE, params.stored - (token - local));
    let found = stored_row(page, local, rows_in_page, params.sections, vec2<u32>(SLOT_WORDS, SIDE_WORDS));
    if (found.raw) {
        return element_bits(store[found.word + channel / ELEMENTS], channel);
    }
    let number = slot_number(found.word, channel);
    if (found.magnitude == NOWHERE) {
        return round_to_bits(number);
    }
    return round_to_bits(half_magnitude(found.magnitude) * number);
}

@compute @workgroup_size(WORKGROUP)
fn restore(place: Place, id: Invocation) {
    store_word(linear_workgroup(place) * WORKGROUP + id.local_index);
}
