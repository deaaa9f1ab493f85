// Exact scores q . k of raw keys: one key an invocation, one query and WORKGROUP keys a workgroup. Twin: attention::cpu::exact_scores.

struct Params {
    attention: Attention,
    // Offset of the first element, then batch, head and token strides.
    query: vec4<u32>,
    key: vec4<u32>,
    // Groups of WORKGROUP keys.
    tiles: u32,
    // First element of the output, numbers of a row of it, and the one that the store's first token becomes.
    offset: u32,
    pitch: u32,
    column: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> queries: array<u32>;
@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn exact_scores(place: Place, id: Invocation) {
    let sizes = params.attention;
    let index = linear_workgroup(place);
    let row = min(index / params.tiles, sizes.rows - 1u);
    let query_row = sizes.first_row + row;
    let head = row / sizes.queries;
    let kv_head = (head / sizes.query_heads) * sizes.kv_heads + (head % sizes.query_heads) / sizes.group;
    let token = (index % params.tiles) * WORKGROUP + id.local_index;
    load_query(query_row, id.local_index);
    workgroupBarrier();
    let start = row_start(params.key, kv_head, min(token, sizes.tokens - 1u));
    var sum = 0.0;
    var finite = query_is_finite(query_row);
    for (var pair = 0u; pair < PAIRS; pair++) {
        let key = key_pair(start, 2u * pair);
        finite = finite && key.finite;
        sum += dot(query[pair], key.numbers);
    }
    let at = params.offset + query_row * params.pitch + params.column + token;
    if (index / params.tiles < sizes.rows && token < sizes.tokens && at < arrayLength(&output)) {
        output[at] = select(0.0, sum, finite);
    }
}
