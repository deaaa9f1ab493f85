// f16 elements as bits, to copy them untouched or to round to them.

const ELEMENTS: u32 = 2u;

fn element_bits(word: u32, element_index: u32) -> u32 {
    return (word >> ((element_index & 1u) * 16u)) & 0xffffu;
}

fn round_to_bits(x: f32) -> u32 {
    // Clamped, since a number beyond the type has no defined f16.
    return pack2x16float(vec2<f32>(clamp(x, -65504.0, 65504.0), 0.0)) & 0xffffu;
}

// Two neighbouring elements.
fn round_to_word(numbers: vec2<f32>) -> u32 {
    return pack2x16float(clamp(numbers, vec2<f32>(-65504.0), vec2<f32>(65504.0)));
}
