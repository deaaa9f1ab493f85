// Codes of a few bits, one after the other, the least significant bit of a word first, and the odd levels that they stand for.

// The code that begins at a bit of two words; it may straddle them.
fn code_in(words: vec2<u32>, bit: u32, bits: u32) -> u32 {
    let inside = bit & 31u;
    let first = select(words.x, words.y, bit >= 32u);
    let behind = select(words.y, 0u, bit >= 32u);
    // A shift by 32 has no meaning.
    let rest = select(0u, behind << ((32u - inside) & 31u), inside > 0u);
    return ((first >> inside) | rest) & ((1u << bits) - 1u);
}

fn level_in(words: vec2<u32>, bit: u32, bits: u32) -> f32 {
    return f32(2u * code_in(words, bit, bits)) - f32((1u << bits) - 1u);
}
