// Folds a pair into a store: writes the page table, and slots, magnitudes and side rows where it says. One invocation per channel pair of a row.
// Twin: minicache::cpu::merge.

struct Params {
    pages: u32,
    pages_per_head: u32,
    tokens: u32,
    heads: u32,
    sections: Sections,
    lower: vec4<u32>,
    upper: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lower: array<u32>;
@group(0) @binding(2) var<storage, read> upper: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<Row>;
@group(0) @binding(4) var<storage, read> pages: array<Page>;
@group(0) @binding(5) var<storage, read_write> store: array<u32>;

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

// The f16 of a raw bf16 or f32 by its bits, as the twin rounds it: infinite from 65520 on, NaN kept; pack2x16float promises
// neither, and fast math has no NaN in a number.
fn raw_f16(element: u32) -> u32 {
    let bits = select(element << 16u, element, ELEMENTS == 1u);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= bitcast<u32>(65520.0)) {
        return sign | 0x7c00u;
    }
    return pack2x16float(vec2<f32>(clamp(bitcast<f32>(bits), -65504.0, 65504.0), 0.0)) & 0xffffu;
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
    if (MODE == SHARED) {
        let found = rows[first + row];
        let both = select(vec2<f32>(found.lower, found.upper), vec2<f32>(1.0), is_retained(page, row));
        put(params.sections.magnitudes + slot, pack2x16float(clamp(both, vec2<f32>(), vec2<f32>(65504.0))));
    }
    // Two slots share a word; the even row writes for both.
    if (MODE == ANCHOR && row % 2u == 0u) {
        let high = ratio_bits(page, row + 1u, rows_in_page, first);
        put(params.sections.magnitudes + slot / 2u, ratio_bits(page, row, rows_in_page, first) | (high << 16u));
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
        if (SIDE_PER_RETAINED < LAYERS) {
            let bits = vec2<u32>(upper_bits(upper_start, channels.x), upper_bits(upper_start, channels.y));
            store_raw_slot(slot, pair, bits);
        }
        return;
    }
    if (raw) {
        let bits = vec2<u32>(upper_bits(upper_start, channels.x), upper_bits(upper_start, channels.y));
        if (SLOT_IS_INPUT) {
            store_raw_slot(slot, pair, bits);
        } else {
            put(params.sections.slots + slot * SLOT_WORDS + pair, raw_f16(bits.x) | (raw_f16(bits.y) << 16u));
        }
        return;
    }
    let upper_numbers = vec2<f32>(upper_number(upper_start, channels.x), upper_number(upper_start, channels.y));
    let lower_numbers = vec2<f32>(lower_number(lower_start, channels.x), lower_number(lower_start, channels.y));
    let direction = found.weight_lower * lower_numbers + found.weight_upper * upper_numbers;
    store_f16_slot(slot, pair, select(direction, found.upper * direction, MODE == COMPAT));
}

@compute @workgroup_size(WORKGROUP)
fn merge(place: Place, id: Invocation) {
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
