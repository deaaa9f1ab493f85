// Adds the squares of new queries to what tables are made of, token by token. One workgroup a KV head.
// Twin: QueryEnergy::add, in f64.

struct Params {
    view: View,
    group: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
// Of each KV head: the sums of squares of every channel, and how many queries they are of.
@group(0) @binding(2) var<storage, read_write> energies: array<f32>;

fn query_number(head: u32, token: u32, channel: u32) -> f32 {
    let at = view_token(params.view, head, token) + channel;
    return element(input[word_index(at)], at);
}

@compute @workgroup_size(WORKGROUP)
fn query_energy(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let kv_head = linear_workgroup(place);
    let inside = (kv_head + 1u) * params.group <= params.view.heads;
    let first = select(0u, kv_head * params.group, inside);
    for (var row = 0u; row < params.view.tokens * params.group; row++) {
        let head = first + row % params.group;
        let token = row / params.group;
        var broken = 0.0;
        for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
            let at = view_token(params.view, head, token) + i;
            broken = max(broken, select(1.0, 0.0, element_is_finite(input[word_index(at)], at)));
        }
        let finite = row_max(vec4<f32>(broken), lane).x == 0.0;
        for (var i = lane; i <= HEAD_DIM; i += WORKGROUP) {
            let number = query_number(head, token, min(i, HEAD_DIM - 1u));
            let at = kv_head * (HEAD_DIM + 1u) + i;
            if (finite && inside && at < arrayLength(&energies)) {
                energies[at] += select(number * number, 1.0, i == HEAD_DIM);
            }
        }
    }
}
