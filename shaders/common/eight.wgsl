// Eight neighbouring channels of a row, zeros behind its end, and whether all are finite; where one is not, all are zeros, which no
// weight turns NaN. No && and no if: a branch after each load keeps a GPU from having many of them under way. Nor & of two bools:
// in Metal's text that is an int, which no struct takes for a bool.

struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
    finite: bool,
}

fn both(a: bool, b: bool) -> bool {
    return select(false, b, a);
}

fn eight_if(low: vec4<f32>, high: vec4<f32>, finite: bool) -> Eight {
    return Eight(select(vec4<f32>(), low, finite), select(vec4<f32>(), high, finite), finite);
}

// Of four words of two channels each.
fn eight_of_halves(words: vec4<u32>) -> Eight {
    return eight_if(vec4<f32>(unpack_pair(words.x, 0u), unpack_pair(words.y, 0u)),
                    vec4<f32>(unpack_pair(words.z, 0u), unpack_pair(words.w, 0u)), words_are_finite(words));
}

// Of eight words.
fn eight_of_words(low: vec4<u32>, high: vec4<u32>) -> Eight {
    return eight_if(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high), both(words_are_finite(low), words_are_finite(high)));
}
