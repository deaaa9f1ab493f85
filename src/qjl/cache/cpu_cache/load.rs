//! Loading a cache from the bytes of a file.

use std::collections::BTreeMap;
use std::sync::Arc;

use safetensors::Dtype;

use super::super::coders::Coders;
use super::super::head::{Head, SavedTail, SavedTrack};
use super::super::ledger::Ledger;
use super::super::track::Coded;
use super::arrays::Numbers;
use super::file::{CACHE, DIGEST, HEAD, VERSION, layer_name, track_name};
use super::{CpuQjlCache, HostCodes, HostTrack};
use crate::cache::LayerShape;
use crate::cache::host::HostBlock;
use crate::cache::tail::Tail;
use crate::container::{self, to_file_dtype};
use crate::error::{Error, Result};
use crate::qjl::planes::{Codec, QueryEnergy, Sketch, Tables};
use crate::qjl::{Counts, Projection};
use crate::store::tensors::{Reader, Tensors, check_version, digest, required};
use crate::tensor::{Shape, TensorView};

/// A loaded cache may take this many times the bytes of its file, or so many bytes, before it is refused: trimmed to a page, the
/// largest block of a layer leaves less empty beside its file's tables.
const MAX_GROWTH: usize = 4096;
const SMALL: usize = 1 << 24;

pub(super) fn from_bytes(bytes: &[u8]) -> Result<CpuQjlCache> {
    let file = container::read(bytes)?;
    let mut entries = file.metadata;
    check_version(&entries, CACHE, "saved cache", VERSION)?;
    let mut tensors = Tensors::default();
    file.tensors.into_iter().for_each(|stored| tensors.add(stored));
    let want = required(entries.remove(DIGEST), DIGEST, "the digest of the contents")?;
    let have = digest(&entries, &tensors);
    if want != have {
        return Err(Error::Digest { what: "saved cache".to_owned(), want, have });
    }
    let head = Head::parse(&required(entries.remove(HEAD), HEAD, "the JSON object of a saved cache")?, HEAD)?;
    let mut reader = tensors.reader();
    let mut cache = empty(&head, &mut reader)?;
    check_growth(&head, bytes.len())?;
    for (sequence, tracks) in head.sequences.iter().enumerate() {
        if tracks.len() != head.layers.len() {
            return Err(Error::shape("saved layers", head.layers.len(), tracks.len()));
        }
        let mut loaded = Vec::with_capacity(tracks.len());
        for (layer, saved) in tracks.iter().enumerate() {
            loaded.push(track(&cache, &mut reader, layer, &track_name(sequence, layer), saved)?);
        }
        cache.ledger.sequences.push(loaded);
    }
    reader.finish()?;
    Ok(cache)
}

/// The cache without its sequences.
fn empty(head: &Head, reader: &mut Reader<'_>) -> Result<CpuQjlCache> {
    let mut options = head.options()?;
    if let Some(saved) = head.projection {
        let matrix = reader.singles("projection.0", &[saved.sketch_dim, saved.head_dim])?;
        let (kind, seed) = (saved.kind, saved.seed);
        options.projection = Some(Projection::drawn(kind, seed, &matrix, saved.head_dim, saved.sketch_dim)?);
    }
    if head.shared_tables {
        let layers = head.layers.iter().enumerate();
        let tables = layers.map(|(index, layer)| read_tables(reader, &layer_name(index), layer));
        options.tables = Some(tables.collect::<Result<_>>()?);
    }
    let ledger = Ledger::new(&head.layers, 0, options, u64::MAX)?;
    let mut matrices = BTreeMap::new();
    for name in head.digests.keys() {
        if !reader.has(name) {
            continue;
        }
        let channels = name.strip_prefix("rotation.").and_then(|channels| channels.parse::<usize>().ok());
        if let Some(n) = channels.filter(|n| (1..=crate::tensor::MAX_HEAD_DIM).contains(n)) {
            matrices.insert(n, finite(name, reader.singles(name, &[n, n])?)?);
        }
    }
    let mut coders = Coders::new(&head.layers, &ledger.options, &matrices)?;
    for (index, codec) in coders.all.iter_mut().enumerate() {
        check_codec(head, reader, index, codec)?;
    }
    let counts = |&[non_finite, zero, overflow]: &[u32; 3]| Counts { non_finite, zero, overflow };
    let [keys, values] = &head.status;
    Ok(CpuQjlCache { ledger, coders, status: [counts(keys), counts(values)] })
}

