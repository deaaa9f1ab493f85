// Attention over sketched keys and 8-bit values. Twin: qjl::cpu::attend.

struct Params {
    attention: Attention,
    factor: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<f32>;
@group(0) @binding(2) var<storage, read> words: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> value_words: array<u32>;
@group(0) @binding(5) var<storage, read> value_scales: array<u32>;
@group(0) @binding(6) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> partials: array<vec4<f32>>;

fn load_query(query_row: u32, lane: u32) {
    if (CHUNKS == 1u) {
        load_chunk(query_row, 0u, lane);
    }
}

fn query_is_finite(query_row: u32) -> bool {
    return sketches[query_row * (SKETCH_DIM + 1u) + SKETCH_DIM] > 0.0;
}

fn key_scale(row: u32) -> u32 {
    return half_at(scales[row / 2u], row);
}

fn value_scale_bits(row: u32) -> u32 {
    return half_at(value_scales[row / 2u], row);
}

fn tile_score(query_row: u32, kv_head: u32, tile: u32, token: u32, lane: u32) -> f32 {
    let row = kv_head * params.attention.tokens + token;
    var sum = 0.0;
    for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        if (CHUNKS > 1u) {
            workgroupBarrier();
            load_chunk(query_row, chunk, lane);
            workgroupBarrier();
        }
        sum += chunk_dot(row, chunk);
    }
    return params.factor * unpack2x16float(key_scale(row)).x * sum;
}

fn is_masked(kv_head: u32, token: u32) -> bool {
    let row = kv_head * params.attention.tokens + token;
    return !half_is_finite(key_scale(row)) || !half_is_finite(value_scale_bits(row));
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    return unpack2x16float(value_scale_bits(kv_head * params.attention.tokens + token)).x;
}

fn four_values(kv_head: u32, token: u32, four: u32) -> vec4<f32> {
    let row = kv_head * params.attention.tokens + token;
    let codes = bitcast<i32>(value_words[row * VALUE_FOURS + four]);
    return vec4<f32>(f32(extractBits(codes, 0u, 8u)), f32(extractBits(codes, 8u, 8u)),
                     f32(extractBits(codes, 16u, 8u)), f32(extractBits(codes, 24u, 8u)));
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
