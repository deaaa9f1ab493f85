//! What a store saves, and what it costs.

use serde::{Deserialize, Serialize};

use super::head::Method;
use super::{Part, Store};
use crate::capture::Capture;
use crate::error::Result;
use crate::metrics::RelativeError;

/// Sizes of a store, and how far the restored keys and values are from the original.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StoreReport {
    /// `minicache`, `planes` or `sketch`.
    pub method: String,
    /// [`Store::bytes_before`].
    pub bytes_before: u64,
    /// [`Store::payload_bytes`]: the layers', and what they share.
    pub bytes_after: u64,
    /// `bytes_before / bytes_after`; `None` where nothing is stored.
    pub ratio: Option<f64>,
    /// Bytes of `bytes_after` that all layers share: rotations and projections that are matrices.
    pub shared_bytes: u64,
    /// [`Store::kept_bytes`].
    pub kept_bytes: u64,
    /// `|x - x'|_F / |x|_F` over the keys of all layers; `None` without an original, or where it cannot be computed.
    pub key_relative_error: Option<f64>,
    /// The same over the values.
    pub value_relative_error: Option<f64>,
    /// Every layer.
    pub layers: Vec<LayerReport>,
}

/// One layer's part of a [`StoreReport`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LayerReport {
    /// The layer.
    pub layer: usize,
    /// The layer that this one is folded with.
    pub pair: Option<usize>,
    /// Bytes of the layer's keys and values, without padding.
    pub bytes_before: u64,
    /// Bytes of what is stored of them; of a pair's, half each, the odd byte the lower layer's.
    pub bytes_after: u64,
    /// `bytes_before / bytes_after`.
    pub ratio: Option<f64>,
    /// As [`StoreReport::key_relative_error`].
    pub key_relative_error: Option<f64>,
    /// As [`StoreReport::value_relative_error`].
    pub value_relative_error: Option<f64>,
}

impl Store {
    /// Sizes, and errors against the capture that was folded.
    ///
    /// # Errors
    /// As [`Store::unfold`]; [`Error::Shape`](crate::Error::Shape) when the original has other shapes.
    pub fn report(&self, original: Option<&Capture>) -> Result<StoreReport> {
        let restored = original.map(|_| self.unfold()).transpose()?;
        let pairs: &[[usize; 2]] = match &self.head.method {
            Method::Minicache { pairs, .. } => pairs,
            Method::Planes { .. } | Method::Sketch { .. } => &[],
        };
        let tokens: usize = (0..self.head.batch).map(|sequence| self.length(sequence)).sum();
        let stored = self.layer_bytes();
        let mut total = [RelativeError::default(), RelativeError::default()];
        let mut layers = Vec::with_capacity(self.head.layers.len());
        for (layer, head) in self.head.layers.iter().enumerate() {
            let own = stored.get(layer).copied().unwrap_or(0);
            let (pair, after) = match pairs.iter().find(|pair| pair.contains(&layer)) {
                None => (None, own),
                Some(&[lower, upper]) if lower == layer => (Some(upper), own - own / 2),
                Some(&[lower, _]) => (Some(lower), stored.get(lower).copied().unwrap_or(0) / 2),
            };
            let mut errors = [RelativeError::default(), RelativeError::default()];
            if let Some((original, restored)) = original.zip(restored.as_ref()) {
                for ((part, error), total) in Part::BOTH.into_iter().zip(&mut errors).zip(&mut total) {
                    self.compare(part, layer, original, restored, [error, total])?;
                }
            }
            let before = head.token_bytes() * tokens;
            let [keys, values] = errors.map(|error| original.and_then(|_| error.value()));
            layers.push(LayerReport {
                layer,
                pair,
                bytes_before: before as u64,
                bytes_after: after as u64,
                ratio: ratio(before, after),
                key_relative_error: keys,
                value_relative_error: values,
            });
        }
        let (before, after) = (self.bytes_before(), self.payload_bytes());
        let [keys, values] = total.map(|error| original.and_then(|_| error.value()));
        Ok(StoreReport {
            method: self.method().to_owned(),
            bytes_before: before as u64,
            bytes_after: after as u64,
            ratio: ratio(before, after),
            shared_bytes: (after - stored.iter().sum::<usize>()) as u64,
            kept_bytes: self.kept_bytes() as u64,
            key_relative_error: keys,
            value_relative_error: values,
            layers,
        })
    }

    const fn method(&self) -> &'static str {
        match self.head.method {
            Method::Minicache { .. } => "minicache",
            Method::Planes { .. } => "planes",
            Method::Sketch { .. } => "sketch",
        }
    }

    /// Bytes stored under each layer's name.
    fn layer_bytes(&self) -> Vec<usize> {
        let mut all = vec![0; self.head.layers.len()];
        for stored in self.tensors.stored().filter(|stored| stored.name.starts_with("sequence.")) {
            let layer = stored.name.split('.').nth(3).and_then(|layer| layer.parse::<usize>().ok());
            if let Some(bytes) = layer.and_then(|layer| all.get_mut(layer)) {
                *bytes += stored.bytes.len();
            }
        }
        all
    }

    /// Adds a layer's rows, padding left out, to both errors.
    fn compare(
        &self,
        part: Part,
        layer: usize,
        original: &Capture,
        restored: &Capture,
        errors: [&mut RelativeError; 2],
    ) -> Result<()> {
        let (exact, restored) = (part.of(original, layer)?, part.of(restored, layer)?);
        exact.shape().check_equal("the original", restored.shape())?;
        let [own, total] = errors;
        let (mut x, mut y) = (vec![0.0; exact.shape().dim], vec![0.0; exact.shape().dim]);
        for (b, h, t) in exact.shape().iter_rows().filter(|&(b, _, t)| t < self.length(b)) {
            exact.view().read_row(b, h, t, &mut x);
            restored.view().read_row(b, h, t, &mut y);
            own.add(&x, &y);
            total.add(&x, &y);
        }
        Ok(())
    }
}

fn ratio(before: usize, after: usize) -> Option<f64> {
    (after > 0).then(|| before as f64 / after as f64)
}
