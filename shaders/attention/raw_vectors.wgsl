// Raw rows that start at whole vec4s and have eights of channels: one vec4, or two where an element is a word.

@group(0) @binding(2) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> values: array<vec4<u32>>;

const MOST_TOKENS: u32 = 8u;

fn key_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let at = row_start(params.key, kv_head, token) + 8u * eight;
    if (word_index(1u) == 1u) {
        return eight_of_words(keys[at / 4u], keys[at / 4u + 1u]);
    }
    return eight_of_halves(keys[at / 8u]);
}

fn value_held(kv_head: u32, token: u32, eight: u32) -> Held {
    let at = row_start(params.value, kv_head, token) + 8u * eight;
    if (word_index(1u) == 1u) {
        return held_words(values[at / 4u], values[at / 4u + 1u]);
    }
    return held_halves(values[at / 8u]);
}

fn value_of(held: Held) -> Eight {
    if (word_index(1u) == 1u) {
        return eight_of_words(held.low, held.high);
    }
    return eight_of_halves(held.low);
}
