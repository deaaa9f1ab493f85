// Scores of every query and coded key, the mean's part included: four tokens an invocation, four query rows of one KV head and
// one tile of tokens a workgroup. Twin: qjl::planes::cpu::scores.

struct Params {
    attention: Attention,
    fine_at: u32,
    // Where the tile's angles begin, in vec4s.
    tile_angles_at: u32,
    key_scales_at: u32,
    means_at: u32,
    block: u32,
    // Tiles of tokens, fours of query rows, and the first element of the output.
    tiles: u32,
    units: u32,
    offset: u32,
    // Numbers of a row of the output, and the one of it that the store's first token becomes.
    pitch: u32,
    column: u32,
    // Pairs of angles that a tile has of its own.
    fast_pairs: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sketches: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> angles: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;
@group(0) @binding(4) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;

fn turn_at(index: u32) -> vec2<f32> {
    let two = angles[index / 2u];
    return select(two.xy, two.zw, (index & 1u) == 1u);
}

// The scores of one token.
fn put(rows: Fours, seen: vec4<bool>, token: u32, scores: vec4<f32>) {
    if (token < params.attention.live_first || token >= params.attention.live_end) {
        return;
    }
    for (var i = 0u; i < 4u; i++) {
        let at = params.offset + rows.rows[i] * params.pitch + params.column + token;
        if (rows.exist[i] && at < arrayLength(&output)) {
            output[at] = select(0.0, scores[i], seen[i]);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn scores(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let index = linear_workgroup(place);
    let rows = fours_of(index / params.tiles);
    let tile = (index % params.tiles) * TILE_TOKENS;
    load_query(sketch_at(rows), lane);
    load_mean(sketch_at(rows), tile, lane);
    workgroupBarrier();
    let token = tile + 4u * lane;
    let readable = min(token, 32u * store_tiles() - 4u);
    let scalars = key_scalars(rows.kv_head, readable);
    let four = four_scores(rows, scalars, readable, lane);
    let finite = rows_are_finite(rows);
    if (index / params.tiles < params.units) {
        put(rows, finite & vec4<bool>(scalars.finite.x), token, four[0]);
        put(rows, finite & vec4<bool>(scalars.finite.y), token + 1u, four[1]);
        put(rows, finite & vec4<bool>(scalars.finite.z), token + 2u, four[2]);
        put(rows, finite & vec4<bool>(scalars.finite.w), token + 3u, four[3]);
    }
}
