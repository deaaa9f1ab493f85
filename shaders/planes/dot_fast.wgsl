// Codes of keys times rotated queries in 8 bits: four tokens a lane (columns), four query rows a workgroup (components).
// Precision::Fast.

// Signed bytes of four channels of each row; of very long sketches they are read from where `project` left them.
const BYTES_STAY: bool = QUERY_CHANNELS > 1024u;
var<workgroup> query: array<vec4<u32>, select(QUERY_CHANNELS / 4u, 1u, BYTES_STAY)>;

// Alone in its function: naga's text for Metal declares the operands of each product, and twice the one that two products share.
fn dot_row(codes: u32, row: u32) -> i32 {
    return dot4I8Packed(codes, row);
}

// Four dot products of a token's codes with the rows.
fn dots(codes: u32, rows: vec4<u32>) -> vec4<i32> {
    return vec4<i32>(dot_row(codes, rows.x), dot_row(codes, rows.y), dot_row(codes, rows.z), dot_row(codes, rows.w));
}

fn load_query(first: u32, lane: u32) {
    for (var four = lane; four < QUERY_CHANNELS / 4u && !BYTES_STAY; four += WORKGROUP) {
        query[four] = sketches[first + BYTES_AT + four];
    }
}

// Sums of products of four tokens.
struct Sums {
    a: vec4<i32>,
    b: vec4<i32>,
    c: vec4<i32>,
    d: vec4<i32>,
}

fn query_bytes(first: u32, four: u32) -> vec4<u32> {
    if (BYTES_STAY) {
        return sketches[first + BYTES_AT + four];
    }
    return query[min(four, QUERY_CHANNELS / 4u - 1u)];
}

fn add_codes(sums: Sums, codes: vec4<u32>, first: u32, four: u32) -> Sums {
    let rows = query_bytes(first, four);
    return Sums(sums.a + dots(codes.x, rows), sums.b + dots(codes.y, rows), sums.c + dots(codes.z, rows),
                sums.d + dots(codes.w, rows));
}

// 2 <q', c> - (2^b - 1) sum q' of a segment, whose words begin at `at` and whose queries at `channel`.
fn segment_dots(first: u32, segment: u32, at: u32, channel: u32, groups: u32, planes: u32) -> mat4x4<f32> {
    var total = mat4x4<f32>();
    var next = key_words(at, planes);
    for (var group = 0u; group < groups; group++) {
        let words = next;
        next = key_words(at + min(group + 1u, groups - 1u) * planes * TILE_FOURS, planes);
        let start = channel / 4u + 8u * group;
        var sums = Sums();
        sums = add_codes(sums, quad(words, planes, 0u), first, start);
        sums = add_codes(sums, quad(words, planes, 1u), first, start + 1u);
        sums = add_codes(sums, quad(words, planes, 2u), first, start + 2u);
        sums = add_codes(sums, quad(words, planes, 3u), first, start + 3u);
        sums = add_codes(sums, quad(words, planes, 4u), first, start + 4u);
        sums = add_codes(sums, quad(words, planes, 5u), first, start + 5u);
        sums = add_codes(sums, quad(words, planes, 6u), first, start + 6u);
        sums = add_codes(sums, quad(words, planes, 7u), first, start + 7u);
        // What to subtract is of the query in units too, so that no error is left on the codes' mean.
        let unit = sketch(first + UNITS_AT + channel / 32u + group);
        let minus = 0.5 * f32((1u << planes) - 1u) * sketch(first + SUMS_AT + channel / 32u + group);
        total += mat4x4<f32>(unit * (vec4<f32>(sums.a) - minus), unit * (vec4<f32>(sums.b) - minus),
                             unit * (vec4<f32>(sums.c) - minus), unit * (vec4<f32>(sums.d) - minus));
    }
    return total;
}
