// Raw rows that start anywhere.

@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<u32>;

// A channel and whether it is finite; 0 behind the end of the row.
fn key_number(start: u32, channel: u32) -> vec2<f32> {
    let at = start + min(channel, HEAD_DIM - 1u);
    let word = keys[word_index(at)];
    let finite = element_is_finite(word, at);
    return select(vec2<f32>(0.0, 1.0), vec2<f32>(element(word, at), select(0.0, 1.0, finite)), channel < HEAD_DIM);
}

fn value_number(start: u32, channel: u32) -> vec2<f32> {
    let at = start + min(channel, VALUE_DIM - 1u);
    let word = values[word_index(at)];
    let finite = element_is_finite(word, at);
    return select(vec2<f32>(0.0, 1.0), vec2<f32>(element(word, at), select(0.0, 1.0, finite)), channel < VALUE_DIM);
}

fn eight_of_numbers(low: mat4x2<f32>, high: mat4x2<f32>) -> Eight {
    let flags = vec4<f32>(low[0].y, low[1].y, low[2].y, low[3].y) * vec4<f32>(high[0].y, high[1].y, high[2].y, high[3].y);
    return eight_if(vec4<f32>(low[0].x, low[1].x, low[2].x, low[3].x), vec4<f32>(high[0].x, high[1].x, high[2].x, high[3].x),
                    all(flags == vec4<f32>(1.0)));
}

fn key_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let start = row_start(params.key, kv_head, token);
    let c = 8u * eight;
    return eight_of_numbers(
        mat4x2<f32>(key_number(start, c), key_number(start, c + 1u), key_number(start, c + 2u), key_number(start, c + 3u)),
        mat4x2<f32>(key_number(start, c + 4u), key_number(start, c + 5u), key_number(start, c + 6u), key_number(start, c + 7u)));
}

fn value_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let start = row_start(params.value, kv_head, token);
    let c = 8u * eight;
    return eight_of_numbers(
        mat4x2<f32>(value_number(start, c), value_number(start, c + 1u), value_number(start, c + 2u), value_number(start, c + 3u)),
        mat4x2<f32>(value_number(start, c + 4u), value_number(start, c + 5u), value_number(start, c + 6u), value_number(start, c + 7u)));
}
