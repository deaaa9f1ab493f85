//! A cache's way from the device to the host and back.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::super::cpu_cache::{CpuQjlCache, HostCodes, HostTrack, Learnt as HostLearnt};
use super::super::ledger::Ledger;
use super::super::track::Coded;
use super::codes::DeviceCodes;
use super::{DeviceTrack, Learnt, QjlCache, StatusReadBack};
use crate::cache::LayerShape;
use crate::cache::host::HostBlock;
use crate::cache::tail::Tail;
use crate::error::Result;
use crate::gpu::block::RawBlock;
use crate::gpu::{Gpu, ReadBack, words};
use crate::qjl::cache::coders::Coders;
use crate::qjl::planes::gpu::{PlaneBuffer, Side, TableBuffer};
use crate::qjl::planes::{QueryEnergy, Tables};

/// A block of codes on its way.
#[derive(Debug)]
struct CodesOnTheWay {
    keys: (PlaneBuffer, [ReadBack; 2]),
    values: (PlaneBuffer, [ReadBack; 2]),
}

/// Something on its way that tracks may share, by where the device's handle of it stands.
type Shared<T> = BTreeMap<usize, T>;

/// A cache on its way to the host.
#[derive(Debug)]
pub struct CacheReadBack {
    ledger: Ledger<usize, usize, OnTheWay>,
    coders: Coders,
    raw: Shared<(LayerShape, usize, [ReadBack; 2])>,
    codes: Shared<CodesOnTheWay>,
    tables: Shared<(TableBuffer, ReadBack)>,
    energies: Shared<ReadBack>,
    status: StatusReadBack,
}

/// What a track knows, by where it stands.
#[derive(Clone, Debug, Default)]
struct OnTheWay {
    tables: Option<usize>,
    energies: Option<usize>,
    counted: usize,
}

fn place<T>(thing: &Arc<T>) -> usize {
    Arc::as_ptr(thing).addr()
}

fn tail_of(tail: &Tail<RawBlock>) -> Tail<usize> {
    let blocks = tail.blocks().iter().map(|block| (block.start, block.capacity, place(&block.rows)));
    Tail::loaded(tail.first(), tail.end(), blocks.collect())
}

impl QjlCache {
    /// Schedules the reading of the whole cache; [`CacheReadBack::parse`] makes a [`CpuQjlCache`] of it, which can be saved.
    /// Tables are read as they are, so that the cache goes on exactly when it comes back.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Limit`](crate::Error::Limit). Some of the copies may then
    /// be recorded; they do no harm, and nobody awaits them.
    pub fn read_back(&self, encoder: &mut wgpu::CommandEncoder) -> Result<CacheReadBack> {
        let gpu = &self.gpu;
        let mut read = CacheReadBack {
            ledger: Ledger::new(&self.ledger.layers, 0, self.ledger.options.clone(), u64::MAX)?,
            coders: self.coders.clone(),
            raw: Shared::new(),
            codes: Shared::new(),
            tables: Shared::new(),
            energies: Shared::new(),
            status: self.read_status(encoder)?,
        };
        for tracks in &self.ledger.sequences {
            let mut places = Vec::with_capacity(tracks.len());
            for (track, layer) in tracks.iter().zip(&self.ledger.layers) {
                for block in track.sinks.blocks().iter().chain(track.tail.blocks()) {
                    if let Entry::Vacant(slot) = read.raw.entry(place(&block.rows)) {
                        slot.insert((*layer, block.capacity, block.rows.read_back(gpu, encoder)?));
                    }
                }
                for block in &track.coded {
                    if let Entry::Vacant(slot) = read.codes.entry(place(&block.codes)) {
                        slot.insert(block.codes.read_back(gpu, encoder)?);
                    }
                }
                if let Some(tables) = &track.extra.tables
                    && let Entry::Vacant(slot) = read.tables.entry(place(tables))
                {
                    let back = ReadBack::schedule(gpu, encoder, &tables.buffer)?;
                    slot.insert((tables.as_ref().clone(), back));
                }
                if let Some(energies) = &track.extra.energies
                    && let Entry::Vacant(slot) = read.energies.entry(place(energies))
                {
                    slot.insert(ReadBack::schedule(gpu, encoder, energies)?);
                }
                places.push(places_of(track));
            }
            read.ledger.sequences.push(places);
        }
        Ok(read)
    }

