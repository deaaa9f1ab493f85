// Decides every row: one invocation a row, 32 of them a page, whose bits they set together; counts rows by first cause.
// Twin: minicache::cpu::retain.

struct Params {
    pages: u32,
    pages_per_head: u32,
    tokens: u32,
    heads: u32,
    sinks: u32,
    // Tokens that the rule looked at, and which of them the first is here; later ones break no tie.
    rule_tokens: u32,
    rule_first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> rows: array<Row>;
@group(0) @binding(2) var<storage, read> cuts: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read_write> bitmaps: array<u32>;
@group(0) @binding(4) var<storage, read_write> counts: array<atomic<u32>>;
// Each row's cause in four bits.
@group(0) @binding(5) var<storage, read_write> causes: array<u32>;

const CAUSE_WORDS: u32 = PAGE / 8u;
const CAUSES_HERE: u32 = WORKGROUP / 8u;

var<workgroup> bits: array<atomic<u32>, WORKGROUP / PAGE>;
var<workgroup> codes: array<atomic<u32>, CAUSES_HERE>;
var<workgroup> tally: array<atomic<u32>, CAUSES>;

fn cause_of(row: Row, token: u32, index: u32, cut: vec2<u32>) -> u32 {
    if (row.fault == NON_FINITE) {
        return NON_FINITE;
    }
    if (token < params.sinks) {
        return SINK;
    }
    if (MODE != COMPAT && row.fault == MERGED && both_zero(row)) {
        return MERGED;
    }
    let key = order_key(row.cosine);
    if (key < cut.x || (key == cut.x && index <= cut.y)) {
        return RULE;
    }
    return row.fault;
}

@compute @workgroup_size(WORKGROUP)
fn retain(place: Place, id: Invocation) {
    let page = linear_workgroup(place) * (WORKGROUP / PAGE) + id.local_index / PAGE;
    let head = page / params.pages_per_head;
    let token = (page % params.pages_per_head) * PAGE + id.local_index % PAGE;
    if (id.local_index < WORKGROUP / PAGE) {
        atomicStore(&bits[id.local_index], 0u);
    }
    if (id.local_index < CAUSES_HERE) {
        atomicStore(&codes[id.local_index], 0u);
    }
    if (id.local_index < CAUSES) {
        atomicStore(&tally[id.local_index], 0u);
    }
    workgroupBarrier();
    if (page < params.pages && token < params.tokens) {
        let rule_token = params.rule_first + token;
        let rule_index = (head % params.heads) * params.rule_tokens + rule_token;
        let index = select(0xffffffffu, rule_index, rule_token < params.rule_tokens);
        let cause = cause_of(rows[head * params.tokens + token], token, index, cuts[head / params.heads]);
        if (cause != MERGED) {
            atomicOr(&bits[id.local_index / PAGE], 1u << (id.local_index % PAGE));
        }
        atomicOr(&codes[id.local_index / 8u], cause << (4u * (id.local_index % 8u)));
        atomicAdd(&tally[cause], 1u);
    }
    workgroupBarrier();
    if (page < params.pages && id.local_index % PAGE == 0u) {
        bitmaps[page] = atomicLoad(&bits[id.local_index / PAGE]);
    }
    let first_cause = linear_workgroup(place) * CAUSES_HERE;
    if (id.local_index < CAUSES_HERE && first_cause + id.local_index < params.pages * CAUSE_WORDS) {
        causes[first_cause + id.local_index] = atomicLoad(&codes[id.local_index]);
    }
    if (id.local_index < CAUSES) {
        atomicAdd(&counts[id.local_index], atomicLoad(&tally[id.local_index]));
    }
}
