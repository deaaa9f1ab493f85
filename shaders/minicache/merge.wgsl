// Folds a pair into a store: writes the page table, and slots, magnitudes and side rows where it says. One invocation per
// unit of channels of two rows, a pair or eight of them, as merge_pairs.wgsl and merge_eights.wgsl bind the layers and the store.
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
@group(0) @binding(3) var<storage, read> rows: array<Row>;
@group(0) @binding(4) var<storage, read> pages: array<Page>;

// Workgroups of a page.
const PARTS: u32 = (PAGE / 2u * UNITS + WORKGROUP - 1u) / WORKGROUP;

fn row_start(view: vec4<u32>, head: u32, token: u32) -> u32 {
    return view.x + (head / params.heads) * view.y + (head % params.heads) * view.z + token * view.w;
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

fn raw_f16_pair(elements: vec2<u32>) -> u32 {
    return raw_f16(elements.x) | (raw_f16(elements.y) << 16u);
}

// Words of the magnitudes of so many slots: one each in Shared, one for two in Anchor.
fn magnitude_words(slots: u32) -> u32 {
    return select(select(0u, (slots + 1u) / 2u, MODE == ANCHOR), slots, MODE == SHARED);
}

fn magnitude_word(page: Page, word: u32, rows_in_page: u32, first: u32) -> u32 {
    if (MODE == ANCHOR) {
        let high = ratio_bits(page, 2u * word + 1u, rows_in_page, first);
        return ratio_bits(page, 2u * word, rows_in_page, first) | (high << 16u);
    }
    let norms = vec2<f32>(rows[first + word].lower, rows[first + word].upper);
    let both = select(norms, vec2<f32>(1.0), is_retained(page, word));
    return pack2x16float(clamp(both, vec2<f32>(), vec2<f32>(65504.0)));
}

fn store_slot(page: Page, row: u32, unit: u32, found: Row, lower: Channels, upper: Channels) {
    let slot = page.slots + row;
    if (MODE == ANCHOR) {
        store_raw_slot(slot, unit, lower);
    } else if (!is_retained(page, row)) {
        let weights = vec2<f32>(found.weight_lower, found.weight_upper);
        store_direction(slot, unit, weights, select(1.0, found.upper, MODE == COMPAT), lower, upper);
    } else if (MODE == COMPAT && !SLOT_IS_INPUT) {
        store_raw_f16(slot, unit, upper);
    } else if (MODE == COMPAT || SIDE_PER_RETAINED < LAYERS) {
        // Where a Shared slot cannot hold the row's type both rows stand in the side, and the slot stays zero.
        store_raw_slot(slot, unit, upper);
    }
}

// What a row is folded of.
struct Loaded {
    found: Row,
    lower: Channels,
    upper: Channels,
}

fn load(page: Page, head: u32, token: u32, unit: u32) -> Loaded {
    let lower = lower_channels(row_start(params.lower, head, token), unit);
    // Of Anchor's merged rows the lower one is all that is kept.
    var upper = Channels();
    if (MODE != ANCHOR || is_retained(page, token % PAGE)) {
        upper = upper_channels(row_start(params.upper, head, token), unit);
    }
    return Loaded(rows[head * params.tokens + token], lower, upper);
}

fn store_row(page: Page, row: u32, rows_in_page: u32, first: u32, unit: u32, loaded: Loaded) {
    if (row >= rows_in_page) {
        return;
    }
    store_side(side_row(page, row, rows_in_page, LOWER), unit, loaded.lower);
    store_side(side_row(page, row, rows_in_page, UPPER), unit, loaded.upper);
    if (page.slots == RAW) {
        return;
    }
    store_slot(page, row, unit, loaded.found, loaded.lower, loaded.upper);
    if (unit == 0u) {
        put_magnitudes(page, row, rows_in_page, first);
    }
}

// An invocation takes two rows of a page, both loaded before the first is stored: a GPU has more loads under way.
@compute @workgroup_size(WORKGROUP)
fn merge(place: Place, id: Invocation) {
    let index = (linear_workgroup(place) % PARTS) * WORKGROUP + id.local_index;
    let page_index = linear_workgroup(place) / PARTS;
    let unit = index % UNITS;
    let row = index / UNITS;
    if (page_index >= params.pages || row >= PAGE / 2u) {
        return;
    }
    let head = page_index / params.pages_per_head;
    let first_token = (page_index % params.pages_per_head) * PAGE;
    let rows_in_page = min(PAGE, params.tokens - first_token);
    let first = head * params.tokens + first_token;
    let page = pages[page_index];
    let a = load(page, head, first_token + min(row, rows_in_page - 1u), unit);
    let b = load(page, head, first_token + min(row + PAGE / 2u, rows_in_page - 1u), unit);
    if (row == 0u && unit == 0u) {
        put_page(page_index, page);
    }
    store_row(page, row, rows_in_page, first, unit, a);
    store_row(page, row + PAGE / 2u, rows_in_page, first, unit, b);
}
