// Folds a pair: writes slots, magnitudes and side rows where the page table says. One invocation per channel pair of a row.
// Twin: minicache::cpu::merge.

struct Params {
    pages: u32,
    pages_per_head: u32,
    tokens: u32,
    heads: u32,
    lower: vec4<u32>,
    upper: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lower: array<Word>;
@group(0) @binding(2) var<storage, read> upper: array<Word>;
@group(0) @binding(3) var<storage, read> rows: array<Row>;
@group(0) @binding(4) var<storage, read> pages: array<Page>;
@group(0) @binding(5) var<storage, read_write> slots: array<u32>;
@group(0) @binding(6) var<storage, read_write> magnitudes: array<u32>;
@group(0) @binding(7) var<storage, read_write> side: array<u32>;

const PAIRS: u32 = (HEAD_DIM + 1u) / 2u;

fn row_start(view: vec4<u32>, head: u32, token: u32) -> u32 {
    return view.x + (head / params.heads) * view.y + (head % params.heads) * view.z + token * view.w;
}

// Bits of a channel, 0 past the row's end.
fn lower_bits(start: u32, channel: u32) -> u32 {
    let at = start + min(channel, HEAD_DIM - 1u);
    return select(0u, element_bits(lower[word_index(at)], at), channel < HEAD_DIM);
}

fn upper_bits(start: u32, channel: u32) -> u32 {
    let at = start + min(channel, HEAD_DIM - 1u);
    return select(0u, element_bits(upper[word_index(at)], at), channel < HEAD_DIM);
}

fn lower_number(start: u32, channel: u32) -> f32 {
    let at = start + min(channel, HEAD_DIM - 1u);
    return select(0.0, element(lower[word_index(at)], at), channel < HEAD_DIM);
}

fn upper_number(start: u32, channel: u32) -> f32 {
    let at = start + min(channel, HEAD_DIM - 1u);
    return select(0.0, element(upper[word_index(at)], at), channel < HEAD_DIM);
}

fn store_side(side_row: u32, pair: u32, bits: vec2<u32>) {
    if (side_row == NOWHERE) {
        return;
    }
    let base = side_row * SIDE_WORDS;
    if (ELEMENTS == 2u) {
        let at = base + pair;
        if (at < arrayLength(&side)) {
            side[at] = bits.x | (bits.y << 16u);
        }
        return;
    }
    for (var i = 0u; i < 2u; i++) {
        let at = base + 2u * pair + i;
        if (2u * pair + i < HEAD_DIM && at < arrayLength(&side)) {
            side[at] = bits[i];
        }
    }
}

// A slot in the input's own type: Anchor's lower row, or a raw row that reuses the slot.
fn store_raw_slot(slot: u32, pair: u32, bits: vec2<u32>) {
    let base = slot * SLOT_WORDS;
    if (ELEMENTS == 2u) {
        let at = base + pair;
        if (at < arrayLength(&slots)) {
            slots[at] = bits.x | (bits.y << 16u);
        }
        return;
    }
    for (var i = 0u; i < 2u; i++) {
        let at = base + 2u * pair + i;
        if (2u * pair + i < HEAD_DIM && at < arrayLength(&slots)) {
            slots[at] = bits[i];
        }
    }
}

fn store_f16_slot(slot: u32, pair: u32, numbers: vec2<f32>) {
    let at = slot * SLOT_WORDS + pair;
    if (at < arrayLength(&slots)) {
        slots[at] = pack2x16float(clamp(numbers, vec2<f32>(-65504.0), vec2<f32>(65504.0)));
    }
}

// f16 bits of a row's Anchor ratio, 1 where it is raw and 0 past the page's end.
fn ratio_bits(page: Page, row: u32, rows_in_page: u32, first: u32) -> u32 {
    if (row >= rows_in_page) {
        return 0u;
    }
    let ratio = select(anchor_ratio(rows[first + row]), 1.0, is_retained(page, row));
    return pack2x16float(vec2<f32>(ratio, 0.0)) & 0xffffu;
}

fn store_magnitudes(page: Page, row: u32, rows_in_page: u32, first: u32) {
    let slot = page.slots + row;
    if (MODE == SHARED && slot < arrayLength(&magnitudes)) {
        let found = rows[first + row];
        let both = select(vec2<f32>(found.lower, found.upper), vec2<f32>(1.0), is_retained(page, row));
        magnitudes[slot] = pack2x16float(clamp(both, vec2<f32>(), vec2<f32>(65504.0)));
    }
    // Two slots share a word; the even row writes for both.
    if (MODE == ANCHOR && row % 2u == 0u && slot / 2u < arrayLength(&magnitudes)) {
        let high = ratio_bits(page, row + 1u, rows_in_page, first);
        magnitudes[slot / 2u] = ratio_bits(page, row, rows_in_page, first) | (high << 16u);
    }
}

fn store_slot(page: Page, row: u32, pair: u32, found: Row, lower_start: u32, upper_start: u32) {
    let slot = page.slots + row;
    let channels = vec2<u32>(2u * pair, 2u * pair + 1u);
    let raw = is_retained(page, row);
    if (MODE == ANCHOR) {
        let bits = vec2<u32>(lower_bits(lower_start, channels.x), lower_bits(lower_start, channels.y));
        store_raw_slot(slot, pair, bits);
        return;
    }
    if (MODE == SHARED && raw) {
        // Where the slot cannot hold the row's type both rows stand in the side, and the slot stays zero.
        if (SIDE_PER_RETAINED == 1u) {
            let bits = vec2<u32>(upper_bits(upper_start, channels.x), upper_bits(upper_start, channels.y));
            store_raw_slot(slot, pair, bits);
        }
        return;
    }
    if (raw && SLOT_IS_INPUT) {
        let bits = vec2<u32>(upper_bits(upper_start, channels.x), upper_bits(upper_start, channels.y));
        store_raw_slot(slot, pair, bits);
        return;
    }
    let upper_numbers = vec2<f32>(upper_number(upper_start, channels.x), upper_number(upper_start, channels.y));
    if (raw) {
        store_f16_slot(slot, pair, upper_numbers);
        return;
    }
    let lower_numbers = vec2<f32>(lower_number(lower_start, channels.x), lower_number(lower_start, channels.y));
    let direction = found.weight_lower * lower_numbers + found.weight_upper * upper_numbers;
    store_f16_slot(slot, pair, select(direction, found.upper * direction, MODE == COMPAT));
}

@compute @workgroup_size(WORKGROUP)
fn merge(place: Place, id: Invocation) {
    let index = linear_workgroup(place) * WORKGROUP + id.local;
    let pair = index % PAIRS;
    let row = (index / PAIRS) % PAGE;
    let page_index = index / PAIRS / PAGE;
    let first_token = (page_index % params.pages_per_head) * PAGE;
    if (page_index >= params.pages || first_token + row >= params.tokens) {
        return;
    }
    let page = pages[page_index];
    let head = page_index / params.pages_per_head;
    let rows_in_page = min(PAGE, params.tokens - first_token);
    let first = head * params.tokens + first_token;
    let lower_start = row_start(params.lower, head, first_token + row);
    let upper_start = row_start(params.upper, head, first_token + row);
    let channels = vec2<u32>(2u * pair, 2u * pair + 1u);
    store_side(side_row(page, row, rows_in_page, LOWER), pair,
               vec2<u32>(lower_bits(lower_start, channels.x), lower_bits(lower_start, channels.y)));
    store_side(side_row(page, row, rows_in_page, UPPER), pair,
               vec2<u32>(upper_bits(upper_start, channels.x), upper_bits(upper_start, channels.y)));
    if (page.slots == RAW) {
        return;
    }
    store_slot(page, row, pair, rows[first + row], lower_start, upper_start);
    if (pair == 0u) {
        store_magnitudes(page, row, rows_in_page, first);
    }
}
