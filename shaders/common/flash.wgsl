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

fn add_tokens(found: Found, query: QueryPart, seen: Seen, kv_head: u32, token: u32, lane: u32) -> Found {
    let last = params.attention.tokens - 1u;
    let at = min(token + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last));
    let key_at = min(lane % LANES, KEY_EIGHTS - 1u);
    let value_at = min(lane % LANES, VALUE_EIGHTS - 1u);
    let k0 = key_eight(kv_head, at.x, key_at);
    let k1 = key_eight(kv_head, at.y, key_at);
    let k2 = key_eight(kv_head, at.z, key_at);
    let k3 = key_eight(kv_head, at.w, key_at);
    let v0 = value_eight(kv_head, at.x, value_at);
    let v1 = value_eight(kv_head, at.y, value_at);
    let v2 = value_eight(kv_head, at.z, value_at);
    let v3 = value_eight(kv_head, at.w, value_at);
    let finite = vec4<bool>(k0.finite & v0.finite, k1.finite & v1.finite, k2.finite & v2.finite, k3.finite & v3.finite);
    // Of each token, how many lanes hold a number that is not finite.
    let odd = row_sum(select(vec4<f32>(1.0), vec4<f32>(), finite), lane);
    let s0 = row_sum(part_scores(query, k0), lane) * key_scale(kv_head, at.x);
    let s1 = row_sum(part_scores(query, k1), lane) * key_scale(kv_head, at.y);
    let s2 = row_sum(part_scores(query, k2), lane) * key_scale(kv_head, at.z);
    let s3 = row_sum(part_scores(query, k3), lane) * key_scale(kv_head, at.w);
    let a = logits_of(s0, token, odd.x == 0.0, seen);
    let b = logits_of(s1, token + 1u, odd.y == 0.0, seen);
    let c = logits_of(s2, token + 2u, odd.z == 0.0, seen);
    let d = logits_of(s3, token + 3u, odd.w == 0.0, seen);
    let largest = max(found.largest, max(max(a, b), max(c, d)));
    let keep = exp(max(found.largest - largest, vec4<f32>(-200.0)));
    let pa = exponentials(a, largest);
    let pb = exponentials(b, largest);
    let pc = exponentials(c, largest);
    let pd = exponentials(d, largest);
    let wa = pa * value_scale(kv_head, at.x);
    let wb = pb * value_scale(kv_head, at.y);
    let wc = pc * value_scale(kv_head, at.z);
    let wd = pd * value_scale(kv_head, at.w);
    return Found(largest, found.sum * keep + ((pa + pb) + (pc + pd)),
                 columns_times(found.low, keep)
                     + ((weighed(v0.low, wa) + weighed(v1.low, wb)) + (weighed(v2.low, wc) + weighed(v3.low, wd))),
                 columns_times(found.high, keep)
                     + ((weighed(v0.high, wa) + weighed(v1.high, wb)) + (weighed(v2.high, wc) + weighed(v3.high, wd))));
}

// Where a row's part stands in `partials`.
fn partial_base(row: u32, split: u32) -> u32 {
    return (row * params.attention.all_splits + params.attention.first_split + split) * (1u + VALUE_FOURS);
}

// Largest logit and sum of what another store of the same query has left there; zeros where none may have.
fn partial_before(row: u32, split: u32) -> vec2<f32> {
    let before = partials[min(partial_base(row, split), arrayLength(&partials) - 1u)].xy;
    return select(vec2<f32>(), before, params.attention.adds == 1u);
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
    let any = seen_by_any(seen);
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
    let sum = over_streams(found.sum * keep, lane);
    let a = mat2x4<f32>(over_streams(low[0], lane), over_streams(high[0], lane));
    let b = mat2x4<f32>(over_streams(low[1], lane), over_streams(high[1], lane));
    let c = mat2x4<f32>(over_streams(low[2], lane), over_streams(high[2], lane));
    let d = mat2x4<f32>(over_streams(low[3], lane), over_streams(high[3], lane));
    let rows = four.rows;
    let before = mat4x2<f32>(partial_before(rows.x, split), partial_before(rows.y, split), partial_before(rows.z, split),
                             partial_before(rows.w, split));
    storageBarrier();
    workgroupBarrier();
    let exist = four.exist & vec4<bool>(index < params.units * params.attention.splits);
    store_row(RowFound(rows.x, exist.x, largest.x, sum.x, before[0]), split, a[0], a[1], lane);
    store_row(RowFound(rows.y, exist.y, largest.y, sum.y, before[1]), split, b[0], b[1], lane);
    store_row(RowFound(rows.z, exist.z, largest.z, sum.z, before[2]), split, c[0], c[1], lane);
    store_row(RowFound(rows.w, exist.w, largest.w, sum.w, before[3]), split, d[0], d[1], lane);
}
