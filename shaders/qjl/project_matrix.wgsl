// The projection as a matrix, stored transposed so that neighbouring invocations read neighbouring entries. Two rows at once.

const BLOCK: u32 = WORKGROUP;
const BLOCKS: u32 = (SKETCH_DIM + BLOCK - 1u) / BLOCK;

@group(0) @binding(3) var<storage, read> projection: array<f32>;

var<workgroup> source: array<vec2<f32>, HEAD_DIM>;
var<workgroup> projected: array<vec2<f32>, BLOCK>;

// Rows block * BLOCK .. of S times both sources, into `projected`.
fn project_block(block: u32, lane: u32) {
    let bit = min(block * BLOCK + lane, SKETCH_DIM - 1u);
    var sum = vec2<f32>();
    let fours = HEAD_DIM / 4u * 4u;
    // Four at a time, whose loads overlap.
    for (var channel = 0u; channel < fours; channel += 4u) {
        let at = channel * SKETCH_DIM + bit;
        let a = projection[at];
        let b = projection[at + SKETCH_DIM];
        let c = projection[at + 2u * SKETCH_DIM];
        let d = projection[at + 3u * SKETCH_DIM];
        sum += a * source[channel];
        sum += b * source[channel + 1u];
        sum += c * source[channel + 2u];
        sum += d * source[channel + 3u];
    }
    for (var channel = fours; channel < HEAD_DIM; channel++) {
        sum += projection[channel * SKETCH_DIM + bit] * source[channel];
    }
    projected[lane] = sum;
    workgroupBarrier();
}
