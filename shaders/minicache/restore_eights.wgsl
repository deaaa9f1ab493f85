// Rows of a store and an output that start at whole vec4s, restored by eights of channels.

@group(0) @binding(1) var<storage, read> store: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> output: array<vec4<u32>>;

// Invocations of a page, each of which takes the same eight channels of four rows: a row's numbers are loaded once its page is there,
// and with four a GPU has more loads under way. None of them stands behind a branch for that reason.
const A_PAGE: u32 = PAGE / 4u * UNITS;

fn stored_word(at: u32) -> u32 {
    return store[at / 4u][at % 4u];
}

struct Numbers {
    low: vec4<f32>,
    high: vec4<f32>,
}

// A row's eight channels as they are stored, and what a merged one is multiplied by.
struct Loaded {
    found: Stored,
    words: Channels,
    magnitude: f32,
}

fn load(page: Page, token: u32, eight: u32) -> Loaded {
    let found = row_of(page, token);
    let of_input = found.raw || SLOT_IS_INPUT;
    let at = found.word / 4u + select(1u, VECTORS_AN_EIGHT, of_input) * eight;
    let words = Channels(store[at], store[at + select(0u, LAST, of_input)]);
    if (MODE == COMPAT) {
        return Loaded(found, words, 1.0);
    }
    return Loaded(found, words, half_magnitude(select(found.magnitude, 0u, found.magnitude == NOWHERE)));
}

fn numbers_of_slot(words: Channels) -> Numbers {
    if (SLOT_IS_INPUT) {
        return Numbers(low_numbers(words), high_numbers(words));
    }
    return Numbers(vec4<f32>(unpack2x16float(words.low.x), unpack2x16float(words.low.y)),
                   vec4<f32>(unpack2x16float(words.low.z), unpack2x16float(words.low.w)));
}

fn rounded(a: vec4<f32>, b: vec4<f32>) -> Channels {
    if (ELEMENTS == 1u) {
        return Channels(bitcast<vec4<u32>>(a), bitcast<vec4<u32>>(b));
    }
    let words = vec4<u32>(round_to_word(a.xy), round_to_word(a.zw), round_to_word(b.xy), round_to_word(b.zw));
    return Channels(words, words);
}

fn put(start: u32, token: u32, eight: u32, row: Loaded) {
    let numbers = numbers_of_slot(row.words);
    let whole = row.found.magnitude == NOWHERE;
    let merged = rounded(select(row.magnitude * numbers.low, numbers.low, whole),
                         select(row.magnitude * numbers.high, numbers.high, whole));
    let at = (start + token * params.view.place.w + 8u * eight) / (4u * ELEMENTS);
    if (token < params.view.tokens && at + LAST < arrayLength(&output)) {
        output[at] = select(merged.low, row.words.low, row.found.raw);
        if (ELEMENTS == 1u) {
            output[at + 1u] = select(merged.high, row.words.high, row.found.raw);
        }
    }
}

// The pages of the output's tokens, which may be fewer than the store's.
fn restore_part(part: u32, lane: u32) {
    let view = params.view;
    let index = part * WORKGROUP + lane;
    let pages_per_head = (view.tokens + PAGE - 1u) / PAGE;
    let page_index = index / A_PAGE;
    let head = page_index / pages_per_head;
    if (head * view.tokens >= view.rows) {
        return;
    }
    let eight = index % UNITS;
    let token = (page_index % pages_per_head) * PAGE + index / UNITS % (PAGE / 4u);
    let tokens = token + (PAGE / 4u) * vec4<u32>(0u, 1u, 2u, 3u);
    let page = page_at(head * params.pages_per_head + token / PAGE);
    let readable = min(tokens, vec4<u32>(view.tokens - 1u));
    let a = load(page, readable.x, eight);
    let b = load(page, readable.y, eight);
    let c = load(page, readable.z, eight);
    let d = load(page, readable.w, eight);
    let start = view.place.x + (head / view.heads) * view.place.y + (head % view.heads) * view.place.z;
    put(start, tokens.x, eight, a);
    put(start, tokens.y, eight, b);
    put(start, tokens.z, eight, c);
    put(start, tokens.w, eight, d);
}
