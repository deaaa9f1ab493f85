// Attention over coded keys and values, in the values' rotated basis; unrotate.wgsl turns the result back. Four query rows of one
// KV head and one split of the tokens a workgroup, online softmax over tiles of TILE_TOKENS tokens (flash-decoding). How codes meet
// queries and weights is in dot_exact and weigh_exact, or in dot_fast and weigh_fast. Twin: qjl::planes::cpu::attend.

struct Params {
    attention: Attention,
    // Where the fine rows follow the coarse ones among the angles; where those of a tile begin, in vec4s; and the scalars and means
    // the codes in each store.
    fine_at: u32,
    tile_angles_at: u32,
    key_scales_at: u32,
    means_at: u32,
    value_scales_at: u32,
    // Tokens of a block mean, and fours of query rows.
    block: u32,
    units: u32,
    // Pairs of angles that a tile has of its own.
    fast_pairs: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> angles: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;
@group(0) @binding(4) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> partials: array<vec4<f32>>;

// VALUE_LANES invocations cover a row of values, four channels each; VALUE_GROUPS of them take turns at groups of 32 tokens.
const VALUE_GROUPS: u32 = WORKGROUP / VALUE_LANES;
// The code that stands for 0, and what a step between codes counts: levels are odd, but for bytes.
const MIDDLE: f32 = select(0.5 * f32((1u << VALUE_PLANES) - 1u), 128.0, VALUE_PLANES == 8u);
const STEP: f32 = select(2.0, 1.0, VALUE_PLANES == 8u);
// The least that a value's scalar counts as where weights are measured: f16's smallest number.
const LEAST_NU: f32 = 5.9604645e-8;

fn turn_at(index: u32) -> vec2<f32> {
    let two = angles[index / 2u];
    return select(two.xy, two.zw, (index & 1u) == 1u);
}

// The words of a lane's four channels, of one group of 32 tokens.
fn value_words(kv_head: u32, group: u32, lane: u32) -> Words {
    let four = min(lane % VALUE_LANES, VALUE_FOURS - 1u);
    let at = (kv_head * store_tiles() + group) * VALUE_PLANES * VALUE_FOURS + four;
    var words = Words();
    words.a = values[at];
    if (VALUE_PLANES > 1u) {
        words.b = values[at + VALUE_FOURS];
    }
    if (VALUE_PLANES > 2u) {
        words.c = values[at + 2u * VALUE_FOURS];
    }
    if (VALUE_PLANES > 3u) {
        words.d = values[at + 3u * VALUE_FOURS];
    }
    if (VALUE_PLANES > 4u) {
        words.e = values[at + 4u * VALUE_FOURS];
    }
    if (VALUE_PLANES == 8u) {
        words.f = values[at + 5u * VALUE_FOURS];
        words.g = values[at + 6u * VALUE_FOURS];
        words.h = values[at + 7u * VALUE_FOURS];
    }
    return words;
}

fn value_scalars(kv_head: u32, token: u32) -> Scalars {
    let row = kv_head * store_tiles() * 32u + token;
    let four = values[(params.value_scales_at + row / 2u) / 4u];
    let words = select(four.xy, four.zw, (row & 4u) == 4u);
    return Scalars(four_finite_halves(words), vec4<f32>(), four_are_finite(words));
}

// What a workgroup has found so far: of each row its largest logit, and of a lane its part of the sums: of exponentials, of what
// codes' mean has too much, and of weighted values (columns), all relative to that logit.
struct Found {
    largest: vec4<f32>,
    sum: vec4<f32>,
    excess: vec4<f32>,
    values: mat4x4<f32>,
}

fn add_tile(found: Found, rows: Fours, seen: Seen, tile: u32, last: u32, lane: u32) -> Found {
    let token = min(tile + 4u * lane, 32u * store_tiles() - 4u);
    let nu = key_scalars(rows.kv_head, token);
    let value_nu = value_scalars(rows.kv_head, token);
    let scores = four_scores(rows, nu, token, lane);
    let finite = nu.finite & value_nu.finite & vec4<bool>(tile + 4u * lane == token);
    let a = logits_of(scores[0], token, finite.x, seen);
    let b = logits_of(scores[1], token + 1u, finite.y, seen);
    let c = logits_of(scores[2], token + 2u, finite.z, seen);
    let d = logits_of(scores[3], token + 3u, finite.w, seen);
    // Relative to the largest weight, the value's scalar included: no weight of the tile is above 1.
    let lift = log(max(value_nu.first, vec4<f32>(LEAST_NU)));
    let peak = row_max(max(max(a + lift.x, b + lift.y), max(c + lift.z, d + lift.w)), lane);
    let e = mat4x4<f32>(exponentials(a, peak), exponentials(b, peak), exponentials(c, peak), exponentials(d, peak));
    let excess = share_weights(columns_times(e, value_nu.first), lane);
    workgroupBarrier();
    let tile_values = weigh_tile(rows.kv_head, tile, last, lane);
    let largest = max(found.largest, peak);
    let keep = exp(max(found.largest - largest, vec4<f32>(-200.0)));
    let take = exp(max(peak - largest, vec4<f32>(-200.0)));
    return Found(largest, found.sum * keep + take * (e[0] + e[1] + e[2] + e[3]), found.excess * keep + take * excess,
                 columns_times(found.values, keep) + columns_times(tile_values, take));
}

// Leaves what a row has found: its largest logit and its sum of exponentials, then its weighted sum of values. `own` has the first
// two, and what codes' mean has too much.
fn store_row(row: u32, split: u32, exists: bool, own: vec3<f32>, sums: vec4<f32>, lane: u32) {
    var total = sums;
    if (VALUE_GROUPS > 1u) {
        workgroupBarrier();
        exchange[lane] = sums;
        workgroupBarrier();
        for (var i = 1u; i < VALUE_GROUPS; i++) {
            total += exchange[(lane + i * VALUE_LANES) % WORKGROUP];
        }
    }
    let base = (row * params.attention.all_splits + params.attention.first_split + split) * (1u + VALUE_FOURS);
    if (exists && base + VALUE_FOURS < arrayLength(&partials)) {
        if (lane < VALUE_FOURS) {
            partials[base + 1u + lane] = STEP * (total - own.z);
        }
        if (lane == 0u) {
            partials[base] = vec4<f32>(own.x, own.y, 0.0, 0.0);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let index = linear_workgroup(place);
    let splits = params.attention.splits;
    let rows = fours_of(index / splits);
    let split = index % splits;
    let seen = seen_by(rows, rows_are_finite(rows));
    let start = split * params.attention.split;
    let any = seen_by_any(seen);
    let last = min(any.y, start + params.attention.split);
    load_query(sketch_at(rows), lane);
    var found = Found(vec4<f32>(LOWEST), vec4<f32>(), vec4<f32>(), mat4x4<f32>());
    // Whole tiles before the window see nothing and are left out.
    let skipped = (max(any.x, start) - start) / TILE_TOKENS * TILE_TOKENS;
    for (var tile = start + skipped; tile < last; tile += TILE_TOKENS) {
        workgroupBarrier();
        load_mean(sketch_at(rows), tile, lane);
        workgroupBarrier();
        found = add_tile(found, rows, seen, tile, last, lane);
    }
    let sum = row_sum(found.sum, lane);
    let excess = row_sum(found.excess, lane);
    let exist = rows.exist & vec4<bool>(index / splits < params.units);
    let largest = found.largest;
    store_row(rows.rows.x, split, exist.x, vec3<f32>(largest.x, sum.x, excess.x), found.values[0], lane);
    store_row(rows.rows.y, split, exist.y, vec3<f32>(largest.y, sum.y, excess.y), found.values[1], lane);
    store_row(rows.rows.z, split, exist.z, vec3<f32>(largest.z, sum.z, excess.z), found.values[2], lane);
    store_row(rows.rows.w, split, exist.w, vec3<f32>(largest.w, sum.w, excess.w), found.values[3], lane);
}
