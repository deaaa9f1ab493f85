// Raw rows that start anywhere.

@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<u32>;

const MOST_TOKENS: u32 = 4u;

// Four channels from `channel` on, of words that hold them at these elements, in a row of `dim`.
fn half_of_row(words: vec4<u32>, at: vec4<u32>, channels: vec4<u32>, dim: u32) -> Eight {
    let numbers = vec4<f32>(element(words.x, at.x), element(words.y, at.y), element(words.z, at.z), element(words.w, at.w));
    let finite = vec4<bool>(element_is_finite(words.x, at.x), element_is_finite(words.y, at.y),
                            element_is_finite(words.z, at.z), element_is_finite(words.w, at.w));
    return Eight(select(vec4<f32>(), numbers, finite & (channels < vec4<u32>(dim))), vec4<f32>(), all(finite));
}

fn key_half(start: u32, channel: u32) -> Eight {
    let channels = channel + vec4<u32>(0u, 1u, 2u, 3u);
    let at = start + min(channels, vec4<u32>(HEAD_DIM - 1u));
    let words = vec4<u32>(keys[word_index(at.x)], keys[word_index(at.y)], keys[word_index(at.z)], keys[word_index(at.w)]);
    return half_of_row(words, at, channels, HEAD_DIM);
}

fn value_half(start: u32, channel: u32) -> Eight {
    let channels = channel + vec4<u32>(0u, 1u, 2u, 3u);
    let at = start + min(channels, vec4<u32>(VALUE_DIM - 1u));
    let words = vec4<u32>(values[word_index(at.x)], values[word_index(at.y)], values[word_index(at.z)], values[word_index(at.w)]);
    return half_of_row(words, at, channels, VALUE_DIM);
}

fn key_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let start = row_start(params.key, kv_head, token);
    let low = key_half(start, 8u * eight);
    let high = key_half(start, 8u * eight + 4u);
    return eight_if(low.low, high.low, both(low.finite, high.finite));
}

fn value_held(kv_head: u32, token: u32, eight: u32) -> Held {
    let start = row_start(params.value, kv_head, token);
    let low = value_half(start, 8u * eight);
    let high = value_half(start, 8u * eight + 4u);
    return held_numbers(eight_if(low.low, high.low, both(low.finite, high.finite)));
}

fn value_of(held: Held) -> Eight {
    return eight_of_words(held.low, held.high);
}
