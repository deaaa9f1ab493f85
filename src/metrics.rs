//! What every report and test measures, defined once: percentiles, correlation, relative errors, and the 8-bit and 4-bit
//! keys that a sketch is compared with.
//!
//! Sums run in f64, in which the square of any f32 fits. What cannot be computed, because there is nothing to compute it
//! from or because it is not finite, is `None`.

use half::f16;
use serde::{Deserialize, Serialize};

/// Channels that share a scale and a zero in [`int4_row`].
pub const INT4_GROUP: usize = 32;

/// Largest code of [`int8_row`].
const INT8_MAX: f32 = 127.0;
/// The smallest normal f16: below it a scale would keep too few bits.
const F16_MIN_NORMAL: f32 = 6.103_515_6e-5;
const F16_MAX: f32 = 65504.0;

fn finite(number: f64) -> Option<f64> {
    number.is_finite().then_some(number)
}

/// The arithmetic mean.
#[must_use]
pub fn mean(numbers: &[f32]) -> Option<f64> {
    if numbers.is_empty() {
        return None;
    }
    finite(numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / numbers.len() as f64)
}

/// The `percent`-th percentile of numbers in ascending order, interpolated linearly between the two nearest ranks: rank
/// `percent / 100 * (n - 1)`, as numpy's default. `None` outside 0 to 100.
#[must_use]
pub fn percentile(ascending: &[f32], percent: f64) -> Option<f64> {
    if !(0.0..=100.0).contains(&percent) {
        return None;
    }
    let rank = percent / 100.0 * ascending.len().checked_sub(1)? as f64;
    let at = |index: f64| ascending.get(index as usize).map(|&x| f64::from(x));
    let (low, high) = (at(rank.floor())?, at(rank.ceil())?);
    finite(low + (high - low) * rank.fract())
}

/// Mean and outer percentiles of a set of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// [`mean`].
    pub mean: Option<f64>,
    /// The 5th [`percentile`].
    pub p5: Option<f64>,
    /// The 95th [`percentile`].
    pub p95: Option<f64>,
}

impl Distribution {
    /// The distribution of these numbers, in any order.
    #[must_use]
    pub fn of(mut numbers: Vec<f32>) -> Self {
        numbers.sort_unstable_by(f32::total_cmp);
        Self { mean: mean(&numbers), p5: percentile(&numbers, 5.0), p95: percentile(&numbers, 95.0) }
    }
}

/// Pearson's correlation of pairs of numbers that are given one after the other.
///
/// Means and squares are updated as Welford (Technometrics 4, 1962) does, so that a mean far from zero costs no digits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Correlation {
    count: u64,
    mean: [f64; 2],
    squares: [f64; 2],
    products: f64,
}

impl Correlation {
    /// Adds a pair.
    pub fn add(&mut self, x: f32, y: f32) {
        self.count += 1;
        let (x, y) = (f64::from(x), f64::from(y));
        let step = 1.0 / self.count as f64;
        let [mean_x, mean_y] = &mut self.mean;
        let (dx, dy) = (x - *mean_x, y - *mean_y);
        *mean_x += dx * step;
        *mean_y += dy * step;
        let [squares_x, squares_y] = &mut self.squares;
        *squares_x += dx * (x - *mean_x);
        *squares_y += dy * (y - *mean_y);
        self.products += dx * (y - *mean_y);
    }

    /// The correlation, -1 to 1; `None` where either side never varies.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        let [x, y] = self.squares;
        if x <= 0.0 || y <= 0.0 {
            return None;
        }
        finite(self.products / x.sqrt() / y.sqrt()).map(|r| r.clamp(-1.0, 1.0))
    }
}

/// `|x - x'|_F / |x|_F` of numbers that are given part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RelativeError {
    difference: f64,
    square: f64,
}

impl RelativeError {
    /// Adds exact numbers and what stands for them; as many as both have.
    pub fn add(&mut self, exact: &[f32], approximate: &[f32]) {
        for (&x, &y) in exact.iter().zip(approximate) {
            let (x, y) = (f64::from(x), f64::from(y));
            self.difference += (x - y) * (x - y);
            self.square += x * x;
        }
    }

