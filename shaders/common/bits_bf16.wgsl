// bf16 elements as bits, to copy them untouched or to round to them.

const ELEMENTS: u32 = 2u;

fn element_bits(word: u32, element_index: u32) -> u32 {
    return (word >> ((element_index & 1u) * 16u)) & 0xffffu;
}

// Round to nearest, ties to even; only finite numbers come here.
fn round_to_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
