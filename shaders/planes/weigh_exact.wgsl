// Coded values times weights in f32: four channels a lane (components), four query rows a workgroup (columns).

// Of each token of a tile: the weight of each row, nu included.
var<workgroup> weights: array<vec4<f32>, TILE_TOKENS>;

// Leaves the weights of a lane's four tokens (columns) for everyone. Codes are centred one by one, so that nothing is left to
// subtract.
fn share_weights(four: mat4x4<f32>, lane: u32) -> vec4<f32> {
    weights[4u * lane] = four[0];
    weights[4u * lane + 1u] = four[1];
    weights[4u * lane + 2u] = four[2];
    weights[4u * lane + 3u] = four[3];
    return vec4<f32>();
}

fn add_values(sums: mat4x4<f32>, codes: vec4<u32>, token: u32) -> mat4x4<f32> {
    var next = sums;
    for (var j = 0u; j < 4u; j++) {
        let levels = vec4<f32>((codes >> vec4<u32>(8u * j)) & vec4<u32>(0xffu)) - MIDDLE;
        let weight = weights[token + j];
        next += mat4x4<f32>(levels * weight.x, levels * weight.y, levels * weight.z, levels * weight.w);
    }
    return next;
}

// Sums over the tile's tokens before `last` of weights times (c - MIDDLE).
fn weigh_tile(kv_head: u32, tile: u32, last: u32, lane: u32) -> mat4x4<f32> {
    var sums = mat4x4<f32>();
    for (var group = lane / VALUE_LANES; 32u * group < min(TILE_TOKENS, last - tile); group += VALUE_GROUPS) {
        let words = value_words(kv_head, tile / 32u + group, lane);
        for (var k = 0u; k < 8u; k++) {
            sums = add_values(sums, quad(words, VALUE_PLANES, k), 32u * group + 4u * k);
        }
    }
    return sums;
}
