//! Blocks of raw keys and values on the device, and the copying of a host's rows into them.

use bytemuck::{Pod, Zeroable};

use super::{
    Const, Dispatch, Gpu, Kernel, KvView, Module, OutputParams, ReadBack, Recording, Variant, ViewUse,
};
use crate::cache::LayerShape;
use crate::cache::host::HostBlock;
use crate::cache::tail::{Block, MakeBlock, Write};
use crate::error::Result;
use crate::tensor::{DType, Shape, Strides, checked_bytes};

/// Tokens of the smallest block: what a cache that decodes token by token allocates at once.
const MIN_BLOCK: usize = 128;

/// Keys and values of one sequence and layer, `[kv_heads, capacity, dim]` each, every row at a whole word.
#[derive(Debug)]
pub(crate) struct RawBlock {
    keys: wgpu::Buffer,
    values: wgpu::Buffer,
    shape: LayerShape,
    capacity: usize,
}

/// Elements from one row to the next.
fn pitch(dim: usize, dtype: DType) -> usize {
    dim.next_multiple_of(4 / dtype.size())
}

impl RawBlock {
    fn new(gpu: &Gpu, shape: LayerShape, capacity: usize) -> Result<Self> {
        let buffer = |label, dim| {
            let sizes = [shape.kv_heads, capacity, pitch(dim, shape.dtype)];
            gpu.storage(label, checked_bytes(label, &sizes, shape.dtype.size())? as u64)
        };
        let (keys, values) = (buffer("raw keys", shape.key_dim)?, buffer("raw values", shape.value_dim)?);
        Ok(Self { keys, values, shape, capacity })
    }

    /// A block that holds these rows, padded to whole words.
    pub(crate) fn upload(gpu: &Gpu, shape: LayerShape, capacity: usize, rows: [&[u8]; 2]) -> Result<Self> {
        let [keys, values] = rows;
        let (keys, values) = (gpu.upload("raw keys", keys)?, gpu.upload("raw values", values)?);
        Ok(Self { keys, values, shape, capacity })
    }

    /// Schedules the reading of keys and values, each row at a whole word.
    pub(crate) fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<[ReadBack; 2]> {
        let (keys, values) =
            (ReadBack::prepare(gpu, &[&self.keys])?, ReadBack::prepare(gpu, &[&self.values])?);
        Ok([keys.record(encoder), values.record(encoder)])
    }

    /// Keys and values of `tokens` tokens from row `first` on, `[1, kv_heads, tokens, dim]`.
    pub(crate) fn views(&self, first: usize, tokens: usize) -> [KvView; 2] {
        let view = |(buffer, dim)| {
            let pitch = pitch(dim, self.shape.dtype);
            let heads = self.capacity * pitch;
            let strides = Strides { batch: heads * self.shape.kv_heads, heads, tokens: pitch };
            let shape = Shape { batch: 1, heads: self.shape.kv_heads, tokens, dim };
            KvView::new(buffer, self.shape.dtype, shape).strides(strides).at(first * pitch)
        };
        [(&self.keys, self.shape.key_dim), (&self.values, self.shape.value_dim)].map(view)
    }

    /// The rows in the bytes of both buffers.
    pub(crate) fn on_host(&self, bytes: &[u8]) -> Result<HostBlock> {
        let (keys, values) = bytes.split_at((self.keys.size() as usize).min(bytes.len()));
        HostBlock::padded(self.shape, self.capacity, [keys, values])
    }

    /// The buffers of keys and values.
    pub(crate) fn buffers(&self) -> [&wgpu::Buffer; 2] {
        [&self.keys, &self.values]
    }

    /// Bytes of the two buffers.
    pub(crate) fn bytes(&self) -> u64 {
        self.keys.size() + self.values.size()
    }
}

/// Copies of whole buffers that come before a recording's dispatches.
#[derive(Debug, Default)]
pub(crate) struct Copies(Vec<[wgpu::Buffer; 2]>);

impl Copies {
    /// Adds the copying of a whole buffer to one of its size.
    pub(crate) fn add(&mut self, from: &wgpu::Buffer, to: &wgpu::Buffer) {
        self.0.push([from.clone(), to.clone()]);
    }

