//! Attention over any store of keys and values: options, masking, online softmax, and exact attention as the baseline.
//!
//! One step, for query `q` at position `p` and key `k_t`: `x = scale * score(q, k_t)`, then the soft cap
//! `cap * tanh(x / cap)`, then the mask, then softmax in f32. Query `i` of `n` stands at position `length - n + i`;
//! a query at a negative position sees nothing. Query head `h` reads KV head `h / (query_heads / kv_heads)`.
//! A query that sees nothing, or holds a non-finite number, gets zeros. A key or value row that holds a non-finite
//! number is masked, and so is a score that overflows f32.

pub mod cpu;
#[cfg(feature = "gpu")]
pub mod gpu;
mod rows;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tensor::Shape;
pub use cpu::{exact, exact_scores, non_finite_rows};
use rows::LOWEST;
pub(crate) use rows::{Rows, attend_rows, dot, score_rows};

/// How attention over sign planes is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// [`Fast`](Self::Fast) where the device multiplies bytes natively, [`Exact`](Self::Exact) elsewhere:
    /// [`Caps::byte_products`](crate::gpu::Caps::byte_products).
    #[default]
    Auto,
    /// In f32: below 1e-5 relative to attention over the stored codes in f64.
    Exact,
    /// Queries and weights in 8 bits, products summed as integers: below 3e-2 relative to attention over the stored codes
    /// where scores spread over half a nat to 8 nats, and without a bias.
    Fast,
}

/// How scores become weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct AttendOptions<'a> {
    /// Factor on every score; `None` is `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// A query sees no key after its own position.
    pub causal: bool,
    /// A query at `p` sees the key at `t` iff `0 <= p - t < window`, and the sinks that a cache has
    /// [pinned](crate::qjl::cache::CacheOptions::pin_sinks) as well.
    pub window: Option<u32>,
    /// Scaled scores become `cap * tanh(x / cap)`.
    pub soft_cap: Option<f32>,
    /// A learned logit for each query head that enters the softmax's denominator and nothing else, neither scaled nor
    /// capped (attention sinks as gpt-oss has them).
    pub sink_logits: Option<&'a [f32]>,
    /// How a device attends to sign planes. Raw rows and all other stores are attended exactly, and so is everything on the
    /// host.
    pub precision: Precision,
    /// First tokens that no window hides; the cache sets it.
    pub(crate) pinned: usize,
}

impl<'a> AttendOptions<'a> {
    /// Sets the factor on every score.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets whether later keys are hidden.
    #[must_use]
    pub const fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the sliding window, in tokens, the query's own position included.
    #[must_use]
    pub const fn window(mut self, window: u32) -> Self {
        self.window = Some(window);
        self
    }

    /// Sets the soft cap on scaled scores.
    #[must_use]
    pub const fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// Sets how a device attends to sign planes.
    #[must_use]
    pub const fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the sink logits, one for each query head.
    #[must_use]
    pub const fn sink_logits(mut self, logits: &'a [f32]) -> Self {
        self.sink_logits = Some(logits);
        self
    }

    /// Checks every option that is set.
    ///
    /// # Errors
    /// [`Error::Range`] when the scale or the soft cap is not a finite number above 0, or the window is 0;
    /// [`Error::NonFinite`] naming the first sink logit that is not finite.
    pub fn validate(&self) -> Result<()> {
        let numbers = [("attention scale", self.scale), ("soft cap", self.soft_cap)];
        for (what, number) in numbers {
            if let Some(x) = number.filter(|x| !(x.is_finite() && *x > 0.0)) {
                return Err(Error::range(what, "a finite number above 0", x));
            }
        }
        if self.window == Some(0) {
            return Err(Error::range("window", "at least 1 token", 0));
        }
        let mut logits = self.sink_logits.unwrap_or_default().iter().enumerate();
        match logits.find(|(_, logit)| !logit.is_finite()) {
            Some((index, &value)) => Err(Error::NonFinite { what: "sink logits".to_owned(), index, value }),
            None => Ok(()),
        }
    }

    /// The factor on every score for this key dimension.
    #[must_use]
    pub fn scale_for(&self, key_dim: usize) -> f32 {
        self.scale.unwrap_or_else(|| (1.0 / (key_dim as f64).sqrt()) as f32)
    }

    /// The tokens that query `query` of `queries` sees in a sequence of `length` tokens.
    pub(crate) fn visible(&self, length: usize, queries: usize, query: usize) -> Range<usize> {
        let Some(position) = (length + query).checked_sub(queries) else { return 0..0 };
        let hides_later = self.causal || self.window.is_some();
        let end = if hides_later { length.min(position + 1) } else { length };
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        start.min(end)..end
    }

