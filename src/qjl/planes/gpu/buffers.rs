//! What sign planes keep on the device.

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::super::{CodeLayout, Codec, PlaneCodes, Tables};
use super::Side;
use super::angles::Angles;
use super::tiles::{Tiles, pack, unpack};
use super::variants::pairs;
use crate::error::Result;
use crate::gpu::{Gpu, ReadBack, words};
use crate::qjl::Counts;
use crate::rope::Positions;
use crate::tensor::{Shape, checked_bytes};

/// What the tables say of one coded position of a head: `Channel` of shaders/planes/channel.wgsl.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Channel {
    channel: u32,
    pair: u32,
    mean: f32,
    turned: f32,
    sigma: f32,
}

/// Tables on the device, in coded order.
#[derive(Clone, Debug)]
pub struct TableBuffer {
    pub(super) sets: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(in crate::qjl) buffer: wgpu::Buffer,
}

impl TableBuffer {
    /// Room for one set of tables.
    pub(in crate::qjl) fn new(gpu: &Gpu, heads: usize, dim: usize) -> Result<Self> {
        let bytes = checked_bytes("tables", &[heads, dim], size_of::<Channel>())?;
        Ok(Self { sets: 1, heads, dim, buffer: gpu.storage("tables", bytes as u64)? })
    }

    /// Tables that change nothing, for rows that are not centred.
    pub(in crate::qjl) fn plain(gpu: &Gpu, heads: usize, dim: usize) -> Result<Self> {
        let channel =
            |channel: usize| Channel { channel: channel as u32, pair: 0, mean: 0.0, turned: 0.0, sigma: 1.0 };
        let channels: Vec<Channel> = (0..heads).flat_map(|_| (0..dim).map(channel)).collect();
        Ok(Self { sets: 1, heads, dim, buffer: gpu.upload("tables", bytemuck::cast_slice(&channels))? })
    }

    pub(in crate::qjl) fn upload(gpu: &Gpu, codec: &Codec, tables: &Tables) -> Result<Self> {
        // Of each channel: its pair, the other channel of it, and the sign with which that one's mean turns into this one.
        let still = (pairs(codec) as u32 - 1, 0, 0.0);
        let mut turns = vec![still; tables.dim];
        for (pair, (a, b)) in (0..).zip(codec.mean_rope().into_iter().flat_map(crate::rope::Rope::pairs)) {
            if let Ok([first, second]) = turns.get_disjoint_mut([a, b]) {
                (*first, *second) = ((pair, b, -1.0), (pair, a, 1.0));
            }
        }
        let mut channels = Vec::with_capacity(tables.order.len());
        for (batch, head) in (0..tables.sets).flat_map(|set| (0..tables.heads).map(move |head| (set, head))) {
            let head = tables.head(batch, head);
            let mean = |c: usize| head.mu.get(c).map_or(0.0, |mu| mu.to_f32());
            for place in 0..tables.dim {
                let c = if codec.keys().is_split() {
                    head.order.get(place).map_or(place, |&c| usize::from(c))
                } else {
                    place
                };
                let (pair, other, sign) = turns.get(c).copied().unwrap_or(still);
                let sigma = head.sigma.get(c).copied().unwrap_or(1.0);
                channels.push(Channel {
                    channel: c as u32,
                    pair,
                    mean: mean(c),
                    turned: sign * mean(other),
                    sigma,
                });
            }
        }
        let buffer = gpu.upload("tables", bytemuck::cast_slice(&channels))?;
        Ok(Self { sets: tables.sets, heads: tables.heads, dim: tables.dim, buffer })
    }

