//! Figures of a folded pair, from what twins or kernels found.

use super::span::Span;
use super::types::{Causes, FoldFigures};
use crate::error::Result;
use crate::metrics::{Distribution, RelativeError};
use crate::minicache::{Cause, Layout, PAGE, Page, Row, Totals};
use crate::tensor::{Shape, Tensor};

/// What an engine found of one span of a pair's keys or values.
pub(super) struct SpanFold {
    pub(super) layout: Layout,
    pub(super) rows: Vec<Row>,
    pub(super) pages: Vec<Page>,
    pub(super) totals: Totals,
    /// Bytes of what is stored.
    pub(super) bytes: u64,
    /// Both layers restored, the lower one first.
    pub(super) restored: [Tensor; 2],
}

/// The keys or values of a pair, the lower layer first.
pub(super) type Both<'a> = [&'a Tensor; 2];

/// Why two layers are no pair, if they are none.
pub(super) fn mismatch(keys: Both<'_>, values: Both<'_>) -> Option<String> {
    let kinds = [("keys", keys), ("values", values)];
    let differ =
        |what: String, [a, b]: [String; 2]| (a != b).then(|| format!("{what}: {a} below, {b} above"));
    let sizes = |what: &str, of: fn(Shape) -> usize, [a, b]: Both<'_>| {
        differ(what.to_owned(), [a, b].map(|tensor| of(tensor.shape()).to_string()))
    };
    sizes("KV heads differ", |shape| shape.heads, keys).or_else(|| {
        kinds.into_iter().find_map(|(kind, both)| {
            sizes(&format!("head dimensions of {kind} differ"), |shape| shape.dim, both).or_else(|| {
                let types = both.map(|tensor| tensor.dtype().to_string());
                differ(format!("element types of {kind} differ"), types)
            })
        })
    })
}

/// The figures of a pair's keys or values over all spans.
pub(super) fn figures(
    folds: &[SpanFold],
    spans: &[Span],
    originals: Both<'_>,
    threshold: f32,
) -> Result<FoldFigures> {
    let mut cosines = Vec::new();
    let mut causes = Causes::default();
    let mut errors = Errors::default();
    let (mut rows, mut bytes_before, mut bytes_after) = (0, 0, 0);
    for (fold, span) in folds.iter().zip(spans) {
        rows += fold.rows.len() as u64;
        let finite = fold.rows.iter().filter(|row| row.fault != Some(Cause::NonFinite));
        cosines.extend(finite.map(|row| row.cosine));
        let merged = merged_rows(fold);
        add_causes(&mut causes, fold, &merged);
        for (original, restored) in originals.into_iter().zip(&fold.restored) {
            errors.add(fold.layout.shape, span, original, restored, &merged)?;
        }
        bytes_before += fold.layout.bytes_before() as u64;
        bytes_after += fold.bytes;
    }
    let above_threshold = cosines.iter().filter(|&&cosine| cosine >= threshold).count() as u64;
    Ok(FoldFigures {
        cosine: Distribution::of(cosines),
        rows,
        above_threshold,
        retained: causes.total(),
        causes,
        relative_error: errors.all.value(),
        relative_error_merged: errors.merged.value(),
        bytes_before,
        bytes_after,
    })
}

/// Whether each row is merged, in row order.
pub(super) fn merged_rows(fold: &SpanFold) -> Vec<bool> {
    let pages_per_head = fold.layout.pages_per_head();
    let merged = |head: usize, token: usize| {
        let page = fold.pages.get(head * pages_per_head + token / PAGE);
        page.is_some_and(|page| page.retained >> (token % PAGE) & 1 == 0)
    };
    let shape = fold.layout.shape;
    shape.iter_rows().map(|(b, h, t)| merged(b * shape.heads + h, t)).collect()
}

/// Adds a fold's retained rows: those by cause, and those that only a raw page keeps raw.
fn add_causes(causes: &mut Causes, fold: &SpanFold, merged: &[bool]) {
    let counts = fold.totals.counts;
    causes.non_finite += u64::from(counts.non_finite);
    causes.sink += u64::from(counts.sink);
    causes.rule += u64::from(counts.rule);
    causes.antiparallel += u64::from(counts.antiparallel);
    causes.range += u64::from(counts.range);
    let stored_merged = merged.iter().filter(|&&merged| merged).count() as u64;
    causes.raw_page += u64::from(counts.merged).saturating_sub(stored_merged);
}

impl Causes {
    /// Rows kept raw, whatever the cause.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.non_finite + self.sink + self.rule + self.antiparallel + self.range + self.raw_page
    }
}

/// Errors of restored rows.
#[derive(Default)]
struct Errors {
    all: RelativeError,
    merged: RelativeError,
}

impl Errors {
    /// Adds one layer's span. A row with a non-finite number is restored bit for bit and has no error to measure.
    fn add(
        &mut self,
        shape: Shape,
        span: &Span,
        original: &Tensor,
        restored: &Tensor,
        merged: &[bool],
    ) -> Result<()> {
        let (original, restored) = (span.view(original)?, restored.view());
        let (mut x, mut y) = (vec![0.0; shape.dim], vec![0.0; shape.dim]);
        for ((b, h, t), &merged) in shape.iter_rows().zip(merged) {
            original.read_row(b, h, t, &mut x);
            restored.read_row(b, h, t, &mut y);
            if x.iter().all(|x| x.is_finite()) {
                self.all.add(&x, &y);
                if merged {
                    self.merged.add(&x, &y);
                }
            }
        }
        Ok(())
    }
}
