// Two neighbouring channels of a row, and whether both are finite.

struct Pair {
    numbers: vec2<f32>,
    finite: bool,
}

// Of a row whose pairs start a word: the words of the first and of the second channel.
fn packed_pair(first: u32, second: u32) -> Pair {
    return Pair(unpack_pair(first, second), packed_pair_is_finite(first, second));
}

// Of any row: each channel's word and element index.
fn loose_pair(words: vec2<u32>, at: vec2<u32>) -> Pair {
    return Pair(vec2<f32>(element(words.x, at.x), element(words.y, at.y)),
                element_is_finite(words.x, at.x) && element_is_finite(words.y, at.y));
}
