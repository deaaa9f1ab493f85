// Eight channels of a query, zeros behind its end.

fn query_half(query_row: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(query_channel(query_row, channel), query_channel(query_row, channel + 1u),
                     query_channel(query_row, channel + 2u), query_channel(query_row, channel + 3u));
}

fn query_half_is_finite(query_row: u32, channel: u32) -> bool {
    let first = query_at(query_row, 0u);
    let at = first + min(channel + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(HEAD_DIM - 1u));
    return query_is_finite_at(at.x) && query_is_finite_at(at.y) && query_is_finite_at(at.z) && query_is_finite_at(at.w);
}

fn query_eight(query_row: u32, channel: u32) -> Eight {
    let finite = query_half_is_finite(query_row, channel) && query_half_is_finite(query_row, channel + 4u);
    return Eight(query_half(query_row, channel), query_half(query_row, channel + 4u), finite);
}
