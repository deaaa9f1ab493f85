// f16 elements read from 32-bit words, which needs no device feature.

alias Word = u32;

fn word_index(element_index: u32) -> u32 {
    return element_index >> 1u;
}

fn element(word: Word, element_index: u32) -> f32 {
    let both = unpack2x16float(word);
    return select(both.x, both.y, (element_index & 1u) == 1u);
}

// Two channels that start a word; the second word is used by 32-bit types only.
fn unpack_pair(first: Word, second: Word) -> vec2<f32> {
    return unpack2x16float(first);
}
