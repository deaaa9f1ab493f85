// The verdict of the rules that look at a whole sequence: rows whose (key(cosine), index) is at most the cut stay raw.
// One workgroup per sequence. Range needs the extremes; Fraction selects the n-th smallest pair digit by digit, so that ties
// fall to the lower index and the count is exact. Twin: minicache::cpu::threshold.

struct Params {
    sequence_rows: u32,
    tokens: u32,
    sinks: u32,
    amount: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> rows: array<Row>;
@group(0) @binding(2) var<storage, read_write> cuts: array<vec2<u32>>;

var<workgroup> bins: array<atomic<u32>, 256>;
var<workgroup> lowest: array<f32, WORKGROUP>;
var<workgroup> highest: array<f32, WORKGROUP>;
// The digits of the wanted pair found so far (key, index), and its rank among the rows that share them.
var<workgroup> found: vec2<u32>;
var<workgroup> rank: u32;

fn is_candidate(index: u32, row: Row) -> bool {
    return row.fault != NON_FINITE && index % params.tokens >= params.sinks && (MODE == COMPAT || !both_zero(row));
}

fn range_cut(base: u32, lane: u32) -> vec2<u32> {
    var low = 2.0;
    var high = -2.0;
    for (var i = lane; i < params.sequence_rows; i += WORKGROUP) {
        let row = rows[base + i];
        if (is_candidate(i, row)) {
            low = min(low, row.cosine);
            high = max(high, row.cosine);
        }
    }
    lowest[lane] = low;
    highest[lane] = high;
    workgroupBarrier();
    for (var width = WORKGROUP / 2u; width > 0u; width >>= 1u) {
        if (lane < width) {
            lowest[lane] = min(lowest[lane], lowest[lane + width]);
            highest[lane] = max(highest[lane], highest[lane + width]);
        }
        workgroupBarrier();
    }
    if (lowest[0] > highest[0]) {
        return vec2<u32>();
    }
    return vec2<u32>(order_key(lowest[0] + params.amount * (highest[0] - lowest[0])) - 1u, 0xffffffffu);
}

// Counts, for one digit, the candidates that agree with the digits found.
fn count_digit(base: u32, lane: u32, round: u32) {
    let shift = 24u - 8u * (round % 4u);
    let above = select(0xffffffffu << ((shift + 8u) & 31u), 0u, shift == 24u);
    for (var i = lane; i < params.sequence_rows; i += WORKGROUP) {
        let row = rows[base + i];
        let pair = vec2<u32>(order_key(row.cosine), i);
        let part = select(pair.y, pair.x, round < 4u);
        let known = select(found.y, found.x, round < 4u);
        let same_key = round < 4u || pair.x == found.x;
        if (is_candidate(i, row) && same_key && ((part ^ known) & above) == 0u) {
            atomicAdd(&bins[(part >> shift) & 255u], 1u);
        }
    }
}

// Walks the bins to the one that holds the wanted rank.
fn take_digit(round: u32) {
    let shift = 24u - 8u * (round % 4u);
    var digit = 0u;
    for (var left = rank; digit < 255u; digit++) {
        let here = atomicLoad(&bins[digit]);
        if (left <= here) {
            break;
        }
        left -= here;
        rank = left;
    }
    if (round < 4u) {
        found.x |= digit << shift;
    } else {
        found.y |= digit << shift;
    }
}

fn fraction_cut(base: u32, lane: u32) -> vec2<u32> {
    atomicStore(&bins[lane], 0u);
    workgroupBarrier();
    for (var i = lane; i < params.sequence_rows; i += WORKGROUP) {
        if (is_candidate(i, rows[base + i])) {
            atomicAdd(&bins[0], 1u);
        }
    }
    workgroupBarrier();
    if (lane == 0u) {
        found = vec2<u32>();
        rank = u32(ceil(params.amount * f32(atomicLoad(&bins[0]))));
    }
    workgroupBarrier();
    let wanted = rank;
    for (var round = 0u; round < 8u; round++) {
        workgroupBarrier();
        atomicStore(&bins[lane], 0u);
        workgroupBarrier();
        count_digit(base, lane, round);
        workgroupBarrier();
        if (lane == 0u) {
            take_digit(round);
        }
    }
    workgroupBarrier();
    return select(found, vec2<u32>(), wanted == 0u);
}

@compute @workgroup_size(WORKGROUP)
fn threshold(place: Place, id: Invocation) {
    let sequence = linear_workgroup(place);
    let base = sequence * params.sequence_rows;
    var cut: vec2<u32>;
    if (FRACTION) {
        cut = fraction_cut(base, id.local_index);
    } else {
        cut = range_cut(base, id.local_index);
    }
    if (id.local_index == 0u && sequence < arrayLength(&cuts)) {
        cuts[sequence] = cut;
    }
}
