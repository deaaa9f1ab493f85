//! A report's numbers from the CPU twins.

use super::layer::Attended;
use super::pair::{Both, SpanFold};
use super::planes::{PlanesSketch, PlanesTask};
use super::queries::Slice;
use super::span::Span;
use crate::error::Result;
use crate::minicache::{Layer, MergeOptions, Row, cpu as minicache};
use crate::qjl::planes::{Stored, cpu as planes};
use crate::qjl::{KeyScale, Projection, QuantizedValues, SketchedKeys, cpu as qjl};
use crate::rope::Positions;
use crate::tensor::Tensor;

/// Folds and restores a pair's keys or values.
pub(super) fn fold(both: Both<'_>, spans: &[Span], options: &MergeOptions) -> Result<Vec<SpanFold>> {
    let fold = |span: &Span| {
        let [lower, upper] = [span.view(both[0])?, span.view(both[1])?];
        let rows = minicache::similarity(&lower, &upper, options)?;
        let folded = minicache::merge(&lower, &upper, options)?;
        Ok(SpanFold {
            layout: folded.layout,
            rows,
            totals: folded.totals,
            bytes: folded.bytes(),
            restored: [
                minicache::restore(&folded, Layer::Lower)?,
                minicache::restore(&folded, Layer::Upper)?,
            ],
            pages: folded.pages,
        })
    };
    spans.iter().map(fold).collect()
}

/// Measures a pair's keys or values.
pub(super) fn similarity(both: Both<'_>, spans: &[Span], options: &MergeOptions) -> Result<Vec<Vec<Row>>> {
    let rows = |span: &Span| minicache::similarity(&span.view(both[0])?, &span.view(both[1])?, options);
    spans.iter().map(rows).collect()
}

/// A sketched layer.
pub(super) struct Sketch<'a> {
    projection: &'a Projection,
    scale: KeyScale,
    keys: SketchedKeys,
    pub(super) values: QuantizedValues,
}

impl<'a> Sketch<'a> {
    pub(super) fn new(
        keys: &Tensor,
        values: &Tensor,
        projection: &'a Projection,
        scale: KeyScale,
    ) -> Result<Self> {
        let keys = qjl::quantize(&keys.view(), projection, scale)?;
        Ok(Self { projection, scale, keys, values: qjl::quantize_values(&values.view())? })
    }

    pub(super) fn attend(&self, slice: &Slice<'_>) -> Result<Attended> {
        let Self { projection, scale, keys, values } = self;
        let (queries, lengths) = (slice.queries.view(), Some(slice.lengths.as_slice()));
        Ok(Attended {
            scores: qjl::scores(&queries, keys, projection, *scale)?,
            output: qjl::attend(&queries, keys, values, projection, *scale, lengths, &slice.options)?,
        })
    }
}

/// Codes a layer in sign planes, scores its queries, and attends them once for each codec of the task.
pub(super) fn sign_planes(slice: &Slice<'_>, values: &Tensor, task: &PlanesTask<'_>) -> Result<PlanesSketch> {
    let Some(codec) = task.codecs.first() else { return Ok(PlanesSketch::default()) };
    let (keys, values, view) = (slice.keys.view(), values.view(), slice.queries.view());
    let key_codes = planes::encode_keys(codec, &keys, Positions::Start(task.starts), task.tables)?;
    let value_codes = planes::encode_values(codec, &values)?;
    let stored = Stored {
        keys: &keys,
        key_codes: &key_codes,
        values: &values,
        value_codes: &value_codes,
        tables: task.tables,
    };
    let (lengths, options) = (Some(slice.lengths.as_slice()), &slice.options);
    let attend = |codec| planes::attend(codec, &view, &stored, lengths, options);
    Ok(PlanesSketch {
        scores: planes::scores(codec, &view, &key_codes, task.tables)?,
        outputs: task.codecs.iter().map(attend).collect::<Result<_>>()?,
    })
}
