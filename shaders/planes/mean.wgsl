// The part of scores that the keys' mean has: four tokens a lane (columns), four query rows a workgroup (components).

const MEAN_ROWS: u32 = select(2u * PAIRS, HEAD_DIM, CENTRING == BLOCK_MEAN);

// A and B of every pair, turned to the position of the tile's first token where the others follow it; or the queries.
var<workgroup> mean_query: array<vec4<f32>, select(MEAN_ROWS, 1u, STAYS || CENTRING == UNCENTRED)>;

fn mean_turns() -> bool {
    return CENTRING == PRE_ROPE && !STAYS && params.attention.consecutive == 1u;
}

fn mean_channel(first: u32, at: u32) -> vec4<f32> {
    if (STAYS || CENTRING == UNCENTRED) {
        return sketches[first + MEAN_AT + at];
    }
    return mean_query[at];
}

fn position_of(kv_head: u32, token: u32) -> u32 {
    if (params.attention.consecutive == 1u) {
        return params.attention.position + token;
    }
    let last = params.attention.tokens - 1u;
    return positions[(kv_head / params.attention.kv_heads) * params.attention.tokens + min(token, last)];
}

// Before each tile, between barriers.
fn load_mean(first: u32, tile: u32, lane: u32) {
    if (STAYS || CENTRING == UNCENTRED) {
        return;
    }
    if (!mean_turns()) {
        for (var i = lane; i < MEAN_ROWS; i += WORKGROUP) {
            mean_query[i] = sketches[first + MEAN_AT + i];
        }
        return;
    }
    for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
        let turn = angle(params.attention.position + tile, pair);
        let a = sketches[first + MEAN_AT + pair];
        let b = sketches[first + MEAN_AT + PAIRS + pair];
        mean_query[pair] = a * turn.x + b * turn.y;
        mean_query[PAIRS + pair] = b * turn.x - a * turn.y;
    }
}

// q . mu of four tokens from the tile's angles, A cos + B sin.
fn turned_mean(lane: u32) -> mat4x4<f32> {
    var sums = mat4x4<f32>();
    for (var pair = 0u; pair < PAIRS; pair++) {
        let at = params.tile_angles_at + 2u * pair * WORKGROUP + lane;
        let cosines = angles[at];
        let sines = angles[at + WORKGROUP];
        let a = mean_query[pair];
        let b = mean_query[PAIRS + pair];
        sums += mat4x4<f32>(a * cosines.x + b * sines.x, a * cosines.y + b * sines.y, a * cosines.z + b * sines.z,
                            a * cosines.w + b * sines.w);
    }
    return sums;
}

// q . mu of one token.
fn token_mean(first: u32, kv_head: u32, token: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    if (CENTRING == PRE_ROPE) {
        let position = position_of(kv_head, token);
        for (var pair = 0u; pair < PAIRS; pair++) {
            let turn = angle(position, pair);
            sum += mean_channel(first, pair) * turn.x + mean_channel(first, PAIRS + pair) * turn.y;
        }
    } else {
        let blocks = (params.attention.tokens + params.block - 1u) / params.block;
        let readable = min(token, params.attention.tokens - 1u);
        let row = params.means_at + (kv_head * blocks + readable / params.block) * MEAN_WORDS;
        for (var i = 0u; i < HEAD_DIM; i++) {
            let both = unpack2x16float(key_word(row + i / 2u));
            sum += mean_channel(first, i) * select(both.x, both.y, (i & 1u) == 1u);
        }
    }
    return sum;
}

fn mean_scores(first: u32, kv_head: u32, token: u32, lane: u32) -> mat4x4<f32> {
    if (CENTRING == UNCENTRED) {
        return mat4x4<f32>();
    }
    if (mean_turns()) {
        return turned_mean(lane);
    }
    return mat4x4<f32>(token_mean(first, kv_head, token), token_mean(first, kv_head, token + 1u),
                       token_mean(first, kv_head, token + 2u), token_mean(first, kv_head, token + 3u));
}
