//! The alignment probe: how similar neighbouring layers are once one of them is turned by the best rotation.
//!
//! On real models two layers' keys and values are not similar as they stand, so that nothing merges. A rotation `R` that maps the
//! upper layer's rows onto the lower's may bring them together: `R = U V^T` of the singular value decomposition
//! `A^T B = U S V^T` (orthogonal Procrustes; Schönemann 1966), for every head by itself or for whole tokens, all heads of a layer
//! concatenated. It is fitted on the first half of every sequence and judged on the second, so that what it says is not
//! what it was fitted to. Folding such a pair takes a matrix per pair and, for keys, turning every row back before RoPE.

use std::ops::Range;

use nalgebra::DMatrix;
use serde::{Deserialize, Serialize};

use crate::capture::{Capture, Layer};
use crate::error::{Error, Result};
use crate::report::Progress;
use crate::rope::Rope;
use crate::tensor::Tensor;

/// Channels of the largest rotation that is fitted: the decomposition takes their cube.
const MAX_CHANNELS: usize = 2048;

/// Two neighbouring layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Alignment {
    /// Index of the layer nearer the input.
    pub lower: usize,
    /// Index of the layer above it.
    pub upper: usize,
    /// Keys as cached; `None` where the capture has none, or the shapes differ.
    pub keys: Option<Aligned>,
    /// Keys before RoPE: captured, or turned back where the capture describes its RoPE.
    pub keys_pre_rope: Option<Aligned>,
    /// Values.
    pub values: Option<Aligned>,
}

/// Mean cosines over the second half of every sequence. Tokens with a number that is not finite are left out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Aligned {
    /// Tokens that rotations were fitted to. With fewer than a rotation has channels the fit is not determined.
    pub fitted: usize,
    /// Tokens that were judged.
    pub judged: usize,
    /// Of whole tokens as they stand.
    pub raw: Option<f64>,
    /// Of whole tokens after one rotation of all heads together; `None` above 2,048 channels.
    pub token: Option<f64>,
    /// Of single heads after a rotation each.
    pub head: Option<f64>,
}

/// Finite rows of both layers, the lower one's first.
type Both<'a> = (&'a Vec<f64>, &'a Vec<f64>);

/// Rows of whole tokens, `[tokens][heads * dim]`: those to fit, and those to judge.
struct Rows {
    heads: usize,
    fit: Vec<Vec<f64>>,
    judge: Vec<Vec<f64>>,
}

/// Fits and judges rotations for every two neighbouring layers. `progress` is told of every pair, first with none done; when it
/// returns false the work ends.
///
/// # Errors
/// What [`Capture::check`] says of the capture; [`Error::Cancelled`] when `progress` says so.
pub fn align(capture: &Capture, progress: &mut dyn FnMut(Progress) -> bool) -> Result<Vec<Alignment>> {
    capture.check()?;
    let pairs = capture.layers.len() - 1;
    let mut tell = |done| {
        if progress(Progress::new(done, pairs)) { Ok(()) } else { Err(Error::Cancelled { done, of: pairs }) }
    };
    tell(0)?;
    let mut all = Vec::with_capacity(pairs);
    for lower in 0..pairs {
        let upper = lower + 1;
        let both = |of: &dyn Fn(usize) -> Result<Option<Rows>>| -> Result<Option<Aligned>> {
            Ok(of(lower)?.zip(of(upper)?).and_then(|(a, b)| aligned(&a, &b)))
        };
        all.push(Alignment {
            lower,
            upper,
            keys: both(&|layer| {
                Ok(held(capture, layer).keys.as_ref().map(|keys| rows(capture, keys, None)))
            })?,
            keys_pre_rope: both(&|layer| pre_rope(capture, layer))?,
            values: both(&|layer| Ok(Some(rows(capture, &held(capture, layer).values, None))))?,
        });
        tell(upper)?;
    }
    Ok(all)
}

