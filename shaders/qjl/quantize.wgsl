// Sketches keys, less their mean where they have one: sign bits of S k and one scalar nu, row after row; planes/tile.wgsl takes them
// from there. Two rows a workgroup, so that their f16 scalars share a word. Twin: qjl::cpu::quantize.

@group(0) @binding(1) var<storage, read> input: array<u32>;

const SKETCH_WORDS: u32 = (SKETCH_DIM + 31u) / 32u;

var<workgroup> bits: array<atomic<u32>, 2u * SKETCH_WORDS>;

// The mean of a key's channel.
fn source_mean(row: u32, channel: u32) -> f32 {
    if (CENTRING == UNCENTRED) {
        return 0.0;
    }
    let head = row / params.view.tokens;
    return mean_at(head, row % params.view.tokens, channels[table_of(head) + channel]);
}

// nu of both rows from the sums of |y| and y^2 and of squares of the rows over their peaks.
fn key_scales(pair: RowPair, magnitudes: vec2<f32>, squares: vec2<f32>, lengths: vec2<f32>) -> vec2<f32> {
    if (KEY_SCALE == NORM) {
        return pair.peaks * sqrt(lengths);
    }
    if (KEY_SCALE == MSE) {
        return magnitudes / f32(SKETCH_DIM);
    }
    return squares * vec2<f32>(inverse_or_zero(magnitudes.x), inverse_or_zero(magnitudes.y));
}

@compute @workgroup_size(WORKGROUP)
fn quantize(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let first = 2u * linear_workgroup(place);
    let pair = load_row_pair(first, lane);
    for (var i = lane; i < 2u * SKETCH_WORDS; i += WORKGROUP) {
        atomicStore(&bits[i], 0u);
    }
    workgroupBarrier();
    var sums = vec4<f32>();
    for (var block = 0u; block < BLOCKS; block++) {
        project_block(block, lane);
        for (var i = lane; i < BLOCK; i += WORKGROUP) {
            let bit = block * BLOCK + i;
            if (bit < SKETCH_DIM) {
                let y = projected[i];
                sums += vec4<f32>(abs(y), y * y);
                let mask = 1u << (bit % 32u);
                atomicOr(&bits[bit / 32u], select(0u, mask, y.x >= 0.0));
                atomicOr(&bits[SKETCH_WORDS + bit / 32u], select(0u, mask, y.y >= 0.0));
            }
        }
        workgroupBarrier();
    }
    sums = row_sum(sums, lane);
    let inverse = vec2<f32>(inverse_or_zero(pair.peaks.x), inverse_or_zero(pair.peaks.y));
    var lengths = vec4<f32>();
    for (var channel = lane; channel < HEAD_DIM; channel += WORKGROUP) {
        let unit = source[channel] * inverse;
        lengths += vec4<f32>(unit * unit, 0.0, 0.0);
    }
    lengths = row_sum(lengths, lane);

    for (var i = lane; i < 2u * SKETCH_WORDS; i += WORKGROUP) {
        let second = i >= SKETCH_WORDS;
        let at = select(pair.rows.x, pair.rows.y, second) * SKETCH_WORDS + i % SKETCH_WORDS;
        if (select(pair.inside.x, pair.inside.y, second) && at < arrayLength(&coded)) {
            coded[at] = select(0u, atomicLoad(&bits[i]), select(pair.finite.x, pair.finite.y, second));
        }
    }
    if (lane == 0u && pair.inside.x) {
        let scale = key_scales(pair, sums.xy, sums.zw, lengths.xy);
        let low = stored_scale(scale.x, 0.0, pair.finite.x, pair.peaks.x == 0.0, true);
        let high = stored_scale(scale.y, 0.0, pair.finite.y, pair.peaks.y == 0.0, pair.inside.y);
        coded[params.scales_at + first / 2u] = low | (high << 16u);
    }
}
