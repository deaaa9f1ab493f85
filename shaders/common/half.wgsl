// f16 scalars stored two to a word.

fn half_at(word: u32, index: u32) -> u32 {
    return (word >> ((index & 1u) * 16u)) & 0xffffu;
}
