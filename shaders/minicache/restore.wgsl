// Restores one layer of a folded pair: raw rows bit for bit, merged rows as magnitude times direction. One invocation per
// 32-bit word of the output. Twin: minicache::cpu::restore.

struct Params {
    view: Output,
    sections: Sections,
    pages_per_head: u32,
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

fn slot_number(slot: u32, channel: u32) -> f32 {
    if (MODE == ANCHOR) {
        return element(store[params.sections.slots + slot * SLOT_WORDS + channel / ELEMENTS], channel);
    }
    let both = unpack2x16float(store[params.sections.slots + slot * SLOT_WORDS + channel / 2u]);
    return select(both.x, both.y, (channel & 1u) == 1u);
}

fn row_bits(row: u32, channel: u32) -> u32 {
    let head = row / params.view.tokens;
    let token = row % params.view.tokens;
    let page = page_at(head * params.pages_per_head + token / PAGE);
    let local = token % PAGE;
    let rows_in_page = min(PAGE, params.view.tokens - (token - local));
    let raw = side_row(page, local, rows_in_page, params.layer);
    if (raw != NOWHERE) {
        return element_bits(store[params.sections.side + raw * SIDE_WORDS + channel / ELEMENTS], channel);
    }
    let slot = page.slots + local;
    let in_slot = (MODE == ANCHOR && params.layer == LOWER) || (MODE == SHARED && is_retained(page, local))
        || (MODE == COMPAT && SLOT_IS_INPUT);
    if (in_slot) {
        return element_bits(store[params.sections.slots + slot * SLOT_WORDS + channel / ELEMENTS], channel);
    }
    if (MODE == COMPAT) {
        return round_to_bits(slot_number(slot, channel));
    }
    let magnitude = half_magnitude(select(slot, 2u * slot + params.layer, MODE == SHARED));
    return round_to_bits(magnitude * slot_number(slot, channel));
}

@compute @workgroup_size(WORKGROUP)
fn restore(place: Place, id: Invocation) {
    store_word(linear_workgroup(place) * WORKGROUP + id.local_index);
}
