// Any store and output, restored word by word.

@group(0) @binding(1) var<storage, read> store: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<u32>;

fn stored_word(at: u32) -> u32 {
    return store[at];
}

fn slot_number(row: u32, channel: u32) -> f32 {
    if (SLOT_IS_INPUT) {
        return element(store[row + channel / ELEMENTS], channel);
    }
    let both = unpack2x16float(store[row + channel / 2u]);
    return select(both.x, both.y, (channel & 1u) == 1u);
}

fn row_bits(row: u32, channel: u32) -> u32 {
    let token = row % params.view.tokens;
    let page = page_at(row / params.view.tokens * params.pages_per_head + token / PAGE);
    let found = row_of(page, token);
    if (found.raw) {
        return element_bits(store[found.word + channel / ELEMENTS], channel);
    }
    let number = slot_number(found.word, channel);
    if (found.magnitude == NOWHERE) {
        return round_to_bits(number);
    }
    return round_to_bits(half_magnitude(found.magnitude) * number);
}

fn restore_part(part: u32, lane: u32) {
    store_word(part * WORKGROUP + lane);
}
