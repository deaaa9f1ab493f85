//! Spherical interpolation without built-in trigonometry: WGSL's `acos`, `atan2` and `sin` may be wrong by 2^-11, so twin and
//! kernel share these polynomials (minimax fits, relative error below 1.2e-7 in f32).

/// Below this length of the sum of two unit rows they count as opposite: rounding would decide their common direction.
pub(crate) const OPPOSITE: f32 = 1.0 / 1024.0;

/// `atan(x) / x` in powers of `x^2`, for `x` in `[0, 1]`.
const ATAN: [f32; 10] = [
    0.999_999_997_6,
    -0.333_332_84,
    0.199_982_66,
    -0.142_619_33,
    0.109_420_285,
    -0.083_773_11,
    0.057_552_03,
    -0.030_804_535,
    0.010_726_917,
    -0.001_753_925_1,
];
/// `sin(x) / x` in powers of `x^2`, for `x` in `[0, pi / 2]`.
const SIN: [f32; 5] = [0.999_999_994_7, -0.166_666_57, 0.008_333_025_1, -0.000_198_074_18, 2.601_902_3e-6];

/// What each row's unit vector contributes to the shared direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    pub(crate) lower: f32,
    pub(crate) upper: f32,
}

/// Weights at `t` from the lengths of the unit rows' sum (`2 cos(W/2)`) and difference (`2 sin(W/2)`), normalised. The two
/// lengths give the angle and the norm without the cancellation that `acos(c)` and `2 + 2c` suffer.
pub(crate) fn weights(lower_zero: bool, upper_zero: bool, sum: f32, difference: f32, t: f32) -> Weights {
    if lower_zero || upper_zero {
        return Weights {
            lower: if lower_zero { 0.0 } else { 1.0 },
            upper: if upper_zero { 0.0 } else { 1.0 },
        };
    }
    let half_angle = atan_ratio(difference, sum);
    // Where the rows are parallel to rounding, both sines vanish and the interpolation is linear.
    let linear = half_angle < 1e-6 || t == 0.5;
    let (a, b) = if t == 0.5 {
        (1.0, 1.0)
    } else if linear {
        (1.0 - t, t)
    } else {
        (sin((1.0 - t) * 2.0 * half_angle), sin(t * 2.0 * half_angle))
    };
    let (mean, offset) = (0.5 * (a + b) * sum, 0.5 * (a - b) * difference);
    let norm = (mean * mean + offset * offset).sqrt();
    let inverse = if norm > 0.0 { 1.0 / norm } else { 0.0 };
    Weights { lower: a * inverse, upper: b * inverse }
}

/// `atan(y / x)` for non-negative `y` and `x`, not both zero.
fn atan_ratio(y: f32, x: f32) -> f32 {
    let ratio = y.min(x) / y.max(x);
    let square = ratio * ratio;
    let angle = ratio * ATAN.iter().rev().fold(0.0, |sum, &term| sum * square + term);
    if y > x { std::f32::consts::FRAC_PI_2 - angle } else { angle }
}

/// `sin(x)` for `x` in `[0, pi]`.
fn sin(x: f32) -> f32 {
    let x = x.min(std::f32::consts::PI - x);
    let square = x * x;
    x * SIN.iter().rev().fold(0.0, |sum, &term| sum * square + term)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polynomials_follow_the_functions() {
        for i in 0..=10_000 {
            let x = f64::from(i) / 10_000.0;
            let angle = f64::from(atan_ratio(x as f32, 1.0));
            let exact = f64::from(x as f32).atan();
            assert!((angle - exact).abs() <= 2e-7 * exact, "atan {x}: {angle} {exact}");
            let steep = f64::from(atan_ratio(1.0, x as f32));
            assert!((steep - 1f64.atan2(f64::from(x as f32))).abs() <= 2e-7, "atan 1/{x}");
            let x = (x * std::f64::consts::PI) as f32;
            let exact = f64::from(x).sin();
            // Near pi the argument's own rounding (half an ulp of pi) is what remains.
            assert!((f64::from(sin(x)) - exact).abs() <= 2e-7 * exact + 1.3e-7, "sin {x}");
        }
    }

    #[test]
    fn weights_make_a_unit_vector_at_every_angle() {
        for degrees in 1..180 {
            let angle = f64::from(degrees).to_radians();
            let (sum, difference) = (2.0 * (angle / 2.0).cos(), 2.0 * (angle / 2.0).sin());
            for t in [0.0, 0.3, 0.5, 0.6, 1.0] {
                let w = weights(false, false, sum as f32, difference as f32, t);
                let (a, b) = (f64::from(w.lower), f64::from(w.upper));
                let exact_a = ((1.0 - f64::from(t)) * angle).sin() / angle.sin();
                let exact_b = (f64::from(t) * angle).sin() / angle.sin();
                // The weights' slope in the angle is at most 1 / sin^2; the angle is good to a few f32 ulp.
                let tolerance = 1e-6 / (angle.sin() * angle.sin());
                assert!((a - exact_a).abs() < tolerance && (b - exact_b).abs() < tolerance, "{degrees} {t}");
            }
        }
    }
}
