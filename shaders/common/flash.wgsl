// Attention over rows of numbers, four query rows of one KV head and one split of the tokens a workgroup (flash-decoding). LANES
// invocations share a row of keys and the row of values behind it, eight channels each; every such stream takes SPAN tokens that
// follow each other at a time, with a softmax of its own, and the streams of a workgroup meet at its end. The kernel declares
// `attention: Attention` in its params, and
//   MOST_TOKENS                           the most that a stream takes at a time, whose values it holds meanwhile: 4 or 8
//   key_eight(kv_head, token, eight)      channels 8 eight .. of a key row; a number that is not finite makes the score so
//   value_held(kv_head, token, eight)     of a value row, as it is held until its weight is known; zeros where not all are finite
//   value_of(held)                        its numbers
//   key_scale(kv_head, token)             factor on a key row
//   value_scale(kv_head, token)           on a value row
// and the binding `partials`, vec4s, where each split leaves what it found for combine.wgsl: its largest logit and its sum of
// exponentials in one, then its weighted sum of values.

const STREAMS: u32 = WORKGROUP / LANES;
const KEY_EIGHTS: u32 = (HEAD_DIM + 7u) / 8u;
const VALUE_EIGHTS: u32 = (VALUE_DIM + 7u) / 8u;
// Tokens of a stream, each weighed by one of its lanes, or by several that share it; and fours of them that are loaded together.
const SPAN: u32 = min(LANES, MOST_TOKENS);
const CHUNKS: u32 = SPAN / 4u;
// Tokens that a workgroup looks at together.
const TILE: u32 = SPAN * STREAMS;
// A lane's part of a score whose value is not finite: no sum with it is in range, unless other lanes' parts exceed 1.3e38, which no
// rows of f16 do.
const ODD: f32 = -3.0e38;

var<workgroup> gathered: array<vec4<f32>, WORKGROUP>;
var<workgroup> peaks: array<vec4<f32>, STREAMS>;
// What the tokens of a tile weigh.
var<workgroup> shares: array<vec4<f32>, TILE>;

// A lane's channels of four query rows (columns), and whether all of them are finite.
struct QueryPart {
    low: mat4x4<f32>,
    high: mat4x4<f32>,
    finite: vec4<bool>,
}

fn query_part(four: Fours, eight: u32) -> QueryPart {
    // Lanes behind the last channel have zeros.
    let a = query_eight(four.rows.x, 8u * eight);
    let b = query_eight(four.rows.y, 8u * eight);
    let c = query_eight(four.rows.z, 8u * eight);
    let d = query_eight(four.rows.w, 8u * eight);
    return QueryPart(mat4x4<f32>(a.low, b.low, c.low, d.low), mat4x4<f32>(a.high, b.high, c.high, d.high),
                     vec4<bool>(a.finite, b.finite, c.finite, d.finite));
}

// What a lane's channels of a key add to the scores of four query rows.
fn part_scores(query: QueryPart, key: Eight) -> vec4<f32> {
    return vec4<f32>(dot(query.low[0], key.low) + dot(query.high[0], key.high),
                     dot(query.low[1], key.low) + dot(query.high[1], key.high),
                     dot(query.low[2], key.low) + dot(query.high[2], key.high),
                     dot(query.low[3], key.low) + dot(query.high[3], key.high));
}

// What a stream has found so far: of each row its largest logit and, of a lane, its part of the sum of exponentials and the
// weighted values of its channels (columns), relative to that logit.
struct Found {
    largest: vec4<f32>,
    sum: vec4<f32>,
    low: mat4x4<f32>,
    high: mat4x4<f32>,
}

// A lane's channels of the values of four tokens.
struct FourHeld {
    a: Held,
    b: Held,
    c: Held,
    d: Held,
}

// Four tokens of a stream: CHUNKS from one to the next, so that the lanes that weigh a stream's tokens stand in their order.
fn four_tokens(token: u32) -> vec4<u32> {
    return min(token + CHUNKS * vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.attention.tokens - 1u));
}

fn four_held(kv_head: u32, token: u32, lane: u32) -> FourHeld {
    let at = four_tokens(token);
    let eight = min(lane % LANES, VALUE_EIGHTS - 1u);
    return FourHeld(value_held(kv_head, at.x, eight), value_held(kv_head, at.y, eight), value_held(kv_head, at.z, eight),
                    value_held(kv_head, at.w, eight));
}

// A lane's part of the scores of one token.
fn part_of(query: QueryPart, key: Eight, value: Held) -> vec4<f32> {
    return select(vec4<f32>(ODD), part_scores(query, key), vec4<bool>(both(key.finite, value.finite)));
}

// Of two sums the one whose token the lane weighs, with what the lane that differs in the bit `offset`, and weighs the other, has.
fn halved(first: vec4<f32>, second: vec4<f32>, lane: u32, offset: u32) -> vec4<f32> {
    let takes_second = (lane & offset) != 0u;
    return select(first, second, takes_second) + row_exchange(select(second, first, takes_second), lane, offset);
}