    /// The error; `None` where the exact numbers are all zero or there are none.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        if self.square > 0.0 { finite((self.difference / self.square).sqrt()) } else { None }
    }
}

fn to_f16(number: f32) -> f32 {
    f16::from_f32(number.clamp(-F16_MAX, F16_MAX)).to_f32()
}

/// Replaces a row by what symmetric 8-bit codes with one f16 scale make of it: the codes are `x / scale` rounded half to
/// even, `scale = max|x| / 127` rounded to f16. A row that holds a non-finite number stays as it is.
pub fn int8_row(row: &mut [f32]) {
    if row.iter().any(|x| !x.is_finite()) {
        return;
    }
    let largest = row.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    if largest == 0.0 {
        return;
    }
    let scale = to_f16((largest / INT8_MAX).max(F16_MIN_NORMAL));
    row.iter_mut().for_each(|x| *x = (*x / scale).round_ties_even().clamp(-INT8_MAX, INT8_MAX) * scale);
}

/// Replaces a row by what asymmetric 4-bit codes in groups of [`INT4_GROUP`] channels make of it: `zero + code * scale`,
/// `zero` the group's least number and `scale` a fifteenth of its range, both rounded to f16. A row that holds a
/// non-finite number stays as it is.
pub fn int4_row(row: &mut [f32]) {
    if row.iter().any(|x| !x.is_finite()) {
        return;
    }
    row.chunks_mut(INT4_GROUP).for_each(|group| asymmetric(group, 4));
}

/// Replaces finite numbers by what asymmetric codes of 1 to 8 bits make of them: `zero + code * scale`, `zero` the least
/// number and `scale` the range over the largest code, both rounded to f16.
pub fn asymmetric(group: &mut [f32], bits: u8) {
    let top = f32::from(u8::MAX >> 8u8.saturating_sub(bits).min(7));
    let low = group.iter().fold(f32::MAX, |m, x| m.min(*x));
    let high = group.iter().fold(f32::MIN, |m, x| m.max(*x));
    let (zero, scale) = (to_f16(low), to_f16(high / top - low / top));
    let code = |x: f32| {
        if scale > 0.0 { ((x - zero) / scale).round_ties_even().clamp(0.0, top) } else { 0.0 }
    };
    group.iter_mut().for_each(|x| *x = zero + code(*x) * scale);
}

/// Bits per channel of [`int8_row`]: 8 and the scale's 16 shared by the row.
#[must_use]
pub fn int8_bits(dim: usize) -> f64 {
    8.0 + 16.0 / dim as f64
}

