// Takes coded directions back to f16 slots, in the magnitudes' scale: R transposed times the levels. Two slots a workgroup. Twin: minicache::cpu::expand.

struct Params {
    coded: Sections,
    slots: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> store: array<u32>;
@group(0) @binding(2) var<storage, read_write> directions: array<u32>;

const PAIRS: u32 = (HEAD_DIM + 1u) / 2u;

fn level(slot: u32, channel: u32) -> f32 {
    let row = params.coded.slots + min(slot, params.slots - 1u) * CODE_WORDS;
    let bit = channel * BITS;
    let words = vec2<u32>(store[row + bit / 32u], store[row + min(bit / 32u + 1u, CODE_WORDS - 1u)]);
    return LEVEL_UNIT * level_in(words, bit & 31u, BITS);
}

fn number(channel: u32) -> vec2<f32> {
    return select(vec2<f32>(), work[min(channel, HEAD_DIM - 1u)], channel < HEAD_DIM);
}

fn put(slot: u32, pair: u32, word: u32) {
    let at = slot * PAIRS + pair;
    if (slot < params.slots && at < arrayLength(&directions)) {
        directions[at] = word;
    }
}

@compute @workgroup_size(WORKGROUP)
fn expand(place: Place, id: Invocation) {
    let lane = id.local_index;
    let first = 2u * linear_workgroup(place);
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        work[i] = vec2<f32>(level(first, i), level(first + 1u, i));
    }
    workgroupBarrier();
    rotate_back(0u, HEAD_DIM, 0u, HADAMARD, FACTOR, lane);
    for (var pair = lane; pair < PAIRS; pair += WORKGROUP) {
        let low = number(2u * pair);
        let high = number(2u * pair + 1u);
        put(first, pair, pack2x16float(vec2<f32>(low.x, high.x)));
        put(first + 1u, pair, pack2x16float(vec2<f32>(low.y, high.y)));
    }
}
