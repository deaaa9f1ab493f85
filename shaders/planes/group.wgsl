// The words of a group of 32 codes of b bits, as quads.wgsl has them, of the codes four a word: code 4 k + j is byte j of the quad k.

struct Quads {
    low: vec4<u32>,
    high: vec4<u32>,
}

// The low two bits of 16 codes.
fn pairs_word(quads: vec4<u32>) -> u32 {
    let pairs = quads & vec4<u32>(0x03030303u);
    return (pairs.x | (pairs.y << 4u)) | ((pairs.z << 2u) | (pairs.w << 6u));
}

// The top bits of 16 codes, which fill half of each byte.
fn top_bits(quads: vec4<u32>, planes: u32) -> u32 {
    let bits = (quads >> vec4<u32>(planes - 1u)) & vec4<u32>(0x01010101u);
    return (bits.x | (bits.y << 4u)) | ((bits.z << 1u) | (bits.w << 5u));
}

// Word `word` of a group of codes of 1 to 5 bits.
fn group_word(quads: Quads, word: u32, planes: u32) -> u32 {
    if (planes >= 4u && word < 4u) {
        let half = select(quads.low, quads.high, word >= 2u);
        let two = select(half.xy, half.zw, (word & 1u) == 1u) & vec2<u32>(0x0f0f0f0fu);
        return two.x | (two.y << 4u);
    }
    if (planes >= 2u && planes < 4u && word < 2u) {
        return pairs_word(select(quads.low, quads.high, word == 1u));
    }
    return top_bits(quads.low, planes) | (top_bits(quads.high, planes) << 2u);
}
