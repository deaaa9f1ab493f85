// What can be measured and stored of a row; the same bounds as in src/minicache/cpu.rs.

const F16_MAX: f32 = 65504.0;
// Rows whose largest number lies outside stay raw: the inverse of their norm, or a weight, would leave f32's normal range.
const MEASURABLE: vec2<f32> = vec2<f32>(7.888609e-31, 1.2676506e30);
// An Anchor ratio may be rounded up to f16 by this factor's inverse.
const RATIO_HEADROOM: f32 = 1.0 - 1.0 / 2048.0;

fn measurable(peak: f32) -> bool {
    return peak == 0.0 || (peak >= MEASURABLE.x && peak <= MEASURABLE.y);
}

fn storable(magnitude: f32) -> bool {
    return magnitude == 0.0 || (magnitude >= MAGNITUDE_MIN && magnitude <= MAGNITUDE_MAX);
}
