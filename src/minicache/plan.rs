//! Which layers are folded together.

use serde::{Deserialize, Serialize};

use super::config::MergeOptions;
use super::cpu;
use super::folded::check_merge;
use crate::capture::Capture;
use crate::error::{Error, Result};

/// A layer's part in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The first, and possibly the only, layer of its group (the original's `primary`).
    Primary,
    /// A layer that is merged onto its group's first (the original's `merge`).
    Merge,
}

/// One layer of a pairing plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerRole {
    /// The layer's part.
    pub role: Role,
    /// Its group, counted from 0 over all layers.
    pub group: usize,
}

/// Pairs layers by depth, as the original does: layers before `start = trunc(layers * start_frac)` stand alone, the rest
/// form groups of `group_size` in order; what is left over at the end is a smaller group.
///
/// Source: MiniCache (arXiv 2405.14366), section 3.2, and `pair_layers_depth` of VeloxQuant-MLX 0.94.15.
///
/// # Errors
/// [`Error::Range`] when `group_size < 2` or `start_frac` is outside `[0, 1]` (the original lets the latter pass).
pub fn pair_layers_depth(layers: usize, start_frac: f64, group_size: usize) -> Result<Vec<LayerRole>> {
    if group_size < 2 {
        return Err(Error::range("group_size", "2 or more", group_size));
    }
    if !(0.0..=1.0).contains(&start_frac) {
        return Err(Error::range("start_frac", "0 to 1", start_frac));
    }
    let start = (layers as f64 * start_frac) as usize;
    let role = |layer: usize| match layer.checked_sub(start) {
        None => LayerRole { role: Role::Primary, group: layer },
        Some(depth) => LayerRole {
            role: if depth.is_multiple_of(group_size) { Role::Primary } else { Role::Merge },
            group: start + depth / group_size,
        },
    };
    Ok((0..layers).map(role).collect())
}

/// A plan made from a capture, and why it leaves pairs alone.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MeasuredPlan {
    /// Each layer's part.
    pub plan: Vec<LayerRole>,
    /// Every pair that the depth plan would fold.
    pub pairs: Vec<MeasuredPair>,
}

/// What a pair of the depth plan would come to.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MeasuredPair {
    /// The layer nearer the input.
    pub lower: usize,
    /// The layer above it.
    pub upper: usize,
    /// Share of the key and value rows that would merge.
    pub merged: f64,
    /// Why the two stand alone; `None` where they are folded.
    pub alone: Option<String>,
}

/// Pairs layers by depth as [`pair_layers_depth`] does, but only those of whose key and value rows on a capture at least a
/// share `least` would merge under these options; the others stand alone, with the reason.
///
/// # Errors
/// [`Error::Range`] when `start_frac` or `least` is outside `[0, 1]` or an option out of range, what [`Capture::check`] says of
/// the capture, [`Error::MissingTensor`] when it holds keys before RoPE alone.
pub fn pair_layers_measured(
    capture: &Capture,
    options: &MergeOptions,
    start_frac: f64,
    least: f64,
) -> Result<MeasuredPlan> {
    if !(0.0..=1.0).contains(&least) {
        return Err(Error::range("share of rows that merge", "0 to 1", least));
    }
    options.validate()?;
    capture.check()?;
    let depth = pair_layers_depth(capture.layers.len(), start_frac, 2)?;
    let mut measured = MeasuredPlan { plan: Vec::with_capacity(depth.len()), pairs: Vec::new() };
    let mut group = 0;
    for (layer, role) in depth.iter().enumerate() {
        let lower = layer.checked_sub(1).filter(|_| role.role == Role::Merge);
        let pair = lower.map(|lower| measure_pair(capture, options, [lower, layer], least)).transpose()?;
        let folded = pair.as_ref().is_some_and(|pair| pair.alone.is_none());
        group += usize::from(!folded && layer > 0);
        let role = if folded { Role::Merge } else { Role::Primary };
        measured.plan.push(LayerRole { role, group });
        measured.pairs.extend(pair);
    }
    Ok(measured)
}

