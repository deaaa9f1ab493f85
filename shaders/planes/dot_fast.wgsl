// Codes of keys times rotated queries in 8 bits: four tokens a lane (columns), four query rows a workgroup (components).
// Precision::Fast.

// Signed bytes of four channels of each row, and per segment their unit and their sum.
var<workgroup> query: array<vec4<u32>, QUERY_CHANNELS / 4u>;
var<private> query_units: array<vec4<f32>, 2>;
var<private> query_sums: array<vec4<f32>, 2>;

// Four dot products of a token's codes with the rows.
fn dots(codes: u32, rows: vec4<u32>) -> vec4<i32> {
    return vec4<i32>(dot4I8Packed(codes, rows.x), dot4I8Packed(codes, rows.y), dot4I8Packed(codes, rows.z),
                     dot4I8Packed(codes, rows.w));
}

// Channels `channel` and up of the queries in units, rounded; sums are of these, so that no error is left on codes' mean.
fn quantize_segment(first: u32, segment: u32, channel: u32, channels: u32, lane: u32) {
    var peak = vec4<f32>();
    for (var i = lane; i < channels; i += WORKGROUP) {
        peak = max(peak, abs(sketches[first + channel + i]));
    }
    let unit = max(row_max(peak, lane), vec4<f32>(1e-30)) / 127.0;
    let inverse = 1.0 / unit;
    var sum = vec4<i32>();
    for (var four = lane; four < channels / 4u; four += WORKGROUP) {
        var packed = vec4<u32>();
        for (var j = 0u; j < 4u; j++) {
            let numbers = sketches[first + channel + 4u * four + j] * inverse;
            let codes = clamp(vec4<i32>(floor(numbers + 0.5)), vec4<i32>(-127), vec4<i32>(127));
            sum += codes;
            packed |= (bitcast<vec4<u32>>(codes) & vec4<u32>(0xffu)) << vec4<u32>(8u * j);
        }
        query[channel / 4u + four] = packed;
    }
    query_units[segment] = unit;
    query_sums[segment] = row_sum(vec4<f32>(sum), lane);
}

fn load_query(first: u32, lane: u32) {
    quantize_segment(first, 0u, 0u, 32u * FIRST_GROUPS, lane);
    if (SECOND_PLANES > 0u) {
        quantize_segment(first, 1u, 32u * FIRST_GROUPS, 32u * SECOND_GROUPS, lane);
    }
}

// Sums of products of four tokens.
struct Sums {
    a: vec4<i32>,
    b: vec4<i32>,
    c: vec4<i32>,
    d: vec4<i32>,
}

fn add_codes(sums: Sums, codes: vec4<u32>, four: u32) -> Sums {
    let rows = query[min(four, QUERY_CHANNELS / 4u - 1u)];
    return Sums(sums.a + dots(codes.x, rows), sums.b + dots(codes.y, rows), sums.c + dots(codes.z, rows),
                sums.d + dots(codes.w, rows));
}

// 2 <q', c> - (2^b - 1) sum q' of a segment, whose words begin at `at` and whose queries at `channel`.
fn segment_dots(first: u32, segment: u32, at: u32, channel: u32, groups: u32, planes: u32) -> mat4x4<f32> {
    var sums = Sums();
    var next = key_words(at, planes);
    for (var group = 0u; group < groups; group++) {
        let words = next;
        next = key_words(at + min(group + 1u, groups - 1u) * planes * TILE_FOURS, planes);
        let start = channel / 4u + 8u * group;
        sums = add_codes(sums, quad(words, planes, 0u), start);
        sums = add_codes(sums, quad(words, planes, 1u), start + 1u);
        sums = add_codes(sums, quad(words, planes, 2u), start + 2u);
        sums = add_codes(sums, quad(words, planes, 3u), start + 3u);
        sums = add_codes(sums, quad(words, planes, 4u), start + 4u);
        sums = add_codes(sums, quad(words, planes, 5u), start + 5u);
        sums = add_codes(sums, quad(words, planes, 6u), start + 6u);
        sums = add_codes(sums, quad(words, planes, 7u), start + 7u);
    }
    let unit = query_units[segment];
    let minus = 0.5 * f32((1u << planes) - 1u) * query_sums[segment];
    return mat4x4<f32>(unit * (vec4<f32>(sums.a) - minus), unit * (vec4<f32>(sums.b) - minus),
                       unit * (vec4<f32>(sums.c) - minus), unit * (vec4<f32>(sums.d) - minus));
}