    /// A score as a logit, or [`LOWEST`] where it is not below 2^127: a bound that a kernel can test without naming
    /// infinity or NaN (`shaders/common/float.wgsl`).
    fn logit(&self, scale: f32, score: f32) -> f32 {
        let x = scale * score;
        if x.abs() < f32::from_bits(0x7f00_0000) {
            self.soft_cap.map_or(x, |cap| soft_cap(x, cap))
        } else {
            LOWEST
        }
    }
}

/// `cap * tanh(x / cap)` by an exponential that cannot overflow.
fn soft_cap(x: f32, cap: f32) -> f32 {
    let e = (-2.0 * (x / cap).abs()).exp();
    (cap * ((1.0 - e) / (1.0 + e))).copysign(x)
}

/// Query heads that share one KV head.
///
/// # Errors
/// [`Error::HeadRatio`] when the query heads are not a positive multiple of the KV heads.
pub fn heads_ratio(query_heads: usize, kv_heads: usize) -> Result<usize> {
    match query_heads.checked_rem(kv_heads) {
        Some(0) if query_heads > 0 => Ok(query_heads / kv_heads),
        _ => Err(Error::HeadRatio { query_heads, kv_heads }),
    }
}

/// Sizes of one attention call, checked against each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) batch: usize,
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    /// Query heads that share one KV head.
    pub(crate) group: usize,
    pub(crate) queries: usize,
    pub(crate) tokens: usize,
    pub(crate) key_dim: usize,
}

impl Geometry {
    /// Sizes of scoring `queries` against `keys`.
    pub(crate) fn of(queries: Shape, keys: Shape) -> Result<Self> {
        keys.check_dim("keys")?;
        let group = heads_ratio(queries.heads, keys.heads)?;
        if queries.batch != keys.batch || queries.dim != keys.dim {
            let want = format!("[{}, heads, tokens, {}] as the keys have", keys.batch, keys.dim);
            return Err(Error::shape("queries", want, queries));
        }
        Ok(Self {
            batch: keys.batch,
            query_heads: queries.heads,
            kv_heads: keys.heads,
            group,
            queries: queries.tokens,
            tokens: keys.tokens,
            key_dim: keys.dim,
        })
    }

    /// `[batch, query_heads, queries, dim]`: the shape of an output of attention, or of scores with `dim = tokens`.
    pub(crate) fn output(&self, dim: usize) -> Result<Shape> {
        Shape::new(self.batch, self.query_heads, self.queries, dim)
    }

    /// Checks values against the keys.
    pub(crate) fn check_values(&self, values: Shape) -> Result<()> {
        values.check_dim("values")?;
        values.check_equal("values", Shape { dim: values.dim, ..self.kv_shape() })
    }

    /// Checks that there is one sink logit for each query head, where there are any.
    pub(crate) fn check_sinks(&self, options: &AttendOptions<'_>) -> Result<()> {
        match options.sink_logits {
            Some(logits) if logits.len() != self.query_heads => {
                Err(Error::shape("sink logits", format_args!("[{}]", self.query_heads), logits.len()))
            }
            _ => Ok(()),
        }
    }

    /// One length per sequence: those given, or all tokens.
    pub(crate) fn lengths(&self, lengths: Option<&[u32]>) -> Result<Vec<usize>> {
        let Some(lengths) = lengths else { return Ok(vec![self.tokens; self.batch]) };
        if lengths.len() != self.batch {
            return Err(Error::shape("lengths", format_args!("[{}]", self.batch), lengths.len()));
        }
        let lengths: Vec<usize> = lengths.iter().map(|&length| length as usize).collect();
        match lengths.iter().find(|&&length| length > self.tokens) {
            Some(long) => Err(Error::range("lengths", format!("at most {} tokens", self.tokens), long)),
            None => Ok(lengths),
        }
    }

    fn kv_shape(&self) -> Shape {
        Shape { batch: self.batch, heads: self.kv_heads, tokens: self.tokens, dim: self.key_dim }
    }

