// Restores one layer of a folded pair: raw rows bit for bit, merged rows as magnitude times direction. One invocation per
// 32-bit word of the output, or per eight channels of four rows, as restore_words.wgsl and restore_eights.wgsl bind store and output.
// Twin: minicache::cpu::restore.

struct Params {
    view: Output,
    sections: Sections,
    pages_per_head: u32,
    // Tokens that the store holds, of which the first are restored.
    stored: u32,
    layer: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

fn page_at(index: u32) -> Page {
    let entry = params.sections.pages + 3u * index;
    return Page(stored_word(entry), stored_word(entry + 1u), stored_word(entry + 2u));
}

fn half_magnitude(index: u32) -> f32 {
    let both = unpack2x16float(stored_word(params.sections.magnitudes + (index >> 1u)));
    return select(both.x, both.y, (index & 1u) == 1u);
}

fn row_of(page: Page, token: u32) -> Stored {
    let local = token % PAGE;
    let rows_in_page = min(PAGE, params.stored - (token - local));
    return stored_row(page, local, rows_in_page, params.sections, vec2<u32>(SLOT_WORDS, SIDE_WORDS));
}

@compute @workgroup_size(WORKGROUP)
fn restore(place: Place, id: Invocation) {
    restore_part(linear_workgroup(place), id.local_index);
}
