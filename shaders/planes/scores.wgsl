// Scores of every query and coded key, the mean's part included: one key an invocation, one query and WORKGROUP keys a workgroup.
// Twin: qjl::planes::cpu::scores.

struct Params {
    attention: Attention,
    fine_at: u32,
    key_scales_at: u32,
    means_at: u32,
    block: u32,
    // Groups of WORKGROUP keys, and the first element of the output.
    tiles: u32,
    offset: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<f32>;
@group(0) @binding(2) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;
@group(0) @binding(4) var<storage, read> keys: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn scores(place: Place, id: Invocation) {
    let index = linear_workgroup(place);
    let query_row = min(index / params.tiles, params.attention.rows - 1u);
    let token = (index % params.tiles) * WORKGROUP + id.local_index;
    let head = query_row / params.attention.queries;
    let kv_head = (head / params.attention.query_heads) * params.attention.kv_heads
        + (head % params.attention.query_heads) / params.attention.group;
    load_query(query_row, id.local_index);
    workgroupBarrier();
    let readable = min(token, params.attention.tokens - 1u);
    let masked = key_is_masked(kv_head * params.attention.tokens + readable) || !query_is_finite(query_row);
    let score = key_score(query_row, kv_head, readable);
    let at = params.offset + query_row * params.attention.tokens + token;
    if (index / params.tiles < params.attention.rows && token < params.attention.tokens && at < arrayLength(&output)) {
        output[at] = select(score, 0.0, masked);
    }
}