// Of the scores of four tokens what the lanes that differ in their two highest bits have found of the one that the lane weighs.
fn four_scores(query: QueryPart, values: FourHeld, kv_head: u32, token: u32, lane: u32) -> vec4<f32> {
    let at = four_tokens(token);
    let eight = min(lane % LANES, KEY_EIGHTS - 1u);
    let a = key_eight(kv_head, at.x, eight);
    let b = key_eight(kv_head, at.y, eight);
    let c = key_eight(kv_head, at.z, eight);
    let d = key_eight(kv_head, at.w, eight);
    let first = halved(part_of(query, a, values.a), part_of(query, c, values.c), lane, LANES / 2u);
    let second = halved(part_of(query, b, values.b), part_of(query, d, values.d), lane, LANES / 2u);
    return halved(first, second, lane, LANES / 4u);
}

// Numbers of a lane's channels added to sums, times the weight of each row (columns).
fn add_weighed(sums: mat4x4<f32>, numbers: vec4<f32>, weights: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(fma(numbers, vec4<f32>(weights.x), sums[0]), fma(numbers, vec4<f32>(weights.y), sums[1]),
                       fma(numbers, vec4<f32>(weights.z), sums[2]), fma(numbers, vec4<f32>(weights.w), sums[3]));
}

fn add_value(found: Found, held: Held, share: u32) -> Found {
    let value = value_of(held);
    let weights = shares[share];
    return Found(found.largest, found.sum, add_weighed(found.low, value.low, weights),
                 add_weighed(found.high, value.high, weights));
}

fn add_four(found: Found, values: FourHeld, share: u32) -> Found {
    var sums = add_value(found, values.a, share);
    sums = add_value(sums, values.b, share + CHUNKS);
    sums = add_value(sums, values.c, share + 2u * CHUNKS);
    return add_value(sums, values.d, share + 3u * CHUNKS);
}

// What was found, with the weight of a lane's own token of score `own`; leaves that weight for the stream.
fn weigh(found: Found, own: vec4<f32>, seen: Seen, kv_head: u32, token: u32, lane: u32) -> Found {
    let rank = (lane % LANES) / (LANES / SPAN);
    let at = min(token + rank, params.attention.tokens - 1u);
    let logit = logits_of(own * key_scale(kv_head, at), token + rank, true, seen);
    // Asked before the factor, which may be 0; so a score that leaves f32's range only without its factor is masked, too.
    let x = select(vec4<f32>(LOWEST), logit, are_in_range(own));
    var peak = x;
    for (var offset = LANES / SPAN; offset < LANES; offset <<= 1u) {
        peak = max(peak, row_exchange(peak, lane, offset));
    }
    let largest = max(found.largest, peak);
    let p = exponentials(x, largest);
    workgroupBarrier();
    if (lane % (LANES / SPAN) == 0u) {
        shares[(lane / LANES) * SPAN + rank] = p * value_scale(kv_head, at);
    }
    workgroupBarrier();
    let keep = exp(max(found.largest - largest, vec4<f32>(-200.0)));
    return Found(largest, found.sum * keep + p, columns_times(found.low, keep), columns_times(found.high, keep));
}

// A stream's next tokens.
fn add_tokens(found: Found, query: QueryPart, seen: Seen, kv_head: u32, token: u32, lane: u32) -> Found {
    let values = four_held(kv_head, token, lane);
    var more = FourHeld();
    var own = four_scores(query, values, kv_head, token, lane);
    if (CHUNKS == 2u) {
        more = four_held(kv_head, token + 1u, lane);
        own = halved(own, four_scores(query, more, kv_head, token + 1u, lane), lane, LANES / 8u);
    }
    for (var offset = 1u; offset < LANES / SPAN; offset <<= 1u) {
        own += row_exchange(own, lane, offset);
    }
    let share = (lane / LANES) * SPAN;
    var next = add_four(weigh(found, own, seen, kv_head, token, lane), values, share);
    if (CHUNKS == 2u) {
        next = add_four(next, more, share + 1u);
    }
    return next;
}

// The sum of exponentials of a stream, of what its lanes have each.
fn stream_sum(sum: vec4<f32>, lane: u32) -> vec4<f32> {
    var all = sum;
    for (var offset = LANES / SPAN; offset < LANES; offset <<= 1u) {
        all += row_exchange(all, lane, offset);
    }
    return all;
}

// Where a row's part stands in `partials`.
fn partial_base(row: u32, split: u32) -> u32 {
    return (row * params.attention.all_splits + params.attention.first_split + split) * (1u + VALUE_FOURS);
}