/// How much of two layers would merge.
fn measure_pair(
    capture: &Capture,
    options: &MergeOptions,
    [lower, upper]: [usize; 2],
    least: f64,
) -> Result<MeasuredPair> {
    let pair = |merged, alone| Ok(MeasuredPair { lower, upper, merged, alone });
    let values = |layer: usize| capture.layers.get(layer).map(|layer| &layer.values);
    let (Some(low), Some(high)) = (values(lower), values(upper)) else { return pair(0.0, None) };
    let (mut merged, mut rows) = (0u64, 0u64);
    for [low, high] in [[capture.keys(lower)?, capture.keys(upper)?], [low, high]] {
        if (low.shape(), low.dtype()) != (high.shape(), high.dtype()) {
            let kinds = [low, high].map(|tensor| format!("{} {}", tensor.shape(), tensor.dtype()));
            return pair(0.0, Some(format!("shapes or element types differ: {}", kinds.join(" and "))));
        }
        for sequence in 0..capture.batch() {
            let tokens = capture.length(sequence);
            let views = [low, high].map(|tensor| tensor.view().part(sequence, 0, tokens));
            let [below, above] = &views;
            let layout =
                check_merge((below.shape(), below.dtype()), (above.shape(), above.dtype()), options)?;
            let found = cpu::similarity(below, above, options)?;
            let causes = cpu::retain(&found, &cpu::threshold(&found, &layout, options), &layout, options);
            merged += causes.iter().filter(|cause| cause.is_none()).count() as u64;
            rows += causes.len() as u64;
        }
    }
    let share = if rows > 0 { merged as f64 / rows as f64 } else { 0.0 };
    let few =
        || format!("{:.1} % of their rows would merge, fewer than {:.1} %", 100.0 * share, 100.0 * least);
    pair(share, (share < least).then(few))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::{CaptureInfo, Layer};
    use crate::{DType, Shape, Tensor};

    #[test]
    fn a_measured_plan_folds_what_merges_and_says_why_not() {
        let shape = Shape::new(1, 1, 40, 4).unwrap();
        let rows = |turn: usize| {
            let numbers = (0..40).flat_map(|t| (0..4).map(move |c| ((c + turn) % 4 * (t + 1)) as f32 + 0.5));
            Tensor::from_f32(&numbers.collect::<Vec<_>>(), DType::F32, shape).unwrap()
        };
        let half = Tensor::from_f32(&rows(0).view().to_f32(), DType::F16, shape).unwrap();
        let tensors = [rows(0), rows(0), rows(0), rows(2), rows(0), half];
        let layers = tensors.map(|tensor| Layer::new(tensor.clone(), tensor)).to_vec();
        let capture = Capture::new(layers, CaptureInfo::default()).unwrap();
        let measured = pair_layers_measured(&capture, &MergeOptions::default(), 0.0, 0.5).unwrap();
        let roles: Vec<_> = measured.plan.iter().map(|layer| (layer.role, layer.group)).collect();
        let (p, m) = (Role::Primary, Role::Merge);
        assert_eq!(roles, [(p, 0), (m, 0), (p, 1), (p, 2), (p, 3), (p, 4)]);
        let [same, turned, typed] = measured.pairs.as_slice() else { panic!("{measured:?}") };
        assert_eq!((same.merged, &same.alone), (0.9, &None), "4 of 40 rows are sinks");
        assert!(turned.alone.as_ref().unwrap().starts_with("0.0 % of their rows would merge"), "{turned:?}");
        assert!(typed.alone.as_ref().unwrap().contains("f32 and [1, 1, 40, 4] f16"), "{typed:?}");
        assert!(matches!(
            pair_layers_measured(&capture, &MergeOptions::default(), 0.0, 1.5),
            Err(Error::Range { .. })
        ));
    }

    #[test]
    fn leftover_layers_keep_their_place() {
        let roles: String = pair_layers_depth(7, 0.5, 2)
            .unwrap()
            .iter()
            .map(|l| format!("{}{} ", if l.role == Role::Primary { 'P' } else { 'M' }, l.group))
            .collect();
        assert_eq!(roles, "P0 P1 P2 P3 M3 P4 M4 ");
    }

    #[test]
    fn hostile_arguments_are_refused() {
        assert!(pair_layers_depth(4, 0.5, 1).unwrap_err().to_string().contains("2 or more, had 1"));
        assert!(pair_layers_depth(4, f64::NAN, 2).unwrap_err().to_string().contains("0 to 1, had NaN"));
        assert!(pair_layers_depth(0, 0.5, 2).unwrap().is_empty());
    }
}
