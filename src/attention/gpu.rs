//! Attention on the GPU: exact attention over raw rows, and what every store's attention shares: how tokens are split among
//! workgroups, the uniform of `shaders/common/flash.wgsl`, and the combining of the splits.

mod combine;
mod scores;
mod segments;

pub(crate) use combine::{AllParts, GatherParams, Parts, combine, join, joined};
use combine::{combine_variant, join_variant};
pub(crate) use scores::ScorePlace;
use scores::scores_variant;
pub(crate) use segments::{SegmentPasses, Stage};

use bytemuck::{Pod, Zeroable};

use super::{AttendOptions, Geometry};
use crate::error::{Error, Result};
use crate::gpu::{
    BoundView, Const, Dispatch, Gpu, Kernel, KvView, Module, Recording, Variant, ViewUse, Window, index32,
    listed_widths,
};
use crate::tensor::{DType, checked_bytes};

/// The most tokens that a stream of `shaders/common/flash.wgsl` takes at a time.
const SPAN: usize = 8;
/// Bytes that the partial results of one call over many stores may take; one split of each query always fits.
const MAX_PARTIAL_BYTES: usize = 16 << 20;

/// `Attention` of shaders/common/attention.wgsl.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AttentionParams {
    queries: u32,
    query_heads: u32,
    group: u32,
    rows: u32,
    tokens: u32,
    start: u32,
    splits: u32,
    split: u32,
    all_splits: u32,
    first_split: u32,
    causal: u32,
    window: u32,
    soft_cap: f32,
    scale: f32,
    kv_heads: u32,
    first_row: u32,
    live_first: u32,
    live_end: u32,
    position: u32,
    consecutive: u32,
    adds: u32,
    behind: u32,
    reserved: [u32; 2],
}

impl AttentionParams {
    /// Of a store whose positions are stored, or follow the first one.
    pub(crate) fn of_store(
        g: Geometry,
        place: &ScorePlace,
        (position, consecutive): (u32, u32),
    ) -> Result<Self> {
        Ok(Self {
            rows: index32(g.batch * g.query_heads * g.queries)?,
            first_row: index32(place.first_row)?,
            tokens: index32(g.tokens)?,
            live_first: index32(place.live.start)?,
            live_end: index32(place.live.end)?,
            position,
            consecutive,
            ..Self::new(g, &AttendOptions::default())?
        })
    }

    /// What does not depend on a store and its splits.
    fn new(g: Geometry, options: &AttendOptions<'_>) -> Result<Self> {
        Ok(Self {
            queries: index32(g.queries)?,
            query_heads: index32(g.query_heads)?,
            group: index32(g.group)?,
            causal: u32::from(options.causal),
            window: options.window.unwrap_or(u32::MAX),
            soft_cap: options.soft_cap.unwrap_or(0.0),
            scale: options.scale_for(g.key_dim),
            kv_heads: index32(g.kv_heads)?,
            ..Self::zeroed()
        })
    }
}

/// How a kernel divides a pass among workgroups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    /// Workgroups of one split of one sequence.
    units: usize,
    /// Tokens that a workgroup looks at together.
    tokens: usize,
    /// Workgroups that a pass aims for: enough to fill a large GPU once. More splits cost more combining.
    target: usize,
}

impl Tiling {
    /// Rows of numbers: `shaders/common/flash.wgsl`.
    pub(crate) const fn rows(g: Geometry, value_dim: usize) -> Self {
        let dims = [g.key_dim, value_dim];
        // Six workgroups on each of a large GPU's multiprocessors, as many as their registers allow.
        Self::fours(g, SPAN * flash_workgroup(dims) / row_lanes(dims)).aiming_at(792)
    }

    /// Four query rows of one KV head a workgroup, which is small: `shaders/planes/attend.wgsl`.
    pub(crate) const fn fours(g: Geometry, tokens: usize) -> Self {
        Self { units: g.kv_heads * (g.group * g.queries).div_ceil(4), tokens, target: 2048 }
    }