fn finite(name: &str, numbers: Vec<f32>) -> Result<Vec<f32>> {
    match numbers.iter().enumerate().find(|(_, x)| !x.is_finite()) {
        Some((index, &value)) => Err(Error::NonFinite { what: name.to_owned(), index, value }),
        None => Ok(numbers),
    }
}

/// Takes a projection's matrix from the file, and compares digests.
fn check_codec(head: &Head, reader: &mut Reader<'_>, index: usize, codec: &mut Codec) -> Result<()> {
    let check = |name: String, have: u64| -> Result<()> {
        let have = format!("{have:016x}");
        match head.digests.get(&name) {
            Some(want) if *want == have => Ok(()),
            want => Err(Error::Digest { what: name, want: want.cloned().unwrap_or_default(), have }),
        }
    };
    for rotation in codec.rotations().all() {
        check(format!("rotation.{}", rotation.channels()), rotation.digest())?;
    }
    let Some(Sketch { projection, .. }) = codec.sketch_mut() else { return Ok(()) };
    let name = format!("projection.{index}");
    if projection.matrix().is_some() {
        let (m, dim) = (projection.sketch_dim(), projection.head_dim());
        let matrix = reader.singles(&name, &[m, dim])?;
        *projection = Arc::new(Projection::drawn(projection.kind(), projection.seed(), &matrix, dim, m)?);
    }
    check(name, projection.digest())
}

/// Refuses to hold far more than the file does.
fn check_growth(head: &Head, bytes: usize) -> Result<()> {
    let most = bytes.saturating_mul(MAX_GROWTH).max(SMALL);
    let mut need = 0usize;
    for tracks in &head.sequences {
        for (track, layer) in tracks.iter().zip(&head.layers) {
            let raw = track.sinks.blocks.iter().chain(&track.tail.blocks);
            let raw = raw.fold(0usize, |sum, &[_, capacity]| sum.saturating_add(capacity));
            let room = track.coded.iter().map(|&[.., capacity]| capacity);
            let coded = room.fold(0usize, usize::saturating_add);
            let coded_bytes = 2 * layer.kv_heads * head.coding.most_row_bytes(layer);
            need = need.saturating_add(raw.saturating_mul(layer.token_bytes()));
            need = need.saturating_add(coded.saturating_mul(coded_bytes));
        }
    }
    if need <= most {
        return Ok(());
    }
    Err(Error::range("bytes of a saved cache's blocks", format!("at most {most}"), need))
}

fn read_tables(reader: &mut Reader<'_>, prefix: &str, layer: &LayerShape) -> Result<Tables> {
    let sizes = [layer.kv_heads, layer.key_dim];
    let mut tables = Tables::identity(layer.kv_heads, layer.key_dim);
    tables.mu = reader.halves(&format!("{prefix}.mu"), &sizes)?;
    tables.sigma = reader.singles(&format!("{prefix}.sigma"), &sizes)?;
    tables.order = reader.shorts(&format!("{prefix}.order"), &sizes)?;
    tables.check(Shape { batch: 1, heads: layer.kv_heads, tokens: 0, dim: layer.key_dim })?;
    Ok(tables)
}

fn track(
    cache: &CpuQjlCache,
    reader: &mut Reader<'_>,
    layer: usize,
    prefix: &str,
    saved: &SavedTrack,
) -> Result<HostTrack> {
    let (shape, rules) = (cache.ledger.layer(layer)?, &cache.ledger.rules);
    let mut track = HostTrack::new(rules);
    track.sinks = tail(reader, &format!("{prefix}.sinks"), &saved.sinks, shape)?;
    track.tail = tail(reader, &format!("{prefix}.tail"), &saved.tail, shape)?;
    (track.evicted, track.extra.counted) = (saved.evicted, saved.counted);
    track.runs = saved.runs.clone();
    track.check_loaded(rules, &saved.coded)?;
    track.coded = coded(cache, reader, layer, prefix, saved)?;
    if saved.tables {
        track.extra.tables = Some(Arc::new(read_tables(reader, prefix, shape)?));
    }
    if saved.energies {
        let name = format!("{prefix}.energy");
        let bytes = reader.read(&name, Dtype::F64, &[shape.kv_heads, shape.key_dim + 1])?;
        let numbers: Vec<f64> = bytes.as_chunks::<8>().0.iter().map(|&x| f64::from_le_bytes(x)).collect();
        for row in numbers.chunks_exact(shape.key_dim + 1) {
            let Some((&count, sums)) = row.split_last() else { continue };
            track.extra.energies.push(QueryEnergy { sums: sums.to_vec(), count });
        }
    }
    Ok(track)
}

