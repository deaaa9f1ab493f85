// Rows of a folded pair whose directions are in codes, for attend.wgsl. Keys are twice as wide as they are: a raw row's numbers
// stand in the first half, a code's levels, which are rotated, in the second, and the other half is zeros, so that one product
// with a query in both bases (turn.wgsl) meets either. Of values a pass sees those of one kind, CODED_VALUES or raw, since their
// sums are in different bases: rows of the other kind are masked.

const WIDTH: u32 = HEAD_DIM / 2u;
const MOST_TOKENS: u32 = 4u;

// Levels of eight channels from `8 eight` on, zeros behind the row's end.
fn eight_levels(words: vec2<u32>, eight: u32, dim: u32, unit: f32) -> Eight {
    let bit = (8u * eight * BITS) & 31u;
    let low = vec4<f32>(level_in(words, bit, BITS), level_in(words, bit + BITS, BITS),
                        level_in(words, bit + 2u * BITS, BITS), level_in(words, bit + 3u * BITS, BITS));
    let high = vec4<f32>(level_in(words, bit + 4u * BITS, BITS), level_in(words, bit + 5u * BITS, BITS),
                         level_in(words, bit + 6u * BITS, BITS), level_in(words, bit + 7u * BITS, BITS));
    let channels = 8u * eight + vec4<u32>(0u, 1u, 2u, 3u);
    return Eight(select(vec4<f32>(), unit * low, channels < vec4<u32>(dim)),
                 select(vec4<f32>(), unit * high, channels + 4u < vec4<u32>(dim)), true);
}

fn key_levels(word: u32, eight: u32) -> Eight {
    let at = min(8u * eight * BITS / 32u, KEY_SLOT_WORDS - 1u);
    let words = vec2<u32>(keys[word + at], keys[word + min(at + 1u, KEY_SLOT_WORDS - 1u)]);
    return eight_levels(words, eight, KEY_DIM, KEY_LEVEL_UNIT);
}

fn value_levels(word: u32, eight: u32) -> Eight {
    let at = min(8u * eight * BITS / 32u, VALUE_SLOT_WORDS - 1u);
    let words = vec2<u32>(values[word + at], values[word + min(at + 1u, VALUE_SLOT_WORDS - 1u)]);
    return eight_levels(words, eight, VALUE_DIM, VALUE_LEVEL_UNIT);
}

fn raw_key(word: u32, eight: u32) -> Eight {
    if (ELEMENTS == 1u) {
        return eight_of_words(key_words(word, 8u * eight, true), key_words(word, 8u * eight + 4u, true));
    }
    return eight_of_halves(key_words(word, 4u * eight, false));
}

fn raw_value(word: u32, eight: u32) -> Eight {
    if (ELEMENTS == 1u) {
        return finite_words(value_words(word, 8u * eight, true), value_words(word, 8u * eight + 4u, true));
    }
    return finite_halves(value_words(word, 4u * eight, false));
}

fn key_eight(kv_head: u32, token: u32, eight: u32) -> Eight {
    let row = key_row(kv_head, token);
    let rotated = eight >= WIDTH / 8u;
    let at = select(eight, eight - WIDTH / 8u, rotated);
    var found = Eight(vec4<f32>(), vec4<f32>(), true);
    if (row.raw) {
        if (!rotated) {
            found = raw_key(row.word, at);
        }
    } else if (rotated) {
        found = key_levels(row.word, at);
    }
    return found;
}

fn value_held(kv_head: u32, token: u32, eight: u32) -> Held {
    let row = value_row(kv_head, token);
    var found = Eight(vec4<f32>(), vec4<f32>(), false);
    if (row.raw) {
        if (!CODED_VALUES) {
            found = raw_value(row.word, eight);
        }
    } else if (CODED_VALUES) {
        found = value_levels(row.word, eight);
    }
    return held_numbers(found);
}

fn value_of(held: Held) -> Eight {
    return eight_of_words(held.low, held.high);
}
