//! What sign planes keep on the device.

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::super::{CodeLayout, Codec, PlaneCodes, Tables};
use super::Side;
use super::tiles::{Tiles, pack, unpack};
use super::variants::{attend_tokens, pairs};
use crate::error::{Error, Result};
use crate::gpu::{Gpu, ReadBack, index32, words};
use crate::qjl::Counts;
use crate::rope::{ANGLE_TILE, Positions};
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

/// Cosines and sines of every pair's angle: coarse rows for tiles of positions, then fine rows for those within one; then what
/// the tokens that a workgroup attends to together need ([`tile_angles`]).
#[derive(Clone, Debug)]
pub(in crate::qjl) struct Angles {
    pub(in crate::qjl) buffer: wgpu::Buffer,
    /// Index of the first fine row.
    pub(in crate::qjl) fine_at: u32,
    /// Where the angles of a workgroup's tokens begin, in fours of numbers.
    pub(in crate::qjl) tile_at: u32,
    /// Pairs that have angles there; those behind them are slow.
    pub(in crate::qjl) fast_pairs: u32,
    /// Positions below this one have angles.
    pub(in crate::qjl) end: u64,
}

impl Angles {
    /// No angles, for rows that are not centred.
    fn none(gpu: &Gpu) -> Result<Self> {
        let buffer = gpu.storage("angles", 16)?;
        Ok(Self { buffer, fine_at: 0, tile_at: 0, fast_pairs: 0, end: u64::MAX })
    }

    /// The angles of positions up to `last`, rounded up to a whole tile.
    pub(in crate::qjl) fn upload(gpu: &Gpu, codec: &Codec, last: u32) -> Result<Self> {
        // Without a mean that turns no kernel reads an angle, and one row does.
        let turns = codec.mean_rope().is_some();
        let tile = if turns { attend_tokens(codec) } else { 0 };
        let whole = if turns { u64::from(last / ANGLE_TILE) + 1 } else { 1 };
        // A workgroup's tile begins at a position that has angles, and its middle is asked for too.
        let coarse = whole + (tile as u64 / 2).div_ceil(u64::from(ANGLE_TILE));
        let fast_pairs = fast_pairs(codec, tile);
        let of_tile = (8 + tile / 2) * fast_pairs + SLOW_DEGREES * pairs(codec).next_multiple_of(4);
        let need = (coarse + u64::from(ANGLE_TILE)) * pairs(codec) as u64 * 8 + 4 * of_tile as u64;
        let have = gpu.caps().largest_binding();
        if need > have {
            return Err(Error::Limit { what: "bytes of the angles of all positions", need, have });
        }
        let mut rows: Vec<[f32; 2]> = Vec::new();
        let mut push = |position: u32| {
            rows.extend(codec.mean_rope().into_iter().flat_map(|rope| rope.angles(position)));
            rows.push([1.0, 0.0]);
        };
        let coarse = coarse as u32;
        (0..coarse).for_each(|tile| push(tile.saturating_mul(ANGLE_TILE)));
        (0..ANGLE_TILE).for_each(&mut push);
        let mut numbers: Vec<f32> = rows.drain(..).flatten().collect();
        numbers.resize(numbers.len().next_multiple_of(4), 0.0);
        let tile_at = index32(numbers.len() / 4)?;
        numbers.extend(tile_angles(codec, tile, fast_pairs));
        Ok(Self {
            buffer: gpu.upload("angles", bytemuck::cast_slice(&numbers))?,
            fine_at: coarse * pairs(codec) as u32,
            tile_at,
            fast_pairs: fast_pairs as u32,
            end: if turns { whole * u64::from(ANGLE_TILE) } else { u64::MAX },
        })
    }
}

/// Coefficients of the slow pairs' polynomial: `shaders/planes/mean.wgsl`.
const SLOW_DEGREES: usize = 8;
/// How far a slow pair turns at the most from the middle of a tile to its end, in radians.
const SLOW_ANGLE: f64 = 0.5;

/// Of the pairs that turn.
fn frequencies(codec: &Codec) -> &[f64] {
    codec.mean_rope().map_or(&[], crate::rope::Rope::inv_freq)
}

/// Pairs up to the last one that is not slow over a tile of so many tokens.
fn fast_pairs(codec: &Codec, tokens: usize) -> usize {
    let frequencies = frequencies(codec);
    let slow = |frequency: &f64| frequency.abs() * tokens as f64 / 2.0 <= SLOW_ANGLE;
    frequencies.iter().rposition(|frequency| !slow(frequency)).map_or(0, |last| last + 1)
}

/// What a tile of so many tokens needs. Of each fast pair cosine and sine of 1, 2 and 3 positions in eight numbers; then, pair by
/// pair, cosine and sine of every fourth token, counted from the tile's middle. Then, degree by degree, of each slow pair the
/// factor of the series of cosine and sine where its angle at the end of the tile is 1, in whole fours of pairs: the last pair,
/// which does not turn, is one of them.
fn tile_angles(codec: &Codec, tokens: usize, fast_pairs: usize) -> Vec<f32> {
    let mut numbers = Vec::new();
    let middle = tokens as f64 / 2.0;
    let fast = || frequencies(codec).iter().take(fast_pairs);
    let turn = |angle: f64| [angle.cos() as f32, angle.sin() as f32];
    for frequency in fast() {
        numbers.extend((1..4).flat_map(|step| turn(frequency * f64::from(step))));
        numbers.extend([0.0; 2]);
    }
    for frequency in fast() {
        numbers.extend((0..tokens).step_by(4).flat_map(|token| turn(frequency * (token as f64 - middle))));
    }
    let slow: Vec<f64> =
        frequencies(codec).iter().skip(fast_pairs).map(|f| f * middle).chain([0.0]).collect();
    let mut factorial = 1.0;
    for degree in 0..SLOW_DEGREES as i32 {
        factorial *= f64::from(degree.max(1));
        // The derivatives of A cos + B sin at 0: A, B, -A, -B, and so on.
        let sign = if degree % 4 < 2 { 1.0 } else { -1.0 };
        numbers.extend(slow.iter().map(|angle| (sign * angle.powi(degree) / factorial) as f32));
        numbers.resize(numbers.len().next_multiple_of(4), 0.0);
    }
    numbers
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