#[allow(clippy::indexing_slicing, reason = "callers count over the capture's layers")]
fn held(capture: &Capture, layer: usize) -> &Layer {
    &capture.layers[layer]
}

fn pre_rope(capture: &Capture, layer: usize) -> Result<Option<Rows>> {
    let held = held(capture, layer);
    if let Some(keys) = &held.keys_pre_rope {
        return Ok(Some(rows(capture, keys, None)));
    }
    let rope = Rope::from_capture(capture, layer)?;
    Ok(held.keys.as_ref().zip(rope).map(|(keys, rope)| rows(capture, keys, Some(&rope))))
}

/// The rows of a tensor, turned back by `rope` where there is one.
fn rows(capture: &Capture, tensor: &Tensor, rope: Option<&Rope>) -> Rows {
    let (view, shape) = (tensor.view(), tensor.shape());
    let mut rows = Rows { heads: shape.heads, fit: Vec::new(), judge: Vec::new() };
    for sequence in 0..shape.batch {
        let length = capture.length(sequence);
        let start = capture.info.position_start.as_ref().and_then(|starts| starts.get(sequence)).copied();
        for token in 0..length {
            let angles = rope.map(|rope| rope.angles(start.unwrap_or(0).saturating_add(token as u32)));
            let mut whole = Vec::with_capacity(shape.heads * shape.dim);
            for head in 0..shape.heads {
                let mut row = vec![0.0; shape.dim];
                view.read_row(sequence, head, token, &mut row);
                if let Some((rope, angles)) = rope.zip(angles.as_ref()) {
                    rope.unrotate(&mut row, angles);
                }
                whole.extend(row.into_iter().map(f64::from));
            }
            if token < length / 2 { rows.fit.push(whole) } else { rows.judge.push(whole) }
        }
    }
    rows
}

/// The figures of two layers' rows; `None` where their shapes differ.
fn aligned(lower: &Rows, upper: &Rows) -> Option<Aligned> {
    let channels = lower.fit.first().or(lower.judge.first()).map_or(0, Vec::len);
    let of_upper = upper.fit.first().or(upper.judge.first()).map_or(0, Vec::len);
    if lower.heads != upper.heads || channels != of_upper || channels == 0 {
        return None;
    }
    let finite = |(a, b): &Both<'_>| a.iter().chain(b.iter()).all(|x| x.is_finite());
    let pairs = |a, b| -> Vec<Both<'_>> { Iterator::zip(a, b).filter(finite).collect() };
    let fit = pairs(lower.fit.iter(), upper.fit.iter());
    let judge = pairs(lower.judge.iter(), upper.judge.iter());
    let dim = channels / lower.heads;
    let whole = 0..channels;
    let token = (channels <= MAX_CHANNELS)
        .then(|| rotation(&fit, &whole))
        .and_then(|rotation| cosine(&judge, &whole, rotation.as_ref()?.into()));
    let heads = (0..lower.heads).map(|head| {
        let channels = head * dim..(head + 1) * dim;
        let rotation = rotation(&fit, &channels)?;
        cosine(&judge, &channels, Some(&rotation))
    });
    let heads: Option<Vec<f64>> = heads.collect();
    Some(Aligned {
        fitted: fit.len(),
        judged: judge.len(),
        raw: cosine(&judge, &whole, None),
        token,
        head: heads.map(|heads| heads.iter().sum::<f64>() / heads.len() as f64),
    })
}

