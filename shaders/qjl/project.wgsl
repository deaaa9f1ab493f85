// Queries as S q, made ready to be scored against sketched keys, two rows a workgroup; planes/sketch.wgsl lists what is left of each.
// A sign stands for FACTOR nu, so that FACTOR is put into the query. Twin: qjl::planes::cpu::project.

var<workgroup> work: array<vec2<f32>, HEAD_DIM>;

// Queries are sketched as they are; only keys have a mean.
fn source_mean(row: u32, channel: u32) -> f32 {
    return 0.0;
}

// Number `i` of a row as it has been put, which a barrier makes known.
fn part_of_row(row: u32, i: u32) -> f32 {
    return bitcast<f32>(sketches[min(place_of_row(row, i), arrayLength(&sketches) - 1u)]);
}

// Everything but S q of one of the two rows, whose numbers sum up to `sum`.
fn put_rest(row: u32, sum: f32, finite: bool, lane: u32) {
    let readable = min(row, params.view.rows - 1u);
    put_groups(row, GROUPS, lane);
    if (lane == 0u) {
        put(row, MINUS_AT, sum);
        put(row, MINUS_AT + 1u, 0.0);
        put(row, FINITE_AT, select(0.0, 1.0, finite));
    }
    put_mean(row, readable, table_of(readable), finite, lane);
}

@compute @workgroup_size(WORKGROUP)
fn project(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let pair = load_row_pair(2u * linear_workgroup(place), lane);
    var sums = vec4<f32>();
    for (var block = 0u; block < BLOCKS; block++) {
        project_block(block, lane);
        for (var i = lane; i < BLOCK; i += WORKGROUP) {
            let bit = block * BLOCK + i;
            if (bit < SKETCH_DIM) {
                let numbers = FACTOR * projected[i];
                sums += vec4<f32>(numbers, 0.0, 0.0);
                put(pair.rows.x, bit, 2.0 * numbers.x);
                put(pair.rows.y, bit, 2.0 * numbers.y);
            }
        }
        workgroupBarrier();
    }
    for (var i = SKETCH_DIM + lane; i < QUERY_CHANNELS; i += WORKGROUP) {
        put(pair.rows.x, i, 0.0);
        put(pair.rows.y, i, 0.0);
    }
    sums = row_sum(sums, lane);
    storageBarrier();
    put_rest(pair.rows.x, sums.x, pair.finite.x, lane);
    put_rest(pair.rows.y, sums.y, pair.finite.y, lane);
}