    /// The tables of one set, of the words of the buffer. Where codes are not split the order of channels is not kept.
    pub(in crate::qjl) fn parse(&self, words: &[u32]) -> Tables {
        let mut tables = Tables::identity(self.heads, self.dim);
        let channels = words.chunks_exact(size_of::<Channel>() / 4).enumerate();
        for (place, words) in channels {
            let channel = bytemuck::pod_read_unaligned::<Channel>(bytemuck::cast_slice(words));
            let head = place / self.dim * self.dim;
            let at = head + channel.channel as usize;
            if let Some(order) = tables.order.get_mut(place) {
                *order = channel.channel as u16;
            }
            if let Some((mu, sigma)) = tables.mu.get_mut(at).zip(tables.sigma.get_mut(at)) {
                (*mu, *sigma) = (f16::from_f32(channel.mean), channel.sigma);
            }
        }
        tables
    }

    /// Heads that a sequence skips to reach its own tables.
    pub(super) fn set_heads(&self) -> u32 {
        if self.sets > 1 { self.heads as u32 } else { 0 }
    }

    /// Bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.buffer.size()
    }
}

/// Positions of tokens and the angles that they need, on the device; layers of one RoPE share them.
#[derive(Clone, Debug)]
pub struct PositionBuffer {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) host: Vec<u32>,
    /// The first position, where the others follow it and are not stored.
    pub(super) first: Option<u32>,
    pub(super) positions: wgpu::Buffer,
    pub(super) angles: Angles,
}

impl PositionBuffer {
    pub(super) fn upload(
        gpu: &Gpu,
        codec: &Codec,
        positions: Positions<'_>,
        [batch, tokens]: [usize; 2],
    ) -> Result<Self> {
        let host = positions.resolve(batch, tokens)?;
        let last = host.iter().copied().max().unwrap_or(0);
        let follows = host.windows(2).all(|two| matches!(two, [a, b] if a.checked_add(1) == Some(*b)));
        let first = host.first().copied().filter(|_| batch == 1 && follows);
        let positions = gpu.upload("positions", bytemuck::cast_slice(&host))?;
        Ok(Self { batch, tokens, host, first, positions, angles: Angles::upload(gpu, codec, last)? })
    }

    /// No positions, for rows that are not centred.
    pub(in crate::qjl) fn nowhere(gpu: &Gpu) -> Result<Self> {
        let angles = Angles::none(gpu)?;
        let positions = angles.buffer.clone();
        Ok(Self { batch: 0, tokens: 0, host: Vec::new(), first: Some(0), positions, angles })
    }

    /// The positions of one sequence's tokens in a store: stored, or consecutive from the first on.
    pub(in crate::qjl) fn of_store(
        angles: &Angles,
        stored: Option<&wgpu::Buffer>,
        first: u32,
        tokens: usize,
    ) -> Self {
        let positions = stored.unwrap_or(&angles.buffer).clone();
        let first = if stored.is_some() { None } else { Some(first) };
        Self { batch: 1, tokens, host: Vec::new(), first, positions, angles: angles.clone() }
    }

    /// The first position and whether the others follow it, as kernels take them.
    pub(super) fn consecutive(&self) -> (u32, u32) {
        self.first.map_or((0, 0), |first| (first, 1))
    }
}

/// Coded rows on the device, in tiles of 32 tokens: one store of codes, scalars and, of keys, block means.
#[derive(Clone, Debug)]
pub struct PlaneBuffer {
    pub(in crate::qjl) shape: Shape,
    pub(super) layout: CodeLayout,
    pub(in crate::qjl) side: Side,
    pub(super) positions: Vec<u32>,
    pub(in crate::qjl) store: wgpu::Buffer,
    pub(in crate::qjl) status: wgpu::Buffer,
    /// Where scalars and block means begin, in words.
    pub(super) scales_at: usize,
    pub(super) means_at: usize,
    means: usize,
}

impl PlaneBuffer {
    /// Room for rows of this shape and, of keys, for `means` block means.
    pub(in crate::qjl) fn new(
        gpu: &Gpu,
        shape: Shape,
        (codec, side): (&Codec, Side),
        positions: Vec<u32>,
        means: usize,
    ) -> Result<Self> {
        let status = gpu.storage("status", 12)?;
        Ok(Self { positions, ..Self::counted(gpu, shape, (codec, side), means, status)? })
    }

