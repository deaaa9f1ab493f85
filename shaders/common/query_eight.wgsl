// Eight channels of a query, zeros behind its end. Without branches between loads, as in eight.wgsl.

// The word of each of four channels.
fn query_words(at: vec4<u32>) -> vec4<u32> {
    let word = select(at >> vec4<u32>(1u), at, vec4<bool>(QUERY_DTYPE == F32));
    return vec4<u32>(queries[word.x], queries[word.y], queries[word.z], queries[word.w]);
}

fn query_half(row_at: u32, channel: u32) -> Eight {
    let channels = channel + vec4<u32>(0u, 1u, 2u, 3u);
    let at = row_at + min(channels, vec4<u32>(HEAD_DIM - 1u));
    let words = query_words(at);
    let odd = (at & vec4<u32>(1u)) == vec4<u32>(1u);
    let half_exponent = vec4<u32>(select(0x7c00u, 0x7f80u, QUERY_DTYPE == BF16));
    let exponent = select(select(half_exponent, half_exponent << vec4<u32>(16u), odd), vec4<u32>(0x7f800000u),
                          vec4<bool>(QUERY_DTYPE == F32));
    let numbers = vec4<f32>(number_of(words.x, odd.x), number_of(words.y, odd.y), number_of(words.z, odd.z),
                            number_of(words.w, odd.w));
    let finite = (words & exponent) != exponent;
    return Eight(select(vec4<f32>(), numbers, finite & (channels < vec4<u32>(HEAD_DIM))), vec4<f32>(), all(finite));
}

fn query_eight(query_row: u32, channel: u32) -> Eight {
    let row_at = query_at(query_row, 0u);
    let low = query_half(row_at, channel);
    let high = query_half(row_at, channel + 4u);
    return Eight(low.low, high.low, both(low.finite, high.finite));
}
