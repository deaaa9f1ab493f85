// f32 elements, one a word. What is finite is read off the stored bits, as in load_f16.wgsl.

fn word_index(element_index: u32) -> u32 {
    return element_index;
}

fn element(word: u32, element_index: u32) -> f32 {
    return bitcast<f32>(word);
}

fn element_is_finite(word: u32, element_index: u32) -> bool {
    return (word & 0x7f800000u) != 0x7f800000u;
}

fn unpack_pair(first: u32, second: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(first), bitcast<f32>(second));
}

fn packed_pair_is_finite(first: u32, second: u32) -> bool {
    return element_is_finite(first, 0u) && element_is_finite(second, 0u);
}

// Four words at once, without a branch between the loads of others.
fn words_are_finite(words: vec4<u32>) -> bool {
    let exponent = vec4<u32>(0x7f800000u);
    return all((words & exponent) != exponent);
}
