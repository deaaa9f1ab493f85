//! The captured queries of a layer, and slices of them: a score for every query, head and token at once can be larger than a
//! device binds and a host has to spare.

use crate::attention::{self, AttendOptions, Precision};
use crate::capture::Capture;
use crate::error::Result;
use crate::tensor::{Shape, Tensor, TensorView};

/// Bytes that a tensor over queries should not exceed. Larger slices gain nothing: at 2,048 tokens and 9 heads this is 227
/// queries, work for thousands of workgroups.
pub(super) const SLICE: u64 = 16 << 20;

/// How a layer's captured queries attend.
pub(super) struct Queries<'a> {
    queries: &'a Tensor,
    pub(super) keys: &'a Tensor,
    options: AttendOptions<'static>,
    /// Query heads that share a KV head.
    pub(super) group: usize,
    /// Of each sequence, the position after its last query: what lies further on no query sees.
    lengths: Vec<u32>,
    /// Of each sequence, the queries that stand on tokens and not on padding.
    real: Vec<usize>,
}

/// Consecutive queries of every sequence and head.
pub(super) struct Slice<'a> {
    pub(super) queries: Tensor,
    pub(super) keys: &'a Tensor,
    pub(super) options: AttendOptions<'static>,
    pub(super) lengths: Vec<u32>,
    group: usize,
    /// Of every row of `queries`, whether it stands on a token and is finite.
    judged: Vec<bool>,
}

impl<'a> Queries<'a> {
    /// The queries of a layer; `None` where there is nothing to attend.
    pub(super) fn of(capture: &'a Capture, index: usize, keys: &'a Tensor) -> Option<Self> {
        let queries = capture.layers.get(index)?.queries.as_ref()?;
        if queries.shape().elements() == 0 || keys.shape().elements() == 0 {
            return None;
        }
        let sequences = (0..capture.batch()).map(|sequence| {
            let positions = capture.query_positions(index, sequence)?;
            let real = capture.length(sequence).saturating_sub(positions.start).min(positions.len());
            Some((u32::try_from(positions.end).ok()?, real))
        });
        let (lengths, real) = sequences.collect::<Option<Vec<_>>>()?.into_iter().unzip();
        // The figures of a report are of the codes, and the same on every device.
        let mut options = AttendOptions::default().causal(true).precision(Precision::Exact);
        options.scale = capture.info.attn_scale;
        options.window = capture.info.sliding_window.get(index).copied().flatten();
        let group = attention::heads_ratio(queries.shape().heads, keys.shape().heads).ok()?;
        Some(Self { queries, keys, options, group, lengths, real })
    }

    /// All queries, in slices of which none has a tensor of f32 above `bytes`, if it has more than one query: `width` is the
    /// numbers of the widest row that anything has for a query and head.
    pub(super) fn slices(&self, width: usize, bytes: u64) -> impl Iterator<Item = Result<Slice<'a>>> {
        let shape = self.queries.shape();
        let of_one = 4 * (shape.batch * shape.heads) as u64 * width as u64;
        let count = usize::try_from(bytes / of_one.max(1)).unwrap_or(usize::MAX).clamp(1, shape.tokens);
        (0..shape.tokens).step_by(count).map(move |start| self.slice(start, count.min(shape.tokens - start)))
    }

    /// All queries in one slice.
    pub(super) fn whole(&self) -> Result<Slice<'a>> {
        self.slice(0, self.queries.shape().tokens)
    }

    /// `count` queries from `start` on. Query `i` of `n` stands at `length - n + i`, so the length of a slice ends with it.
    fn slice(&self, start: usize, count: usize) -> Result<Slice<'a>> {
        let whole = self.queries.view();
        let shape = Shape { tokens: count, ..whole.shape() };
        let rows = shape.iter_rows().flat_map(|(b, h, i)| whole.row_bytes(b, h, start + i));
        let queries = Tensor::new(rows.copied().collect(), self.queries.dtype(), shape)?;
        let after = u32::try_from(whole.shape().tokens - start - count).unwrap_or(u32::MAX);
        let view = queries.view();
        let judged = |(b, h, i): (usize, usize, usize)| {
            self.real.get(b).is_some_and(|&real| start + i < real) && is_finite(&view, b, h, i)
        };
        Ok(Slice {
            judged: shape.iter_rows().map(judged).collect(),
            keys: self.keys,
            options: self.options,
            lengths: self.lengths.iter().map(|length| length.saturating_sub(after)).collect(),
            group: self.group,
            queries,
        })
    }
}

impl Slice<'_> {
    /// Every query row that is judged by, as its index, the index of the first key row that it could read, and the tokens
    /// from there on that it sees.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
        let (shape, keys) = (self.queries.shape(), self.keys.shape());
        let rows = shape.iter_rows().enumerate().zip(&self.judged).filter(|(_, judged)| **judged);
        rows.map(move |((row, (b, h, i)), _)| {
            let length = self.lengths.get(b).copied().unwrap_or_default() as usize;
            (row, keys.row(b, h / self.group, 0), self.options.visible(length, shape.tokens, i))
        })
    }
}

/// Whether a row holds finite numbers alone.
pub(super) fn is_finite(view: &TensorView<'_>, batch: usize, head: usize, token: usize) -> bool {
    let mut row = vec![0.0; view.shape().dim];
    view.read_row(batch, head, token, &mut row);
    row.iter().all(|x| x.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::{CaptureInfo, Layer};
    use crate::tensor::DType;

    #[test]
    fn slices_see_what_the_whole_sees() {
        let tensor = |heads, tokens| {
            let shape = Shape::new(2, heads, tokens, 2).unwrap();
            let numbers: Vec<f32> = (0..shape.elements()).map(|i| i as f32).collect();
            Tensor::from_f32(&numbers, DType::F32, shape).unwrap()
        };
        let mut layer = Layer::new(tensor(2, 20), tensor(2, 20));
        layer.queries = Some(tensor(4, 7));
        let info = CaptureInfo {
            query_positions: Some(9..16),
            lengths: Some(vec![20, 12]),
            sliding_window: vec![Some(4)],
            ..CaptureInfo::default()
        };
        let capture = Capture::new(vec![layer], info).unwrap();
        let queries = Queries::of(&capture, 0, capture.keys(0).unwrap()).unwrap();
        let seen = |bytes: u64| -> (usize, Vec<_>) {
            let slices: Vec<_> = queries.slices(20, bytes).map(|slice| slice.unwrap()).collect();
            let mut all: Vec<(Vec<u8>, usize, std::ops::Range<usize>)> = Vec::new();
            for slice in &slices {
                let rows = slice.queries.bytes().chunks(8).collect::<Vec<_>>();
                all.extend(slice.rows().map(|(row, keys, tokens)| (rows[row].to_vec(), keys, tokens)));
            }
            all.sort_by(|a, b| a.0.cmp(&b.0));
            (slices.len(), all)
        };
        let (one, whole) = seen(u64::MAX);
        // Of the second sequence the three queries at 9, 10 and 11 stand on tokens.
        assert_eq!((one, whole.len()), (1, 4 * 7 + 4 * 3));
        let first = (tensor(4, 7).bytes()[..8].to_vec(), 0, 6..10);
        assert!(whole.contains(&first), "the query at 9 sees the last four");
        // A query's scores are 2 sequences of 4 heads of 20 numbers, 640 bytes.
        for (bytes, slices) in [(0, 7), (640, 7), (1280, 4), (3 * 640 + 1, 3), (7 * 640, 1)] {
            assert_eq!(seen(bytes), (slices, whole.clone()), "{bytes}");
        }
    }
}
