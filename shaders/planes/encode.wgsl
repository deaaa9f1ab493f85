// Codes keys or values: centred and balanced by the tables, rotated, and each segment's channels kept in b bits beside one f16
// scalar nu, row after row; tile.wgsl takes them from there. Two rows a workgroup. encode_tiles.wgsl does most rows in one pass.
// Twin: qjl::planes::cpu::encode.

@group(0) @binding(1) var<storage, read> input: array<u32>;

const ROW_WORDS: u32 = FIRST_WORDS + SECOND_WORDS;

var<workgroup> packed: array<atomic<u32>, 2u * ROW_WORDS>;

fn raw_number(row: u32, channel: u32) -> f32 {
    let at = view_row(params.view, row) + channel;
    return element(input[word_index(at)], at);
}

fn raw_is_finite(row: u32, channel: u32) -> bool {
    let at = view_row(params.view, row) + channel;
    return element_is_finite(input[word_index(at)], at);
}

// Channel `i` in coded order, centred and balanced.
fn centred(row: u32, i: u32) -> f32 {
    let view = params.view;
    let head = row / view.tokens;
    let at = channels[table_of(head) + i];
    return (raw_number(row, at.channel) - mean_at(head, row % view.tokens, at)) * (1.0 / at.sigma);
}

// Fills `work` with two rows in coded order; zeros where a row is not finite. Returns the largest magnitudes after centring, and
// 1 in z, w where a row is not finite.
fn load_rows(rows: vec2<u32>, lane: u32) -> vec4<f32> {
    var broken = vec4<f32>();
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let finite = vec2<bool>(raw_is_finite(rows.x, i), raw_is_finite(rows.y, i));
        broken = max(broken, vec4<f32>(0.0, 0.0, select(vec2<f32>(1.0), vec2<f32>(), finite)));
    }
    broken = row_max(broken, lane);
    var peaks = broken;
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let both = vec2<f32>(centred(rows.x, i), centred(rows.y, i));
        work[i] = select(vec2<f32>(), both, broken.zw == vec2<f32>());
        peaks = max(peaks, vec4<f32>(abs(work[i]), 0.0, 0.0));
    }
    return row_max(peaks, lane);
}

// Code of a number at a step, b bits.
fn code_of(y: f32, inverse_step: f32, planes: u32) -> u32 {
    let middle = f32(1u << (planes - 1u));
    return u32(clamp(floor(y * inverse_step) + middle, 0.0, 2.0 * middle - 1.0));
}

// y . L and L . L of both rows when they are coded at these steps.
fn fit(first: u32, channels: u32, planes: u32, inverse_steps: vec2<f32>, lane: u32) -> vec4<f32> {
    var sums = vec4<f32>();
    let top = f32((1u << planes) - 1u);
    for (var i = lane; i < channels; i += WORKGROUP) {
        let y = work[first + i];
        let levels = 2.0 * vec2<f32>(f32(code_of(y.x, inverse_steps.x, planes)), f32(code_of(y.y, inverse_steps.y, planes))) - top;
        sums += vec4<f32>(y * levels, levels * levels);
    }
    return row_sum(sums, lane);
}