/// The rotation that maps the upper rows' channels onto the lower's; `None` where there are no rows or it was not found.
fn rotation(fit: &[Both<'_>], channels: &Range<usize>) -> Option<DMatrix<f64>> {
    let count = channels.len();
    let matrix = |upper: bool| {
        let rows = fit
            .iter()
            .flat_map(|&(a, b)| if upper { b } else { a }.get(channels.clone()).unwrap_or_default());
        DMatrix::from_row_iterator(fit.len(), count, rows.copied())
    };
    if fit.is_empty() {
        return None;
    }
    let (lower, upper) = (matrix(false), matrix(true));
    let svd = lower.tr_mul(&upper).try_svd(true, true, f64::EPSILON, 0)?;
    Some(svd.u? * svd.v_t?)
}

/// Mean cosine of the lower rows and the turned upper ones; a zero row counts as 0.
fn cosine(judge: &[Both<'_>], channels: &Range<usize>, rotation: Option<&DMatrix<f64>>) -> Option<f64> {
    let mut sum = 0.0;
    for (lower, upper) in judge {
        let lower = DMatrix::from_column_slice(channels.len(), 1, lower.get(channels.clone())?);
        let upper = DMatrix::from_column_slice(channels.len(), 1, upper.get(channels.clone())?);
        let upper = rotation.map_or_else(|| upper.clone(), |rotation| rotation * &upper);
        let norms = lower.norm() * upper.norm();
        sum += if norms > 0.0 { lower.dot(&upper) / norms } else { 0.0 };
    }
    (!judge.is_empty()).then(|| sum / judge.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::CaptureInfo;
    use crate::{DType, Shape};

    /// Two layers of 2 heads of 4 channels, the upper one the lower turned by a permutation with signs, in every head another.
    fn turned() -> Capture {
        let shape = Shape::new(1, 2, 60, 4).unwrap();
        let number = |i: usize| ((i * 7919 + i * i * 31) % 1009) as f32 / 504.5 - 1.0;
        let lower: Vec<f32> = (0..shape.elements()).map(number).collect();
        let turn = |(i, row): (usize, &[f32])| match i / 60 {
            0 => [-row[1], row[0], row[3], row[2]],
            _ => [row[2], row[3], -row[0], row[1]],
        };
        let upper: Vec<f32> = lower.chunks(4).enumerate().flat_map(turn).collect();
        let layer = |numbers: &[f32]| {
            let tensor = Tensor::from_f32(numbers, DType::F32, shape).unwrap();
            Layer::new(tensor.clone(), tensor)
        };
        Capture::new(vec![layer(&lower), layer(&upper)], CaptureInfo::default()).unwrap()
    }

    #[test]
    fn a_turned_layer_is_turned_back() {
        let mut steps = Vec::new();
        let found = align(&turned(), &mut |progress| {
            steps.push(progress.done);
            true
        });
        let [pair] = found.unwrap().try_into().unwrap();
        assert_eq!(steps, [0, 1]);
        let keys = pair.keys.unwrap();
        assert_eq!((keys.fitted, keys.judged, pair.keys_pre_rope), (30, 30, None));
        assert!(keys.raw.unwrap().abs() < 0.5, "{keys:?}");
        for cosine in [keys.token, keys.head] {
            assert!((cosine.unwrap() - 1.0).abs() < 1e-9, "{keys:?}");
        }
        assert_eq!(pair.values, Some(keys));
        assert!(matches!(align(&turned(), &mut |_| false), Err(Error::Cancelled { done: 0, of: 1 })));
    }

    #[test]
    fn what_is_not_finite_and_what_differs_is_left_out() {
        let mut capture = turned();
        let shape = Shape::new(1, 2, 60, 4).unwrap();
        let mut numbers = capture.layers[1].values.view().to_f32();
        numbers[0] = f32::NAN;
        capture.layers[1].values = Tensor::from_f32(&numbers, DType::F32, shape).unwrap();
        let values = align(&capture, &mut |_| true).unwrap()[0].values.unwrap();
        assert_eq!((values.fitted, values.judged), (29, 30));
        let other = Tensor::from_f32(&vec![1.0; 60 * 2 * 6], DType::F32, Shape::new(1, 2, 60, 6).unwrap());
        capture.layers[1].values = other.unwrap();
        assert_eq!(align(&capture, &mut |_| true).unwrap()[0].values, None);
    }
}
