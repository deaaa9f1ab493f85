//! Sequences that are folded in one call: all of a batch, or each by itself where their lengths differ.

use std::ops::Range;

use crate::capture::Capture;
use crate::error::Result;
use crate::tensor::{Shape, Strides, Tensor, TensorView};

/// Sequences of one length, a range of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    sequences: Range<usize>,
    tokens: usize,
}

impl Span {
    /// The spans of a capture, which together hold every token that is not padding.
    pub(super) fn of(capture: &Capture) -> Vec<Self> {
        let (batch, tokens) = (capture.batch(), capture.tokens());
        let even = (0..batch).all(|sequence| capture.length(sequence) == tokens);
        let each = |sequence| Self { sequences: sequence..sequence + 1, tokens: capture.length(sequence) };
        let spans =
            if even { vec![Self { sequences: 0..batch, tokens }] } else { (0..batch).map(each).collect() };
        spans.into_iter().filter(|span| span.tokens > 0).collect()
    }

    /// The shape of the span within a tensor of the whole capture.
    pub(super) const fn shape(&self, whole: Shape) -> Shape {
        Shape { batch: self.sequences.end - self.sequences.start, tokens: self.tokens, ..whole }
    }

    /// Where in a contiguous tensor of the whole capture the span begins, in elements.
    pub(super) const fn offset(&self, whole: Shape) -> usize {
        self.sequences.start * Strides::contiguous(whole).batch
    }

    /// Puts something of each of the span's rows, in row order, where it belongs in `[batch, heads, tokens]`.
    pub(super) fn scatter<T>(&self, whole: Shape, rows: impl Iterator<Item = T>, into: &mut [T]) {
        for ((b, h, t), found) in self.shape(whole).iter_rows().zip(rows) {
            if let Some(place) = into.get_mut(whole.row(self.sequences.start + b, h, t)) {
                *place = found;
            }
        }
    }

    /// The span's rows of a tensor of the whole capture.
    pub(super) fn view<'a>(&self, tensor: &'a Tensor) -> Result<TensorView<'a>> {
        let whole = tensor.shape();
        let start = self.offset(whole) * tensor.dtype().size();
        let bytes = tensor.bytes().get(start..).unwrap_or_default();
        TensorView::strided(bytes, tensor.dtype(), self.shape(whole), Strides::contiguous(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::{CaptureInfo, Layer};
    use crate::tensor::DType;

    fn capture(lengths: Option<Vec<usize>>) -> Capture {
        let shape = Shape::new(3, 2, 4, 1).unwrap();
        let numbers: Vec<f32> = (0..24u8).map(f32::from).collect();
        let tensor = Tensor::from_f32(&numbers, DType::F32, shape).unwrap();
        let info = CaptureInfo { lengths, ..CaptureInfo::default() };
        Capture::new(vec![Layer::new(tensor.clone(), tensor)], info).unwrap()
    }

    #[test]
    fn equal_lengths_are_one_span_and_padding_is_in_none() {
        assert_eq!(Span::of(&capture(None)), [Span { sequences: 0..3, tokens: 4 }]);
        assert_eq!(Span::of(&capture(Some(vec![4; 3]))).len(), 1);
        let ragged = capture(Some(vec![2, 0, 3]));
        let spans = Span::of(&ragged);
        assert_eq!(spans, [Span { sequences: 0..1, tokens: 2 }, Span { sequences: 2..3, tokens: 3 }]);
        let rows = spans[1].view(&ragged.layers[0].values).unwrap();
        assert_eq!(rows.to_f32(), [16.0, 17.0, 18.0, 20.0, 21.0, 22.0]);
        let (whole, mut back) = (ragged.layers[0].values.shape(), vec![0.0; 24]);
        spans[1].scatter(whole, rows.to_f32().into_iter(), &mut back);
        assert_eq!(back[16..], [16.0, 17.0, 18.0, 0.0, 20.0, 21.0, 22.0, 0.0]);
        assert_eq!(back[..16], [0.0; 16]);
    }
}
