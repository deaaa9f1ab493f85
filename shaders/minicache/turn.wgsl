// Queries as attention over coded directions reads them: WIDTH numbers as they came, for the rows that are raw, and WIDTH of the
// rotated query, for the codes; zeros behind the last channel of either. One workgroup a query. Its twin is qjl::planes::Rotation.

struct Params {
    view: View,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
@group(0) @binding(2) var<storage, read_write> turned: array<u32>;

// An element of a query that is not finite.
const INFINITE: u32 = 0x7f800000u;

fn put(row: u32, channel: u32, bits: u32) {
    let at = row * 2u * WIDTH + channel;
    if (row < params.view.rows && at < arrayLength(&turned)) {
        turned[at] = bits;
    }
}

@compute @workgroup_size(WORKGROUP)
fn turn(place: Place, id: Invocation) {
    let lane = id.local_index;
    let row = linear_workgroup(place);
    let start = view_row(params.view, min(row, params.view.rows - 1u));
    for (var i = lane; i < WIDTH; i += WORKGROUP) {
        let at = start + min(i, HEAD_DIM - 1u);
        let word = input[word_index(at)];
        let finite = element_is_finite(word, at);
        let number = select(0.0, element(word, at), finite);
        if (i < HEAD_DIM) {
            work[i] = vec2<f32>(number, 0.0);
        }
        put(row, i, select(select(INFINITE, bitcast<u32>(number), finite), 0u, i >= HEAD_DIM));
    }
    workgroupBarrier();
    rotate(0u, HEAD_DIM, 0u, HADAMARD, FACTOR, lane);
    for (var i = lane; i < WIDTH; i += WORKGROUP) {
        let number = select(0.0, work[min(i, HEAD_DIM - 1u)].x, i < HEAD_DIM);
        put(row, WIDTH + i, bitcast<u32>(number));
    }
}
