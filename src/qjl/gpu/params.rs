//! The uniforms of QJL's kernels, field by field as their `Params` declare them.

use bytemuck::{Pod, Zeroable};

use crate::attention::gpu::AttentionParams;
use crate::gpu::InputParams;

/// Of `quantize` and `quantize_values`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QuantizeParams {
    pub(super) view: InputParams,
    pub(super) capacity: u32,
    pub(super) first: u32,
    pub(super) padding: [u32; 2],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ProjectParams {
    pub(super) view: InputParams,
    pub(super) first_row: u32,
    pub(super) padding: [u32; 3],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ScoresParams {
    pub(super) tokens: u32,
    pub(super) queries: u32,
    pub(super) query_heads: u32,
    pub(super) group: u32,
    pub(super) tiles: u32,
    pub(super) rows: u32,
    pub(super) first_row: u32,
    pub(super) live_first: u32,
    pub(super) live_end: u32,
    pub(super) offset: u32,
    pub(super) pitch: u32,
    pub(super) column: u32,
    pub(super) factor: f32,
    pub(super) padding: [u32; 3],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AttendParams {
    pub(super) attention: AttentionParams,
    pub(super) factor: f32,
    pub(super) padding: [u32; 3],
}
