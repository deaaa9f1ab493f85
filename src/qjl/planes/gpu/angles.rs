//! Angles of RoPE pairs on the device: `shaders/planes/angle.wgsl` and `mean.wgsl`.

use super::super::Codec;
use super::variants::{attend_tokens, pairs};
use crate::error::{Error, Result};
use crate::gpu::{Gpu, index32};
use crate::rope::{ANGLE_TILE, Rope};

/// Cosines and sines of every pair's angle: coarse rows for tiles of positions, then fine rows for those within one; then what
/// the tokens that a workgroup attends to together need ([`tile_angles`]).
#[derive(Clone, Debug)]
pub(in crate::qjl) struct Angles {
    pub(in crate::qjl) buffer: wgpu::Buffer,
    /// Index of the first fine row.
    pub(in crate::qjl) fine_at: u32,
    /// Where the angles of a workgroup's tokens begin, in fours of numbers.
    pub(in crate::qjl) tile_at: u32,
    /// Pairs that have angles there; those behind them are slow.
    pub(in crate::qjl) fast_pairs: u32,
    /// Positions below this one have angles.
    pub(in crate::qjl) end: u64,
}

impl Angles {
    /// No angles, for rows that are not centred.
    pub(super) fn none(gpu: &Gpu) -> Result<Self> {
        let buffer = gpu.storage("angles", 16)?;
        Ok(Self { buffer, fine_at: 0, tile_at: 0, fast_pairs: 0, end: u64::MAX })
    }

    /// The angles of positions up to `last`, rounded up to a whole tile.
    pub(in crate::qjl) fn upload(gpu: &Gpu, codec: &Codec, last: u32) -> Result<Self> {
        // Without a mean that turns no kernel reads an angle, and one row does.
        let turns = codec.mean_rope().is_some();
        let tile = if turns { attend_tokens(codec) } else { 0 };
        let whole = if turns { u64::from(last / ANGLE_TILE) + 1 } else { 1 };
        // A workgroup's tile begins at a position that has angles, and its middle is asked for too.
        let coarse = whole + (tile as u64 / 2).div_ceil(u64::from(ANGLE_TILE));
        let fast_pairs = fast_pairs(codec, tile);
        let of_tile = (8 + tile / 2) * fast_pairs + SLOW_DEGREES * pairs(codec).next_multiple_of(4);
        let need = (coarse + u64::from(ANGLE_TILE)) * pairs(codec) as u64 * 8 + 4 * of_tile as u64;
        let have = gpu.caps().largest_binding();
        if need > have {
            return Err(Error::Limit { what: "bytes of the angles of all positions", need, have });
        }
        let mut rows: Vec<[f32; 2]> = Vec::new();
        let mut push = |position: u32| {
            rows.extend(codec.mean_rope().into_iter().flat_map(|rope| rope.angles(position)));
            rows.push([1.0, 0.0]);
        };
        let coarse = coarse as u32;
        (0..coarse).for_each(|tile| push(tile.saturating_mul(ANGLE_TILE)));
        (0..ANGLE_TILE).for_each(&mut push);
        let mut numbers: Vec<f32> = rows.drain(..).flatten().collect();
        numbers.resize(numbers.len().next_multiple_of(4), 0.0);
        let tile_at = index32(numbers.len() / 4)?;
        numbers.extend(tile_angles(codec, tile, fast_pairs));
        Ok(Self {
            buffer: gpu.upload("angles", bytemuck::cast_slice(&numbers))?,
            fine_at: coarse * pairs(codec) as u32,
            tile_at,
            fast_pairs: fast_pairs as u32,
            end: if turns { whole * u64::from(ANGLE_TILE) } else { u64::MAX },
        })
    }
}

/// Coefficients of the slow pairs' polynomial: `shaders/planes/mean.wgsl`.
const SLOW_DEGREES: usize = 8;
/// How far a slow pair turns at the most from the middle of a tile to its end, in radians.
const SLOW_ANGLE: f64 = 0.5;

/// Of the pairs that turn.
fn frequencies(codec: &Codec) -> &[f64] {
    codec.mean_rope().map_or(&[], Rope::inv_freq)
}

/// Pairs up to the last one that is not slow over a tile of so many tokens.
fn fast_pairs(codec: &Codec, tokens: usize) -> usize {
    let frequencies = frequencies(codec);
    let slow = |frequency: &f64| frequency.abs() * tokens as f64 / 2.0 <= SLOW_ANGLE;
    frequencies.iter().rposition(|frequency| !slow(frequency)).map_or(0, |last| last + 1)
}

