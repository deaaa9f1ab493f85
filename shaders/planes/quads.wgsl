// Codes as attention reads them: groups of 32 codes of b bits in b words, the same word of 32 groups side by side (Tiles).
// Code 4 k + j of a group has its bits
//   where b is 8        all, in word k from bit 8 j on,
//   where b is 4 or 5   the low four in word k / 2 from bit 8 j + 4 (k % 2) on,
//   where b is 2 or 3   the low two in word k / 4 from bit 8 j + 4 (k % 2) + 2 (k / 2 % 2) on,
//   where b is odd      the top one in the last word at bit 8 j + 4 (k % 2) + k / 2,
// so that four codes become the bytes of a word by a shift and a mask. Host: qjl::planes::gpu::tiles.

// The b words of four groups, one group a component.
struct Words {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    e: vec4<u32>,
    f: vec4<u32>,
    g: vec4<u32>,
    h: vec4<u32>,
}

// Four codes of eight bits are a word.
fn byte_quad(words: Words, k: u32) -> vec4<u32> {
    let low = select(select(words.a, words.b, k == 1u), select(words.c, words.d, k == 3u), k >= 2u);
    let high = select(select(words.e, words.f, k == 5u), select(words.g, words.h, k == 7u), k >= 6u);
    return select(low, high, k >= 4u);
}

// The low four bits of codes 8 y to 8 y + 7.
fn nibbles(words: Words, planes: u32, y: u32) -> vec4<u32> {
    if (planes >= 4u) {
        return select(select(words.a, words.b, y == 1u), select(words.c, words.d, y == 3u), y >= 2u);
    }
    if (planes == 1u) {
        return (words.a >> vec4<u32>(y)) & vec4<u32>(0x11111111u);
    }
    let pairs = (select(words.a, words.b, y >= 2u) >> vec4<u32>(2u * (y & 1u))) & vec4<u32>(0x33333333u);
    if (planes == 2u) {
        return pairs;
    }
    let third = (words.c << vec4<u32>(2u - min(y, 2u))) >> vec4<u32>(max(y, 2u) - 2u);
    return pairs | (third & vec4<u32>(0x44444444u));
}

// Codes 4 k to 4 k + 3, one in each byte.
fn quad(words: Words, planes: u32, k: u32) -> vec4<u32> {
    if (planes == 8u) {
        return byte_quad(words, k);
    }
    let shift = 4u * (k & 1u);
    var four = (nibbles(words, planes, k / 2u) >> vec4<u32>(shift)) & vec4<u32>(0x0f0f0f0fu);
    if (planes == 5u) {
        four |= ((words.e >> vec4<u32>(shift + k / 2u)) & vec4<u32>(0x01010101u)) << vec4<u32>(4u);
    }
    return four;
}

fn four_are_finite(words: vec2<u32>) -> vec4<bool> {
    let bits = vec4<u32>(words.x, words.x >> 16u, words.y, words.y >> 16u) & vec4<u32>(0x7c00u);
    return bits != vec4<u32>(0x7c00u);
}

// Four f16 scalars; 0 for those that are not finite, which no product may turn NaN.
fn four_finite_halves(words: vec2<u32>) -> vec4<f32> {
    let halves = vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
    return select(vec4<f32>(), halves, four_are_finite(words));
}
