// Means of blocks of consecutive keys, for models whose RoPE is not known: of the finite rows less the sinks. One workgroup a
// block. Twin: qjl::planes::cpu::block_means.

struct Params {
    view: View,
    sinks: u32,
    means_at: u32,
    block: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
@group(0) @binding(2) var<storage, read_write> coded: array<u32>;

var<workgroup> sums: array<f32, HEAD_DIM>;

fn number(head: u32, token: u32, channel: u32) -> f32 {
    let at = view_token(params.view, head, token) + channel;
    return element(input[word_index(at)], at);
}

@compute @workgroup_size(WORKGROUP)
fn block_means(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let blocks = (params.view.tokens + params.block - 1u) / params.block;
    let index = linear_workgroup(place);
    let heads = params.view.rows / params.view.tokens;
    let head = min(index / blocks, heads - 1u);
    let first = (index % blocks) * params.block;
    let last = min(first + params.block, params.view.tokens);
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        sums[i] = 0.0;
    }
    var count = 0.0;
    for (var token = max(first, params.sinks); token < last; token++) {
        var broken = 0.0;
        for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
            let at = view_token(params.view, head, token) + i;
            broken = max(broken, select(1.0, 0.0, element_is_finite(input[word_index(at)], at)));
        }
        if (row_max(vec4<f32>(broken), lane).x == 0.0) {
            count += 1.0;
            for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
                sums[i] += number(head, token, i);
            }
        }
    }
    workgroupBarrier();
    for (var word = lane; word < MEAN_WORDS; word += WORKGROUP) {
        let odd = select(0.0, sums[min(2u * word + 1u, HEAD_DIM - 1u)], 2u * word + 1u < HEAD_DIM);
        let mean = vec2<f32>(sums[2u * word], odd) / max(count, 1.0);
        let at = params.means_at + index * MEAN_WORDS + word;
        if (index / blocks < heads && at < arrayLength(&coded)) {
            coded[at] = pack2x16float(clamp(mean, vec2<f32>(-65504.0), vec2<f32>(65504.0)));
        }
    }
}
