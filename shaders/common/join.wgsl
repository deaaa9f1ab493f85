// Joins the splits of one query to one partial result for combine.wgsl, one workgroup a query: where there are many, which no single
// invocation should read one after the other. Twin: the sums of attention::rows::attend_rows, which has no splits.

@compute @workgroup_size(WORKGROUP)
fn join(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place);
    let found = gather_row(row, lane);
    put_row(row, found.largest, found.sum, over_groups(found.coded + found.raw, lane), lane);
}
