//! From what splits have found to the output.

use bytemuck::{Pod, Zeroable};

use super::{partial_stride, value_lanes};
use crate::attention::AttendOptions;
use crate::error::Result;
use crate::gpu::{
    Const, Dispatch, Gpu, Kernel, KvView, Module, OutputParams, Recording, Variant, Window, index32,
};
use crate::tensor::{DType, Shape, checked_bytes};

/// The most splits that each word of an output is combined from one after the other.
const FEW_SPLITS: u32 = 4;

/// What passes over one kind of rows have left of every query row: the partial results of so many splits.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) partials: wgpu::Buffer,
    pub(crate) splits: u32,
}

/// What the passes of a call have left: over coded rows, and over raw ones in two buffers.
pub(crate) type AllParts<'a> = [&'a Parts; 3];

/// Records the combining of partial results into `output`, `[batch, query_heads, queries, value_dim]` of any element type.
pub(crate) fn combine(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    parts: &Parts,
    options: &AttendOptions<'_>,
    output: &KvView,
) -> Result<()> {
    if parts.splits > FEW_SPLITS {
        let none = Parts { splits: 0, ..parts.clone() };
        let joined = join(recording, gpu, [&none, parts, &none], output.shape())?;
        return combine(recording, gpu, &joined, options, output);
    }
    let sinks = gpu.upload("sink logits", bytemuck::cast_slice(options.sink_logits.unwrap_or_default()))?;
    let (window, view) = output.bind_output("attention output", gpu)?;
    recording.add(Dispatch {
        variant: combine_variant(output.shape().dim, output.dtype(), options.sink_logits.is_some()),
        params: CombineParams { view, splits: parts.splits, padding: [0; 3] },
        buffers: &[Window::whole(&parts.partials), Window::whole(&sinks), window],
        workgroups: u64::from(view.words).div_ceil(Kernel::Combine.workgroup().into()),
    })
}

/// Joins the splits of every query to one.
pub(crate) fn join(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    parts: AllParts<'_>,
    output: Shape,
) -> Result<Parts> {
    let (joined, [coded, raw, more]) = (joined(gpu, output.rows(), output.dim)?, parts);
    recording.add(Dispatch {
        variant: join_variant(output.dim).with_subgroups(gpu.caps().shuffle_width()),
        params: GatherParams::new(output.rows(), parts)?,
        // The third is of the kernel that turns values back meanwhile.
        buffers: &[&coded.partials, &raw.partials, &raw.partials, &more.partials, &joined.partials]
            .map(Window::whole),
        workgroups: output.rows() as u64,
    })?;
    Ok(joined)
}

/// Room for one partial result of every query row.
pub(crate) fn joined(gpu: &Gpu, rows: usize, value_dim: usize) -> Result<Parts> {
    let bytes = checked_bytes("partial results", &[rows, partial_stride(value_dim) as usize], 16)?;
    Ok(Parts { partials: gpu.scratch("joined", bytes as u64)?, splits: 1 })
}

/// Of `join`, and of the kernel of sign planes that turns values back meanwhile: `shaders/common/gather.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct GatherParams {
    rows: u32,
    coded: u32,
    raw: u32,
    more: u32,
}

impl GatherParams {
    pub(crate) fn new(rows: usize, parts: AllParts<'_>) -> Result<Self> {
        let [coded, raw, more] = parts.map(|parts| parts.splits);
        Ok(Self { rows: index32(rows)?, coded, raw, more })
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CombineParams {
    view: OutputParams,
    splits: u32,
    padding: [u32; 3],
}

pub(super) fn combine_variant(value_dim: usize, dtype: DType, sinks: bool) -> Variant {
    let constants = [
        Const::Bool("HAS_SINKS", sinks),
        Const::U32("HEAD_DIM", value_dim as u32),
        Const::U32("PARTIAL_STRIDE", partial_stride(value_dim)),
    ];
    Variant::new(Kernel::Combine, &[Module::Bits(dtype), Module::OutputParams, Module::Output], &constants)
}

pub(super) fn join_variant(value_dim: usize) -> Variant {
    let [fours, lanes] = value_lanes(value_dim);
    let all = Const::U32("LANES", Kernel::Join.workgroup());
    Variant::new(Kernel::Join, &[Module::Gather], &[fours, lanes, all])
}
