// Codes of keys times rotated queries in f32: four tokens a lane (columns), four query rows a workgroup (components).

var<workgroup> query: array<vec4<f32>, select(QUERY_CHANNELS, 1u, QUERY_STAYS)>;

fn load_query(first: u32, lane: u32) {
    for (var i = lane; i < QUERY_CHANNELS && !QUERY_STAYS; i += WORKGROUP) {
        query[i] = sketch(first + i);
    }
}

fn query_channel(first: u32, channel: u32) -> vec4<f32> {
    if (QUERY_STAYS) {
        return sketch(first + channel);
    }
    return query[min(channel, QUERY_CHANNELS - 1u)];
}

fn add_codes(sums: mat4x4<f32>, codes: vec4<u32>, first: u32, channel: u32) -> mat4x4<f32> {
    var next = sums;
    for (var j = 0u; j < 4u; j++) {
        let four = vec4<f32>((codes >> vec4<u32>(8u * j)) & vec4<u32>(0xffu));
        let numbers = query_channel(first, channel + j);
        next += mat4x4<f32>(numbers * four.x, numbers * four.y, numbers * four.z, numbers * four.w);
    }
    return next;
}

// 2 <q', c> - (2^b - 1) sum q' of a segment, whose words begin at `at` and whose queries at `channel`.
fn segment_dots(first: u32, segment: u32, at: u32, channel: u32, groups: u32, planes: u32) -> mat4x4<f32> {
    var sums = mat4x4<f32>();
    for (var group = 0u; group < groups; group++) {
        let words = key_words(at + group * planes * TILE_FOURS, planes);
        let start = channel + 32u * group;
        for (var k = 0u; k < 8u; k++) {
            sums = add_codes(sums, quad(words, planes, k), first, start + 4u * k);
        }
    }
    let minus = sketch(first + MINUS_AT + segment);
    return sums - mat4x4<f32>(minus, minus, minus, minus);
}
