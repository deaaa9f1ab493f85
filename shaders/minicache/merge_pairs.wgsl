// A pair of any rows, merged by two channels.

@group(0) @binding(1) var<storage, read> lower: array<u32>;
@group(0) @binding(2) var<storage, read> upper: array<u32>;
@group(0) @binding(5) var<storage, read_write> store: array<u32>;

const UNITS: u32 = PAIRS;

fn lower_channels(start: u32, pair: u32) -> Channels {
    let at = start + min(vec2<u32>(2u * pair, 2u * pair + 1u), vec2<u32>(HEAD_DIM - 1u));
    let bits = vec2<u32>(element_bits(lower[word_index(at.x)], at.x), element_bits(lower[word_index(at.y)], at.y));
    return vec2<u32>(bits.x, select(0u, bits.y, 2u * pair + 1u < HEAD_DIM));
}

fn upper_channels(start: u32, pair: u32) -> Channels {
    let at = start + min(vec2<u32>(2u * pair, 2u * pair + 1u), vec2<u32>(HEAD_DIM - 1u));
    let bits = vec2<u32>(element_bits(upper[word_index(at.x)], at.x), element_bits(upper[word_index(at.y)], at.y));
    return vec2<u32>(bits.x, select(0u, bits.y, 2u * pair + 1u < HEAD_DIM));
}

fn numbers_of(bits: Channels) -> vec2<f32> {
    return unpack_pair(select(bits.x | (bits.y << 16u), bits.x, ELEMENTS == 1u), bits.y);
}

fn store_direction(slot: u32, pair: u32, weights: vec2<f32>, scale: f32, lower: Channels, upper: Channels) {
    store_f16_slot(slot, pair, scale * (weights.x * numbers_of(lower) + weights.y * numbers_of(upper)));
}

fn store_raw_f16(slot: u32, pair: u32, bits: Channels) {
    put(params.sections.slots + slot * SLOT_WORDS + pair, raw_f16_pair(bits));
}

// The words are shared out among the rows.
fn put_magnitudes(page: Page, row: u32, rows_in_page: u32, first: u32) {
    if (row < magnitude_words(rows_in_page)) {
        put(params.sections.magnitudes + magnitude_words(page.slots) + row, magnitude_word(page, row, rows_in_page, first));
    }
}
