// Stores of keys and values whose sections and rows start at whole vec4s.

@group(0) @binding(2) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> values: array<vec4<u32>>;

fn key_word(at: u32) -> u32 {
    return keys[at / 4u][at % 4u];
}

fn value_word(at: u32) -> u32 {
    return values[at / 4u][at % 4u];
}

// Four words of a row, of numbers of either size: rows end at whole vec4s, too.
fn key_words(word: u32, first: u32, wide: bool) -> vec4<u32> {
    return keys[(word + first) / 4u];
}

fn value_words(word: u32, first: u32, wide: bool) -> vec4<u32> {
    return values[(word + first) / 4u];
}
