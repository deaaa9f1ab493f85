// Attention over coded keys and values, in the values' rotated basis; unrotate.wgsl turns the result back.
// Twin: qjl::planes::cpu::attend.

struct Params {
    attention: Attention,
    // Where the fine rows follow the coarse ones among the angles, and the scalars and means the codes in each store.
    fine_at: u32,
    key_scales_at: u32,
    means_at: u32,
    value_scales_at: u32,
    // Tokens of a block mean.
    block: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<f32>;
@group(0) @binding(2) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;
@group(0) @binding(4) var<storage, read> keys: array<u32>;
@group(0) @binding(5) var<storage, read> values: array<u32>;
@group(0) @binding(6) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> partials: array<f32>;

fn tile_score(query_row: u32, kv_head: u32, tile: u32, token: u32, lane: u32) -> f32 {
    return key_score(query_row, kv_head, token);
}

fn value_nu(row: u32) -> u32 {
    return half_at(values[params.value_scales_at + row / 2u], row);
}

fn is_masked(kv_head: u32, token: u32) -> bool {
    let row = kv_head * params.attention.tokens + token;
    return key_is_masked(row) || !half_is_finite(value_nu(row));
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    return unpack2x16float(value_nu(kv_head * params.attention.tokens + token)).x;
}

// Levels 2 c - (2^b - 1) of four codes.
fn four_values(kv_head: u32, token: u32, four: u32) -> vec4<f32> {
    let row = (kv_head * params.attention.tokens + token) * VALUE_WORDS;
    var levels = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        let bit = min(4u * four + i, VALUE_DIM - 1u) * VALUE_PLANES;
        var code = values[row + bit / 32u] >> (bit % 32u);
        if (bit % 32u + VALUE_PLANES > 32u) {
            code |= values[row + bit / 32u + 1u] << (32u - bit % 32u);
        }
        levels[i] = 2.0 * f32(code & ((1u << VALUE_PLANES) - 1u)) - f32((1u << VALUE_PLANES) - 1u);
    }
    return levels;
}

@compute @workgroup_size(WORKGROUP)
fn attend(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
