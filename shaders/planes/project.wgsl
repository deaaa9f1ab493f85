// Queries made ready to be scored against coded keys, one workgroup a query; sketch.wgsl lists what is left of each. Rows that fill
// up the last four of a KV head stay zeros. Twin: qjl::planes::cpu::project.

// The sum of a segment of the rotated query.
fn segment_sum(first: u32, count: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var i = lane; i < count; i += WORKGROUP) {
        sum += work[first + i].x;
    }
    return row_sum(vec4<f32>(sum), lane).x;
}

// Number `i` of the rotated query, times 2: of both segments in whole groups, 0 behind the end of each.
fn part_of_row(row: u32, i: u32) -> f32 {
    if (i < 32u * FIRST_GROUPS) {
        return doubled(0u, FIRST_CHANNELS, i);
    }
    return doubled(FIRST_CHANNELS, SECOND_CHANNELS, i - 32u * FIRST_GROUPS);
}

// Twice a number of a segment of the rotated query; 0 behind its end.
fn doubled(first: u32, channels: u32, i: u32) -> f32 {
    return select(0.0, 2.0 * work[first + min(i, max(channels, 1u) - 1u)].x, i < channels);
}

@compute @workgroup_size(WORKGROUP)
fn project(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let row = linear_workgroup(place);
    let readable = min(row, params.view.rows - 1u);
    let table = table_of(readable);
    var broken = 0.0;
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let at = view_row(params.view, readable) + i;
        broken = max(broken, select(1.0, 0.0, element_is_finite(input[word_index(at)], at)));
    }
    let finite = row_max(vec4<f32>(broken), lane).x == 0.0;
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let at = channels[table + i];
        work[i] = vec2<f32>(select(0.0, query_number(readable, at.channel) * at.sigma, finite), 0.0);
    }
    workgroupBarrier();
    rotate(0u, FIRST_CHANNELS, FIRST_AT, FIRST_HADAMARD, FIRST_FACTOR, lane);
    if (SECOND_PLANES > 0u) {
        rotate(FIRST_CHANNELS, SECOND_CHANNELS, SECOND_AT, SECOND_HADAMARD, SECOND_FACTOR, lane);
    }
    let first_sum = segment_sum(0u, FIRST_CHANNELS, lane);
    let second_sum = segment_sum(FIRST_CHANNELS, SECOND_CHANNELS, lane);
    for (var i = lane; i < QUERY_CHANNELS; i += WORKGROUP) {
        put(row, i, part_of_row(row, i));
    }
    put_groups(row, GROUPS, lane);
    if (lane == 0u) {
        put(row, MINUS_AT, f32((1u << FIRST_PLANES) - 1u) * first_sum);
        put(row, MINUS_AT + 1u, f32((1u << SECOND_PLANES) - 1u) * second_sum);
        put(row, FINITE_AT, select(0.0, 1.0, finite));
    }
    put_mean(row, readable, table, finite, lane);
}
