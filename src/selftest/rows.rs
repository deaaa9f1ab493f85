//! The rows that kernels are tried on.

use crate::capture::Capture;
use crate::error::Result;
use crate::tensor::{DType, Shape, Tensor};

/// A pair of layers' keys, values and queries.
pub(super) struct Set {
    pub(super) name: &'static str,
    pub(super) lower: Tensor,
    pub(super) upper: Tensor,
    pub(super) values: Tensor,
    pub(super) queries: Tensor,
}

/// Numbers in `[-1, 1)` that are the same everywhere: SplitMix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn row(&mut self, dim: usize) -> Vec<f32> {
        (0..dim).map(|_| self.next()).collect()
    }
}

/// The sets: two layers of the capture, where there are two with queries, and made-up rows of every kind.
pub(super) fn sets(capture: Option<&Capture>) -> Result<Vec<Set>> {
    let mut sets = vec![made_up()?];
    let layers = capture.map(|capture| capture.layers.as_slice()).unwrap_or_default();
    let pair = layers.windows(2).find_map(|pair| {
        let [lower, upper] = pair else { return None };
        let (a, b, queries) = (lower.keys.clone()?, upper.keys.clone()?, lower.queries.clone()?);
        let equal = a.shape() == b.shape() && a.dtype() == b.dtype() && a.shape().tokens > 16;
        let values = lower.values.clone();
        equal.then_some(Set { name: "capture", lower: a, upper: b, values, queries })
    });
    sets.extend(pair);
    Ok(sets)
}

fn made_up() -> Result<Set> {
    let (shape, dim) = (Shape::new(2, 2, 75, 33)?, 33);
    let mut numbers = Numbers(7);
    let (mut lower, mut upper, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..shape.rows() {
        let a = numbers.row(dim);
        let scaled = |scale: f32| a.iter().map(|x| x * scale).collect::<Vec<_>>();
        let near: Vec<f32> = a.iter().map(|x| 3.0 * x + 0.2 * numbers.next()).collect();
        let one_of = |row: &[f32], number: f32| {
            let mut row = row.to_vec();
            row.iter_mut().skip(dim / 2).take(1).for_each(|x| *x = number);
            row
        };
        let [low, high] = match row % 16 {
            0 => [vec![0.0; dim], a.clone()],
            2 => [vec![0.0; dim], vec![0.0; dim]],
            4 => [a.clone(), scaled(-2.0)],
            6 => [scaled(1e-5), scaled(2e-5)],
            // Not among the lower rows, which are attended to: one such key would take all the weight.
            8 => [near, scaled(4e4)],
            10 => [a.clone(), one_of(&near, f32::NAN)],
            12 => [one_of(&a, f32::INFINITY), near],
            14 => [a.clone(), numbers.row(dim)],
            _ => [a.clone(), near],
        };
        values.extend(if row % 16 == 5 { one_of(&a, f32::NEG_INFINITY) } else { scaled(3.0) });
        lower.extend(low);
        upper.extend(high);
    }
    let asked = Shape::new(2, 6, 3, dim)?;
    let queries = (0..asked.elements()).map(|_| 2.0 * numbers.next()).collect::<Vec<_>>();
    let tensor = |numbers: &[f32], shape| Tensor::from_f32(numbers, DType::F32, shape);
    Ok(Set {
        name: "made up",
        lower: tensor(&lower, shape)?,
        upper: tensor(&upper, shape)?,
        values: tensor(&values, shape)?,
        queries: tensor(&queries, asked)?,
    })
}
