// A pair of rows merged by eights of channels. Every section of the store starts at a whole vec4, and so does what each page has of it:
// vec4s are written whole, since writing a part of one may touch the rest, which another invocation writes.

@group(0) @binding(1) var<storage, read> lower: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> upper: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> store: array<vec4<u32>>;

fn lower_channels(start: u32, eight: u32) -> Channels {
    let at = (start + 8u * eight) / (4u * ELEMENTS);
    return Channels(lower[at], lower[at + LAST]);
}

fn upper_channels(start: u32, eight: u32) -> Channels {
    let at = (start + 8u * eight) / (4u * ELEMENTS);
    return Channels(upper[at], upper[at + LAST]);
}

fn put(at: u32, words: vec4<u32>) {
    if (at < arrayLength(&store)) {
        store[at] = words;
    }
}

fn put_raw(row: u32, eight: u32, channels: Channels) {
    let at = row / 4u + VECTORS_AN_EIGHT * eight;
    put(at, channels.low);
    if (ELEMENTS == 1u) {
        put(at + 1u, channels.high);
    }
}

fn put_f16_slot(slot: u32, eight: u32, words: vec4<u32>) {
    put((params.sections.slots + slot * SLOT_WORDS) / 4u + eight, words);
}

fn halves_of(numbers: vec4<f32>) -> vec2<u32> {
    let held = clamp(numbers, vec4<f32>(-65504.0), vec4<f32>(65504.0));
    return vec2<u32>(pack2x16float(held.xy), pack2x16float(held.zw));
}

fn store_direction(slot: u32, eight: u32, weights: vec2<f32>, scale: f32, lower: Channels, upper: Channels) {
    let low = scale * (weights.x * low_numbers(lower) + weights.y * low_numbers(upper));
    let high = scale * (weights.x * high_numbers(lower) + weights.y * high_numbers(upper));
    put_f16_slot(slot, eight, vec4<u32>(halves_of(low), halves_of(high)));
}

fn store_raw_f16(slot: u32, eight: u32, channels: Channels) {
    let a = channels.low;
    let b = channels.high;
    if (ELEMENTS == 1u) {
        put_f16_slot(slot, eight, vec4<u32>(raw_f16_pair(a.xy), raw_f16_pair(a.zw), raw_f16_pair(b.xy), raw_f16_pair(b.zw)));
        return;
    }
    let first = a & vec4<u32>(0xffffu);
    let second = a >> vec4<u32>(16u);
    put_f16_slot(slot, eight, vec4<u32>(raw_f16_pair(vec2<u32>(first.x, second.x)), raw_f16_pair(vec2<u32>(first.y, second.y)),
                                        raw_f16_pair(vec2<u32>(first.z, second.z)), raw_f16_pair(vec2<u32>(first.w, second.w))));
}

// Entries of four pages are three vec4s; every fourth page writes them.
fn put_page(index: u32, page: Page) {
    if (index % 4u != 0u) {
        return;
    }
    let b = pages[index + 1u];
    let c = pages[index + 2u];
    let d = pages[index + 3u];
    let at = params.sections.pages / 4u + 3u * (index / 4u);
    put(at, vec4<u32>(page.slots, page.side, page.retained, b.slots));
    put(at + 1u, vec4<u32>(b.side, b.retained, c.slots, c.side));
    put(at + 2u, vec4<u32>(c.retained, d.slots, d.side, d.retained));
}

// Fours of words are shared out among the rows.
fn put_magnitudes(page: Page, row: u32, rows_in_page: u32, first: u32) {
    let word = 4u * row;
    if (word < magnitude_words(rows_in_page)) {
        let at = params.sections.magnitudes + magnitude_words(page.slots) + word;
        put(at / 4u, vec4<u32>(magnitude_word(page, word, rows_in_page, first), magnitude_word(page, word + 1u, rows_in_page, first),
                               magnitude_word(page, word + 2u, rows_in_page, first), magnitude_word(page, word + 3u, rows_in_page, first)));
    }
}
