// Writing a host's tensor by whole 32-bit words. The kernel declares `output`, `params.view` and
// `row_bits(row, channel)`, the bits of one number of its result.

fn output_word(word: u32) -> u32 {
    let view = params.view;
    if (view.contiguous == 1u) {
        return view.place.x / ELEMENTS + word;
    }
    let words_a_row = view.pitch / ELEMENTS;
    let row = word / words_a_row;
    let head = row / view.tokens;
    let start = view.place.x + (head / view.heads) * view.place.y + (head % view.heads) * view.place.z
        + (row % view.tokens) * view.place.w;
    return start / ELEMENTS + word % words_a_row;
}

fn store_word(word: u32) {
    let at = output_word(min(word, params.view.words - 1u));
    if (word >= params.view.words || at >= arrayLength(&output)) {
        return;
    }
    if (ELEMENTS == 1u) {
        output[at] = row_bits(word / params.view.pitch, word % params.view.pitch);
        return;
    }
    // A word's second half may begin the next row, or be a gap that is the host's and stays as it is.
    var bits = output[at];
    for (var i = 0u; i < 2u; i++) {
        let element_index = 2u * word + i;
        let row = element_index / params.view.pitch;
        let channel = element_index % params.view.pitch;
        if (row < params.view.rows && channel < HEAD_DIM) {
            bits = (bits & (0xffff0000u >> (16u * i))) | (row_bits(row, channel) << (16u * i));
        }
    }
    output[at] = bits;
}
