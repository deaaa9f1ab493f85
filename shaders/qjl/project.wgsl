// Queries as S q in f32, two rows a workgroup. After a row's SKETCH_DIM numbers stands 1, or 0 where the query holds a
// non-finite number (its numbers are then zeros). Twin: qjl::cpu::project.

struct Params {
    view: View,
    // The row that the view's first becomes.
    first_row: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
@group(0) @binding(3) var<storage, read_write> sketches: array<f32>;

fn store(row: u32, at: u32, number: f32) {
    let index = (params.first_row + row) * (SKETCH_DIM + 1u) + at;
    if (row < params.view.rows && index < arrayLength(&sketches)) {
        sketches[index] = number;
    }
}

@compute @workgroup_size(WORKGROUP)
fn project(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let pair = load_row_pair(2u * linear_workgroup(place), lane);
    for (var block = 0u; block < BLOCKS; block++) {
        project_block(block, lane);
        for (var i = lane; i < BLOCK; i += WORKGROUP) {
            let bit = block * BLOCK + i;
            if (bit < SKETCH_DIM) {
                store(pair.rows.x, bit, projected[i].x);
                store(pair.rows.y, bit, projected[i].y);
            }
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        store(pair.rows.x, SKETCH_DIM, select(0.0, 1.0, pair.finite.x));
        store(pair.rows.y, SKETCH_DIM, select(0.0, 1.0, pair.finite.y));
    }
}
