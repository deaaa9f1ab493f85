// Writing rows into a store by units of channels, two of them in write_pairs.wgsl. The kernel has `sections` in its params.

fn store_side(side_row: u32, unit: u32, bits: Channels) {
    if (side_row != NOWHERE) {
        put_raw(params.sections.side + side_row * SIDE_WORDS, unit, bits);
    }
}

// A slot in the input's own type: Anchor's lower row, or a raw row that reuses the slot.
fn store_raw_slot(slot: u32, unit: u32, bits: Channels) {
    put_raw(params.sections.slots + slot * SLOT_WORDS, unit, bits);
}
