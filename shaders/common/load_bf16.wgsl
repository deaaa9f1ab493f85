// bf16 elements: the upper halves of f32. What is finite is read off the stored bits, as in load_f16.wgsl.

fn word_index(element_index: u32) -> u32 {
    return element_index >> 1u;
}

fn element(word: u32, element_index: u32) -> f32 {
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, (element_index & 1u) == 1u));
}

fn element_is_finite(word: u32, element_index: u32) -> bool {
    let exponent = select(0x7f80u, 0x7f800000u, (element_index & 1u) == 1u);
    return (word & exponent) != exponent;
}

fn unpack_pair(first: u32, second: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(first << 16u), bitcast<f32>(first & 0xffff0000u));
}

fn packed_pair_is_finite(first: u32, second: u32) -> bool {
    return element_is_finite(first, 0u) && element_is_finite(first, 1u);
}

// Four words at once, without a branch between the loads of others. One added to an exponent whose bits are all set carries into the
// sign's place, which the mask has left empty.
fn words_are_finite(words: vec4<u32>) -> bool {
    let carries = (words & vec4<u32>(0x7f807f80u)) + vec4<u32>(0x00800080u);
    return ((carries.x | carries.y | carries.z | carries.w) & 0x80008000u) == 0u;
}
