// Tests on bits: comparisons with NaN may be compiled away (Metal's fast math, and probed elsewhere).

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

fn inverse_or_zero(x: f32) -> f32 {
    return select(0.0, 1.0 / max(x, 1.1754944e-38), x > 0.0);
}
