// bf16 elements: the upper halves of f32.

alias Word = u32;

fn word_index(element_index: u32) -> u32 {
    return element_index >> 1u;
}

fn element(word: Word, element_index: u32) -> f32 {
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (element_index & 1u) == 1u));
}

fn unpack_pair(first: Word, second: Word) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(first << 16u), bitcast<f32>(first & 0xffff0000u));
}
