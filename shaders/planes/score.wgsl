// Scores of coded keys: nu (2 <q', c> - (2^b - 1) sum q') for each segment, and the mean's part.

const ROW_WORDS: u32 = FIRST_WORDS + SECOND_WORDS;

// The rotated query times 2, then A and B of the mean, or the query itself for block means.
var<workgroup> query: array<f32, HEAD_DIM>;
var<workgroup> mean_query: array<f32, max(2u * PAIRS, HEAD_DIM)>;

fn load_query(query_row: u32, lane: u32) {
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        query[i] = sketches[query_row * SKETCH + i];
    }
    let first = HEAD_DIM + 3u + select(0u, 2u * PAIRS, CENTRING == BLOCK_MEAN);
    for (var i = lane; i < select(2u * PAIRS, HEAD_DIM, CENTRING == BLOCK_MEAN); i += WORKGROUP) {
        mean_query[i] = sketches[query_row * SKETCH + first + i];
    }
}

fn query_is_finite(query_row: u32) -> bool {
    return sketches[query_row * SKETCH + HEAD_DIM + 2u] > 0.0;
}

fn mean_score(kv_head: u32, token: u32) -> f32 {
    var sum = 0.0;
    if (CENTRING == PRE_ROPE) {
        var position = params.attention.position + token;
        if (params.attention.consecutive == 0u) {
            position = positions[(kv_head / params.attention.kv_heads) * params.attention.tokens + token];
        }
        for (var pair = 0u; pair < PAIRS; pair++) {
            let turn = angle(position, pair);
            sum += mean_query[pair] * turn.x + mean_query[PAIRS + pair] * turn.y;
        }
    }
    if (CENTRING == BLOCK_MEAN) {
        let blocks = (params.attention.tokens + params.block - 1u) / params.block;
        let first = params.means_at + (kv_head * blocks + token / params.block) * MEAN_WORDS;
        for (var i = 0u; i < HEAD_DIM; i++) {
            let both = unpack2x16float(keys[first + i / 2u]);
            sum += mean_query[i] * select(both.x, both.y, (i & 1u) == 1u);
        }
    }
    return sum;
}

// Sum of code times query over a segment of a row of codes.
fn segment_dot(row: u32, word_base: u32, first: u32, channels: u32, planes: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < channels; i++) {
        let bit = i * planes;
        let at = row * ROW_WORDS + word_base + bit / 32u;
        var code = keys[at] >> (bit % 32u);
        if (bit % 32u + planes > 32u) {
            code |= keys[at + 1u] << (32u - bit % 32u);
        }
        sum += f32(code & ((1u << planes) - 1u)) * query[first + i];
    }
    return sum;
}

fn key_scales(row: u32) -> vec2<f32> {
    if (SECOND_PLANES > 0u) {
        return unpack2x16float(keys[params.key_scales_at + row]);
    }
    let both = unpack2x16float(keys[params.key_scales_at + row / 2u]);
    return vec2<f32>(select(both.x, both.y, (row & 1u) == 1u), 0.0);
}

fn key_is_masked(row: u32) -> bool {
    if (SECOND_PLANES > 0u) {
        return !half_is_finite(keys[params.key_scales_at + row] & 0xffffu);
    }
    return !half_is_finite(half_at(keys[params.key_scales_at + row / 2u], row));
}

fn key_score(query_row: u32, kv_head: u32, token: u32) -> f32 {
    let row = kv_head * params.attention.tokens + token;
    let nu = key_scales(row);
    let minus = vec2<f32>(sketches[query_row * SKETCH + HEAD_DIM], sketches[query_row * SKETCH + HEAD_DIM + 1u]);
    var score = nu.x * (segment_dot(row, 0u, 0u, FIRST_CHANNELS, FIRST_PLANES) - minus.x);
    if (SECOND_PLANES > 0u) {
        score += nu.y * (segment_dot(row, FIRST_WORDS, FIRST_CHANNELS, SECOND_CHANNELS, SECOND_PLANES) - minus.y);
    }
    return score + mean_score(kv_head, token);
}
