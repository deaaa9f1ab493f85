// Attention over rows of numbers, four query rows of one KV head and one split of the tokens a workgroup (flash-decoding). LANES
// invocations share a row of keys and the row of values behind it, eight channels each; every such stream takes four tokens that
// follow each other at a time, with a softmax of its own, and the streams of a workgroup meet at its end. The kernel declares
// `attention: Attention` in its params, and
//   key_eight(kv_head, token, eight)      channels 8 eight .. of a key row, zeros where they are not finite
//   value_eight(kv_head, token, eight)    of a value row
//   key_scale(kv_head, token)             factor on a key row
//   value_scale(kv_head, token)           on a value row
// and the binding `partials`, vec4s, where each split leaves what it found for combine.wgsl: its largest logit and its sum of
// exponentials in one, then its weighted sum of values.

const STREAMS: u32 = WORKGROUP / LANES;
const KEY_EIGHTS: u32 = (HEAD_DIM + 7u) / 8u;
const VALUE_EIGHTS: u32 = (VALUE_DIM + 7u) / 8u;
// Tokens that a workgroup looks at together.
const TILE: u32 = 4u * STREAMS;

var<workgroup> gathered: array<vec4<f32>, WORKGROUP>;
var<workgroup> peaks: array<vec4<f32>, STREAMS>;

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

// Numbers of a lane's channels, times the weight of each row (columns).
fn weighed(numbers: vec4<f32>, weights: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(numbers * weights.x, numbers * weights.y, numbers * weights.z, numbers * weights.w);
}

// What a stream has found so far: of each row its largest logit, its sum of exponentials and, of a lane's channels, its weighted
// values (columns), relative to that logit.
struct Found {
    largest: vec4<f32>,
    sum: vec4<f32>,
    low: mat4x4<f32>,
    high: mat4x4<f32>,
}

// What a lane's channels add to the scores of four tokens, of four query rows each.
struct TokenScores {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

// What four tokens weigh, relative to the largest logit: of each query row the values' weights, and their sum of exponentials, of
// all four or, where lanes share the tokens, of a lane's own.
struct TokenWeights {
    largest: vec4<f32>,
    sum: vec4<f32>,
    weights: mat4x4<f32>,
}

// Whether there are lanes enough for each to weigh one of the four tokens alone: the two highest bits of its number within the row
// say which.
const SHARES: bool = LANES >= 4u;
const HALF: u32 = LANES / 2u;
const QUARTER: u32 = LANES / 4u;

// Every lane weighs one token: sums of scores are halved from step to step, and weights doubled again.
fn weigh_shared(found: Found, scores: TokenScores, odd: u32, seen: Seen, kv_head: u32, token: u32, lane: u32) -> TokenWeights {
    let high = (lane & HALF) != 0u;
    let middle = (lane & QUARTER) != 0u;
    let first = select(scores.a, scores.c, high) + row_exchange(select(scores.c, scores.a, high), lane, HALF);
    let second = select(scores.b, scores.d, high) + row_exchange(select(scores.d, scores.b, high), lane, HALF);
    var own = select(first, second, middle) + row_exchange(select(second, first, middle), lane, QUARTER);
    for (var offset = 1u; offset < QUARTER; offset <<= 1u) {
        own += row_exchange(own, lane, offset);
    }
    let index = select(0u, 2u, high) + select(0u, 1u, middle);
    let at = min(token + index, params.attention.tokens - 1u);
    let x = logits_of(own * key_scale(kv_head, at), token + index, ((odd >> index) & 1u) == 0u, seen);
    var peak = max(x, row_exchange(x, lane, QUARTER));
    peak = max(peak, row_exchange(peak, lane, HALF));
    let largest = max(found.largest, peak);
    let p = exponentials(x, largest);
    let weight = p * value_scale(kv_head, at);
    let other = row_exchange(weight, lane, QUARTER);
    let even = select(weight, other, middle);
    let uneven = select(other, weight, middle);
    let far_even = row_exchange(even, lane, HALF);
    let far_uneven = row_exchange(uneven, lane, HALF);
    return TokenWeights(largest, p,
                        mat4x4<f32>(select(even, far_even, high), select(uneven, far_uneven, high),
                                    select(far_even, even, high), select(far_uneven, uneven, high)));
}

// Every lane weighs all four tokens.
fn weigh_alone(found: Found, scores: TokenScores, odd: u32, seen: Seen, kv_head: u32, token: u32, lane: u32) -> TokenWeights {
    let at = min(token + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.attention.tokens - 1u));
    let a = logits_of(row_sum(scores.a, lane) * key_scale(kv_head, at.x), token, (odd & 1u) == 0u, seen);
    let b = logits_of(row_sum(scores.b, lane) * key_scale(kv_head, at.y), token + 1u, (odd & 2u) == 0u, seen);
    let c = logits_of(row_sum(scores.c, lane) * key_scale(kv_head, at.z), token + 2u, (odd & 4u) == 0u, seen);
    let d = logits_of(row_sum(scores.d, lane) * key_scale(kv_head, at.w), token + 3u, (odd & 8u) == 0u, seen);
    let largest = max(found.largest, max(max(a, b), max(c, d)));
    let pa = exponentials(a, largest);
    let pb = exponentials(b, largest);
    let pc = exponentials(c, largest);
    let pd = exponentials(d, largest);
    return TokenWeights(largest, (pa + pb) + (pc + pd),
                        mat4x4<f32>(pa * value_scale(kv_head, at.x), pb * value_scale(kv_head, at.y),
                                    pc * value_scale(kv_head, at.z), pd * value_scale(kv_head, at.w)));
}

