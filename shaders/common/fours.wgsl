// Four query rows of one KV head, with which a workgroup attends together. The kernel has `attention: Attention` in its params.

// Where they stand among the fours of all heads; the KV head as the store counts it; the sequence; and of each row its number, the
// query's index, and whether there is one.
struct Fours {
    place: u32,
    kv_head: u32,
    sequence: u32,
    rows: vec4<u32>,
    queries: vec4<u32>,
    exist: vec4<bool>,
}

fn fours_of(index: u32) -> Fours {
    let sizes = params.attention;
    let rows_a_head = sizes.group * sizes.queries;
    let fours = (rows_a_head + 3u) / 4u;
    let unit = min(index, (sizes.rows / rows_a_head) * fours - 1u);
    let kv_head = unit / fours;
    let row = 4u * (unit % fours) + vec4<u32>(0u, 1u, 2u, 3u);
    let first_head = (sizes.first_row / (sizes.queries * sizes.query_heads)) * sizes.kv_heads;
    let head = first_head + kv_head;
    // One by one: naga's text for a quotient of vectors is none that Metal is sure to take.
    let queries = vec4<u32>(row.x / sizes.group, row.y / sizes.group, row.z / sizes.group, row.w / sizes.group);
    let rows = (head * sizes.group + row - queries * sizes.group) * sizes.queries + queries;
    let exist = row < vec4<u32>(rows_a_head);
    return Fours(head * fours + unit % fours, kv_head, head / sizes.kv_heads, rows, queries, exist);
}

// A matrix whose columns are each multiplied by a number.
fn columns_times(columns: mat4x4<f32>, by: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(columns[0] * by.x, columns[1] * by.y, columns[2] * by.z, columns[3] * by.w);
}
