//! Operations timed on a device.

use super::{BATCH, ENOUGH, Operation, SUBMITS, Twin, causal, median};
use crate::attention;
use crate::error::Result;
use crate::gpu::{Gpu, KvView, ReadBack};
use crate::minicache::{self, Layer, MergeOptions};
use crate::qjl::planes;
use crate::qjl::{self, KeyScale};
use crate::rope::Positions;
use crate::tensor::{DType, Shape};

/// Everything on the device.
pub(super) struct Device {
    gpu: Gpu,
    merge: MergeOptions,
    keys: KvView,
    upper: KvView,
    values: KvView,
    queries: KvView,
    decision: minicache::gpu::Decision,
    folded: minicache::gpu::FoldedBuffers,
    restored: KvView,
    projection: qjl::gpu::ProjectionBuffer,
    sketch: qjl::gpu::SketchedKeyBuffers,
    quantized: qjl::gpu::QuantizedValueBuffers,
    codec: planes::gpu::CodecBuffer,
    tables: planes::gpu::TableBuffer,
    positions: planes::gpu::PositionBuffer,
    key_codes: planes::gpu::PlaneBuffer,
    value_codes: planes::gpu::PlaneBuffer,
    scores: KvView,
    output: KvView,
}

impl Device {
    pub(super) async fn new(gpu: &Gpu, twin: &Twin<'_>) -> Result<Self> {
        let set = twin.set;
        let upload = |tensor: &crate::Tensor| {
            Ok(KvView::new(&gpu.upload("timing", tensor.bytes())?, tensor.dtype(), tensor.shape()))
        };
        let room = |dtype: DType, shape: Shape| -> Result<KvView> {
            let bytes = (shape.bytes(dtype) as u64).next_multiple_of(4).max(4);
            Ok(KvView::new(&gpu.storage("timing", bytes)?, dtype, shape))
        };
        let [keys, upper] = [upload(&set.lower)?, upload(&set.upper)?];
        let [values, queries] = [upload(&set.values)?, upload(&set.queries)?];
        let (fold, sign, code) =
            (minicache::gpu::Ops::new(gpu), qjl::gpu::Ops::new(gpu), planes::gpu::Ops::new(gpu));
        let mut decision = gpu.submit(|encoder| fold.encode_decide(encoder, &keys, &upper, &twin.merge))?;
        decision.totals().await?;
        let projection = sign.upload_projection(&twin.projection)?;
        let codec = code.upload_codec(&twin.codec)?;
        let tables = code.upload_tables(&codec, &twin.tables)?;
        let (shape, asked) = (keys.shape(), queries.shape());
        let starts = Positions::Start(&twin.starts);
        let positions = code.upload_positions(&codec, starts, shape.batch, shape.tokens)?;
        let (folded, sketch, quantized) = gpu.submit(|encoder| {
            Ok((
                fold.encode_merge(encoder, &decision)?,
                sign.encode_quantize(encoder, &keys, &projection, KeyScale::Norm)?,
                sign.encode_quantize_values(encoder, &values)?,
            ))
        })?;
        let (key_codes, value_codes) = gpu.submit(|encoder| {
            let keys = code.encode_key_codes(encoder, &keys, &codec, &tables, &positions)?;
            Ok((keys, code.encode_value_codes(encoder, &values, &codec)?))
        })?;
        Ok(Self {
            restored: room(keys.dtype(), shape)?,
            scores: room(DType::F32, Shape { dim: shape.tokens, ..asked })?,
            output: room(DType::F32, Shape { dim: values.shape().dim, ..asked })?,
            gpu: gpu.clone(),
            merge: twin.merge.clone(),
            keys,
            upper,
            values,
            queries,
            decision,
            folded,
            projection,
            sketch,
            quantized,
            codec,
            tables,
            positions,
            key_codes,
            value_codes,
        })
    }

    /// Milliseconds of a call, and how many calls were in each submit.
    pub(super) async fn time(&self, operation: Operation, clock: &dyn Fn() -> f64) -> Result<(f64, u32)> {
        // The first submit compiles the kernels.
        self.submit(operation, 1).await?;
        let start = clock();
        self.submit(operation, 1).await?;
        let batch = ((ENOUGH / (clock() - start).max(f64::MIN_POSITIVE)) as u32).clamp(1, BATCH);
        let mut times = Vec::with_capacity(SUBMITS);
        for _ in 0..SUBMITS {
            let start = clock();
            self.submit(operation, batch).await?;
            times.push((clock() - start) / f64::from(batch));
        }
        Ok((median(times), batch))
    }

    /// Submits so many calls and waits for them.
    async fn submit(&self, operation: Operation, calls: u32) -> Result<()> {
        let last = self.gpu.storage("timing", 4)?;
        let end = self.gpu.submit(|encoder| {
            for _ in 0..calls {
                self.record(operation, encoder)?;
            }
            ReadBack::schedule(&self.gpu, encoder, &last)
        })?;
        end.await.map(drop)
    }

    fn record(&self, operation: Operation, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let fold = minicache::gpu::Ops::new(&self.gpu);
        let sign = qjl::gpu::Ops::new(&self.gpu);
        let code = planes::gpu::Ops::new(&self.gpu);
        let Self { keys, upper, values, queries, projection, sketch, quantized, output, .. } = self;
        let Self { codec, tables, positions, key_codes, value_codes, scores, .. } = self;
        match operation {
            Operation::Similarity => {
                fold.encode_similarity(encoder, keys, upper, &self.merge)?;
            }
            Operation::Merge => {
                fold.encode_merge(encoder, &self.decision)?;
            }
            Operation::Restore => {
                fold.encode_restore(encoder, &self.folded, Layer::Upper, &self.restored)?;
            }
            Operation::Exact => {
                let ops = attention::gpu::Ops::new(&self.gpu);
                ops.encode_exact(encoder, queries, keys, values, None, &causal(), output)?;
            }
            Operation::Quantize => {
                sign.encode_quantize(encoder, keys, projection, KeyScale::Norm)?;
            }
            Operation::QuantizeValues => {
                sign.encode_quantize_values(encoder, values)?;
            }
            Operation::Scores => sign.encode_scores(encoder, queries, sketch, projection, scores)?,
            Operation::Attend => {
                let options = causal();
                sign.encode_attend(encoder, queries, sketch, quantized, projection, None, &options, output)?;
            }
            Operation::PlaneKeys => {
                code.encode_key_codes(encoder, keys, codec, tables, positions)?;
            }
            Operation::PlaneValues => {
                code.encode_value_codes(encoder, values, codec)?;
            }
            Operation::PlaneScores => {
                code.encode_scores(encoder, queries, key_codes, codec, tables, positions, scores)?;
            }
            Operation::PlaneAttend => {
                let stored = planes::gpu::Stored { keys, key_codes, values, value_codes, tables, positions };
                code.encode_attend(encoder, queries, &stored, codec, None, &causal(), output)?;
            }
        }
        Ok(())
    }
}
