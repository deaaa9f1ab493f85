// Spherical interpolation without built-in trigonometry, whose allowed error is 2^-11; the same polynomials as
// src/minicache/slerp.rs (minimax fits, relative error below 1.2e-7).

// Below this length of the sum of two unit rows they count as opposite: rounding would decide their common direction.
const OPPOSITE: f32 = 0.0009765625;
const PI: f32 = 3.14159265;

// atan(y / x) for non-negative y and x, not both zero.
fn atan_ratio(y: f32, x: f32) -> f32 {
    let ratio = min(y, x) / max(y, x);
    let z = ratio * ratio;
    var sum = -0.0017539251;
    sum = sum * z + 0.010726917;
    sum = sum * z - 0.030804537;
    sum = sum * z + 0.05755203;
    sum = sum * z - 0.0837731;
    sum = sum * z + 0.10942029;
    sum = sum * z - 0.14261933;
    sum = sum * z + 0.19998266;
    sum = sum * z - 0.33333284;
    sum = sum * z + 1.0;
    let angle = ratio * sum;
    return select(angle, 0.5 * PI - angle, y > x);
}

// sin(x) for x in [0, pi].
fn arc_sin_of(x: f32) -> f32 {
    let folded = min(x, PI - x);
    let z = folded * folded;
    var sum = 2.6019024e-6;
    sum = sum * z - 0.00019807418;
    sum = sum * z + 0.008333025;
    sum = sum * z - 0.16666657;
    sum = sum * z + 1.0;
    return folded * sum;
}

// What each row's unit vector contributes to the shared direction, from the lengths of the unit rows' sum (2 cos(W/2)) and
// difference (2 sin(W/2)): the angle and the norm without the cancellation that acos(c) and 2 + 2c suffer.
fn slerp_weights(lower_zero: bool, upper_zero: bool, sum: f32, difference: f32, t: f32) -> vec2<f32> {
    if (lower_zero || upper_zero) {
        return vec2<f32>(select(1.0, 0.0, lower_zero), select(1.0, 0.0, upper_zero));
    }
    var weights = vec2<f32>(1.0, 1.0);
    if (t != 0.5) {
        let half_angle = atan_ratio(difference, max(sum, 1e-30));
        // Where the rows are parallel to rounding, both sines vanish and the interpolation is linear.
        if (half_angle < 1e-6) {
            weights = vec2<f32>(1.0 - t, t);
        } else {
            weights = vec2<f32>(arc_sin_of((1.0 - t) * 2.0 * half_angle), arc_sin_of(t * 2.0 * half_angle));
        }
    }
    let mean = 0.5 * (weights.x + weights.y) * sum;
    let offset = 0.5 * (weights.x - weights.y) * difference;
    return weights * inverse_or_zero(sqrt(mean * mean + offset * offset));
}
