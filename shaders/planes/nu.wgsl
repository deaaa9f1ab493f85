// The scalars of a coded row, and the counts of odd ones.

// Bits of a segment's nu, clamped to f16's range; the marker where the row is not finite.
fn nu_bits(nu: f32, finite: bool) -> u32 {
    if (!finite) {
        return NON_FINITE_SCALE;
    }
    return half_bits(select(F16_MAX, nu, fits_f16(nu)));
}

// Counts a row that is odd; its sums may have left f32.
fn count_row(finite: bool, zero: bool, nu: vec2<f32>) {
    if (!finite) {
        atomicAdd(&status[NON_FINITE_AT], 1u);
    } else if (zero) {
        atomicAdd(&status[ZERO_AT], 1u);
    }
    if (finite && !(fits_f16(nu.x) && fits_f16(nu.y))) {
        atomicAdd(&status[OVERFLOW_AT], 1u);
    }
}
