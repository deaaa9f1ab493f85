// Estimated scores g/m * nu * <S q, s> of every query and key: one key an invocation, one query and WORKGROUP keys a
// workgroup. Twin: qjl::cpu::scores.

struct Params {
    tokens: u32,
    queries: u32,
    query_heads: u32,
    group: u32,
    tiles: u32,
    rows: u32,
    // The first query row of these, whose sequence is the first of the store.
    first_row: u32,
    // Tokens of the store that count: the first, and one past the last.
    live_first: u32,
    live_end: u32,
    // First element of the output, numbers of a row of it, and the one that the store's first token becomes.
    offset: u32,
    pitch: u32,
    column: u32,
    factor: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<f32>;
@group(0) @binding(2) var<storage, read> words: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read_write> output: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn scores(place: Place, id: Invocation) {
    let index = linear_workgroup(place);
    let query_row = min(index / params.tiles, params.rows - 1u);
    let token = (index % params.tiles) * WORKGROUP + id.local_index;
    let head = query_row / params.queries;
    let kv_head = (head / params.query_heads) * (params.query_heads / params.group)
        + (head % params.query_heads) / params.group;
    let key_row = kv_head * params.tokens + min(token, params.tokens - 1u);
    var sum = 0.0;
    for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        load_chunk(params.first_row + query_row, chunk, id.local_index);
        workgroupBarrier();
        sum += chunk_dot(key_row, chunk);
        workgroupBarrier();
    }
    let bits = half_at(scales[key_row / 2u], key_row);
    let score = params.factor * unpack2x16float(bits).x * sum;
    let at = params.offset + (params.first_row + query_row) * params.pitch + params.column + token;
    let lives = token >= params.live_first && token < params.live_end;
    if (index / params.tiles < params.rows && lives && at < arrayLength(&output)) {
        output[at] = select(0.0, score, half_is_finite(bits));
    }
}
