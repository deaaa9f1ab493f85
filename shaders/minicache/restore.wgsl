// Restores one layer of a folded pair: raw rows bit for bit, merged rows as magnitude times direction. One invocation per
// 32-bit word of the output. Twin: minicache::cpu::restore.

struct Params {
    view: Output,
    pages_per_head: u32,
    layer: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> pages: array<Page>;
@group(0) @binding(2) var<storage, read> slots: array<u32>;
@group(0) @binding(3) var<storage, read> magnitudes: array<u32>;
@group(0) @binding(4) var<storage, read> side: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<u32>;

fn half_magnitude(index: u32) -> f32 {
    let both = unpack2x16float(magnitudes[index >> 1u]);
    return select(both.x, both.y, (index & 1u) == 1u);
}

fn slot_number(slot: u32, channel: u32) -> f32 {
    if (MODE == ANCHOR) {
        return element(slots[slot * SLOT_WORDS + channel / ELEMENTS], channel);
    }
    let both = unpack2x16float(slots[slot * SLOT_WORDS + channel / 2u]);
    return select(both.x, both.y, (channel & 1u) == 1u);
}

fn row_bits(row: u32, channel: u32) -> u32 {
    let head = row / params.view.tokens;
    let token = row % params.view.tokens;
    let page = pages[head * params.pages_per_head + token / PAGE];
    let local = token % PAGE;
    let rows_in_page = min(PAGE, params.view.tokens - (token - local));
    let raw = side_row(page, local, rows_in_page, params.layer);
    if (raw != NOWHERE) {
        return element_bits(side[raw * SIDE_WORDS + channel / ELEMENTS], channel);
    }
    let slot = page.slots + local;
    let in_slot = (MODE == ANCHOR && params.layer == LOWER) || (MODE == SHARED && is_retained(page, local))
        || (MODE == COMPAT && SLOT_IS_INPUT);
    if (in_slot) {
        return element_bits(slots[slot * SLOT_WORDS + channel / ELEMENTS], channel);
    }
    if (MODE == COMPAT) {
        return round_to_bits(slot_number(slot, channel));
    }
    let magnitude = half_magnitude(select(slot, 2u * slot + params.layer, MODE == SHARED));
    return round_to_bits(magnitude * slot_number(slot, channel));
}

@compute @workgroup_size(WORKGROUP)
fn restore(place: Place, id: Invocation) {
    store_word(linear_workgroup(place) * WORKGROUP + id.local);
}
