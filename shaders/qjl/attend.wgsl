// Attention over sketched keys and 8-bit values, one query and one split of the tokens a workgroup: online softmax in f32 over
// tiles of WORKGROUP tokens. What each split finds is combined by combine.wgsl. Twin: qjl::cpu::attend.

struct Params {
    tokens: u32,
    queries: u32,
    query_heads: u32,
    group: u32,
    rows: u32,
    splits: u32,
    // Tokens of a split, a multiple of WORKGROUP.
    split: u32,
    causal: u32,
    // 0xffffffff where there is none.
    window: u32,
    // 0 where there is none.
    soft_cap: f32,
    factor: f32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<f32>;
@group(0) @binding(2) var<storage, read> words: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> value_words: array<u32>;
@group(0) @binding(5) var<storage, read> value_scales: array<u32>;
@group(0) @binding(6) var<storage, read> lengths: array<u32>;
@group(0) @binding(7) var<storage, read_write> partials: array<f32>;

// VALUE_LANES invocations cover a value row, four channels each; VALUE_GROUPS of them take turns at the tokens.
const VALUE_GROUPS: u32 = WORKGROUP / VALUE_LANES;
const LOWEST: f32 = -3.402823e38;

var<workgroup> weights: array<f32, WORKGROUP>;
var<workgroup> gathered: array<vec4<f32>, WORKGROUP>;

// cap * tanh(x / cap) by an exponential that cannot overflow.
fn soft_capped(x: f32) -> f32 {
    let e = exp(-2.0 * abs(x / params.soft_cap));
    return sign(x) * params.soft_cap * ((1.0 - e) / (1.0 + e));
}

fn logit(score: f32) -> f32 {
    let x = params.scale * score;
    if (!is_finite(x)) {
        return LOWEST;
    }
    if (params.soft_cap > 0.0) {
        return soft_capped(x);
    }
    return x;
}

// First and one past the last token that a query sees.
fn visible(length: u32, query_index: u32) -> vec2<u32> {
    if (length + query_index < params.queries) {
        return vec2<u32>();
    }
    let position = length + query_index - params.queries;
    let hides_later = params.causal == 1u || params.window != 0xffffffffu;
    let end = select(length, min(length, position + 1u), hides_later);
    let start = select(0u, position + 1u - min(position + 1u, params.window), params.window != 0xffffffffu);
    return vec2<u32>(min(start, end), end);
}

// Four value codes of a word as numbers.
fn four_codes(word: u32) -> vec4<f32> {
    let signed = bitcast<i32>(word);
    return vec4<f32>(f32(extractBits(signed, 0u, 8u)), f32(extractBits(signed, 8u, 8u)),
                     f32(extractBits(signed, 16u, 8u)), f32(extractBits(signed, 24u, 8u)));
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let index = linear_workgroup(place);
    let query_row = min(index / params.splits, params.rows - 1u);
    let split = index % params.splits;
    let head = query_row / params.queries;
    let batch = head / params.query_heads;
    let kv_head = batch * (params.query_heads / params.group) + (head % params.query_heads) / params.group;
    let seen = visible(lengths[batch], query_row % params.queries);
    let first = split * params.split;
    let last = min(seen.y, first + params.split);
    let query_is_finite = sketches[query_row * (SKETCH_DIM + 1u) + SKETCH_DIM] > 0.0;
    let value_lane = lane % VALUE_LANES;

    if (CHUNKS == 1u) {
        load_chunk(query_row, 0u, lane);
    }
    var running_max = LOWEST;
    var sum = 0.0;
    var acc = vec4<f32>();
    // Whole tiles before the window see nothing and are left out.
    let skipped = (max(seen.x, first) - first) / WORKGROUP * WORKGROUP;
    for (var tile = first + skipped; tile < last; tile += WORKGROUP) {
        let token = tile + lane;
        let key_row = kv_head * params.tokens + min(token, params.tokens - 1u);
        workgroupBarrier();
        var dot_product = 0.0;
        for (var chunk = 0u; chunk < CHUNKS; chunk++) {
            if (CHUNKS > 1u) {
                workgroupBarrier();
                load_chunk(query_row, chunk, lane);
                workgroupBarrier();
            }
            dot_product += chunk_dot(key_row, chunk);
        }
        let key_bits = half_at(scales[key_row / 2u], key_row);
        let value_bits = half_at(value_scales[key_row / 2u], key_row);
        let usable = query_is_finite && half_is_finite(key_bits) && half_is_finite(value_bits);
        var x = LOWEST;
        if (usable && token >= seen.x && token < last) {
            x = logit(params.factor * unpack2x16float(key_bits).x * dot_product);
        }
        let new_max = max(running_max, row_max(vec4<f32>(x), lane).x);
        // The floor keeps the difference of the two extremes from leaving f32.
        let rescale = exp(max(running_max - new_max, -200.0));
        running_max = new_max;
        let p = select(0.0, exp(max(x - new_max, -200.0)), x > LOWEST);
        sum = sum * rescale + p;
        weights[lane] = select(0.0, p * unpack2x16float(value_bits).x, x > LOWEST);
        workgroupBarrier();
        acc *= rescale;
        for (var i = lane / VALUE_LANES; i < WORKGROUP; i += VALUE_GROUPS) {
            if (tile + i < last && value_lane < VALUE_WORDS) {
                let value_row = kv_head * params.tokens + tile + i;
                acc += weights[i] * four_codes(value_words[value_row * VALUE_WORDS + value_lane]);
            }
        }
    }
    sum = row_sum(vec4<f32>(sum), lane).x;
    gathered[lane] = acc;
    workgroupBarrier();
    let base = index * (2u + 4u * VALUE_WORDS);
    let writes = index / params.splits < params.rows && base + 1u + 4u * VALUE_WORDS < arrayLength(&partials);
    if (writes && lane < VALUE_WORDS) {
        var total = vec4<f32>();
        for (var i = 0u; i < VALUE_GROUPS; i++) {
            total += gathered[i * VALUE_LANES + lane];
        }
        for (var i = 0u; i < 4u; i++) {
            partials[base + 2u + 4u * lane + i] = total[i];
        }
    }
    if (writes && lane == 0u) {
        partials[base] = running_max;
        partials[base + 1u] = sum;
    }
}
