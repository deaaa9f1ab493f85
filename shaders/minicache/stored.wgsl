// Where a stored row's numbers stand: the same cases as src/minicache/cpu.rs::stored. The kernel has `layer` in its params.

struct Stored {
    // The row's first word.
    word: u32,
    // Index of the f16 magnitude that its numbers are multiplied by, or NOWHERE.
    magnitude: u32,
    // Whether they are of the input's type though slots are f16.
    raw: bool,
}

// Row `row` of a page of `rows`; `words` are those of a slot and of a side row.
fn stored_row(page: Page, row: u32, rows: u32, sections: Sections, words: vec2<u32>) -> Stored {
    let side = side_row(page, row, rows, params.layer);
    if (side != NOWHERE) {
        return Stored(sections.side + side * words.y, NOWHERE, true);
    }
    let slot = page.slots + row;
    let word = sections.slots + slot * words.x;
    let in_slot = (MODE == ANCHOR && params.layer == LOWER) || (MODE == SHARED && is_retained(page, row))
        || (MODE == COMPAT && SLOT_IS_INPUT);
    if (in_slot || MODE == COMPAT) {
        return Stored(word, NOWHERE, in_slot);
    }
    let magnitude = select(slot * (LAYERS - 1u) + params.layer - 1u, slot * LAYERS + params.layer, MODE == SHARED);
    return Stored(word, magnitude, false);
}
