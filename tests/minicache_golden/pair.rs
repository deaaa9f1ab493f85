//! One pair of golden tensors through reference and twin, and the tolerances of both.

use half::f16;
use kvfold::minicache::{Cause, Folded, Layer, Layout, MergeOptions, Mode, Retention, Row, cpu, reference};
use kvfold::{DType, Shape, Tensor};

use crate::golden::Golden;

/// The original's relative rounding of a norm: an f32 sum of up to 256 squares.
const NORM: f64 = 1e-6;

/// Two layers' tensors.
pub struct Pair {
    pub lower: Tensor,
    pub upper: Tensor,
}

/// What reference and twin make of a pair.
pub struct Both {
    pub reference: reference::Merged,
    pub rows: Vec<Row>,
    pub causes: Vec<Option<Cause>>,
    pub folded: Folded,
    pub restored: [Vec<f32>; 2],
}

/// Options that decide as the original does: no sinks, and no page stays raw as a whole.
pub fn original(mode: Mode, retention: Retention, t: f32) -> MergeOptions {
    MergeOptions::default().mode(mode).retention(retention).slerp_t(t).sinks(0).raw_page_share(1.0)
}

impl Pair {
    /// The named tensors, which hold numbers of `dtype` exactly. Fewer than four sizes are led by ones.
    pub fn read(golden: &Golden, [lower, upper]: [String; 2], dtype: DType) -> Self {
        let sizes = golden.file().tensor(&lower).unwrap().shape().to_vec();
        let [batch, heads, tokens, dim] = [vec![1; 4 - sizes.len()], sizes].concat()[..] else {
            panic!("{lower}: more than four sizes")
        };
        let shape = Shape::new(batch, heads, tokens, dim).unwrap();
        let tensor = |name: &str| {
            let numbers = golden.f32(name);
            let tensor = Tensor::from_f32(&numbers, dtype, shape).unwrap();
            assert_eq!(tensor.view().to_f32(), numbers, "{name} is exactly {dtype}");
            tensor
        };
        Self { lower: tensor(&lower), upper: tensor(&upper) }
    }

    pub fn dim(&self) -> usize {
        self.lower.shape().dim
    }

    pub fn run(&self, options: &MergeOptions) -> Both {
        let (lower, upper) = (self.lower.view(), self.upper.view());
        let at = (lower.shape(), lower.dtype());
        let layout = Layout::new(at, at, options.mode).unwrap();
        let rows = cpu::similarity(&lower, &upper, options).unwrap();
        let causes = cpu::retain(&rows, &cpu::threshold(&rows, &layout, options), &layout, options);
        let folded = cpu::merge(&lower, &upper, options).unwrap();
        let restored =
            [Layer::Lower, Layer::Upper].map(|which| cpu::restore(&folded, which).unwrap().view().to_f32());
        if options.mode == Mode::Compat {
            assert_eq!(restored[0], lower.to_f32(), "the lower layer passes through");
        }
        let retained = causes.iter().filter(|cause| cause.is_some()).count();
        assert_eq!(folded.totals.counts.retained() as usize, retained);
        let reference = reference::merge(&lower, &upper, options).unwrap();
        Both { reference, rows, causes, folded, restored }
    }

    /// The twin's shared direction of a row, in f64 from its f32 weights.
    pub fn direction(&self, row: usize, found: &Row) -> Vec<f64> {
        let (a, b) = (row_of(&self.lower.view().to_f32(), row, self.dim()), self.upper.view().to_f32());
        let weighted = |x: f32, y: f32| {
            f64::from(found.weight_lower) * f64::from(x) + f64::from(found.weight_upper) * f64::from(y)
        };
        a.iter().zip(row_of(&b, row, self.dim())).map(|(&x, y)| weighted(x, y)).collect()
    }
}

pub fn row_of<T: Clone>(numbers: &[T], row: usize, dim: usize) -> Vec<T> {
    numbers[row * dim..(row + 1) * dim].to_vec()
}

/// The original's f16 output of a merged row.
pub fn product(magnitude: f32, direction: &[f32]) -> Vec<f32> {
    direction.iter().map(|e| f16::from_f32(magnitude * e).to_f32()).collect()
}

/// The distance of f16 numbers around `x`.
fn f16_ulp(x: f64) -> f64 {
    2f64.powi(((x.abs().log2().floor() as i32).clamp(-14, 15)) - 10)
}

/// How far a merged number may be from the original's f16 output `want`: `direction` and a norm's rounding for the numbers
/// before rounding, half an f16 ulp for the original's output, half for ours when it is f16 too, and half a bf16 ulp (2^-8)
/// when it is bf16 on top.
pub struct Tolerance {
    pub direction: f64,
    pub rounded: bool,
    pub dtype: DType,
}

impl Tolerance {
    /// For the reference's restored rows, which are not rounded.
    pub fn exact(direction: f64) -> Self {
        Self { direction, rounded: false, dtype: DType::F32 }
    }

    /// For the twin's.
    pub fn twin(direction: f64, dtype: DType) -> Self {
        Self { direction, rounded: true, dtype }
    }

    pub fn check(&self, have: &[f64], want: &[f32], magnitude: f32, context: &str) {
        assert_eq!(have.len(), want.len(), "{context}");
        for (have, want) in have.iter().zip(want) {
            let want = f64::from(*want);
            let ulps = if self.rounded { 1.0 } else { 0.5 };
            let bf16 = if self.dtype == DType::Bf16 { 2f64.powi(-8) * want.abs() } else { 0.0 };
            let tolerance = ulps * f16_ulp(want) + bf16 + (self.direction + NORM) * f64::from(magnitude);
            assert!(
                (have - want).abs() <= tolerance,
                "{context}: {have}, the original {want}, ± {tolerance:e}"
            );
        }
    }
}

pub fn widened(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&x| f64::from(x)).collect()
}

/// The largest difference of two rows.
pub fn distance(a: &[f64], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - f64::from(*y)).abs()).fold(0.0, f64::max)
}
