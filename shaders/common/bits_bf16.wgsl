// bf16 elements as bits, to copy them untouched or to round to them.

const ELEMENTS: u32 = 2u;

fn element_bits(word: u32, element_index: u32) -> u32 {
    return (word >> ((element_index & 1u) * 16u)) & 0xffffu;
}

// Round to nearest, ties to even; a NaN stays one whatever its bits, which rounding could carry into a zero.
fn round_to_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return ((bits >> 16u) & 0x8000u) | 0x7fc0u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

// Two neighbouring elements.
fn round_to_word(numbers: vec2<f32>) -> u32 {
    return round_to_bits(numbers.x) | (round_to_bits(numbers.y) << 16u);
}
