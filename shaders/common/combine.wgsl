// Combines the partial softmaxes of one query's splits into its output row: one invocation per word of the output.
// A split's part is its largest logit and the sum of its exponentials, in one vec4, and its weighted sum of values; one that
// nobody wrote, or that saw nothing, has a sum of 0.

struct Params {
    view: Output,
    splits: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partials: array<vec4<f32>>;
// A logit for each query head that enters the denominator alone.
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
@group(0) @binding(3) var<storage, read_write> output: array<u32>;

fn row_bits(row: u32, channel: u32) -> u32 {
    let first = row * params.splits * PARTIAL_STRIDE;
    var largest = -3.402823e38;
    for (var split = 0u; split < params.splits; split++) {
        let base = first + split * PARTIAL_STRIDE;
        largest = max(largest, select(largest, partials[base].x, partials[base].y > 0.0));
    }
    var sum = 0.0;
    var number = 0.0;
    for (var split = 0u; split < params.splits; split++) {
        let base = first + split * PARTIAL_STRIDE;
        let head = partials[base];
        let weight = select(0.0, exp(clamp(head.x - largest, -200.0, 0.0)), head.y > 0.0);
        sum += weight * head.y;
        number += weight * partials[base + 1u + channel / 4u][channel % 4u];
    }
    if (HAS_SINKS && sum > 0.0) {
        let sink = sinks[(row / params.view.tokens) % params.view.heads];
        let rescale = exp(max(min(largest - sink, 0.0), -200.0));
        sum = sum * rescale + exp(max(min(sink - largest, 0.0), -200.0));
        number *= rescale;
    }
    // A query that saw nothing has a sum of 0 and a row of zeros.
    return round_to_bits(select(number / max(sum, 1.1754944e-38), 0.0, sum == 0.0));
}

@compute @workgroup_size(WORKGROUP)
fn combine(place: Place, id: Invocation) {
    store_word(linear_workgroup(place) * WORKGROUP + id.local_index);
}