    /// Copies a cache to the device.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn upload(gpu: &Gpu, host: &CpuQjlCache) -> Result<Self> {
        let (layers, options) = (&host.ledger.layers, host.ledger.options.clone());
        let mut cache = Self::with_coders(gpu, layers, options, host.coders.clone())?;
        let status = |counts: crate::qjl::Counts| {
            let counts = [counts.non_finite, counts.zero, counts.overflow];
            gpu.upload("status", bytemuck::cast_slice(&counts))
        };
        let [keys, values] = host.status;
        cache.status = [status(keys)?, status(values)?];
        let mut shared = Uploaded::default();
        for tracks in &host.ledger.sequences {
            let layers =
                tracks.iter().enumerate().map(|(layer, track)| shared.track(&mut cache, layer, track));
            let tracks = layers.collect::<Result<Vec<_>>>()?;
            cache.ledger.sequences.push(tracks);
        }
        Ok(cache)
    }

    /// The bytes of a file that holds the cache, the same as the host's (`docs/cache-format.md`). Submits to the device's queue and
    /// waits. What was recorded before must have been submitted.
    ///
    /// # Errors
    /// As [`read_back`](Self::read_back), [`CacheReadBack::parse`] and [`CpuQjlCache::save`].
    pub async fn save(&self) -> Result<Vec<u8>> {
        self.gpu.submit(|encoder| self.read_back(encoder))?.parse().await?.save()
    }

    /// [`save`](Self::save), waiting for it.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn save_blocking(&self) -> Result<Vec<u8>> {
        self.gpu.block_on(self.save())
    }

    /// The cache that a file holds, of a device or of the host: it goes on as if it had never stopped, bit for bit on the same
    /// adapter.
    ///
    /// # Errors
    /// As [`CpuQjlCache::load`] and [`upload`](Self::upload).
    pub fn load(gpu: &Gpu, file: &[u8]) -> Result<Self> {
        Self::upload(gpu, &CpuQjlCache::load(file)?)
    }
}

fn places_of(track: &DeviceTrack) -> super::Track<usize, usize, OnTheWay> {
    let coded = |block: &Coded<DeviceCodes>| Coded {
        start: block.start,
        tokens: block.tokens,
        capacity: block.capacity,
        codes: Arc::new(place(&block.codes)),
    };
    super::Track {
        sinks: tail_of(&track.sinks),
        coded: track.coded.iter().map(coded).collect(),
        tail: tail_of(&track.tail),
        runs: track.runs.clone(),
        evicted: track.evicted,
        reserved: track.reserved,
        extra: OnTheWay {
            tables: track.extra.tables.as_ref().map(place),
            energies: track.extra.energies.as_ref().map(place),
            counted: track.extra.counted,
        },
    }
}

/// What has come.
#[derive(Default)]
struct Arrived {
    raw: Shared<Arc<HostBlock>>,
    codes: Shared<HostCodes>,
    tables: Shared<Arc<Tables>>,
    /// `[kv_heads, key_dim + 1]`.
    energies: Shared<Vec<f64>>,
}

impl CacheReadBack {
    /// The cache on the host.
    ///
    /// # Errors
    /// What the read-backs say.
    pub async fn parse(self) -> Result<CpuQjlCache> {
        let mut arrived = Arrived::default();
        for (place, (layer, capacity, [keys, values])) in self.raw {
            let block = HostBlock::padded(layer, capacity, [&keys.await?, &values.await?])?;
            arrived.raw.insert(place, Arc::new(block));
        }
        for (place, codes) in self.codes {
            arrived.codes.insert(place, codes.parse().await?);
        }
        for (place, (tables, back)) in self.tables {
            arrived.tables.insert(place, Arc::new(tables.parse(&words(&back.await?))));
        }
        for (place, back) in self.energies {
            let numbers = words(&back.await?).into_iter().map(|bits| f64::from(f32::from_bits(bits)));
            arrived.energies.insert(place, numbers.collect());
        }
        let mut ledger = Ledger::new(&self.ledger.layers, 0, self.ledger.options.clone(), u64::MAX)?;
        for tracks in &self.ledger.sequences {
            let tracks =
                tracks.iter().zip(&self.ledger.layers).map(|(track, layer)| arrived.track(track, layer));
            ledger.sequences.push(tracks.collect());
        }
        Ok(CpuQjlCache { ledger, coders: self.coders, status: self.status.counts().await? })
    }
}

impl Arrived {
    fn tail(&self, tail: &Tail<usize>) -> Tail<HostBlock> {
        let blocks = tail.blocks().iter();
        let block = |place: &usize| self.raw.get(place).cloned();
        let blocks = blocks.filter_map(|b| Some((b.start, b.capacity, block(&b.rows)?)));
        Tail::sharing(tail.first(), tail.end(), blocks.collect())
    }

    fn track(&self, track: &super::Track<usize, usize, OnTheWay>, layer: &LayerShape) -> HostTrack {
        let coded = track.coded.iter().filter_map(|block| {
            let mut codes = self.codes.get(block.codes.as_ref())?.clone();
            codes.place(&track.runs.of(block.start..block.end()));
            let Coded { start, tokens, capacity, .. } = *block;
            Some(Coded { start, tokens, capacity, codes: Arc::new(codes) })
        });
        let energies = track.extra.energies.and_then(|place| self.energies.get(&place));
        let rows = energies.into_iter().flat_map(|all| all.chunks_exact(layer.key_dim + 1));
        let energy = |row: &[f64]| {
            let (count, sums) = row.split_last().map_or((0.0, &[][..]), |(&count, sums)| (count, sums));
            QueryEnergy { sums: sums.to_vec(), count }
        };
        HostTrack {
            sinks: self.tail(&track.sinks),
            coded: coded.collect(),
            tail: self.tail(&track.tail),
            runs: track.runs.clone(),
            evicted: track.evicted,
            reserved: track.reserved,
            extra: HostLearnt {
                tables: track.extra.tables.and_then(|place| self.tables.get(&place).cloned()),
                energies: rows.map(energy).collect(),
                counted: track.extra.counted,
            },
        }
    }
}