    /// Room for rows that are counted in `status`, 12 bytes.
    pub(in crate::qjl) fn counted(
        gpu: &Gpu,
        shape: Shape,
        (codec, side): (&Codec, Side),
        means: usize,
        status: wgpu::Buffer,
    ) -> Result<Self> {
        let layout = side.layout(codec);
        let tiles = Tiles::new(shape, layout, side);
        let sizes =
            [shape.batch * shape.heads * tiles.tiles, tiles.tile_words() + tiles.scalar_words() + shape.dim];
        checked_bytes("plane codes", &sizes, 4)?;
        let means_at = tiles.words();
        let words = (means_at + means * shape.dim.div_ceil(2)).next_multiple_of(4).max(4);
        Ok(Self {
            shape,
            layout: layout.clone(),
            side,
            positions: Vec::new(),
            store: gpu.storage("plane codes", 4 * words as u64)?,
            status,
            scales_at: tiles.code_words(),
            means_at,
            means,
        })
    }

    /// Copies codes to the device; new rows are counted in `status`, 12 bytes.
    pub(in crate::qjl) fn upload(
        gpu: &Gpu,
        codes: &PlaneCodes,
        side: Side,
        status: wgpu::Buffer,
    ) -> Result<Self> {
        let (shape, layout) = (codes.shape, &codes.layout);
        let tiles = Tiles::new(shape, layout, side);
        let mut words = pack(codes, side);
        for mean in codes.means.chunks(shape.dim.max(1)) {
            let both = |halves: &[f16]| {
                halves.iter().rev().fold(0u32, |word, half| word << 16 | u32::from(half.to_bits()))
            };
            words.extend(mean.chunks(2).map(both));
        }
        words.resize(words.len().next_multiple_of(4).max(4), 0);
        Ok(Self {
            shape,
            layout: layout.clone(),
            side,
            positions: Vec::new(),
            store: gpu.upload("plane codes", bytemuck::cast_slice(&words))?,
            status,
            scales_at: tiles.code_words(),
            means_at: tiles.words(),
            means: codes.means.len() / shape.dim.max(1),
        })
    }

    /// Tiles of a head.
    pub(super) fn tiles(&self) -> Tiles {
        Tiles::new(self.shape, &self.layout, self.side)
    }

    /// Shape of the rows, `[batch, heads, tokens, head_dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes of the store.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.store.size()
    }

    /// Schedules the read-back of everything stored; [`parse`](Self::parse) makes [`PlaneCodes`] of it.
    ///
    /// # Errors
    /// As [`ReadBack::schedule`].
    pub fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<[ReadBack; 2]> {
        let (store, status) =
            (ReadBack::prepare(gpu, &[&self.store])?, ReadBack::prepare(gpu, &[&self.status])?);
        Ok([store.record(encoder), status.record(encoder)])
    }

    /// The codes on the host, in their canonical layout.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(&self, [store, status]: [ReadBack; 2]) -> Result<PlaneCodes> {
        let (store, status) = (words(&store.await?), words(&status.await?));
        let half = |at: usize, index: usize| {
            let word = store.get(at + index / 2).copied().unwrap_or_default();
            f16::from_bits((word >> (index % 2 * 16)) as u16)
        };
        let mut codes = PlaneCodes::new(self.shape, &self.layout);
        codes.segments = unpack(&store, self.shape, &self.layout, self.side);
        let mean_words = self.shape.dim.div_ceil(2);
        for mean in 0..self.means {
            codes.means.extend((0..self.shape.dim).map(|c| half(self.means_at + mean * mean_words, c)));
        }
        codes.positions.clone_from(&self.positions);
        let at = |index: usize| status.get(index).copied().unwrap_or_default();
        codes.status = Counts { non_finite: at(0), zero: at(1), overflow: at(2) };
        Ok(codes)
    }
}
