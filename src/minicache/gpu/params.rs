//! The uniforms of MiniCache's kernels, field by field as their `Params` declare them.

use bytemuck::{Pod, Zeroable};

use super::super::folded::Sections;
use crate::attention::gpu::AttentionParams;
use crate::gpu::{InputParams, OutputParams};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SimilarityParams {
    pub(super) rows: u32,
    pub(super) tokens: u32,
    pub(super) heads: u32,
    pub(super) t: f32,
    pub(super) lower: [u32; 4],
    pub(super) upper: [u32; 4],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ThresholdParams {
    pub(super) sequence_rows: u32,
    pub(super) tokens: u32,
    pub(super) sinks: u32,
    pub(super) amount: f32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RetainParams {
    pub(super) pages: u32,
    pub(super) pages_per_head: u32,
    pub(super) tokens: u32,
    pub(super) heads: u32,
    pub(super) sinks: u32,
    pub(super) rule_tokens: u32,
    pub(super) rule_first: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ArrangeParams {
    pub(super) pages: u32,
    pub(super) pages_per_head: u32,
    pub(super) last_rows: u32,
    pub(super) full_limit: u32,
    pub(super) last_limit: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MergeParams {
    pub(super) pages: u32,
    pub(super) pages_per_head: u32,
    pub(super) tokens: u32,
    pub(super) heads: u32,
    pub(super) sections: Sections,
    pub(super) lower: [u32; 4],
    pub(super) upper: [u32; 4],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RestoreParams {
    pub(super) view: OutputParams,
    pub(super) sections: Sections,
    pub(super) pages_per_head: u32,
    pub(super) stored: u32,
    pub(super) layer: u32,
    pub(super) padding: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AttendParams {
    pub(super) attention: AttentionParams,
    pub(super) query: [u32; 4],
    pub(super) keys: Sections,
    pub(super) values: Sections,
    pub(super) pages_per_head: u32,
    pub(super) stored: u32,
    pub(super) layer: u32,
    pub(super) units: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GroupSimilarityParams {
    pub(super) rows: u32,
    pub(super) tokens: u32,
    pub(super) heads: u32,
    pub(super) padding: u32,
    pub(super) source: [u32; 4],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GroupMergeParams {
    pub(super) pages: u32,
    pub(super) pages_per_head: u32,
    pub(super) tokens: u32,
    pub(super) padding: u32,
    pub(super) sections: Sections,
    pub(super) source: [u32; 4],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RefillParams {
    pub(super) old: Sections,
    pub(super) fresh: Sections,
    pub(super) words: u32,
    pub(super) scales_at: u32,
    pub(super) padding: [u32; 2],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ExpandParams {
    pub(super) coded: Sections,
    pub(super) slots: u32,
    pub(super) padding: [u32; 3],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TurnParams {
    pub(super) view: InputParams,
}