    /// Another number of workgroups that a pass aims for.
    pub(crate) const fn aiming_at(self, target: usize) -> Self {
        Self { target, ..self }
    }

    /// Workgroups of one split of one sequence.
    pub(crate) const fn units(self) -> usize {
        self.units
    }

    /// Splits of a store of so many tokens, and the tokens of one, where so many sequences are attended at once.
    fn split(self, tokens: usize, sequences: usize) -> (usize, usize) {
        let tiles = tokens.div_ceil(self.tokens).max(1);
        let tiles_per_split = tiles.div_ceil(self.target.div_ceil((self.units * sequences).max(1)));
        (tiles.div_ceil(tiles_per_split), tiles_per_split * self.tokens)
    }
}

/// Which rows passes look at. Each kind leaves its partial results in a buffer of its own, since two passes that write one buffer
/// wait for each other on the device: raw rows in two, so that sinks and recent rows do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowKind {
    Coded,
    Raw,
    More,
}

impl RowKind {
    const fn label(self) -> &'static str {
        match self {
            Self::Coded => "coded partials",
            Self::Raw => "raw partials",
            Self::More => "more partials",
        }
    }
}

/// Room for the partial results of passes over one kind of rows. Where each part is written by one pass, a buffer that earlier
/// calls have used will do; else it must hold zeros.
fn partials(
    gpu: &Gpu,
    kind: RowKind,
    [rows, splits]: [usize; 2],
    value_dim: usize,
    written: bool,
) -> Result<wgpu::Buffer> {
    let sizes = [rows, splits, partial_stride(value_dim) as usize];
    let bytes = checked_bytes("partial results", &sizes, 16)?.max(16) as u64;
    if written { gpu.scratch(kind.label(), bytes) } else { gpu.storage(kind.label(), bytes) }
}

/// What of each sequence a pass may see: its length, and the first and one past the last token.
pub(crate) type Span = [u32; 4];

/// The spans of whole sequences.
pub(crate) fn whole(lengths: &[usize]) -> Vec<Span> {
    lengths.iter().map(|&length| [length as u32, 0, length as u32, 0]).collect()
}

/// One pass of an attention call over one store: its sizes, its splits, and where their partial results go.
pub(crate) struct Pass {
    pub(crate) params: AttentionParams,
    pub(crate) spans: wgpu::Buffer,
    pub(crate) partials: wgpu::Buffer,
    /// Workgroups of one split.
    pub(crate) units: usize,
    /// Workgroups of the store's dispatch; none where it has no tokens, and then the partial sums are the zeros that a new
    /// buffer holds.
    pub(crate) workgroups: u64,
}

impl Pass {
    /// One pass over one kind of rows. Checks the options.
    pub(crate) fn of(
        gpu: &Gpu,
        (kind, spans, tiling): (RowKind, &[Span], Tiling),
        g: Geometry,
        value_dim: usize,
        options: &AttendOptions<'_>,
    ) -> Result<Self> {
        options.validate()?;
        g.check_sinks(options)?;
        let rows = g.batch * g.query_heads * g.queries;
        let (splits, split) = tiling.split(g.tokens, g.batch);
        let units = g.batch * tiling.units();
        Ok(Self {
            params: AttentionParams {
                rows: index32(rows)?,
                tokens: index32(g.tokens)?,
                live_end: index32(g.tokens)?,
                all_splits: index32(splits)?,
                splits: index32(splits)?,
                split: index32(split)?,
                ..AttentionParams::new(g, options)?
            },
            spans: gpu.upload("spans", bytemuck::cast_slice(spans))?,
            partials: partials(gpu, kind, [rows, splits], value_dim, g.tokens > 0)?,
            units,
            workgroups: if g.tokens == 0 { 0 } else { (units * splits) as u64 },
        })
    }

    /// The only pass of a call that sees whole sequences.
    pub(crate) fn new(
        gpu: &Gpu,
        g: Geometry,
        value_dim: usize,
        lengths: Option<&[u32]>,
        options: &AttendOptions<'_>,
    ) -> Result<Self> {
        let spans = whole(&g.lengths(lengths)?);
        Self::of(gpu, (RowKind::Raw, &spans, Tiling::rows(g, value_dim)), g, value_dim, options)
    }

