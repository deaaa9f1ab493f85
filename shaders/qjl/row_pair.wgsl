// Loading two rows of a host's tensor for projecting, and what they are. The kernel declares `source_mean(row, channel)`, what is
// taken off a number first.

// Two rows: their indices, whether they are rows of the tensor, whether they are finite, and their largest magnitudes.
struct RowPair {
    rows: vec2<u32>,
    inside: vec2<bool>,
    finite: vec2<bool>,
    peaks: vec2<f32>,
}

// Fills `source` with both rows less their means, zeros where a row is outside or not finite.
fn load_row_pair(first: u32, lane: u32) -> RowPair {
    let rows = vec2<u32>(first, first + 1u);
    let last = vec2<u32>(params.view.rows - 1u);
    let starts = vec2<u32>(view_row(params.view, min(rows.x, last.x)), view_row(params.view, min(rows.y, last.y)));
    var peaks = vec4<f32>();
    for (var channel = lane; channel < HEAD_DIM; channel += WORKGROUP) {
        let at = starts + channel;
        let words = vec2<u32>(input[word_index(at.x)], input[word_index(at.y)]);
        let finite = vec2<bool>(element_is_finite(words.x, at.x), element_is_finite(words.y, at.y));
        let means = vec2<f32>(source_mean(min(rows.x, last.x), channel), source_mean(min(rows.y, last.y), channel));
        let both = select(vec2<f32>(), vec2<f32>(element(words.x, at.x), element(words.y, at.y)) - means, finite);
        source[channel] = both;
        peaks = max(peaks, vec4<f32>(abs(both), select(vec2<f32>(1.0), vec2<f32>(), finite)));
    }
    peaks = row_max(peaks, lane);
    let finite = peaks.zw == vec2<f32>();
    for (var channel = lane; channel < HEAD_DIM; channel += WORKGROUP) {
        source[channel] = select(vec2<f32>(), source[channel], finite);
    }
    workgroupBarrier();
    return RowPair(rows, rows <= last, finite, peaks.xy);
}
