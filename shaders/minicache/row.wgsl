// What the similarity kernel finds for one row of a pair, and the causes that keep a row raw.

struct Row {
    cosine: f32,
    lower: f32,
    upper: f32,
    weight_lower: f32,
    weight_upper: f32,
    fault: u32,
}

const MERGED: u32 = 0u;
const NON_FINITE: u32 = 1u;
const SINK: u32 = 2u;
const RULE: u32 = 3u;
const ANTIPARALLEL: u32 = 4u;
const RANGE: u32 = 5u;

const SHARED: u32 = 0u;
const ANCHOR: u32 = 1u;
const COMPAT: u32 = 2u;

fn both_zero(row: Row) -> bool {
    return row.fault != NON_FINITE && row.lower == 0.0 && row.upper == 0.0;
}

// |upper| / |lower|, 0 for a zero upper row.
fn norm_ratio(upper: f32, lower: f32) -> f32 {
    return select(upper / max(lower, 1.1754944e-38), 0.0, upper == 0.0);
}

fn anchor_ratio(row: Row) -> f32 {
    return norm_ratio(row.upper, row.lower);
}

// A key that orders finite f32 as unsigned integers do; both zeros share one.
fn order_key(x: f32) -> u32 {
    let bits = select(bitcast<u32>(x), 0u, x == 0.0);
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}
