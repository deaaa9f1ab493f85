//! What pairs of layers would come to in MiniCache, measured on a capture.

use super::measured::Budget;
use crate::capture::Capture;
use crate::error::Result;
use crate::minicache::{CacheOptions, Layer, MergeOptions, Retention, cpu, pair_layers_measured};
use crate::report::replaced;

/// The cosine from which rows merge. The shared direction halves the angle of 0.142 between two rows, which leaves a row off by at
/// most 0.071 of its length: values too, of which a divergence of weights says nothing. A code of 4 bits leaves 0.1 of a Gaussian.
const COSINE: f32 = 0.99;
/// The share of two layers' rows that must merge for them to be measured as a pair.
const LEAST: f64 = 0.5;
/// Newest tokens that stay raw, as in the presets of sign planes.
const RECENT: usize = 64;

/// Two neighbouring layers whose rows merge.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pair {
    /// The layer nearer the input; the other is the next.
    pub(super) lower: usize,
    /// Share of their rows that merge.
    merged: f64,
    /// Bits of a token of both.
    pub(super) bits: f64,
    /// Bits of a token of both in f16.
    raw_bits: f64,
    /// KL of the attention weights of either in nats.
    pub(super) divergences: [f64; 2],
}

/// How pairs that a measured policy chooses are folded.
pub(super) fn options() -> CacheOptions {
    let merge = MergeOptions::default().retention(Retention::Cosine(COSINE));
    CacheOptions::default().merge(merge).recent(RECENT)
}

/// Pairs of which most rows merge and neither layer has a window, since no row leaves a pair.
pub(super) fn measured(capture: &Capture) -> Result<Vec<Pair>> {
    let options = options().merge;
    let windowed = |layer: usize| matches!(capture.info.sliding_window.get(layer), Some(Some(_)));
    let pairs = pair_layers_measured(capture, &options, 0.0, LEAST)?.pairs;
    let mut found = Vec::new();
    for pair in pairs {
        if pair.alone.is_none() && !windowed(pair.lower) && !windowed(pair.upper) {
            found.extend(measure(capture, pair.lower, pair.merged, &options)?);
        }
    }
    Ok(found)
}

/// What two layers come to; nothing where no query sees anything.
fn measure(capture: &Capture, lower: usize, merged: f64, options: &MergeOptions) -> Result<Option<Pair>> {
    let (Some(low), Some(high)) = (capture.layers.get(lower), capture.layers.get(lower + 1)) else {
        return Ok(None);
    };
    let keys = [capture.keys(lower)?, capture.keys(lower + 1)?];
    let (mut restored, mut bits, mut raw_bits) = ([Vec::new(), Vec::new()], 0.0, 0.0);
    for [below, above] in [keys, [&low.values, &high.values]] {
        let folded = cpu::merge(&below.view(), &above.view(), options)?;
        let shape = below.shape();
        let raw = 2.0 * 16.0 * (shape.heads * shape.dim) as f64;
        bits += raw * folded.bytes() as f64 / folded.layout.bytes_before() as f64;
        raw_bits += raw;
        for (restored, layer) in restored.iter_mut().zip([Layer::Lower, Layer::Upper]) {
            restored.push(cpu::restore(&folded, layer)?);
        }
    }
    let mut divergences = [0.0; 2];
    for ((place, restored), layer) in divergences.iter_mut().zip(&restored).zip(lower..) {
        let [keys, values] = restored.as_slice() else { return Ok(None) };
        let Some(kl) = replaced(capture, layer, keys, values)?.weights_kl else { return Ok(None) };
        *place = kl;
    }
    Ok(Some(Pair { lower, merged, bits, raw_bits, divergences }))
}