    /// Records the copies.
    pub(crate) fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        for [from, to] in &self.0 {
            encoder.copy_buffer_to_buffer(from, 0, to, 0, from.size());
        }
    }
}

/// Makes blocks for one layer; the copies that they need are collected.
pub(crate) struct Blocks<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) shape: LayerShape,
    /// Whether every block may be as large as those before it together, so that few hold many tokens; a tail that is folded
    /// as it grows needs no more room than a step's.
    pub(crate) grows: bool,
    pub(crate) copies: &'a mut Copies,
}

/// Tokens of a layer that one binding can show, in whole 32s.
pub(crate) fn largest(gpu: &Gpu, shape: LayerShape) -> usize {
    let dim = shape.key_dim.max(shape.value_dim);
    let token = (shape.kv_heads * pitch(dim, shape.dtype) * shape.dtype.size()) as u64;
    ((gpu.caps().largest_binding() / token.max(1)) as usize / 32 * 32).max(32)
}

impl MakeBlock<RawBlock> for Blocks<'_> {
    fn capacity(&self, start: usize, tokens: usize) -> usize {
        let wanted = if self.grows { tokens.max(start / 2) } else { tokens };
        wanted.next_multiple_of(32).max(MIN_BLOCK).min(largest(self.gpu, self.shape))
    }

    fn make(&mut self, capacity: usize) -> Result<RawBlock> {
        RawBlock::new(self.gpu, self.shape, capacity)
    }

    fn copy(&mut self, block: &Block<RawBlock>) -> Result<RawBlock> {
        let copy = RawBlock::new(self.gpu, self.shape, block.capacity)?;
        let from = &block.rows;
        self.copies.0.push([from.keys.clone(), copy.keys.clone()]);
        self.copies.0.push([from.values.clone(), copy.values.clone()]);
        Ok(copy)
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AppendParams {
    view: OutputParams,
    source: [u32; 4],
}

fn append_variant(dim: usize, dtype: DType) -> Variant {
    let modules = [Module::Load(dtype), Module::Bits(dtype), Module::OutputParams, Module::Output];
    Variant::new(Kernel::Append, &modules, &[Const::U32("HEAD_DIM", dim as u32)])
}

/// Every variant some adapter can take, for a selection of dimensions.
pub(crate) fn variants() -> Vec<Variant> {
    let dims = [1, 64, 80, 511];
    dims.iter().flat_map(|&dim| DType::ALL.map(|dtype| append_variant(dim, dtype))).collect()
}

/// Room for a tensor whose rows begin at whole words.
pub(crate) fn room(gpu: &Gpu, label: &'static str, shape: Shape, dtype: DType) -> Result<KvView> {
    let pitch = pitch(shape.dim, dtype);
    let bytes = checked_bytes(label, &[shape.rows(), pitch], dtype.size())?;
    let heads = shape.tokens * pitch;
    let strides = Strides { batch: shape.heads * heads, heads, tokens: pitch };
    Ok(KvView::new(&gpu.storage(label, bytes as u64)?, dtype, shape).strides(strides))
}

/// Copies a step's keys and values of one sequence into a block.
pub(crate) fn append(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    [keys, values]: [&KvView; 2],
    sequence: usize,
    write: &Write<RawBlock>,
) -> Result<()> {
    let [to_keys, to_values] = write.rows.views(write.at, write.count);
    for (from, to) in [(keys, &to_keys), (values, &to_values)] {
        copy(recording, gpu, &from.part(sequence, write.from, write.count), to)?;
    }
    Ok(())
}

/// Copies rows of one sequence, bit for bit; those of `to` begin at whole words.
pub(crate) fn copy(recording: &mut Recording<'_>, gpu: &Gpu, from: &KvView, to: &KvView) -> Result<()> {
    let source = from.bind("rows", ViewUse::Read, gpu)?;
    let (output, view) = to.bind_output("rows", gpu)?;
    let variant = append_variant(to.shape().dim, to.dtype());
    recording.add(Dispatch {
        workgroups: u64::from(view.words).div_ceil(u64::from(variant.workgroup())),
        variant,
        params: AppendParams { view, source: source.layout },
        buffers: &[(&source).into(), output],
    })
}
