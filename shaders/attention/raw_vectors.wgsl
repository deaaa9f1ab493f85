// Raw rows that start at whole vec4s and have eights of channels: one vec4, or two where an element is a word.

@group(0) @binding(2) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> values: array<vec4<u32>>;

fn key_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let at = row_start(params.key, kv_head, token) + 8u * eight;
    if (word_index(1u) == 1u) {
        return eight_of_words(keys[at / 4u], keys[at / 4u + 1u]);
    }
    return eight_of_halves(keys[at / 8u]);
}

fn value_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let at = row_start(params.value, kv_head, token) + 8u * eight;
    if (word_index(1u) == 1u) {
        return eight_of_words(values[at / 4u], values[at / 4u + 1u]);
    }
    return eight_of_halves(values[at / 8u]);
}