    /// What this pass and those that share its buffer leave.
    pub(crate) fn parts(&self) -> Parts {
        Parts { partials: self.partials.clone(), splits: self.params.all_splits }
    }

    /// Records the combining of all splits into `output`.
    pub(crate) fn combine(
        &self,
        recording: &mut Recording<'_>,
        gpu: &Gpu,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        combine(recording, gpu, &self.parts(), options, output)
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ExactParams {
    attention: AttentionParams,
    query: [u32; 4],
    key: [u32; 4],
    value: [u32; 4],
    units: u32,
    padding: [u32; 3],
}

/// Groups of four channels of a value row.
pub(crate) fn value_fours(value_dim: usize) -> u32 {
    value_dim.div_ceil(4) as u32
}

/// Fours of a value's channels, and the invocations that cover them, a power of two.
pub(crate) fn value_lanes(value_dim: usize) -> [Const; 2] {
    let fours = value_fours(value_dim);
    [Const::U32("VALUE_FOURS", fours), Const::U32("VALUE_LANES", fours.next_power_of_two())]
}

/// Fours of numbers of one split's partial result.
pub(crate) fn partial_stride(value_dim: usize) -> u32 {
    1 + value_fours(value_dim)
}

/// Invocations that share a row of keys and of values, eight channels each: four at the least, of which each weighs a token.
const fn row_lanes([key_dim, value_dim]: [usize; 2]) -> usize {
    let dim = if key_dim > value_dim { key_dim } else { value_dim };
    let lanes = dim.div_ceil(8).next_power_of_two();
    if lanes < 4 { 4 } else { lanes }
}

/// Invocations of a workgroup: small ones wait less for each other.
const fn flash_workgroup(dims: [usize; 2]) -> usize {
    let lanes = row_lanes(dims);
    if lanes < 64 { 64 } else { lanes }
}

/// What a kernel by shaders/common/flash.wgsl is made of, but for what reads its rows.
const FLASH: [Module; 7] = [
    Module::AttentionParams,
    Module::Fours,
    Module::Query,
    Module::QueryEight,
    Module::Logits,
    Module::Softmax,
    Module::Flash,
];

/// A kernel by `shaders/common/flash.wgsl`, with what reads its rows of these dimensions.
pub(crate) fn flash_variant(
    kernel: Kernel,
    rows: &[Module],
    dims: [usize; 2],
    queries: DType,
    constants: &[Const],
) -> Variant {
    let [key_dim, value_dim] = dims;
    let own = [
        Const::U32("HEAD_DIM", key_dim as u32),
        Const::U32("VALUE_DIM", value_dim as u32),
        Const::U32("QUERY_DTYPE", queries as u32),
        Const::U32("VALUE_FOURS", value_fours(value_dim)),
        Const::U32("LANES", row_lanes(dims) as u32),
    ];
    let invocations = flash_workgroup(dims) as u32;
    Variant::new(kernel, &[rows, &FLASH].concat(), &[constants, &own].concat()).with_workgroup(invocations)
}

fn exact_variant(dims: [usize; 2], [query, stored]: [DType; 2], vectors: bool) -> Variant {
    let rows = if vectors { Module::RawVectors } else { Module::RawWords };
    let read = [Module::Float, Module::Load(stored), Module::Eight, Module::RawRows, rows];
    // For the name alone, in which modules do not stand.
    flash_variant(Kernel::Exact, &read, dims, query, &[Const::Bool("VECTORS", vectors)])
}

/// Every variant some adapter can take, for a selection of dimensions.
pub(crate) fn variants() -> Vec<Variant> {
    let mut variants = Vec::new();
    for dims in [[1, 1], [64, 64], [192, 128], [80, 80], [511, 512]] {
        let widths = listed_widths(&[4, 8, 32, 64], dims[1]);
        for stored in DType::ALL {
            variants.extend(widths.iter().map(|&width| join_variant(dims[1]).with_subgroups(width)));
            variants.extend([false, true].map(|sinks| combine_variant(dims[1], stored, sinks)));
            for query in DType::ALL {
                let even = dims.map(|dim| dim % 2 == 0);
                for vectors in [false, true].into_iter().filter(|v| !v || dims.iter().all(|dim| dim % 8 == 0))
                {
                    let variant = exact_variant(dims, [query, stored], vectors);
                    variants.extend(widths.iter().map(|&width| variant.clone().with_subgroups(width)));
                }
                variants.push(scores_variant(dims[0], [query, stored], even[0]));
            }
        }
    }
    variants
}

/// Exact attention, recorded into the caller's encoder: the honest baseline beside every folded cache.
#[derive(Clone, Debug)]
pub struct Ops {
    gpu: Gpu,
}

impl Ops {
    /// Operations on this device. Kernels are compiled when first recorded.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        Self { gpu: gpu.clone() }
    }

    /// Records exact attention over raw rows into `output`, `[batch, query_heads, queries, value_dim]` of any element type.
    /// `queries` `[batch, query_heads, queries, key_dim]` of any type, `keys` `[batch, kv_heads, tokens, key_dim]` and
    /// `values` `[batch, kv_heads, tokens, value_dim]` of one type; `lengths` one per sequence (default: all tokens).
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::HeadRatio`], [`Error::DType`] or [`Error::Range`] when shapes, types, lengths or options do
    /// not fit, the errors of a view that cannot be bound or written, [`Error::Limit`], [`Error::OutOfMemory`].
    #[allow(clippy::too_many_arguments, reason = "attention has this many inputs, each of another kind")]
    pub fn encode_exact(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        queries: &KvView,
        keys: &KvView,
        values: &KvView,
        lengths: Option<&[u32]>,
        options: &AttendOptions<'_>,
        output: &KvView,
    ) -> Result<()> {
        let geometry = Geometry::of(queries.shape(), keys.shape())?;
        geometry.check_values(values.shape())?;
        if keys.dtype() != values.dtype() {
            let (want, have) = (keys.dtype().to_string(), values.dtype().to_string());
            return Err(Error::DType { what: "values".to_owned(), want, have });
        }
        let value_dim = values.shape().dim;
        output.shape().check_equal("attention output", geometry.output(value_dim)?)?;
        let pass = Pass::new(&self.gpu, geometry, value_dim, lengths, options)?;
        let mut recording = Recording::new(&self.gpu);
        if output.shape().elements() > 0 {
            self.exact(&mut recording, &pass, [queries, keys, values])?;
            pass.combine(&mut recording, &self.gpu, options, output)?;
        }
        recording.record(encoder);
        Ok(())
    }

    /// Records one pass over raw rows.
    pub(crate) fn exact(
        &self,
        recording: &mut Recording<'_>,
        pass: &Pass,
        [queries, keys, values]: [&KvView; 3],
    ) -> Result<()> {
        let bind =
            |what: &str, view: &KvView| -> Result<BoundView> { view.bind(what, ViewUse::Read, &self.gpu) };
        let (query, key, value) = (bind("queries", queries)?, bind("keys", keys)?, bind("values", values)?);
        let dims = [keys.shape().dim, values.shape().dim];
        let dtypes = [queries.dtype(), keys.dtype()];
        recording.add(Dispatch {
            variant: exact_variant(dims, dtypes, key.vectors && value.vectors)
                .with_subgroups(self.gpu.caps().shuffle_width()),
            params: ExactParams {
                attention: pass.params,
                query: query.layout,
                key: key.layout,
                value: value.layout,
                units: index32(pass.units)?,
                padding: [0; 3],
            },
            buffers: &[
                (&query).into(),
                (&key).into(),
                (&value).into(),
                Window::whole(&pass.spans),
                Window::whole(&pass.partials),
            ],
            workgroups: pass.workgroups,
        })
    }
}