/// Bits per channel of [`int4_row`]: 4 and the 32 of a scale and a zero for each group, the last one possibly smaller.
#[must_use]
pub fn int4_bits(dim: usize) -> f64 {
    4.0 + (32 * dim.div_ceil(INT4_GROUP)) as f64 / dim as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy.percentile([1, 2, 3, 10], [0, 5, 50, 95, 100])
        let numbers = [1.0, 2.0, 3.0, 10.0];
        let found = [0.0, 5.0, 50.0, 95.0, 100.0].map(|p| percentile(&numbers, p).unwrap());
        for (found, want) in found.iter().zip([1.0, 1.15, 2.5, 8.95, 10.0]) {
            assert!((found - want).abs() < 1e-12, "{found} {want}");
        }
        assert_eq!(percentile(&[], 5.0), None);
        assert_eq!(percentile(&[7.0], 95.0), Some(7.0));
        assert_eq!(percentile(&numbers, 100.5), None);
        assert_eq!(percentile(&[f32::NAN], 5.0), None);
        let unsorted = Distribution::of(vec![10.0, 1.0, 3.0, 2.0]);
        assert_eq!((unsorted.mean, unsorted.p5), (Some(4.0), percentile(&numbers, 5.0)));
        assert_eq!(Distribution::of(Vec::new()), Distribution::default());
    }

    #[test]
    fn correlation_by_hand_and_far_from_zero() {
        let of = |pairs: &[(f32, f32)]| {
            let mut all = Correlation::default();
            pairs.iter().for_each(|&(x, y)| all.add(x, y));
            all.value()
        };
        // Deviations (-1, 0, 1) and (-4/3, -1/3, 5/3): 3 / sqrt(2 * 14/3).
        let r = of(&[(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)]).unwrap();
        assert!((r - 3.0 / (28.0f64 / 3.0).sqrt()).abs() < 1e-12, "{r}");
        assert!((of(&[(1.0, -2.0), (2.0, -4.0)]).unwrap() + 1.0).abs() < 1e-12);
        let far: Vec<_> = (0..1000u16).map(|i| (1e6 + f32::from(i % 7), -f32::from(i % 7))).collect();
        assert!((of(&far).unwrap() + 1.0).abs() < 1e-9);
        assert_eq!(of(&[(1.0, 1.0), (1.0, 2.0)]), None, "one side does not vary");
        assert_eq!(of(&[(1.0, 1.0)]), None);
        assert_eq!(of(&[(f32::NAN, 1.0), (1.0, 2.0)]), None);
        assert!(
            of(&[(f32::MAX, f32::MAX), (f32::MIN, f32::MIN)]).is_some(),
            "squares of the largest f32 fit"
        );
    }

    #[test]
    fn relative_errors_by_hand() {
        let mut error = RelativeError::default();
        assert_eq!(error.value(), None);
        error.add(&[3.0], &[0.0]);
        error.add(&[4.0], &[4.0]);
        assert_eq!(error.value(), Some(0.6));
        let mut zero = RelativeError::default();
        zero.add(&[0.0], &[1.0]);
        assert_eq!(zero.value(), None);
        let mut large = RelativeError::default();
        large.add(&[f32::MAX], &[f32::MIN]);
        assert_eq!(large.value(), Some(2.0));
    }

    #[test]
    fn codes_stay_within_half_a_step() {
        let row: Vec<f32> = (0..70u8).map(|i| (f32::from(i) * 0.7).sin() * 3.0 + 1.0).collect();
        let (mut eight, mut four) = (row.clone(), row.clone());
        int8_row(&mut eight);
        int4_row(&mut four);
        // Half a step, and f16's 2^-11 of the scale and of the zero over all codes.
        let (step8, step4) = (4.0 / 127.0, 6.0 / 15.0);
        for ((x, a), b) in row.iter().zip(&eight).zip(&four) {
            assert!((x - a).abs() <= 0.5 * step8 + 4.0 * 2f32.powi(-11), "{x} {a}");
            assert!((x - b).abs() <= 0.5 * step4 + 8.0 * 2f32.powi(-11), "{x} {b}");
        }
        assert!(four.iter().zip(&row).any(|(a, b)| (a - b).abs() > step8), "4 bits are coarser than 8");
    }

    #[test]
    fn odd_rows_survive_their_codes() {
        for code in [int8_row, int4_row] {
            let (mut zero, mut broken, mut constant) = ([0.0f32; 5], [1.0, f32::NAN], [2.5f32; 40]);
            code(&mut zero);
            code(&mut broken);
            code(&mut constant);
            assert_eq!(zero, [0.0; 5]);
            assert!(broken[0] == 1.0 && broken[1].is_nan());
            assert!(constant.iter().all(|x| (x - 2.5).abs() < 0.01));
            let mut huge = [f32::MAX, f32::MIN, 1.0];
            code(&mut huge);
            assert!(huge.iter().all(|x| x.is_finite()), "{huge:?}");
        }
    }

    #[test]
    fn bits_count_scales_and_zeros() {
        assert_eq!((int8_bits(64), int4_bits(64)), (8.25, 5.0));
        assert_eq!((int8_bits(80), int4_bits(80)), (8.2, 4.0 + 96.0 / 80.0));
    }
}
