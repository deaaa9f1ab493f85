// A row's f16 scale: its bits, the marker of a row that must not be seen, and the counts of odd rows in `status`.

const NORM: u32 = 0u;
const MSE: u32 = 1u;
const NON_FINITE_SCALE: u32 = 0x7e00u;
const NON_FINITE_AT: u32 = 0u;
const ZERO_AT: u32 = 1u;
const OVERFLOW_AT: u32 = 2u;
const F16_MAX: f32 = 65504.0;

// Whether a magnitude can be an f16. Compared as an integer, which sees NaN and infinity whatever fast math assumes.
fn fits_f16(magnitude: f32) -> bool {
    return bitcast<u32>(magnitude) <= bitcast<u32>(F16_MAX);
}

fn half_bits(x: f32) -> u32 {
    return pack2x16float(vec2<f32>(x, 0.0)) & 0xffffu;
}

// A finite row's scale from `least` up, clamped to f16's range; 0 for zeros, the marker for non-finite rows, 0 past the end.
fn stored_scale(scale: f32, least: f32, finite: bool, zero: bool, inside: bool) -> u32 {
    if (!inside) {
        return 0u;
    }
    if (!finite) {
        atomicAdd(&status[NON_FINITE_AT], 1u);
        return NON_FINITE_SCALE;
    }
    if (zero) {
        atomicAdd(&status[ZERO_AT], 1u);
        return 0u;
    }
    // Too large, or the sums of a finite row left f32.
    if (!fits_f16(scale)) {
        atomicAdd(&status[OVERFLOW_AT], 1u);
        return half_bits(F16_MAX);
    }
    return half_bits(max(scale, least));
}

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
