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
    for (var channel = 0u; channel < HEAD_DIM; channel++) {
        sum += projection[channel * SKETCH_DIM + bit] * source[channel];
    }
    projected[lane] = sum;
    workgroupBarrier();
}
