//! What scores and values make of attention, against exact attention: one judge for every method and engine.

use super::types::AttentionErrors;
use crate::error::Result;
use crate::metrics::RelativeError;
use crate::report::layer::Attended;
use crate::report::queries::Slice;
use crate::tensor::{Tensor, TensorView};

/// Exact attention of a layer's queries, and which tokens stay raw.
pub(in crate::report) struct Judge<'a> {
    queries: &'a Slice<'a>,
    values: &'a Tensor,
    value_rows: Vec<f32>,
    scores: Vec<f32>,
    output: Vec<f32>,
    sinks: usize,
}

/// An estimate of the layer's attention.
pub(super) struct Estimate<'a> {
    /// Of every query and token, raw ones included, `[batch, query_heads, queries, tokens]`.
    pub(super) scores: &'a [f32],
    /// As f32, `[batch, kv_heads, tokens, value_dim]`.
    pub(super) values: &'a [f32],
    /// The output where an engine attended; else it is made of scores and values.
    pub(super) output: Option<&'a [f32]>,
}

impl<'a> Judge<'a> {
    pub(in crate::report) fn new(queries: &'a Slice<'a>, values: &'a Tensor, sinks: u32) -> Result<Self> {
        let Attended { scores, output } = Attended::exact(queries, &queries.keys.view(), &values.view())?;
        let value_rows = values.view().to_f32();
        Ok(Self { queries, values, value_rows, scores, output, sinks: sinks as usize })
    }

    /// The queries.
    pub(super) fn asked(&self) -> TensorView<'_> {
        self.queries.queries.view()
    }

    /// Errors where sinks and this many recent tokens are raw.
    pub(super) fn errors(&self, estimate: &Estimate<'_>, recent: u32) -> AttentionErrors {
        let (mut kl, mut agreed, mut count) = (0.0, 0u64, 0u64);
        let mut error = RelativeError::default();
        let dim = self.values.shape().dim;
        for (row, first, visible) in self.queries.rows() {
            let Some(found) = self.row(row, (first, visible), estimate, recent as usize) else { continue };
            kl += found.kl;
            agreed += u64::from(found.agrees);
            count += 1;
            let numbers = row * dim..(row + 1) * dim;
            let Some(exact) = self.output.get(numbers.clone()) else { continue };
            match estimate.output {
                Some(output) => error.add(exact, output.get(numbers).unwrap_or_default()),
                None => error.add(exact, &found.output),
            }
        }
        let mean = |sum: f64| (count > 0).then(|| sum / count as f64).filter(|x| x.is_finite());
        AttentionErrors {
            output_relative_error: error.value(),
            // Rounding leaves a divergence of nothing a little below 0.
            weights_kl: mean(kl).map(|kl| kl.max(0.0)),
            top1_agreement: mean(agreed as f64),
        }
    }

    /// Scores and weights of one query head, each of a sequence's queries a row.
    pub(in crate::report) fn head(
        &self,
        sequence: usize,
        head: usize,
        scores: &[f32],
        recent: u32,
    ) -> HeadAttention {
        let (asked, tokens) = (self.queries.queries.shape(), self.queries.keys.shape().tokens);
        let first = asked.row(sequence, head, 0);
        let length = self.queries.lengths.get(sequence).copied().unwrap_or_default() as usize;
        let unseen = || vec![f32::NAN; asked.tokens * tokens];
        let mut found = HeadAttention {
            queries: asked.tokens,
            tokens,
            first_query: length.saturating_sub(asked.tokens),
            exact_scores: unseen(),
            estimated_scores: unseen(),
            exact_weights: unseen(),
            estimated_weights: unseen(),
        };
        let scale = self.queries.options.scale_for(self.queries.keys.shape().dim);
        let rows = self.queries.rows().filter(|(row, ..)| (first..first + asked.tokens).contains(row));
        for (row, keys, visible) in rows {
            let Some([exact, estimated]) = self.weights(row, keys, &visible, scores, recent as usize) else {
                continue;
            };
            let (from, into) = (row * tokens, (row - first) * tokens);
            for ((t, exact), estimated) in visible.zip(exact).zip(estimated) {
                let score = |of: &[f32]| of.get(from + t).map_or(f32::NAN, |score| scale * score);
                let put = |into_of: &mut Vec<f32>, x: f32| {
                    if let Some(place) = into_of.get_mut(into + t) {
                        *place = x;
                    }
                };
                put(&mut found.exact_scores, score(&self.scores));
                put(&mut found.estimated_scores, score(scores));
                put(&mut found.exact_weights, exact.exp() as f32);
                put(&mut found.estimated_weights, estimated.exp() as f32);
            }
        }
        found
    }

    /// Whether a token of a sequence stays raw.
    fn is_raw(&self, head: usize, recent: usize) -> impl Fn(usize) -> bool + use<> {
        let keys = self.queries.keys.shape();
        let sequence = head / (keys.heads * keys.tokens).max(1);
        let length = self.queries.lengths.get(sequence).copied().unwrap_or_default() as usize;
        let sinks = self.sinks;
        move |t| t < sinks || t + recent >= length
    }

    /// Logarithms of one query's exact and estimated weights on the tokens that it sees; `None` where it sees nothing.
    fn weights(
        &self,
        row: usize,
        head: usize,
        visible: &std::ops::Range<usize>,
        scores: &[f32],
        recent: usize,
    ) -> Option<[Vec<f64>; 2]> {
        let keys = self.queries.keys.shape();
        let is_raw = self.is_raw(head, recent);
        let scale = f64::from(self.queries.options.scale_for(keys.dim));
        let logits = |pick: &dyn Fn(usize) -> Option<f32>| -> Option<Vec<f64>> {
            visible.clone().map(|t| Some(scale * f64::from(pick(t)?))).collect()
        };
        let first = row * keys.tokens;
        let exact = log_weights(logits(&|t| self.scores.get(first + t).copied())?)?;
        let mixed = |t: usize| if is_raw(t) { &self.scores } else { scores }.get(first + t).copied();
        Some([exact, log_weights(logits(&mixed)?)?])
    }

    /// One query; `None` where it sees nothing.
    fn row(
        &self,
        row: usize,
        (head, visible): (usize, std::ops::Range<usize>),
        estimate: &Estimate<'_>,
        recent: usize,
    ) -> Option<Row> {
        let dim = self.values.shape().dim;
        let is_raw = self.is_raw(head, recent);
        let [exact, estimated] = self.weights(row, head, &visible, estimate.scores, recent)?;
        let kl = exact.iter().zip(&estimated).map(|(p, q)| p.exp() * (p - q)).sum();
        let agrees = largest(&exact) == largest(&estimated);
        let mut sum = vec![0.0; if estimate.output.is_some() { 0 } else { dim }];
        for (t, weight) in visible.zip(&estimated) {
            let rows = if is_raw(t) { &self.value_rows } else { estimate.values };
            let numbers = rows.get((head + t) * dim..).unwrap_or_default();
            let weight = weight.exp();
            sum.iter_mut().zip(numbers).for_each(|(sum, v)| *sum += weight * f64::from(*v));
        }
        Some(Row { kl, agrees, output: sum.into_iter().map(|x| x as f32).collect() })
    }
}

