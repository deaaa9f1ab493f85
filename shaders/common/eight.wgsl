// Eight neighbouring channels of a row, zeros behind its end. No && and no if: a branch after each load keeps a GPU from having many
// of them under way. Nor & of two bools: in Metal's text that is an int, which no struct takes for a bool.

struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
    // Whether the row counts.
    finite: bool,
}

// Of a value, as its store has it where that is smaller than its numbers; all zeros where one is not finite, which no weight turns
// NaN.
struct Held {
    low: vec4<u32>,
    high: vec4<u32>,
    // What a kernel must know to tell the numbers.
    of_input: bool,
    finite: bool,
}

fn both(a: bool, b: bool) -> bool {
    return select(false, b, a);
}

fn eight_if(low: vec4<f32>, high: vec4<f32>, finite: bool) -> Eight {
    return Eight(select(vec4<f32>(), low, finite), select(vec4<f32>(), high, finite), finite);
}

// Of four words of two channels each, whatever they are.
fn eight_of_halves(words: vec4<u32>) -> Eight {
    return Eight(vec4<f32>(unpack_pair(words.x, 0u), unpack_pair(words.y, 0u)),
                 vec4<f32>(unpack_pair(words.z, 0u), unpack_pair(words.w, 0u)), true);
}

// Of eight words.
fn eight_of_words(low: vec4<u32>, high: vec4<u32>) -> Eight {
    return Eight(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high), true);
}

// The same, zeros where one is not finite.
fn finite_halves(words: vec4<u32>) -> Eight {
    let eight = eight_of_halves(words);
    return eight_if(eight.low, eight.high, words_are_finite(words));
}

fn finite_words(low: vec4<u32>, high: vec4<u32>) -> Eight {
    let eight = eight_of_words(low, high);
    return eight_if(eight.low, eight.high, both(words_are_finite(low), words_are_finite(high)));
}

fn held_if(low: vec4<u32>, high: vec4<u32>, of_input: bool, finite: bool) -> Held {
    return Held(select(vec4<u32>(), low, finite), select(vec4<u32>(), high, finite), of_input, finite);
}

fn held_halves(words: vec4<u32>) -> Held {
    return held_if(words, vec4<u32>(), true, words_are_finite(words));
}

fn held_words(low: vec4<u32>, high: vec4<u32>) -> Held {
    return held_if(low, high, true, both(words_are_finite(low), words_are_finite(high)));
}

// Numbers that are held as such.
fn held_numbers(eight: Eight) -> Held {
    return Held(bitcast<vec4<u32>>(eight.low), bitcast<vec4<u32>>(eight.high), true, eight.finite);
}
