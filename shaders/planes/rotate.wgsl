// Rotations of one or two segments of two rows at once, in workgroup memory: rounds of signs and Walsh-Hadamard butterflies
// where a segment's width is a power of two, else a matrix. Twin: qjl::planes::Rotation.

@group(0) @binding(3) var<storage, read> rotations: array<u32>;

var<workgroup> work: array<vec2<f32>, HEAD_DIM>;
var<workgroup> spare: array<vec2<f32>, HEAD_DIM>;

fn butterflies(first: u32, channels: u32, lane: u32) {
    for (var half_size = 1u; half_size < channels; half_size <<= 1u) {
        for (var pair = lane; pair < channels / 2u; pair += WORKGROUP) {
            let low = first + (pair / half_size) * 2u * half_size + pair % half_size;
            let a = work[low];
            let b = work[low + half_size];
            work[low] = a + b;
            work[low + half_size] = a - b;
        }
        workgroupBarrier();
    }
}

fn flip(first: u32, channels: u32, signs: u32, lane: u32) {
    for (var i = lane; i < channels; i += WORKGROUP) {
        let negative = ((rotations[signs + i / 32u] >> (i % 32u)) & 1u) == 1u;
        work[first + i] = select(work[first + i], -work[first + i], negative);
    }
    workgroupBarrier();
}

fn scale_work(first: u32, channels: u32, factor: f32, lane: u32) {
    for (var i = lane; i < channels; i += WORKGROUP) {
        work[first + i] *= factor;
    }
    workgroupBarrier();
}

// Row `i` of the matrix times the segment, or its column where it is transposed.
fn multiply(first: u32, channels: u32, at: u32, transposed: bool, lane: u32) {
    for (var i = lane; i < channels; i += WORKGROUP) {
        var sum = vec2<f32>();
        for (var j = 0u; j < channels; j++) {
            let entry = select(i * channels + j, j * channels + i, transposed);
            sum += bitcast<f32>(rotations[at + entry]) * work[first + j];
        }
        spare[i] = sum;
    }
    workgroupBarrier();
    for (var i = lane; i < channels; i += WORKGROUP) {
        work[first + i] = spare[i];
    }
    workgroupBarrier();
}

// R times the segment of `channels` channels from `first` on; its signs or matrix begin at `at`.
fn rotate(first: u32, channels: u32, at: u32, hadamard: bool, factor: f32, lane: u32) {
    if (hadamard) {
        let sign_words = (channels + 31u) / 32u;
        for (var round = 0u; round < ROUNDS; round++) {
            flip(first, channels, at + round * sign_words, lane);
            butterflies(first, channels, lane);
        }
        scale_work(first, channels, factor, lane);
    } else {
        multiply(first, channels, at, false, lane);
    }
}

// R transposed.
fn rotate_back(first: u32, channels: u32, at: u32, hadamard: bool, factor: f32, lane: u32) {
    if (hadamard) {
        let sign_words = (channels + 31u) / 32u;
        for (var round = 0u; round < ROUNDS; round++) {
            butterflies(first, channels, lane);
            flip(first, channels, at + (ROUNDS - 1u - round) * sign_words, lane);
        }
        scale_work(first, channels, factor, lane);
    } else {
        multiply(first, channels, at, true, lane);
    }
}
