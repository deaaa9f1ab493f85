// The part of scores that the keys' mean has: four tokens a lane (columns), four query rows a workgroup (components).

const MEAN_ROWS: u32 = select(2u * PAIRS, HEAD_DIM, CENTRING == BLOCK_MEAN);

// A and B of every pair, turned to the position of the tile's first token where the others follow it; or the queries.
const MEAN_ROOM: u32 = select(MEAN_ROWS, 1u, MEAN_STAYS || CENTRING == UNCENTRED);
var<workgroup> mean_query: array<vec4<f32>, MEAN_ROOM>;

fn mean_turns() -> bool {
    return CENTRING == PRE_ROPE && !MEAN_STAYS && params.attention.consecutive == 1u;
}

fn mean_channel(first: u32, at: u32) -> vec4<f32> {
    if (MEAN_STAYS || CENTRING == UNCENTRED) {
        return sketch(first + MEAN_AT + at);
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
    if (MEAN_STAYS || CENTRING == UNCENTRED) {
        return;
    }
    if (!mean_turns()) {
        for (var i = lane; i < MEAN_ROWS; i += WORKGROUP) {
            mean_query[i] = sketch(first + MEAN_AT + i);
        }
        return;
    }
    for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
        let turn = angle(params.attention.position + tile, pair);
        let a = sketch(first + MEAN_AT + pair);
        let b = sketch(first + MEAN_AT + PAIRS + pair);
        mean_query[pair] = a * turn.x + b * turn.y;
        mean_query[PAIRS + pair] = b * turn.x - a * turn.y;
    }
}

// What a pair adds to q . mu of four tokens, A cos + B sin: the angle of a lane's first one, turned on by one, two and three
// positions. A table of all tokens' angles would be four times as many bytes.
fn pair_scores(pair: u32, turn: vec2<f32>) -> mat4x4<f32> {
    let near = angles[params.tile_angles_at + 2u * pair];
    let far = angles[params.tile_angles_at + 2u * pair + 1u];
    let cosines = vec4<f32>(turn.x, turn.x * near.x - turn.y * near.y, turn.x * near.z - turn.y * near.w,
                            turn.x * far.x - turn.y * far.y);
    let sines = vec4<f32>(turn.y, turn.y * near.x + turn.x * near.y, turn.y * near.z + turn.x * near.w,
                          turn.y * far.x + turn.x * far.y);
    let a = mean_query[pair];
    let b = mean_query[PAIRS + pair];
    return mat4x4<f32>(a * cosines.x + b * sines.x, a * cosines.y + b * sines.y, a * cosines.z + b * sines.z,
                       a * cosines.w + b * sines.w);
}

// q . mu of four tokens. Four pairs at a time, whose loads overlap; the last one, which does not turn, and what four do not divide
// one by one.
fn turned_mean(lane: u32) -> mat4x4<f32> {
    let still = mean_query[min(PAIRS, MEAN_ROOM) - 1u];
    var sums = mat4x4<f32>(still, still, still, still);
    let first = 2u * (params.tile_angles_at + 2u * PAIRS) + lane;
    let fours = (PAIRS - 1u) / 4u * 4u;
    for (var pair = 0u; pair < fours; pair += 4u) {
        let a = turn_at(first + pair * WORKGROUP);
        let b = turn_at(first + (pair + 1u) * WORKGROUP);
        let c = turn_at(first + (pair + 2u) * WORKGROUP);
        let d = turn_at(first + (pair + 3u) * WORKGROUP);
        sums += pair_scores(pair, a);
        sums += pair_scores(pair + 1u, b);
        sums += pair_scores(pair + 2u, c);
        sums += pair_scores(pair + 3u, d);
    }
    for (var pair = fours; pair < PAIRS - 1u; pair++) {
        sums += pair_scores(pair, turn_at(first + pair * WORKGROUP));
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
