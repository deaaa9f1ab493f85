// The rotation of rows that lie in registers, 32 channels in each of the LANES lanes of a row: the signs, pairs and order of levels
// are those of rotate.wgsl, so that the results are, too.

@group(0) @binding(3) var<storage, read> rotations: array<u32>;

// Neighbouring channels of a lane, four a member.
struct Channels {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
    e: vec4<f32>,
    f: vec4<f32>,
    g: vec4<f32>,
    h: vec4<f32>,
}

// What the channels are multiplied with before each round, a lane's in a row of vec4s: one over the balance, with the signs of the
// round. The ninth keeps the lanes of a row out of each other's banks.
const WEIGHT_ROW: u32 = 9u;

var<workgroup> weights: array<vec4<f32>, ROUNDS * LANES * WEIGHT_ROW>;

// Fills `weights` for the channels of which the tables say something from `table` on.
fn load_weights(table: u32, lane: u32) {
    for (var four = lane; four < 8u * ROUNDS * LANES; four += WORKGROUP) {
        let first = 4u * (four % (8u * LANES));
        let source = table + first;
        let sigma = vec4<f32>(channels[source].sigma, channels[source + 1u].sigma, channels[source + 2u].sigma,
                              channels[source + 3u].sigma);
        let magnitude = select(vec4<f32>(1.0), 1.0 / sigma, four < 8u * LANES);
        let signs = (vec4<u32>(rotations[FIRST_AT + four / 8u] >> (first % 32u)) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u);
        weights[(four / 8u) * WEIGHT_ROW + four % 8u] = select(magnitude, -magnitude, signs == vec4<u32>(1u));
    }
    workgroupBarrier();
}

fn weigh(x: Channels, first: u32) -> Channels {
    return Channels(x.a * weights[first], x.b * weights[first + 1u], x.c * weights[first + 2u], x.d * weights[first + 3u],
                    x.e * weights[first + 4u], x.f * weights[first + 5u], x.g * weights[first + 6u], x.h * weights[first + 7u]);
}

// Distances 1 and 2.
fn within_four(x: vec4<f32>) -> vec4<f32> {
    let y = vec4<f32>(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    return vec4<f32>(y.xy + y.zw, y.xy - y.zw);
}

// Distances 1 to 16.
fn within_lane(x: Channels) -> Channels {
    let a = within_four(x.a);
    let b = within_four(x.b);
    let c = within_four(x.c);
    let d = within_four(x.d);
    let e = within_four(x.e);
    let f = within_four(x.f);
    let g = within_four(x.g);
    let h = within_four(x.h);
    let y = Channels(a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h);
    let z = Channels(y.a + y.c, y.b + y.d, y.a - y.c, y.b - y.d, y.e + y.g, y.f + y.h, y.e - y.g, y.f - y.h);
    return Channels(z.a + z.e, z.b + z.f, z.c + z.g, z.d + z.h, z.a - z.e, z.b - z.f, z.c - z.g, z.d - z.h);
}

// The sum for the lower of two lanes, the difference for the upper, whose sign is -1.
fn across(x: vec4<f32>, lane: u32, offset: u32, sign: f32) -> vec4<f32> {
    return row_exchange(x, lane, offset) + sign * x;
}

// R times the row of which `x` is a lane's part, weighed.
fn rotate_row(x: Channels, lane: u32) -> Channels {
    var y = x;
    for (var round = 0u; round < ROUNDS; round++) {
        y = within_lane(weigh(y, (round * LANES + lane % LANES) * WEIGHT_ROW));
        for (var offset = 1u; offset < LANES; offset <<= 1u) {
            let sign = select(1.0, -1.0, (lane & offset) != 0u);
            y = Channels(across(y.a, lane, offset, sign), across(y.b, lane, offset, sign), across(y.c, lane, offset, sign),
                         across(y.d, lane, offset, sign), across(y.e, lane, offset, sign), across(y.f, lane, offset, sign),
                         across(y.g, lane, offset, sign), across(y.h, lane, offset, sign));
        }
    }
    return Channels(y.a * FIRST_FACTOR, y.b * FIRST_FACTOR, y.c * FIRST_FACTOR, y.d * FIRST_FACTOR,
                    y.e * FIRST_FACTOR, y.f * FIRST_FACTOR, y.g * FIRST_FACTOR, y.h * FIRST_FACTOR);
}
