//! Sign planes on the device.

use super::super::planes::{PlanesSketch, PlanesTask};
use super::super::queries::Slice;
use super::super::work::At;
use super::{Kernels, LayerViews, floats, output, upload};
use crate::error::Result;
use crate::gpu::{KvView, ReadBack};
use crate::qjl::planes::gpu::{Ops, Stored};
use crate::rope::Positions;
use crate::tensor::{DType, Shape, Tensor};

impl Kernels {
    /// A tensor's numbers as f32, which holds those of every type.
    fn singles(&self, tensor: &Tensor) -> Result<KvView> {
        upload(&self.gpu, &Tensor::from_f32(&tensor.view().to_f32(), DType::F32, tensor.shape())?)
    }

    /// Codes a layer, scores its queries, and attends them once for each codec of the task.
    pub(in crate::report) async fn planes(
        &mut self,
        at: At<'_>,
        slice: &Slice<'_>,
        task: &PlanesTask<'_>,
    ) -> Result<PlanesSketch> {
        let ops = Ops::new(&self.gpu);
        let views = if at.keys.dtype() == at.layer.values.dtype() {
            self.resident(at)?
        } else {
            // The kernels read keys and values in one type.
            LayerViews { keys: self.singles(at.keys)?, values: self.singles(&at.layer.values)? }
        };
        let codecs = task.codecs.iter().map(|codec| ops.upload_codec(codec)).collect::<Result<Vec<_>>>()?;
        let Some(codec) = codecs.first() else { return Ok(PlanesSketch::default()) };
        let (kept, asked) = (views.keys.shape(), slice.queries.shape());
        let tables = ops.upload_tables(codec, task.tables)?;
        let starts = Positions::Start(task.starts);
        let positions = ops.upload_positions(codec, starts, kept.batch, kept.tokens)?;
        let view = upload(&self.gpu, &slice.queries)?;
        let scores = Shape::new(asked.batch, asked.heads, asked.tokens, kept.tokens)?;
        let scores = output(&self.gpu, "scores", DType::F32, scores)?;
        let shape = Shape::new(asked.batch, asked.heads, asked.tokens, views.values.shape().dim)?;
        let room = || output(&self.gpu, "attention output", DType::F32, shape);
        let outputs = codecs.iter().map(|_| room()).collect::<Result<Vec<_>>>()?;
        let (lengths, options) = (Some(slice.lengths.as_slice()), &slice.options);
        let (scores, outputs) = self.gpu.submit(|encoder| {
            let key_codes = ops.encode_key_codes(encoder, &views.keys, codec, &tables, &positions)?;
            let value_codes = ops.encode_value_codes(encoder, &views.values, codec)?;
            ops.encode_scores(encoder, &view, &key_codes, codec, &tables, &positions, &scores)?;
            let stored = Stored {
                keys: &views.keys,
                key_codes: &key_codes,
                values: &views.values,
                value_codes: &value_codes,
                tables: &tables,
                positions: &positions,
            };
            let scores = ReadBack::schedule(&self.gpu, encoder, scores.buffer())?;
            let mut read = Vec::with_capacity(codecs.len());
            for (codec, output) in codecs.iter().zip(&outputs) {
                ops.encode_attend(encoder, &view, &stored, codec, lengths, options, output)?;
                read.push(ReadBack::schedule(&self.gpu, encoder, output.buffer())?);
            }
            Ok((scores, read))
        })?;
        let mut sketch = PlanesSketch { scores: floats(&scores.await?), outputs: Vec::new() };
        for output in outputs {
            sketch.outputs.push(floats(&output.await?));
        }
        Ok(sketch)
    }
}