// Codes a segment of both rows and returns their nu: |y| / |L| at the step that fits best.
fn code_segment(first: u32, channels: u32, planes: u32, delta: f32, bit_base: u32, lane: u32) -> vec2<f32> {
    var squares = vec4<f32>();
    for (var i = lane; i < channels; i += WORKGROUP) {
        squares += vec4<f32>(work[first + i] * work[first + i], 0.0, 0.0);
    }
    let total = row_sum(squares, lane).xy;
    let spread = max(sqrt(total / f32(channels)), vec2<f32>(1e-20));
    var best = vec2<f32>(-1.0);
    var lengths = vec2<f32>(1.0);
    var inverse_steps = vec2<f32>(1.0) / (delta * spread);
    if (planes > 1u) {
        let base = inverse_steps;
        for (var candidate = 0u; candidate < 5u; candidate++) {
            let steps = base / (0.75 + 0.125 * f32(candidate));
            let sums = fit(first, channels, planes, steps, lane);
            let score = sums.xy * sums.xy / max(sums.zw, vec2<f32>(1.0));
            let better = score > best;
            best = select(best, score, better);
            lengths = select(lengths, sums.zw, better);
            inverse_steps = select(inverse_steps, steps, better);
        }
    } else {
        lengths = vec2<f32>(f32(channels));
    }
    for (var i = lane; i < channels; i += WORKGROUP) {
        let y = work[first + i];
        put_code(bit_base, i, planes, select(code_of(y.x, inverse_steps.x, planes), u32(y.x >= 0.0), planes == 1u));
        put_code(bit_base + 32u * ROW_WORDS, i, planes,
                 select(code_of(y.y, inverse_steps.y, planes), u32(y.y >= 0.0), planes == 1u));
    }
    return sqrt(total) / sqrt(lengths);
}

// Sets the bits of code `i` behind `bit_base`; a code may straddle two words.
fn put_code(bit_base: u32, i: u32, planes: u32, code: u32) {
    let bit = bit_base + i * planes;
    atomicOr(&packed[bit / 32u], code << (bit % 32u));
    if (bit % 32u + planes > 32u) {
        atomicOr(&packed[bit / 32u + 1u], code >> (32u - bit % 32u));
    }
}

fn put(at: u32, word: u32) {
    if (at < arrayLength(&coded)) {
        coded[at] = word;
    }
}

@compute @workgroup_size(WORKGROUP)
fn encode(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let first_row = 2u * linear_workgroup(place);
    let last = params.view.rows - 1u;
    let inside = first_row + 1u <= last;
    let rows = min(vec2<u32>(first_row, first_row + 1u), vec2<u32>(last));
    let peaks = load_rows(rows, lane);
    let finite = peaks.zw == vec2<f32>();
    for (var i = lane; i < 2u * ROW_WORDS; i += WORKGROUP) {
        atomicStore(&packed[i], 0u);
    }
    workgroupBarrier();
    rotate(0u, FIRST_CHANNELS, FIRST_AT, FIRST_HADAMARD, FIRST_FACTOR, lane);
    let first_nu = code_segment(0u, FIRST_CHANNELS, FIRST_PLANES, FIRST_DELTA, 0u, lane);
    var second_nu = vec2<f32>();
    if (SECOND_PLANES > 0u) {
        rotate(FIRST_CHANNELS, SECOND_CHANNELS, SECOND_AT, SECOND_HADAMARD, SECOND_FACTOR, lane);
        second_nu = code_segment(FIRST_CHANNELS, SECOND_CHANNELS, SECOND_PLANES, SECOND_DELTA, 32u * FIRST_WORDS, lane);
    }
    workgroupBarrier();
    for (var i = lane; i < 2u * ROW_WORDS; i += WORKGROUP) {
        let second = i >= ROW_WORDS;
        let row = first_row + select(0u, 1u, second);
        if (row <= last) {
            put(row * ROW_WORDS + i % ROW_WORDS,
                select(0u, atomicLoad(&packed[i]), select(finite.x, finite.y, second)));
        }
    }
    if (lane == 0u && first_row <= last) {
        count_row(finite.x, peaks.x == 0.0, vec2<f32>(first_nu.x, second_nu.x));
        let low = nu_bits(first_nu.x, finite.x);
        var high = 0u;
        if (inside) {
            count_row(finite.y, peaks.y == 0.0, vec2<f32>(first_nu.y, second_nu.y));
            high = nu_bits(first_nu.y, finite.y);
        }
        if (SECOND_PLANES == 0u) {
            put(params.scales_at + first_row / 2u, low | (high << 16u));
        } else {
            // Two scalars a row.
            put(params.scales_at + first_row, low | (nu_bits(second_nu.x, finite.x) << 16u));
            if (inside) {
                put(params.scales_at + first_row + 1u, high | (nu_bits(second_nu.y, finite.y) << 16u));
            }
        }
    }
}
