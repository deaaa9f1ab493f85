// Rows by two channels, and how a store takes them word by word. The kernel binds `store` and has `sections` in its params.

// Bits of both, 0 past the row's end.
alias Channels = vec2<u32>;

const PAIRS: u32 = (HEAD_DIM + 1u) / 2u;

fn put(at: u32, word: u32) {
    if (at < arrayLength(&store)) {
        store[at] = word;
    }
}

fn put_page(index: u32, page: Page) {
    let entry = params.sections.pages + 3u * index;
    put(entry, page.slots);
    put(entry + 1u, page.side);
    put(entry + 2u, page.retained);
}

// Two channels in the input's own type, into the row of words that begins at `row`.
fn put_raw(row: u32, pair: u32, bits: Channels) {
    if (ELEMENTS == 2u) {
        put(row + pair, bits.x | (bits.y << 16u));
        return;
    }
    put(row + 2u * pair, bits.x);
    if (2u * pair + 1u < HEAD_DIM) {
        put(row + 2u * pair + 1u, bits.y);
    }
}

fn store_f16_slot(slot: u32, pair: u32, numbers: vec2<f32>) {
    let bits = pack2x16float(clamp(numbers, vec2<f32>(-65504.0), vec2<f32>(65504.0)));
    put(params.sections.slots + slot * SLOT_WORDS + pair, bits);
}
