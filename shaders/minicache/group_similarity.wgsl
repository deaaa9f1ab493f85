// The probe of a group of LAYERS layers: the smallest cosine of any two, norms, weights of the shared direction, and what forbids
// merging, for every row. LANES invocations share a row. Twin: minicache::cpu::group_similarity.

struct Params {
    rows: u32,
    tokens: u32,
    heads: u32,
    // Offset of the first element, then layer, head and token strides.
    source: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> layers: array<u32>;
@group(0) @binding(2) var<storage, read_write> rows: array<Row>;
// Norm and weight of every layer, row by row.
@group(0) @binding(3) var<storage, read_write> scales: array<vec2<f32>>;

const STEPS: u32 = (HEAD_DIM + 2u * LANES - 1u) / (2u * LANES);

// Two channels of a layer's row; zeros past its end and where one is not finite. Rows begin at whole words.
fn channels(layer: u32, row: u32, step: u32, lane: u32) -> Pair {
    let channel = 2u * (step * LANES + lane % LANES);
    let start = params.source.x + layer * params.source.y + (row / params.tokens) * params.source.z
        + (row % params.tokens) * params.source.w;
    let at = start + min(vec2<u32>(channel, channel + 1u), vec2<u32>(HEAD_DIM - 1u));
    var pair = loose_pair(vec2<u32>(layers[word_index(at.x)], layers[word_index(at.y)]), at);
    let inside = vec2<bool>(channel < HEAD_DIM, channel + 1u < HEAD_DIM);
    pair.numbers = select(vec2<f32>(), pair.numbers, inside & vec2<bool>(pair.finite));
    return pair;
}

fn out_of_range(norms: array<f32, LAYERS>, peak: f32) -> bool {
    var outside = false;
    for (var layer = 0u; layer < LAYERS; layer++) {
        if (MODE == SHARED) {
            outside = outside || !storable(norms[layer]);
        } else if (layer > 0u) {
            let ratio = norm_ratio(norms[layer], norms[0]);
            outside = outside || !storable(ratio) || ratio * peak > DTYPE_MAX * RATIO_HEADROOM;
        }
    }
    return outside;
}

@compute @workgroup_size(WORKGROUP)
fn group_similarity(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place) * (WORKGROUP / LANES) + lane / LANES;
    let readable = min(row, params.rows - 1u);

    var peaks: array<f32, LAYERS>;
    var norms: array<f32, LAYERS>;
    var units: array<f32, LAYERS>;
    var finite = true;
    var can_measure = true;
    var largest_upper = 0.0;
    var peak_upper = 0.0;
    for (var layer = 0u; layer < LAYERS; layer++) {
        var found = vec4<f32>();
        for (var step = 0u; step < STEPS; step++) {
            let pair = channels(layer, readable, step, lane);
            found.x = max(found.x, max(abs(pair.numbers.x), abs(pair.numbers.y)));
            found.y = max(found.y, select(1.0, 0.0, pair.finite));
        }
        found = row_max(found, lane);
        let scale = inverse_or_zero(found.x);
        var squares = vec4<f32>();
        for (var step = 0u; step < STEPS; step++) {
            let x = channels(layer, readable, step, lane).numbers * scale;
            squares.x += x.x * x.x + x.y * x.y;
        }
        let length = sqrt(row_sum(squares, lane).x);
        finite = finite && found.y == 0.0;
        can_measure = can_measure && measurable(found.x);
        peaks[layer] = found.x;
        norms[layer] = found.x * length;
        units[layer] = scale * inverse_or_zero(length);
        if (layer > 0u) {
            peak_upper = max(peak_upper, found.x);
            largest_upper = max(largest_upper, norms[layer]);
        }
    }

    var cosine = 1.0;
    for (var b = 1u; b < LAYERS; b++) {
        for (var a = 0u; a < b; a++) {
            var product = vec4<f32>();
            for (var step = 0u; step < STEPS; step++) {
                let x = channels(a, readable, step, lane).numbers * units[a];
                let y = channels(b, readable, step, lane).numbers * units[b];
                product.x += x.x * y.x + x.y * y.y;
            }
            cosine = min(cosine, row_sum(product, lane).x);
        }
    }

    var squares = vec4<f32>();
    for (var step = 0u; step < STEPS; step++) {
        var sum = vec2<f32>();
        for (var layer = 0u; layer < LAYERS; layer++) {
            sum += channels(layer, readable, step, lane).numbers * units[layer];
        }
        squares.x += sum.x * sum.x + sum.y * sum.y;
    }
    let chord = sqrt(row_sum(squares, lane).x);

    var found = Row(clamp(cosine, -1.0, 1.0), norms[0], largest_upper, 0.0, 0.0, MERGED);
    let unanchored = MODE == ANCHOR && peaks[0] == 0.0 && largest_upper > 0.0;
    if (!finite) {
        found = Row(0.0, 0.0, 0.0, 0.0, 0.0, NON_FINITE);
    } else if (!can_measure) {
        found = Row(0.0, peaks[0], peak_upper, 0.0, 0.0, RANGE);
    } else if ((chord < OPPOSITE && !both_zero(found)) || unanchored) {
        found.fault = ANTIPARALLEL;
    } else if (out_of_range(norms, peaks[0])) {
        found.fault = RANGE;
    }
    if (row < params.rows && lane % LANES == 0u) {
        rows[row] = found;
        for (var layer = 0u; layer < LAYERS; layer++) {
            scales[row * LAYERS + layer] = vec2<f32>(norms[layer], units[layer] * inverse_or_zero(chord));
        }
    }
}
