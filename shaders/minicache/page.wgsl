// Where a row's parts stand in a store: the same rules as src/minicache/cpu.rs::side_row. A store is one buffer of words:
// the page table, the slots, the magnitudes, the side rows.

const RAW: u32 = 0xffffffffu;
const NOWHERE: u32 = 0xffffffffu;
const LOWER: u32 = 0u;
const UPPER: u32 = 1u;

// Where the sections of a store begin, in words.
struct Sections {
    pages: u32,
    slots: u32,
    magnitudes: u32,
    side: u32,
}

struct Page {
    slots: u32,
    side: u32,
    retained: u32,
}

fn is_retained(page: Page, row: u32) -> bool {
    return ((page.retained >> row) & 1u) == 1u;
}

// Side row of a layer's row in a page of `rows` rows, or NOWHERE. Layers are counted from the lowest.
fn side_row(page: Page, row: u32, rows: u32, layer: u32) -> u32 {
    if (page.slots == RAW) {
        return page.side + layer * rows + row;
    }
    if (MODE == COMPAT) {
        return select(NOWHERE, page.side + row, layer == LOWER);
    }
    if (!is_retained(page, row)) {
        return NOWHERE;
    }
    let rank = countOneBits(page.retained & ((1u << row) - 1u));
    let first = page.side + rank * SIDE_PER_RETAINED;
    if (SIDE_PER_RETAINED == LAYERS) {
        return first + layer;
    }
    let in_slot = select(LAYERS - 1u, LOWER, MODE == ANCHOR);
    return select(first + layer - select(0u, 1u, MODE == ANCHOR), NOWHERE, layer == in_slot);
}
