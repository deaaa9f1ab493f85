// f16 elements read as f16, where the device has the type.

alias Word = vec2<f16>;

fn word_index(element_index: u32) -> u32 {
    return element_index >> 1u;
}

fn element(word: Word, element_index: u32) -> f32 {
    return f32(select(word.x, word.y, (element_index & 1u) == 1u));
}

fn unpack_pair(first: Word, second: Word) -> vec2<f32> {
    return vec2<f32>(first);
}
