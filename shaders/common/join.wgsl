// Joins the splits of one query to one partial result for combine.wgsl, one workgroup a query: where there are many, which no single
// invocation should read one after the other. Twin: the sums of attention::rows::attend_rows, which has no splits.

@compute @workgroup_size(WORKGROUP)
fn join(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place);
    let first = min(row, params.rows - 1u) * params.splits * STRIDE;
    let largest = largest_logit(first, lane);
    let gathered = gather(first, largest, lane);
    let sum = row_sum(vec4<f32>(gathered.sum), lane).x;
    put_row(row, largest, sum, over_groups(gathered.raw, lane), lane);
}
