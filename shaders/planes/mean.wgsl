// The part of scores that the keys' mean has: four tokens a lane (columns), four query rows a workgroup (components).

const MEAN_ROWS: u32 = select(2u * PAIRS, HEAD_DIM, CENTRING == BLOCK_MEAN);

// A and B of every pair, turned to the middle of the tile where positions follow each other; or the queries.
const MEAN_ROOM: u32 = select(MEAN_ROWS, 1u, MEAN_STAYS || CENTRING == UNCENTRED);
var<workgroup> mean_query: array<vec4<f32>, MEAN_ROOM>;

// Pairs so slow that over a tile their angle stays within half a radian of the middle's are one polynomial together, of
// SLOW_DEGREES coefficients: what their series leaves out is 1e-7 of what a pair adds. The host puts the slow pairs last.
const SLOW_DEGREES: u32 = 8u;
var<workgroup> slow: array<vec4<f32>, SLOW_DEGREES>;
// Invocations that share a coefficient.
const DEGREE_LANES: u32 = WORKGROUP / SLOW_DEGREES;

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
    if (mean_turns()) {
        for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
            let turn = angle(params.attention.position + tile + TILE_TOKENS / 2u, pair);
            let a = sketch(first + MEAN_AT + pair);
            let b = sketch(first + MEAN_AT + PAIRS + pair);
            mean_query[pair] = a * turn.x + b * turn.y;
            mean_query[PAIRS + pair] = b * turn.x - a * turn.y;
        }
        workgroupBarrier();
        load_slow(lane);
    } else if (!MEAN_STAYS && CENTRING != UNCENTRED) {
        for (var i = lane; i < MEAN_ROWS; i += WORKGROUP) {
            mean_query[i] = sketch(first + MEAN_AT + i);
        }
    }
}

// The polynomial of the slow pairs: coefficient k is the sum over them of A where k is even, else B, times a factor that the host
// made, signs included. Four pairs at a time.
fn load_slow(lane: u32) {
    let degree = lane / DEGREE_LANES;
    let odd = (degree & 1u) * PAIRS;
    let fours = (PAIRS - params.fast_pairs + 3u) / 4u;
    let factors_at = params.tile_angles_at + (2u + WORKGROUP / 2u) * params.fast_pairs + degree * fours;
    var sum = vec4<f32>();
    for (var four = lane % DEGREE_LANES; four < fours; four += DEGREE_LANES) {
        let factors = angles[factors_at + four];
        let pairs = min(params.fast_pairs + 4u * four + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(PAIRS - 1u)) + odd;
        sum += (mean_query[pairs.x] * factors.x + mean_query[pairs.y] * factors.y)
            + (mean_query[pairs.z] * factors.z + mean_query[pairs.w] * factors.w);
    }
    for (var offset = 1u; offset < DEGREE_LANES; offset <<= 1u) {
        sum += row_exchange(sum, lane, offset);
    }
    if (lane % DEGREE_LANES == 0u) {
        slow[degree] = sum;
    }
}

// Sums, with what a pair adds to q . mu of four tokens, A cos + B sin: the angle of a lane's first one, turned on by one, two and
// three positions. A table of all tokens' angles would be four times as many bytes, and more than stays near the kernel.
fn add_pair(sums: mat4x4<f32>, pair: u32, turn: vec2<f32>) -> mat4x4<f32> {
    let near = angles[params.tile_angles_at + 2u * pair];
    let far = angles[params.tile_angles_at + 2u * pair + 1u];
    let cosines = vec4<f32>(turn.x, turn.x * near.x - turn.y * near.y, turn.x * near.z - turn.y * near.w,
                            turn.x * far.x - turn.y * far.y);
    let sines = vec4<f32>(turn.y, turn.y * near.x + turn.x * near.y, turn.y * near.z + turn.x * near.w,
                          turn.y * far.x + turn.x * far.y);
    let a = mean_query[pair];
    let b = mean_query[PAIRS + pair];
    return mat4x4<f32>(fma(b, vec4<f32>(sines.x), fma(a, vec4<f32>(cosines.x), sums[0])),
                       fma(b, vec4<f32>(sines.y), fma(a, vec4<f32>(cosines.y), sums[1])),
                       fma(b, vec4<f32>(sines.z), fma(a, vec4<f32>(cosines.z), sums[2])),
                       fma(b, vec4<f32>(sines.w), fma(a, vec4<f32>(cosines.w), sums[3])));
}

// The slow pairs' polynomial at four tokens.
fn slow_scores(lane: u32) -> mat4x4<f32> {
    let half_tile = f32(TILE_TOKENS / 2u);
    let x = (f32(4u * lane) - half_tile + vec4<f32>(0.0, 1.0, 2.0, 3.0)) / half_tile;
    let highest = slow[SLOW_DEGREES - 1u];
    var sums = mat4x4<f32>(highest, highest, highest, highest);
    for (var i = 1u; i < SLOW_DEGREES; i++) {
        let next = slow[SLOW_DEGREES - 1u - i];
        sums = mat4x4<f32>(sums[0] * x.x + next, sums[1] * x.y + next, sums[2] * x.z + next, sums[3] * x.w + next);
    }
    return sums;
}

// q . mu of four tokens. Of the fast pairs four at a time, whose loads overlap, and what four do not divide one by one.
fn turned_mean(lane: u32) -> mat4x4<f32> {
    var sums = slow_scores(lane);
    let first = 2u * (params.tile_angles_at + 2u * params.fast_pairs) + lane;
    let fours = params.fast_pairs / 4u * 4u;
    for (var pair = 0u; pair < fours; pair += 4u) {
        let a = turn_at(first + pair * WORKGROUP);
        let b = turn_at(first + (pair + 1u) * WORKGROUP);
        let c = turn_at(first + (pair + 2u) * WORKGROUP);
        let d = turn_at(first + (pair + 3u) * WORKGROUP);
        sums = add_pair(sums, pair, a);
        sums = add_pair(sums, pair + 1u, b);
        sums = add_pair(sums, pair + 2u, c);
        sums = add_pair(sums, pair + 3u, d);
    }
    for (var pair = fours; pair < params.fast_pairs; pair++) {
        sums = add_pair(sums, pair, turn_at(first + pair * WORKGROUP));
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