fn weigh(found: Found, scores: TokenScores, odd: u32, seen: Seen, kv_head: u32, token: u32, lane: u32) -> TokenWeights {
    var weights = TokenWeights();
    if (SHARES) {
        weights = weigh_shared(found, scores, odd, seen, kv_head, token, lane);
    } else {
        weights = weigh_alone(found, scores, odd, seen, kv_head, token, lane);
    }
    return weights;
}

// The sum of exponentials of a stream, of what its lanes have each.
fn stream_sum(sum: vec4<f32>, lane: u32) -> vec4<f32> {
    var all = sum;
    if (SHARES) {
        all += row_exchange(all, lane, QUARTER);
        all += row_exchange(all, lane, HALF);
    }
    return all;
}

// A stream's tokens: of each row its largest logit, a lane's part of the sum of exponentials, and of a lane's channels the weighted
// values.
fn add_tokens(found: Found, query: QueryPart, seen: Seen, kv_head: u32, token: u32, lane: u32) -> Found {
    let at = min(token + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.attention.tokens - 1u));
    let key_at = min(lane % LANES, KEY_EIGHTS - 1u);
    let value_at = min(lane % LANES, VALUE_EIGHTS - 1u);
    let ka = key_eight(kv_head, at.x, key_at);
    let kb = key_eight(kv_head, at.y, key_at);
    let kc = key_eight(kv_head, at.z, key_at);
    let kd = key_eight(kv_head, at.w, key_at);
    let va = value_eight(kv_head, at.x, value_at);
    let vb = value_eight(kv_head, at.y, value_at);
    let vc = value_eight(kv_head, at.z, value_at);
    let vd = value_eight(kv_head, at.w, value_at);
    let finite = vec4<bool>(ka.finite, kb.finite, kc.finite, kd.finite) & vec4<bool>(va.finite, vb.finite, vc.finite, vd.finite);
    let flags = select(vec4<u32>(1u, 2u, 4u, 8u), vec4<u32>(), finite);
    // Of each token, whether any lane holds a number that is not finite.
    let odd = row_or(flags.x | flags.y | flags.z | flags.w, lane);
    let scores = TokenScores(part_scores(query, ka), part_scores(query, kb), part_scores(query, kc), part_scores(query, kd));
    let found_here = weigh(found, scores, odd, seen, kv_head, token, lane);
    let keep = exp(max(found.largest - found_here.largest, vec4<f32>(-200.0)));
    let w = found_here.weights;
    return Found(found_here.largest, found.sum * keep + found_here.sum,
                 columns_times(found.low, keep)
                     + ((weighed(va.low, w[0]) + weighed(vb.low, w[1])) + (weighed(vc.low, w[2]) + weighed(vd.low, w[3]))),
                 columns_times(found.high, keep)
                     + ((weighed(va.high, w[0]) + weighed(vb.high, w[1])) + (weighed(vc.high, w[2]) + weighed(vd.high, w[3]))));
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
        found = add_tokens(found, query, seen, four.kv_head, tile + 4u * (lane / LANES), lane);
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
