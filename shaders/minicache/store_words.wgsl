// Stores of keys and values, word by word.

@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<u32>;

fn key_word(at: u32) -> u32 {
    return keys[at];
}

fn value_word(at: u32) -> u32 {
    return values[at];
}

// Words of a row that hold numbers of this type: two a word, or one.
fn key_words(word: u32, first: u32, wide: bool) -> vec4<u32> {
    let last = select((KEY_DIM + 1u) / 2u, KEY_DIM, wide) - 1u;
    let at = first + vec4<u32>(0u, 1u, 2u, 3u);
    let inside = word + min(at, vec4<u32>(last));
    return select(vec4<u32>(), vec4<u32>(keys[inside.x], keys[inside.y], keys[inside.z], keys[inside.w]), at <= vec4<u32>(last));
}

fn value_words(word: u32, first: u32, wide: bool) -> vec4<u32> {
    let last = select((VALUE_DIM + 1u) / 2u, VALUE_DIM, wide) - 1u;
    let at = first + vec4<u32>(0u, 1u, 2u, 3u);
    let inside = word + min(at, vec4<u32>(last));
    return select(vec4<u32>(), vec4<u32>(values[inside.x], values[inside.y], values[inside.z], values[inside.w]), at <= vec4<u32>(last));
}
