// f16 scalars stored two to a word.

fn half_at(word: u32, index: u32) -> u32 {
    return (word >> ((index & 1u) * 16u)) & 0xffffu;
}

// Whether an f16 is finite.
fn half_is_finite(bits: u32) -> bool {
    return (bits & 0x7c00u) != 0x7c00u;
}
