// Copies rows, bit for bit, from a host's view into a block whose rows begin at whole words. One invocation per word.

struct Params {
    view: Output,
    // Offset of the first element, then batch, head and token strides.
    source: vec4<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> rows: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<u32>;

fn row_bits(row: u32, channel: u32) -> u32 {
    let head = row / params.view.tokens;
    let start = params.source.x + head * params.source.z + (row % params.view.tokens) * params.source.w;
    return element_bits(rows[word_index(start + channel)], start + channel);
}

@compute @workgroup_size(WORKGROUP)
fn append(place: Place, id: Invocation) {
    store_word(linear_workgroup(place) * WORKGROUP + id.local_index);
}