/// What a tile of so many tokens needs. Of each fast pair cosine and sine of 1, 2 and 3 positions in eight numbers; then, pair by
/// pair, cosine and sine of every fourth token, counted from the tile's middle. Then, degree by degree, of each slow pair the
/// factor of the series of cosine and sine where its angle at the end of the tile is 1, in whole fours of pairs: the last pair,
/// which does not turn, is one of them.
fn tile_angles(codec: &Codec, tokens: usize, fast_pairs: usize) -> Vec<f32> {
    let mut numbers = Vec::new();
    let middle = tokens as f64 / 2.0;
    let fast = || frequencies(codec).iter().take(fast_pairs);
    let turn = |angle: f64| [angle.cos() as f32, angle.sin() as f32];
    for frequency in fast() {
        numbers.extend((1..4).flat_map(|step| turn(frequency * f64::from(step))));
        numbers.extend([0.0; 2]);
    }
    for frequency in fast() {
        numbers.extend((0..tokens).step_by(4).flat_map(|token| turn(frequency * (token as f64 - middle))));
    }
    let slow: Vec<f64> =
        frequencies(codec).iter().skip(fast_pairs).map(|f| f * middle).chain([0.0]).collect();
    let mut factorial = 1.0;
    for degree in 0..SLOW_DEGREES as i32 {
        factorial *= f64::from(degree.max(1));
        // The derivatives of A cos + B sin at 0: A, B, -A, -B, and so on.
        let sign = if degree % 4 < 2 { 1.0 } else { -1.0 };
        numbers.extend(slow.iter().map(|angle| (sign * angle.powi(degree) / factorial) as f32));
        numbers.resize(numbers.len().next_multiple_of(4), 0.0);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::RopeLayout;
    use crate::qjl::planes::PlanesOptions;

    /// A cos + B sin of every pair, summed at each token of a tile by the table as the kernel reads it: A and B are those of the
    /// middle, and the last pair does not turn.
    fn by_table(table: &[f32], fast: usize, tokens: usize, a: &[f64], b: &[f64]) -> Vec<f64> {
        let pair_of = |at: usize| [f64::from(table[at]), f64::from(table[at + 1])];
        let factors = &table[8 * fast + fast * tokens / 2..];
        let fours = (a.len() - fast).next_multiple_of(4);
        assert_eq!(factors.len(), SLOW_DEGREES * fours);
        let coefficient = |degree: usize| -> f64 {
            let of_pairs = if degree.is_multiple_of(2) { a } else { b };
            let row = &factors[degree * fours..];
            of_pairs[fast..].iter().zip(row).map(|(number, &factor)| number * f64::from(factor)).sum()
        };
        let half = tokens as f64 / 2.0;
        let at_token = |token: usize| {
            let x = (token as f64 - half) / half;
            let slow: f64 = (0..SLOW_DEGREES).map(|degree| coefficient(degree) * x.powi(degree as i32)).sum();
            let turned = |pair: usize| {
                let [c, s] = pair_of(8 * fast + pair * tokens / 2 + token / 4 * 2);
                let [near, mid] = match token % 4 {
                    0 => [1.0, 0.0],
                    step => pair_of(8 * pair + 2 * (step - 1)),
                };
                a[pair] * (c * near - s * mid) + b[pair] * (s * near + c * mid)
            };
            slow + (0..fast).map(turned).sum::<f64>()
        };
        (0..tokens).map(at_token).collect()
    }

    #[test]
    fn a_tile_turns_the_mean_as_rope_does() {
        let own = |frequencies: &[f64]| {
            Rope::new(64, 2 * frequencies.len(), frequencies.to_vec(), RopeLayout::HalfSplit).unwrap()
        };
        let theta = |theta, width| Rope::from_theta(64, width, theta, RopeLayout::HalfSplit).unwrap();
        let ropes = [
            Some(theta(1e4, 64)),
            Some(theta(5e5, 24)),
            Some(own(&[1e-3, -1.5, 0.0, 1e-9, -4e-3, 0.02])),
            Some(own(&[7.8e-3, -7.8e-3, 1e-4])),
            Some(own(&[3.0, 2.0, 1.0])),
            None,
        ];
        for (rope, value_dim) in ropes.into_iter().flat_map(|rope| [(rope.clone(), 64), (rope, 257)]) {
            let codec = Codec::new(PlanesOptions::default(), 64, value_dim, rope.clone()).unwrap();
            let tokens = attend_tokens(&codec);
            let fast = fast_pairs(&codec, tokens);
            let table = tile_angles(&codec, tokens, fast);
            let number = |i: usize| (1.7 * i as f64 + 0.3).sin();
            let [a, b] =
                [0, 100].map(|from| (0..pairs(&codec)).map(|p| number(from + p)).collect::<Vec<_>>());
            let had = by_table(&table, fast, tokens, &a, &b);
            for (token, had) in had.into_iter().enumerate() {
                let mut want = a[pairs(&codec) - 1];
                for (pair, frequency) in frequencies(&codec).iter().enumerate() {
                    let angle = frequency * (token as f64 - tokens as f64 / 2.0);
                    want += a[pair] * angle.cos() + b[pair] * angle.sin();
                }
                // Of each pair the series' rest, 1e-7, and f32's rounding of two factors.
                assert!((had - want).abs() <= 4e-7 * pairs(&codec) as f64, "{rope:?} {token}: {had} {want}");
            }
        }
    }
}
