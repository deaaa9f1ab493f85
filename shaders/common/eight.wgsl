// Eight neighbouring channels of a row, zeros behind its end, and whether all are finite; where one is not, all are zeros, which no
// weight turns NaN.

struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
    finite: bool,
}

fn eight_if(low: vec4<f32>, high: vec4<f32>, finite: bool) -> Eight {
    return Eight(select(vec4<f32>(), low, finite), select(vec4<f32>(), high, finite), finite);
}

// Of four words of two channels each.
fn eight_of_halves(words: vec4<u32>) -> Eight {
    let finite = packed_pair_is_finite(words.x, 0u) && packed_pair_is_finite(words.y, 0u)
        && packed_pair_is_finite(words.z, 0u) && packed_pair_is_finite(words.w, 0u);
    return eight_if(vec4<f32>(unpack_pair(words.x, 0u), unpack_pair(words.y, 0u)),
                    vec4<f32>(unpack_pair(words.z, 0u), unpack_pair(words.w, 0u)), finite);
}

// Of eight words.
fn eight_of_words(low: vec4<u32>, high: vec4<u32>) -> Eight {
    let odd = vec4<u32>(0x7f800000u);
    let finite = all((low & odd) != odd) && all((high & odd) != odd);
    return eight_if(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high), finite);
}