/// One query head's attention under a method, each array `[queries, tokens]`, NaN where a query does not see the token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadAttention {
    /// Queries that were captured.
    pub queries: usize,
    /// Tokens.
    pub tokens: usize,
    /// The token at which the first query stands.
    pub first_query: usize,
    /// `scale * (q . k)`.
    pub exact_scores: Vec<f32>,
    /// The same of coded keys: of every token, those that stay raw included.
    pub estimated_scores: Vec<f32>,
    /// Attention weights.
    pub exact_weights: Vec<f32>,
    /// Attention weights with sinks and recent tokens raw.
    pub estimated_weights: Vec<f32>,
}

/// What became of one query.
struct Row {
    kl: f64,
    agrees: bool,
    output: Vec<f32>,
}

/// `ln softmax`; `None` of nothing.
fn log_weights(mut logits: Vec<f64>) -> Option<Vec<f64>> {
    let most = logits.iter().copied().reduce(f64::max)?;
    let sum = logits.iter().map(|x| (x - most).exp()).sum::<f64>().ln() + most;
    logits.iter_mut().for_each(|x| *x -= sum);
    Some(logits)
}

/// The first of the largest.
fn largest(weights: &[f64]) -> Option<usize> {
    let better = |best: Option<(usize, f64)>, (at, &x): (usize, &f64)| match best {
        Some((_, most)) if x <= most => best,
        _ => Some((at, x)),
    };
    weights.iter().enumerate().fold(None, better).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_by_hand() {
        let weights = log_weights(vec![3f64.ln(), 0.0]).unwrap();
        assert!((weights[0].exp() - 0.75).abs() < 1e-12 && (weights[1].exp() - 0.25).abs() < 1e-12);
        assert_eq!(log_weights(Vec::new()), None);
        assert_eq!(largest(&[0.0, 2.0, 2.0]), Some(1));
    }
}