fn tail(
    reader: &mut Reader<'_>,
    prefix: &str,
    saved: &SavedTail,
    shape: &LayerShape,
) -> Result<Tail<HostBlock>> {
    saved.check()?;
    let tokens = saved.end - saved.first;
    let mut views = Vec::new();
    for (side, dim) in ["keys", "values"].into_iter().zip(shape.dims()) {
        let name = format!("{prefix}.{side}");
        let bytes = reader.read(&name, to_file_dtype(shape.dtype), &[shape.kv_heads, tokens, dim])?;
        views.push(TensorView::new(bytes, shape.dtype, Shape::new(1, shape.kv_heads, tokens, dim)?)?);
    }
    let [keys, values] = views.as_slice() else { return Ok(Tail::starting(saved.end)) };
    let mut blocks = Vec::with_capacity(saved.blocks.len());
    for &[start, capacity] in &saved.blocks {
        let mut rows = HostBlock::new(*shape, capacity)?;
        let (from, to) = (start.max(saved.first), saved.end.min(start + capacity));
        rows.write(
            [keys, values],
            0,
            from.saturating_sub(saved.first),
            from - start,
            to.saturating_sub(from),
        );
        blocks.push((start, capacity, rows));
    }
    Ok(Tail::loaded(saved.first, saved.end, blocks))
}

fn coded(
    cache: &CpuQjlCache,
    reader: &mut Reader<'_>,
    layer: usize,
    prefix: &str,
    saved: &SavedTrack,
) -> Result<Vec<Coded<HostCodes>>> {
    let (shape, codec) = (cache.ledger.layer(layer)?, cache.coders.get(layer)?);
    let mut blocks = Vec::with_capacity(saved.coded.len());
    for &[start, tokens, capacity] in &saved.coded {
        let mut codes = HostCodes::new(codec, shape, capacity)?;
        codes.place(&saved.runs.of(start..start + tokens));
        blocks.push((start, tokens, capacity, codes));
    }
    let Some((.., first)) = blocks.first_mut() else { return Ok(Vec::new()) };
    let arrays: Vec<(String, usize, usize, bool)> = first
        .arrays()
        .into_iter()
        .map(|array| (array.name, array.width, array.tokens, matches!(array.numbers, Numbers::Words(_))))
        .collect();
    for (index, (name, width, per, words)) in arrays.into_iter().enumerate() {
        let rows: usize = saved.coded.iter().map(|&[_, tokens, _]| tokens.div_ceil(per)).sum();
        let (name, sizes) = (format!("{prefix}.{name}"), [shape.kv_heads, rows, width]);
        let (all_words, all_halves) = if words {
            (reader.words(&name, &sizes)?, Vec::new())
        } else {
            (Vec::new(), reader.halves(&name, &sizes)?)
        };
        let mut before = 0;
        for (_, tokens, capacity, codes) in &mut blocks {
            let used = tokens.div_ceil(per);
            let room = capacity.div_ceil(per);
            let place = Place { rows, before, used, room, width };
            if let Some(array) = codes.arrays().into_iter().nth(index) {
                match array.numbers {
                    Numbers::Words(to) => place.copy(&all_words, to, shape.kv_heads),
                    Numbers::Halves(to) => place.copy(&all_halves, to, shape.kv_heads),
                }
            }
            before += used;
        }
    }
    let block = |(start, tokens, capacity, codes)| Coded { start, tokens, capacity, codes: Arc::new(codes) };
    Ok(blocks.into_iter().map(block).collect())
}

/// Where the rows of a block stand in a file's array of so many, and in the block, which has more room.
struct Place {
    rows: usize,
    before: usize,
    used: usize,
    room: usize,
    width: usize,
}

impl Place {
    fn copy<T: Copy>(&self, from: &[T], to: &mut [T], heads: usize) {
        for head in 0..heads {
            let start = (head * self.rows + self.before) * self.width;
            let source = from.get(start..start + self.used * self.width);
            let start = head * self.room * self.width;
            let target = to.get_mut(start..start + self.used * self.width);
            if let Some((target, source)) = target.zip(source) {
                target.copy_from_slice(source);
            }
        }
    }
}
