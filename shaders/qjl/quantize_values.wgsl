// Codes value rows in 8 bits with an f16 scale, row after row; planes/tile.wgsl takes them from there. LANES invocations share a row; a workgroup's rows start at an even one, so
// that two scales share a word. Twin: qjl::cpu::quantize_values.

struct Params {
    view: View,
    // Where the scales follow the codes of the rows.
    scales_at: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
@group(0) @binding(2) var<storage, read_write> coded: array<u32>;
@group(0) @binding(3) var<storage, read_write> status: array<atomic<u32>, 3>;

const ROWS: u32 = WORKGROUP / LANES;
const VALUE_WORDS: u32 = (HEAD_DIM + 3u) / 4u;
const MIN_VALUE_SCALE: f32 = 6.1035156e-5;
const MAX_CODE: f32 = 127.0;

var<workgroup> stored: array<u32, ROWS>;

fn code(x: f32, scale: f32) -> u32 {
    return u32(i32(clamp(round(x / scale), -MAX_CODE, MAX_CODE))) & 0xffu;
}

@compute @workgroup_size(WORKGROUP)
fn quantize_values(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let local_row = lane / LANES;
    let first = linear_workgroup(place) * ROWS;
    let row = first + local_row;
    let start = view_row(params.view, min(row, params.view.rows - 1u));
    var peaks = vec4<f32>();
    for (var channel = lane % LANES; channel < HEAD_DIM; channel += LANES) {
        let at = start + channel;
        let word = input[word_index(at)];
        let finite = element_is_finite(word, at);
        let magnitude = select(0.0, abs(element(word, at)), finite);
        peaks = max(peaks, vec4<f32>(magnitude, select(1.0, 0.0, finite), 0.0, 0.0));
    }
    peaks = row_max(peaks, lane);
    let finite = peaks.y == 0.0;
    if (lane % LANES == 0u) {
        stored[local_row] = stored_scale(peaks.x / MAX_CODE, MIN_VALUE_SCALE, finite, peaks.x == 0.0, row < params.view.rows);
    }
    workgroupBarrier();
    let scale = unpack2x16float(stored[local_row]).x;
    let is_coded = finite && peaks.x > 0.0;
    for (var word = lane % LANES; word < VALUE_WORDS; word += LANES) {
        var bits = 0u;
        for (var i = 0u; i < 4u; i++) {
            let channel = 4u * word + i;
            if (is_coded && channel < HEAD_DIM) {
                bits |= code(element(input[word_index(start + channel)], start + channel), scale) << (8u * i);
            }
        }
        let at = row * VALUE_WORDS + word;
        if (row < params.view.rows && at < arrayLength(&coded)) {
            coded[at] = bits;
        }
    }
    if (lane < ROWS / 2u && first + 2u * lane < params.view.rows) {
        coded[params.scales_at + first / 2u + lane] = stored[2u * lane] | (stored[2u * lane + 1u] << 16u);
    }
}
