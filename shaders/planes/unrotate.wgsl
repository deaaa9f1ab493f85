// Combines the splits of coded and raw rows of one query, one workgroup a query: what the coded ones found is turned back by R
// transposed, and both are added on one scale. Leaves one partial result a query for combine.wgsl. Twin: the end of
// qjl::planes::cpu::attend.

fn channel(i: u32) -> f32 {
    return select(0.0, work[min(i, HEAD_DIM - 1u)].x, i < HEAD_DIM);
}

@compute @workgroup_size(WORKGROUP)
fn unrotate(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place);
    let found = gather_row(row, lane);
    let coded = over_groups(found.coded, lane);
    let raw = over_groups(found.raw, lane);
    for (var i = 0u; i < 4u; i++) {
        if (lane < VALUE_LANES && 4u * lane + i < HEAD_DIM) {
            work[4u * lane + i] = vec2<f32>(coded[i], 0.0);
        }
    }
    workgroupBarrier();
    rotate_back(0u, HEAD_DIM, FIRST_AT, FIRST_HADAMARD, FIRST_FACTOR, lane);
    let i = 4u * lane;
    let turned = vec4<f32>(channel(i), channel(i + 1u), channel(i + 2u), channel(i + 3u));
    put_row(row, found.largest, found.sum, raw + turned, lane);
}
