// Scores of coded keys: nu (2 <q', c> - (2^b - 1) sum q') for each segment, and the mean's part. Four query rows of one KV head
// share a workgroup (components); each lane scores four tokens that follow each other (columns).

// vec4s of one word of 32 groups, and tokens of a tile of a workgroup.
const TILE_FOURS: u32 = 8u;
const TILE_TOKENS: u32 = 4u * WORKGROUP;
// Where what the mean needs would not leave room for the rest in workgroup memory, it is read from where `project` left it; and so
// is S q or R q, beside it and the weights of a tile.
const MEAN_STAYS: bool = HEAD_DIM > 128u && (HEAD_DIM > 256u || WORKGROUP > 64u);
const WEIGHTS_BYTES: u32 = 16u * (TILE_TOKENS + WORKGROUP);
const QUERY_STAYS: bool = MEAN_STAYS || 16u * (QUERY_CHANNELS + HEAD_DIM + 2u) + WEIGHTS_BYTES > 15360u;
const ROW_WORDS: u32 = FIRST_GROUPS * FIRST_PLANES + SECOND_GROUPS * SECOND_PLANES;

fn sketch(at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(sketches[at]);
}

// Where `project` left the four rows.
fn sketch_at(four: Fours) -> u32 {
    return four.place * SKETCH;
}

fn rows_are_finite(four: Fours) -> vec4<bool> {
    return sketch(sketch_at(four) + FINITE_AT) > vec4<f32>();
}

fn key_word(at: u32) -> u32 {
    return keys[at / 4u][at % 4u];
}

fn key_words(at: u32, planes: u32) -> Words {
    var words = Words();
    words.a = keys[at];
    if (planes > 1u) {
        words.b = keys[at + TILE_FOURS];
    }
    if (planes > 2u) {
        words.c = keys[at + 2u * TILE_FOURS];
    }
    if (planes > 3u) {
        words.d = keys[at + 3u * TILE_FOURS];
    }
    if (planes > 4u) {
        words.e = keys[at + 4u * TILE_FOURS];
    }
    return words;
}

// The scalars of four tokens, and whether the rows were finite.
struct Scalars {
    first: vec4<f32>,
    second: vec4<f32>,
    finite: vec4<bool>,
}

fn key_scalars(kv_head: u32, token: u32) -> Scalars {
    let row = kv_head * store_tiles() * 32u + token;
    if (SECOND_PLANES > 0u) {
        let both = keys[(params.key_scales_at + row) / 4u];
        let first = (both.xz & vec2<u32>(0xffffu)) | (both.yw << vec2<u32>(16u));
        let second = (both.xz >> vec2<u32>(16u)) | (both.yw & vec2<u32>(0xffff0000u));
        return Scalars(four_finite_halves(first), four_finite_halves(second), four_are_finite(first));
    }
    let four = keys[(params.key_scales_at + row / 2u) / 4u];
    let words = select(four.xy, four.zw, (row & 4u) == 4u);
    return Scalars(four_finite_halves(words), vec4<f32>(), four_are_finite(words));
}

// Tiles of 32 tokens of a head of the store.
fn store_tiles() -> u32 {
    return (params.attention.tokens + 31u) / 32u;
}

// Scores of the tokens from `token` on, a multiple of 4 inside the store's tiles.
fn four_scores(rows: Fours, scalars: Scalars, token: u32, lane: u32) -> mat4x4<f32> {
    let at = (rows.kv_head * store_tiles() + token / 32u) * ROW_WORDS * TILE_FOURS + (token % 32u) / 4u;
    var scores = columns_times(segment_dots(sketch_at(rows), 0u, at, 0u, FIRST_GROUPS, FIRST_PLANES), scalars.first);
    if (SECOND_PLANES > 0u) {
        let second = at + FIRST_GROUPS * FIRST_PLANES * TILE_FOURS;
        scores += columns_times(
            segment_dots(sketch_at(rows), 1u, second, 32u * FIRST_GROUPS, SECOND_GROUPS, SECOND_PLANES), scalars.second);
    }
    return scores + mean_scores(sketch_at(rows), rows.kv_head, token, lane);
}