impl Pair {
    /// Why the lower or the upper layer is in it.
    pub(super) fn reason(&self, upper: bool, budget: Budget) -> String {
        let [below, above] = self.divergences;
        format!(
            "{:.1} % of its rows merge with layer {}'s: KL {:.4} nats at {:.2} bits a channel{}",
            100.0 * self.merged,
            if upper { self.lower } else { self.lower + 1 },
            if upper { above } else { below },
            16.0 * self.bits / self.raw_bits,
            budget.rule()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CpuFoldedCache, Fold, Model, Policy};
    use super::*;
    use crate::cache::LayerShape;
    use crate::capture::{self, CaptureInfo};
    use crate::{DType, Shape, Tensor};

    const TOKENS: usize = 96;
    const DIM: usize = 16;

    /// Rows of a layer; those of one seed have the same directions.
    fn tensor(seed: u32, scale: f32, tokens: usize) -> Tensor {
        let number = |i: usize| {
            let mixed = (i as u32).wrapping_add(seed).wrapping_mul(0x9e37_79b9) ^ seed;
            let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca6b);
            scale * ((mixed >> 8) as f32 / (1u32 << 23) as f32 - 1.0)
        };
        let numbers: Vec<f32> = (0..tokens * DIM).map(number).collect();
        Tensor::from_f32(&numbers, DType::F16, Shape::new(1, 1, tokens, DIM).unwrap()).unwrap()
    }

    /// Four layers of which the lower two are alike but for their lengths.
    fn capture() -> Capture {
        let layer = |(seed, scale): (u32, f32)| {
            let mut layer =
                capture::Layer::new(tensor(seed, scale, TOKENS), tensor(seed + 1000, scale, TOKENS));
            layer.queries = Some(tensor(77, 2.0, 8));
            layer
        };
        Capture::new([(1, 1.0), (1, 1.5), (2, 1.0), (3, 1.0)].map(layer).to_vec(), CaptureInfo::default())
            .unwrap()
    }

    fn folds(capture: &Capture, budget: Budget) -> Vec<Fold> {
        Policy::measured(capture, budget).unwrap().layers.iter().map(|layer| layer.fold).collect()
    }

    #[test]
    fn layers_that_are_alike_become_a_pair_where_that_is_the_least() {
        let mut capture = capture();
        let pairs = measured(&capture).unwrap();
        let [Pair { lower: 0, merged, bits, raw_bits, divergences }] = pairs.as_slice() else {
            panic!("{pairs:?}")
        };
        assert_eq!(*merged, 92.0 / 96.0, "all but the sinks");
        // Merged rows take half of the two and their lengths, 4 bytes for 64.
        assert!((0.5..0.65).contains(&(bits / raw_bits)), "{bits} of {raw_bits}");
        // Directions in f16, of keys as large as 1.5, before queries as large as 2: scores within a few thousandths.
        assert!(divergences.iter().all(|&kl| kl < 1e-4), "{divergences:?}");
        let pair = Fold::Minicache(0);
        assert_eq!(folds(&capture, Budget::Divergence(1e-4)), [pair, pair, Fold::Raw, Fold::Raw]);
        assert_eq!(folds(&capture, Budget::Ratio(1.2)), [pair, pair, Fold::Raw, Fold::Raw]);
        let small = folds(&capture, Budget::Divergence(10.0));
        assert!(
            small.iter().all(|fold| matches!(fold, Fold::Coded(_))),
            "codes are smaller still: {small:?}"
        );

        let policy = Policy::measured(&capture, Budget::Ratio(1.2)).unwrap();
        let reason = policy.layers[1].reason.as_ref().unwrap();
        assert!(reason.starts_with("95.8 % of its rows merge with layer 0's: KL 0.00"), "{reason}");
        assert_eq!(Policy::from_json(&policy.to_json()).unwrap(), policy);
        let model = Model::new(vec![LayerShape::new(1, DIM, DType::F16); 4]);
        assert!(CpuFoldedCache::new(model, policy, 1).is_ok());

        capture.info.sliding_window = vec![None, Some(64), None, None];
        assert!(measured(&capture).unwrap().is_empty(), "no row leaves a pair");
    }
}
