// Rows of a store and an output that start at whole vec4s, restored by eights of channels.

@group(0) @binding(1) var<storage, read> store: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> output: array<vec4<u32>>;

// Workgroups of a page.
const PARTS: u32 = (PAGE * UNITS + WORKGROUP - 1u) / WORKGROUP;

fn stored_word(at: u32) -> u32 {
    return store[at / 4u][at % 4u];
}

// Numbers of a slot as the output holds them.
fn rounded(found: Stored, low: vec4<f32>, high: vec4<f32>) -> Channels {
    var a = low;
    var b = high;
    if (found.magnitude != NOWHERE) {
        let magnitude = half_magnitude(found.magnitude);
        a *= magnitude;
        b *= magnitude;
    }
    if (ELEMENTS == 1u) {
        return Channels(bitcast<vec4<u32>>(a), bitcast<vec4<u32>>(b));
    }
    let words = vec4<u32>(round_to_word(a.xy), round_to_word(a.zw), round_to_word(b.xy), round_to_word(b.zw));
    return Channels(words, words);
}

fn restored(found: Stored, eight: u32) -> Channels {
    let of_input = found.raw || SLOT_IS_INPUT;
    let at = found.word / 4u + select(1u, VECTORS_AN_EIGHT, of_input) * eight;
    let words = Channels(store[at], store[at + select(0u, LAST, of_input)]);
    if (found.raw) {
        return words;
    }
    if (SLOT_IS_INPUT) {
        return rounded(found, low_numbers(words), high_numbers(words));
    }
    return rounded(found, vec4<f32>(unpack2x16float(words.low.x), unpack2x16float(words.low.y)),
                   vec4<f32>(unpack2x16float(words.low.z), unpack2x16float(words.low.w)));
}

// The pages of the output's tokens, which may be fewer than the store's.
fn restore_part(part: u32, lane: u32) {
    let view = params.view;
    let index = (part % PARTS) * WORKGROUP + lane;
    let pages_per_head = (view.tokens + PAGE - 1u) / PAGE;
    let head = part / PARTS / pages_per_head;
    let token = (part / PARTS % pages_per_head) * PAGE + index / UNITS;
    if (index >= PAGE * UNITS || token >= view.tokens || head * view.tokens >= view.rows) {
        return;
    }
    let words = restored(row_of(head, token), index % UNITS);
    let start = view.place.x + (head / view.heads) * view.place.y + (head % view.heads) * view.place.z + token * view.place.w;
    let at = (start + 8u * (index % UNITS)) / (4u * ELEMENTS);
    if (at + LAST < arrayLength(&output)) {
        output[at] = words.low;
        if (ELEMENTS == 1u) {
            output[at + 1u] = words.high;
        }
    }
}
