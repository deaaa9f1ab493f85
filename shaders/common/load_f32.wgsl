// f32 elements, one a word.

alias Word = u32;

fn word_index(element_index: u32) -> u32 {
    return element_index;
}

fn element(word: Word, element_index: u32) -> f32 {
    return bitcast<f32>(word);
}

fn unpack_pair(first: Word, second: Word) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(first), bitcast<f32>(second));
}
