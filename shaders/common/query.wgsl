// Queries of any element type. The kernel binds `queries` and has `attention` and `query`, the
// offset of the first element, then batch, head and token strides, in its params.

// kvfold's DType as a number.
const BF16: u32 = 1u;
const F32: u32 = 2u;

fn query_at(query_row: u32, channel: u32) -> u32 {
    let head = query_row / params.attention.queries;
    return params.query.x + (head / params.attention.query_heads) * params.query.y
        + (head % params.attention.query_heads) * params.query.z
        + (query_row % params.attention.queries) * params.query.w + channel;
}

// Queries have a type of their own: a number's word, and the bits that only NaN and infinity have all set.
fn query_word(at: u32) -> u32 {
    return queries[select(at >> 1u, at, QUERY_DTYPE == F32)];
}

fn query_is_finite_at(at: u32) -> bool {
    let half_exponent = select(0x7c00u, 0x7f80u, QUERY_DTYPE == BF16);
    let packed_exponent = select(half_exponent, half_exponent << 16u, (at & 1u) == 1u);
    let exponent = select(packed_exponent, 0x7f800000u, QUERY_DTYPE == F32);
    return (query_word(at) & exponent) != exponent;
}

// A number of a word, of two the second where it stands at an odd place.
fn number_of(word: u32, odd: bool) -> f32 {
    if (QUERY_DTYPE == F32) {
        return bitcast<f32>(word);
    }
    if (QUERY_DTYPE == BF16) {
        return bitcast<f32>(select(word << 16u, word & 0xffff0000u, odd));
    }
    let both = unpack2x16float(word);
    return select(both.x, both.y, odd);
}

// A channel of a query; 0 past its end, and where it is not finite: such a query sees nothing, and no product may turn NaN.
fn query_channel(query_row: u32, channel: u32) -> f32 {
    let at = query_at(query_row, min(channel, HEAD_DIM - 1u));
    return select(0.0, number_of(query_word(at), (at & 1u) == 1u), channel < HEAD_DIM && query_is_finite_at(at));
}
