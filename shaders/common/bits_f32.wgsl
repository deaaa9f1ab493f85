// f32 elements as bits.

const ELEMENTS: u32 = 1u;

fn element_bits(word: u32, element_index: u32) -> u32 {
    return word;
}

fn round_to_bits(x: f32) -> u32 {
    return bitcast<u32>(x);
}

// The first of two neighbouring elements, which 16-bit types have in one word.
fn round_to_word(numbers: vec2<f32>) -> u32 {
    return bitcast<u32>(numbers.x);
}
