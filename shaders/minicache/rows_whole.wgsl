// Rows of a folded pair whose directions are in f16, for attend.wgsl.

const KEY_DIM: u32 = HEAD_DIM;

const MOST_TOKENS: u32 = 8u;

// Eight numbers of a slot in f16.
fn eight_of_slot(words: vec4<u32>) -> Eight {
    return Eight(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
                 vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)), true);
}

fn slot_is_finite(words: vec4<u32>) -> bool {
    let carries = (words & vec4<u32>(0x7c007c00u)) + vec4<u32>(0x04000400u);
    return ((carries.x | carries.y | carries.z | carries.w) & 0x80008000u) == 0u;
}

// Of a row whose numbers are two a word, be they a slot's or of the input's type: no branch waits for what the page says.
fn eight_of_either(words: vec4<u32>, of_input: bool) -> Eight {
    let slot = eight_of_slot(words);
    let raw = eight_of_halves(words);
    return Eight(select(slot.low, raw.low, of_input), select(slot.high, raw.high, of_input), true);
}

fn key_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let row = key_row(kv_head, token);
    let of_input = row.raw | SLOT_IS_INPUT;
    if (ELEMENTS == 1u && of_input) {
        return eight_of_words(key_words(row.word, 8u * eight, true), key_words(row.word, 8u * eight + 4u, true));
    }
    return eight_of_either(key_words(row.word, 4u * eight, false), of_input);
}

fn value_held(kv_head: u32, token: u32, eight: u32) -> Held {
    let row = value_row(kv_head, token);
    let of_input = row.raw | SLOT_IS_INPUT;
    if (ELEMENTS == 1u && of_input) {
        return held_words(value_words(row.word, 8u * eight, true), value_words(row.word, 8u * eight + 4u, true));
    }
    let words = value_words(row.word, 4u * eight, false);
    return held_if(words, vec4<u32>(), of_input, select(slot_is_finite(words), words_are_finite(words), of_input));
}

fn value_of(held: Held) -> Eight {
    if (ELEMENTS == 1u && held.of_input) {
        return eight_of_words(held.low, held.high);
    }
    return eight_of_either(held.low, held.of_input);
}
