// f16 elements, two a word, which needs no device feature. What is finite is read off the stored bits: fast math, which
// wgpu leaves on in Metal, takes every f32 to be finite. Keys of exact attention alone are asked by their scores' bits (float.wgsl).

fn word_index(element_index: u32) -> u32 {
    return element_index >> 1u;
}

fn element(word: u32, element_index: u32) -> f32 {
    let both = unpack2x16float(word);
    return select(both.x, both.y, (element_index & 1u) == 1u);
}

fn element_is_finite(word: u32, element_index: u32) -> bool {
    let exponent = select(0x7c00u, 0x7c000000u, (element_index & 1u) == 1u);
    return (word & exponent) != exponent;
}

// Two channels that start a word; the second word is used by 32-bit types only.
fn unpack_pair(first: u32, second: u32) -> vec2<f32> {
    return unpack2x16float(first);
}

fn packed_pair_is_finite(first: u32, second: u32) -> bool {
    return element_is_finite(first, 0u) && element_is_finite(first, 1u);
}

// Four words at once, without a branch between the loads of others. One added to an exponent whose bits are all set carries into the
// sign's place, which the mask has left empty.
fn words_are_finite(words: vec4<u32>) -> bool {
    let carries = (words & vec4<u32>(0x7c007c00u)) + vec4<u32>(0x04000400u);
    return ((carries.x | carries.y | carries.z | carries.w) & 0x80008000u) == 0u;
}