/// What is on the device already.
#[derive(Default)]
struct Uploaded {
    raw: Shared<Arc<RawBlock>>,
    /// By place, and whether the tokens' positions follow each other: of forks one may have been trimmed to where they do.
    codes: BTreeMap<(usize, bool), Arc<DeviceCodes>>,
    tables: Shared<Arc<TableBuffer>>,
}

impl Uploaded {
    fn tail(&mut self, gpu: &Gpu, layer: LayerShape, tail: &Tail<HostBlock>) -> Result<Tail<RawBlock>> {
        let mut blocks = Vec::with_capacity(tail.blocks().len());
        for block in tail.blocks() {
            let rows = match self.raw.get(&place(&block.rows)) {
                Some(rows) => Arc::clone(rows),
                None => {
                    let [keys, values] = block.rows.padded_bytes();
                    let rows = Arc::new(RawBlock::upload(gpu, layer, block.capacity, [&keys, &values])?);
                    self.raw.insert(place(&block.rows), Arc::clone(&rows));
                    rows
                }
            };
            blocks.push((block.start, block.capacity, rows));
        }
        Ok(Tail::sharing(tail.first(), tail.end(), blocks))
    }

    fn track(&mut self, cache: &mut QjlCache, layer: usize, track: &HostTrack) -> Result<DeviceTrack> {
        let (gpu, shape) = (cache.gpu.clone(), *cache.ledger.layer(layer)?);
        let mut coded = Vec::with_capacity(track.coded.len());
        for block in &track.coded {
            let tokens = block.start..block.end();
            let last = track.runs.of(tokens.clone()).into_iter().max().unwrap_or(0);
            cache.grow(layer, last)?;
            let consecutive = track.runs.are_consecutive(&tokens);
            let codes = match self.codes.entry((place(&block.codes), consecutive)) {
                Entry::Occupied(slot) => Arc::clone(slot.get()),
                Entry::Vacant(slot) => {
                    let codes = DeviceCodes::upload(&gpu, &block.codes, consecutive, cache.status())?;
                    Arc::clone(slot.insert(Arc::new(codes)))
                }
            };
            coded.push(Coded { start: block.start, tokens: block.tokens, capacity: block.capacity, codes });
        }
        let mut extra = Learnt { counted: track.extra.counted, ..Learnt::default() };
        if let Some(tables) = &track.extra.tables {
            let codec = cache.device_codec(layer)?.buffer.codec();
            let uploaded = match self.tables.get(&place(tables)) {
                Some(uploaded) => Arc::clone(uploaded),
                None => Arc::new(TableBuffer::upload(&gpu, codec, tables)?),
            };
            extra.tables = Some(Arc::clone(self.tables.entry(place(tables)).or_insert(uploaded)));
        }
        if !track.extra.energies.is_empty() {
            let numbers = track.extra.energies.iter().flat_map(|energy| {
                let sums = (0..shape.key_dim).map(|c| energy.sums.get(c).copied().unwrap_or(0.0));
                sums.chain([energy.count]).map(|number| number as f32)
            });
            let numbers: Vec<f32> = numbers.collect();
            extra.energies = Some(Arc::new(gpu.upload("query energies", bytemuck::cast_slice(&numbers))?));
        }
        Ok(DeviceTrack {
            sinks: self.tail(&gpu, shape, &track.sinks)?,
            coded,
            tail: self.tail(&gpu, shape, &track.tail)?,
            runs: track.runs.clone(),
            evicted: track.evicted,
            reserved: track.reserved,
            extra,
        })
    }
}

impl DeviceCodes {
    fn read_back(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<CodesOnTheWay> {
        let Self { keys, values, .. } = self;
        Ok(CodesOnTheWay {
            keys: (keys.clone(), keys.read_back(gpu, encoder)?),
            values: (values.clone(), values.read_back(gpu, encoder)?),
        })
    }

    /// A block like that on the host; its odd rows are counted already.
    fn upload(
        gpu: &Gpu,
        HostCodes { keys, values }: &HostCodes,
        consecutive: bool,
        [key_status, value_status]: [&wgpu::Buffer; 2],
    ) -> Result<Self> {
        let positions = if consecutive {
            None
        } else {
            Some(gpu.upload("positions", bytemuck::cast_slice(&keys.positions))?)
        };
        let keys = PlaneBuffer::upload(gpu, keys, Side::Keys, key_status.clone())?;
        let values = PlaneBuffer::upload(gpu, values, Side::Values, value_status.clone())?;
        Ok(Self { keys, values, positions })
    }
}

impl CodesOnTheWay {
    async fn parse(self) -> Result<HostCodes> {
        let Self { keys: (keys, key_back), values: (values, value_back) } = self;
        let mut coded = keys.parse(key_back).await?;
        coded.positions = vec![0; coded.shape.tokens];
        Ok(HostCodes { keys: coded, values: values.parse(value_back).await? })
    }
}
