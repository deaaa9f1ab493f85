//! From what splits have found to the output.

use bytemuck::{Pod, Zeroable};

use super::{WORKGROUP, partial_stride, value_lanes};
use crate::attention::AttendOptions;
use crate::error::Result;
use crate::gpu::{
    Const, Dispatch, Gpu, Kernel, KvView, Module, OutputParams, Recording, Variant, Window, index32,
};
use crate::tensor::{DType, Shape, checked_bytes};

/// The most splits that each word of an output is combined from one after the other.
const FEW_SPLITS: u32 = 4;

/// Records the combining of partial results into `output`, `[batch, query_heads, queries, value_dim]` of any element type.
pub(crate) fn combine(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    partials: &wgpu::Buffer,
    splits: u32,
    options: &AttendOptions<'_>,
    output: &KvView,
) -> Result<()> {
    if splits > FEW_SPLITS {
        let joined = join(recording, gpu, partials, splits, output.shape())?;
        return combine(recording, gpu, &joined, 1, options, output);
    }
    let sinks = gpu.upload("sink logits", bytemuck::cast_slice(options.sink_logits.unwrap_or_default()))?;
    let (window, view) = output.bind_output("attention output", gpu)?;
    recording.add(Dispatch {
        variant: combine_variant(output.shape().dim, output.dtype(), options.sink_logits.is_some()),
        params: CombineParams { view, splits, padding: [0; 3] },
        buffers: &[Window::whole(partials), Window::whole(&sinks), window],
        workgroups: u64::from(view.words).div_ceil(WORKGROUP as u64),
    })
}

/// Joins the splits of every query to one.
fn join(
    recording: &mut Recording<'_>,
    gpu: &Gpu,
    partials: &wgpu::Buffer,
    splits: u32,
    output: Shape,
) -> Result<wgpu::Buffer> {
    let sizes = [output.rows(), partial_stride(output.dim) as usize];
    let joined = gpu.scratch("joined", checked_bytes("partial results", &sizes, 16)? as u64)?;
    recording.add(Dispatch {
        variant: join_variant(output.dim).with_subgroups(gpu.caps().shuffle_width()),
        params: GatherParams { rows: index32(output.rows())?, splits, coded: 0, padding: 0 },
        buffers: &[Window::whole(partials), Window::whole(&joined)],
        workgroups: output.rows() as u64,
    })?;
    Ok(joined)
}

/// Of `join`, and of the kernel of sign planes that turns values back meanwhile: `shaders/common/gather.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct GatherParams {
    pub(crate) rows: u32,
    pub(crate) splits: u32,
    pub(crate) coded: u32,
    pub(crate) padding: u32,
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
    Variant::new(Kernel::Combine, &[Module::Bits(dtype), Module::Output], &constants)
}

pub(super) fn join_variant(value_dim: usize) -> Variant {
    let [fours, lanes] = value_lanes(value_dim);
    let all = Const::U32("LANES", Kernel::Join.workgroup());
    Variant::new(Kernel::Join, &[Module::Gather], &[fours, lanes, all])
}
