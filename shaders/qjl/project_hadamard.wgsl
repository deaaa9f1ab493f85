// The projection as two rounds of random signs and Walsh-Hadamard butterflies per block of HEAD_DIM rows. Two rows at once.

const BLOCK: u32 = HEAD_DIM;
const BLOCKS: u32 = (SKETCH_DIM + BLOCK - 1u) / BLOCK;
const SIGN_WORDS: u32 = (HEAD_DIM + 31u) / 32u;

@group(0) @binding(3) var<storage, read> projection: array<u32>;

var<workgroup> source: array<vec2<f32>, HEAD_DIM>;
var<workgroup> projected: array<vec2<f32>, BLOCK>;

fn flip(numbers: vec2<f32>, round: u32, channel: u32) -> vec2<f32> {
    let word = projection[round * SIGN_WORDS + channel / 32u];
    return select(numbers, -numbers, ((word >> (channel % 32u)) & 1u) == 1u);
}

fn butterflies(lane: u32) {
    for (var half_size = 1u; half_size < HEAD_DIM; half_size <<= 1u) {
        for (var pair = lane; pair < HEAD_DIM / 2u; pair += WORKGROUP) {
            let low = (pair / half_size) * 2u * half_size + pair % half_size;
            let a = projected[low];
            let b = projected[low + half_size];
            projected[low] = a + b;
            projected[low + half_size] = a - b;
        }
        workgroupBarrier();
    }
}

// Rows block * BLOCK .. of S times both sources, into `projected`.
fn project_block(block: u32, lane: u32) {
    for (var channel = lane; channel < HEAD_DIM; channel += WORKGROUP) {
        projected[channel] = flip(source[channel], 2u * block, channel);
    }
    workgroupBarrier();
    butterflies(lane);
    for (var channel = lane; channel < HEAD_DIM; channel += WORKGROUP) {
        projected[channel] = flip(projected[channel] * SHRINK, 2u * block + 1u, channel);
    }
    workgroupBarrier();
    butterflies(lane);
}
