// Coded values times weights in 8 bits: four channels a lane, four query rows a workgroup. Precision::Fast.

// Of four tokens that follow each other: the weights of each row (components) in the bytes of a word.
var<workgroup> weights: array<vec4<u32>, WORKGROUP>;

// Leaves the weights of a lane's four tokens (columns), from 0 to 1, in steps of 1/255 for everyone. Returns MIDDLE times their
// sum as rounded, which is what codes' mean has too much.
fn share_weights(four: mat4x4<f32>, lane: u32) -> vec4<f32> {
    let a = rounded(four[0]);
    let b = rounded(four[1]);
    let c = rounded(four[2]);
    let d = rounded(four[3]);
    weights[lane] = a | (b << vec4<u32>(8u)) | (c << vec4<u32>(16u)) | (d << vec4<u32>(24u));
    return (MIDDLE / 255.0) * vec4<f32>(a + b + c + d);
}

fn rounded(weight: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(min(255.0 * weight + 0.5, vec4<f32>(255.0)));
}

// Sums of products of four channels, one row a component.
struct Products {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

// Alone in its function, as in dot_fast.wgsl.
fn weigh_row(codes: u32, row: u32) -> u32 {
    return dot4U8Packed(codes, row);
}

fn products(codes: u32, rows: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(weigh_row(codes, rows.x), weigh_row(codes, rows.y), weigh_row(codes, rows.z), weigh_row(codes, rows.w));
}

fn add_values(sums: Products, codes: vec4<u32>, four: u32) -> Products {
    let rows = weights[four];
    return Products(sums.a + products(codes.x, rows), sums.b + products(codes.y, rows),
                    sums.c + products(codes.z, rows), sums.d + products(codes.w, rows));
}

// Sums over the tile's tokens before `last` of weights times codes.
fn weigh_tile(kv_head: u32, tile: u32, last: u32, lane: u32) -> mat4x4<f32> {
    var sums = Products();
    let groups = (min(TILE_TOKENS, last - tile) + 31u) / 32u;
    let first = lane / VALUE_LANES;
    var next = value_words(kv_head, tile / 32u + min(first, groups - 1u), lane);
    for (var group = first; group < groups; group += VALUE_GROUPS) {
        let words = next;
        next = value_words(kv_head, tile / 32u + min(group + VALUE_GROUPS, groups - 1u), lane);
        let four = 8u * group;
        sums = add_values(sums, quad(words, VALUE_PLANES, 0u), four);
        sums = add_values(sums, quad(words, VALUE_PLANES, 1u), four + 1u);
        sums = add_values(sums, quad(words, VALUE_PLANES, 2u), four + 2u);
        sums = add_values(sums, quad(words, VALUE_PLANES, 3u), four + 3u);
        sums = add_values(sums, quad(words, VALUE_PLANES, 4u), four + 4u);
        sums = add_values(sums, quad(words, VALUE_PLANES, 5u), four + 5u);
        sums = add_values(sums, quad(words, VALUE_PLANES, 6u), four + 6u);
        sums = add_values(sums, quad(words, VALUE_PLANES, 7u), four + 7u);
    }
    let unit = 1.0 / 255.0;
    return unit * transpose(mat4x4<f32>(vec4<f32>(sums.a), vec4<f32>(sums.b), vec4<f32>(sums.c), vec4<f32>(sums.d)));
}