// Largest logit and sum of what another store of the same query has left there; zeros where none may have. In the place of a row that
// does not exist another workgroup may leave its own.
fn partial_before(row: u32, split: u32, exists: bool) -> vec2<f32> {
    var before = vec2<f32>();
    if (exists && params.attention.adds == 1u) {
        before = partials[min(partial_base(row, split), arrayLength(&partials) - 1u)].xy;
    }
    return before;
}

// The sum over streams of four channels, in the lanes of the first.
fn over_streams(numbers: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier();
    gathered[lane] = numbers;
    workgroupBarrier();
    var total = vec4<f32>();
    if (lane < LANES) {
        for (var i = 0u; i < STREAMS; i++) {
            total += gathered[lane + i * LANES];
        }
    }
    return total;
}

// What a row has found: its number, whether there is one, its largest logit and sum of exponentials, and those left before.
struct RowFound {
    row: u32,
    exists: bool,
    largest: f32,
    sum: f32,
    before: vec2<f32>,
}

// Leaves what a row has found, added to what was there.
fn store_row(found: RowFound, split: u32, low: vec4<f32>, high: vec4<f32>, lane: u32) {
    let base = partial_base(found.row, split);
    let is_there = found.before.y > 0.0;
    let joined = select(found.largest, max(found.largest, found.before.x), is_there);
    let weight = exp(clamp(found.largest - joined, -200.0, 0.0));
    let weight_before = select(0.0, exp(clamp(found.before.x - joined, -200.0, 0.0)), is_there);
    if (!found.exists || base + VALUE_FOURS >= arrayLength(&partials)) {
        return;
    }
    for (var half = 0u; half < 2u; half++) {
        let four = 2u * lane + half;
        if (lane < LANES && four < VALUE_FOURS) {
            let own = weight * select(low, high, half == 1u);
            let at = base + 1u + four;
            partials[at] = select(own, own + weight_before * partials[at], vec4<bool>(is_there));
        }
    }
    if (lane == 0u) {
        partials[base] = vec4<f32>(joined, weight * found.sum + weight_before * found.before.y, 0.0, 0.0);
    }
}

// All streams' largest logits.
fn largest_of_streams(largest: vec4<f32>, lane: u32) -> vec4<f32> {
    if (lane % LANES == 0u) {
        peaks[lane / LANES] = largest;
    }
    workgroupBarrier();
    var all = largest;
    for (var i = 0u; i < STREAMS; i++) {
        all = max(all, peaks[i]);
    }
    return all;
}

fn flash_attend(index: u32, lane: u32) {
    let split = index % params.attention.splits;
    let four = fours_of(index / params.attention.splits);
    let query = query_part(four, lane % LANES);
    let finite = row_sum(select(vec4<f32>(1.0), vec4<f32>(), query.finite), lane) == vec4<f32>();
    let seen = seen_by(four, finite);
    // Without what lanes have found of the queries, so that a browser knows that all run the same loop.
    let any = seen_by_any(seen_by(four, vec4<bool>(true)));
    let start = split * params.attention.split;
    let last = min(any.y, start + params.attention.split);
    var found = Found(vec4<f32>(LOWEST), vec4<f32>(), mat4x4<f32>(), mat4x4<f32>());
    // Whole tiles before the window see nothing and are left out.
    let skipped = (max(any.x, start) - start) / TILE * TILE;
    for (var tile = start + skipped; tile < last; tile += TILE) {
        found = add_tokens(found, query, seen, four.kv_head, tile + SPAN * (lane / LANES), lane);
    }
    let largest = largest_of_streams(found.largest, lane);
    let keep = exp(max(found.largest - largest, vec4<f32>(-200.0)));
    let low = columns_times(found.low, keep);
    let high = columns_times(found.high, keep);
    let sum = over_streams(stream_sum(found.sum * keep, lane), lane);
    let first = mat4x4<f32>(over_streams(low[0], lane), over_streams(low[1], lane), over_streams(low[2], lane),
                            over_streams(low[3], lane));
    let second = mat4x4<f32>(over_streams(high[0], lane), over_streams(high[1], lane), over_streams(high[2], lane),
                             over_streams(high[3], lane));
    let rows = four.rows;
    let exist = four.exist & vec4<bool>(index < params.units * params.attention.splits);
    let a = partial_before(rows.x, split, exist.x);
    let b = partial_before(rows.y, split, exist.y);
    let c = partial_before(rows.z, split, exist.z);
    let d = partial_before(rows.w, split, exist.w);
    storageBarrier();
    workgroupBarrier();
    store_row(RowFound(rows.x, exist.x, largest.x, sum.x, a), split, first[0], second[0], lane);
    store_row(RowFound(rows.y, exist.y, largest.y, sum.y, b), split, first[1], second[1], lane);
    store_row(RowFound(rows.z, exist.z, largest.z, sum.z, c), split, first[2], second[2], lane);
    store_row(RowFound(rows.w, exist.w, largest.w, sum.w, d), split, first[3], second[3], lane);
}