    /// Every (batch entry, KV head) in order.
    fn kv_heads(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |b| (0..self.kv_heads).map(move |h| (b, h)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Tensor};

    fn tensor(heads: usize, tokens: usize, numbers: &[f32]) -> Tensor {
        let dim = numbers.len() / heads / tokens;
        Tensor::from_f32(numbers, DType::F32, Shape::new(1, heads, tokens, dim).unwrap()).unwrap()
    }

    #[test]
    fn options_and_heads_out_of_range_are_named() {
        let refused = [
            AttendOptions::default().scale(f32::NAN),
            AttendOptions::default().scale(0.0),
            AttendOptions::default().soft_cap(-1.0),
            AttendOptions::default().soft_cap(f32::INFINITY),
            AttendOptions::default().window(0),
        ];
        for options in refused {
            assert!(matches!(options.validate(), Err(Error::Range { .. })), "{options:?}");
        }
        assert!(AttendOptions::default().scale(0.5).causal(true).window(1).soft_cap(50.0).validate().is_ok());
        assert_eq!(heads_ratio(21, 3).unwrap(), 7);
        for (query_heads, kv_heads) in [(4, 3), (2, 4), (0, 3), (3, 0)] {
            assert!(heads_ratio(query_heads, kv_heads).is_err(), "{query_heads} over {kv_heads}");
        }
    }

    #[test]
    fn visibility_follows_position_window_and_length() {
        let plain = AttendOptions::default();
        assert_eq!(plain.visible(5, 2, 0), 0..5);
        assert_eq!(plain.visible(1, 3, 1), 0..0, "position -1");
        assert_eq!(plain.visible(1, 3, 2), 0..1);
        assert_eq!(plain.causal(true).visible(5, 2, 0), 0..4);
        assert_eq!(plain.window(2).visible(5, 2, 0), 2..4, "a window hides later keys too");
        assert_eq!(plain.window(9).visible(5, 2, 1), 0..5);
    }

    #[test]
    fn two_keys_by_hand() {
        // Scores ln 3 and 0: weights 3/4 and 1/4.
        let queries = tensor(1, 1, &[1.0]);
        let keys = tensor(1, 2, &[3.0f32.ln(), 0.0]);
        let values = tensor(1, 2, &[4.0, 0.0, 8.0, 16.0]);
        let out =
            exact(&queries.view(), &keys.view(), &values.view(), None, &AttendOptions::default()).unwrap();
        assert!((out[0] - 5.0).abs() < 1e-5 && (out[1] - 4.0).abs() < 1e-5, "{out:?}");
    }

    #[test]
    fn sink_logits_enter_the_denominator_alone() {
        // Scores ln 3 and 0 of each head; the first head's sink weighs 4, the second's next to nothing.
        let queries = tensor(2, 1, &[1.0, 1.0]);
        let keys = tensor(1, 2, &[3.0f32.ln(), 0.0]);
        let values = tensor(1, 2, &[4.0, 8.0]);
        let sinks = [4.0f32.ln(), -80.0];
        let options = AttendOptions::default().sink_logits(&sinks);
        let attend =
            |options: &AttendOptions<'_>| exact(&queries.view(), &keys.view(), &values.view(), None, options);
        let out = attend(&options).unwrap();
        assert!((out[0] - 2.5).abs() < 1e-5 && (out[1] - 5.0).abs() < 1e-5, "{out:?}");
        // A sink alone: the query sees nothing.
        let nothing = exact(&queries.view(), &keys.view(), &values.view(), Some(&[0]), &options).unwrap();
        assert_eq!(nothing, [0.0, 0.0]);
        let error = attend(&AttendOptions::default().sink_logits(&sinks[..1])).unwrap_err();
        assert_eq!(error.to_string(), "sink logits: wanted [2], had 1");
        let error = attend(&AttendOptions::default().sink_logits(&[0.0, f32::NAN])).unwrap_err();
        assert!(matches!(error, Error::NonFinite { index: 1, .. }), "{error}");
    }

    #[test]
    fn rows_that_are_not_finite_are_masked_and_counted() {
        let queries = tensor(2, 1, &[1.0, f32::NAN]);
        let keys = tensor(1, 3, &[f32::INFINITY, 0.0, 0.0]);
        let values = tensor(1, 3, &[1.0, f32::NAN, 7.0]);
        let out =
            exact(&queries.view(), &keys.view(), &values.view(), None, &AttendOptions::default()).unwrap();
        assert_eq!(out, [7.0, 0.0]);
        assert_eq!(exact_scores(&queries.view(), &keys.view()).unwrap(), [0.0; 6]);
        assert_eq!((non_finite_rows(&keys.view()), non_finite_rows(&values.view())), (1, 1));
        assert_eq!(non_finite_rows(&queries.view()), 1);
    }

    #[test]
    fn scores_near_the_ends_of_f32_do_not_spread() {
        // 1e30 * 1e30 overflows and is masked; the tiny key is the only one left.
        let queries = tensor(1, 1, &[1e30]);
        let keys = tensor(1, 2, &[1e30, 1e-30]);
        let values = tensor(1, 2, &[1.0, 2.0]);
        let out =
            exact(&queries.view(), &keys.view(), &values.view(), None, &AttendOptions::default()).unwrap();
        assert_eq!(out, [2.0]);
    }

    #[test]
    fn lengths_and_shapes_that_do_not_fit_are_refused() {
        let (queries, keys) = (tensor(1, 1, &[1.0]), tensor(1, 2, &[1.0, 2.0]));
        let attend = |values: &Tensor, lengths: &[u32]| {
            exact(&queries.view(), &keys.view(), &values.view(), Some(lengths), &AttendOptions::default())
        };
        assert!(matches!(attend(&keys, &[3]), Err(Error::Range { .. })));
        assert!(matches!(attend(&keys, &[1, 1]), Err(Error::Shape { .. })));
        assert!(matches!(attend(&queries, &[1]), Err(Error::Shape { .. })), "one value for two keys");
        assert_eq!(attend(&keys, &[0]).unwrap(), [0.0]);
    }
}
