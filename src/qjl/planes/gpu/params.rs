//! The uniforms of the planes' kernels, field by field as their `Params` declare them.

use bytemuck::{Pod, Zeroable};

use crate::attention::gpu::AttentionParams;
use crate::gpu::InputParams;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::qjl) struct EncodeParams {
    pub(in crate::qjl) view: InputParams,
    pub(in crate::qjl) set_heads: u32,
    pub(in crate::qjl) fine_at: u32,
    pub(in crate::qjl) scales_at: u32,
    pub(in crate::qjl) means_at: u32,
    pub(in crate::qjl) block: u32,
    pub(in crate::qjl) position: u32,
    pub(in crate::qjl) consecutive: u32,
    pub(in crate::qjl) first: u32,
    pub(in crate::qjl) store_tiles: u32,
    pub(in crate::qjl) padding: [u32; 3],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TileParams {
    pub(super) heads: u32,
    pub(super) tokens: u32,
    pub(super) from_scales_at: u32,
    pub(super) from_means_at: u32,
    pub(super) first: u32,
    pub(super) store_tiles: u32,
    pub(super) scales_at: u32,
    pub(super) means_at: u32,
    pub(super) blocks: u32,
    pub(super) first_block: u32,
    pub(super) store_blocks: u32,
    pub(super) padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CalibrateParams {
    pub(super) view: InputParams,
    pub(super) fine_at: u32,
    pub(super) position: u32,
    pub(super) consecutive: u32,
    pub(super) padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct QueryEnergyParams {
    pub(super) view: InputParams,
    pub(super) group: u32,
    pub(super) padding: [u32; 3],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct BlockMeansParams {
    pub(super) view: InputParams,
    pub(super) sinks: u32,
    pub(super) means_at: u32,
    pub(super) block: u32,
    pub(super) padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ProjectParams {
    pub(super) view: InputParams,
    pub(super) group: u32,
    pub(super) set_heads: u32,
    pub(super) first_row: u32,
    pub(super) padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ScoresParams {
    pub(super) attention: AttentionParams,
    pub(super) fine_at: u32,
    pub(super) tile_angles_at: u32,
    pub(super) key_scales_at: u32,
    pub(super) means_at: u32,
    pub(super) block: u32,
    pub(super) tiles: u32,
    pub(super) units: u32,
    pub(super) offset: u32,
    pub(super) pitch: u32,
    pub(super) column: u32,
    pub(super) fast_pairs: u32,
    pub(super) padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AttendParams {
    pub(super) attention: AttentionParams,
    pub(super) fine_at: u32,
    pub(super) tile_angles_at: u32,
    pub(super) key_scales_at: u32,
    pub(super) means_at: u32,
    pub(super) value_scales_at: u32,
    pub(super) block: u32,
    pub(super) units: u32,
    pub(super) fast_pairs: u32,
}
