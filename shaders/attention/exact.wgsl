// Exact attention over raw rows: the baseline, and how a cache attends to the rows that it has not folded.
// Twin: attention::cpu::exact.

struct Params {
    attention: Attention,
    // Offset of the first element, then batch, head and token strides.
    query: vec4<u32>,
    key: vec4<u32>,
    value: vec4<u32>,
    // Fours of query rows.
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> queries: array<u32>;
@group(0) @binding(4) var<storage, read> spans: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> partials: array<vec4<f32>>;

fn key_scale(kv_head: u32, token: u32) -> f32 {
    return 1.0;
}

fn value_scale(kv_head: u32, token: u32) -> f32 {
    return 1.0;
}

@compute @workgroup_size(WORKGROUP)
fn exact(place: Place, id: Invocation) {
    flash_attend(linear_workgroup(place), lane_of(id));
}
