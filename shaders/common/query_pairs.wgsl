// A query read once into workgroup memory.

const PAIRS: u32 = (HEAD_DIM + 1u) / 2u;

var<workgroup> query: array<vec2<f32>, PAIRS>;

fn load_query(query_row: u32, lane: u32) {
    for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
        query[pair] = vec2<f32>(query_channel(query_row, 2u * pair), query_channel(query_row, 2u * pair + 1u));
    }
}

fn query_is_finite(query_row: u32) -> bool {
    var finite = true;
    for (var channel = 0u; channel < HEAD_DIM; channel++) {
        finite = finite && query_is_finite_at(query_at(query_row, channel));
    }
    return finite;
}
