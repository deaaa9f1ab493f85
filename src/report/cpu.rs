//! A report's numbers from the CPU twins.

use super::layer::{LayerSketch, Queries};
use super::pair::{Both, SpanFold};
use super::planes::{PlanesSketch, PlanesTask};
use super::span::Span;
use crate::error::Result;
use crate::minicache::{Layer, MergeOptions, cpu as minicache};
use crate::qjl::planes::{Stored, cpu as planes};
use crate::qjl::{KeyScale, Projection, cpu as qjl};
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

/// Sketches a layer and attends its queries.
pub(super) fn sketch(
    queries: &Queries<'_>,
    values: &Tensor,
    projection: &Projection,
    scale: KeyScale,
) -> Result<LayerSketch> {
    let keys = qjl::quantize(&queries.keys.view(), projection, scale)?;
    let values = qjl::quantize_values(&values.view())?;
    let view = queries.queries.view();
    let scores = qjl::scores(&view, &keys, projection, scale)?;
    let (lengths, options) = (Some(queries.lengths.as_slice()), &queries.options);
    let output = qjl::attend(&view, &keys, &values, projection, scale, lengths, options)?;
    Ok(LayerSketch { scores, output, values })
}

/// Codes a layer in sign planes, scores its queries, and attends them once for each codec of the task.
pub(super) fn sign_planes(
    queries: &Queries<'_>,
    values: &Tensor,
    task: &PlanesTask<'_>,
) -> Result<PlanesSketch> {
    let Some(codec) = task.codecs.first() else { return Ok(PlanesSketch::default()) };
    let (keys, values, view) = (queries.keys.view(), values.view(), queries.queries.view());
    let key_codes = planes::encode_keys(codec, &keys, Positions::Start(task.starts), task.tables)?;
    let value_codes = planes::encode_values(codec, &values)?;
    let stored = Stored {
        keys: &keys,
        key_codes: &key_codes,
        values: &values,
        value_codes: &value_codes,
        tables: task.tables,
    };
    let (lengths, options) = (Some(queries.lengths.as_slice()), &queries.options);
    let attend = |codec| planes::attend(codec, &view, &stored, lengths, options);
    Ok(PlanesSketch {
        scores: planes::scores(codec, &view, &key_codes, task.tables)?,
        outputs: task.codecs.iter().map(attend).collect::<Result<_>>()?,
    })
}
