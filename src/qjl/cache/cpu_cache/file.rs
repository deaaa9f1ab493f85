//! Saving a cache to the bytes of a file and loading it.

use std::collections::BTreeMap;

use half::f16;
use safetensors::Dtype;

use super::super::head::{Head, SavedProjection, SavedRope, SavedTail, SavedTrack};
use super::arrays::Numbers;
use super::{CpuQjlCache, HostTrack};
use crate::cache::LayerShape;
use crate::cache::host::HostBlock;
use crate::cache::tail::Tail;
use crate::container::{self, to_file_dtype};
use crate::error::Result;
use crate::qjl::planes::{Codec, Sketch, Tables};
use crate::store::tensors::{Tensors, digest, half_bytes, word_bytes};

/// The newest version of the format, metadata `kvfold.cache`; the only one there is so far.
pub(super) const VERSION: u32 = 1;
/// The metadata keys of the version, of what stands beside the tensors, and of the digest.
pub(super) const CACHE: &str = "kvfold.cache";
pub(super) const HEAD: &str = "kvfold.qjl";
pub(super) const DIGEST: &str = "kvfold.digest";

/// Room beside a block's rows that a file remembers, in tokens: reserved room is not worth more.
const MOST_ROOM: usize = 4096;

pub(super) fn track_name(sequence: usize, layer: usize) -> String {
    format!("sequence.{sequence}.layer.{layer}")
}

pub(super) fn layer_name(layer: usize) -> String {
    format!("layer.{layer}")
}

/// The bytes of a file that holds the cache.
pub(super) fn to_bytes(cache: &CpuQjlCache) -> Result<Vec<u8>> {
    let (ledger, options) = (&cache.ledger, &cache.ledger.options);
    let mut tensors = Tensors::default();
    let mut head = Head {
        layers: ledger.layers.clone(),
        coding: options.coding,
        ropes: options.ropes.iter().map(|rope| rope.as_ref().map(SavedRope::of)).collect(),
        projection: options.projection.as_ref().map(|projection| SavedProjection {
            kind: projection.kind(),
            seed: projection.seed(),
            head_dim: projection.head_dim(),
            sketch_dim: projection.sketch_dim(),
        }),
        shared_tables: options.tables.is_some(),
        capacity: options.capacity,
        pin_sinks: options.pin_sinks,
        fixed: options.fixed,
        digests: BTreeMap::new(),
        status: cache.status.map(|counts| [counts.non_finite, counts.zero, counts.overflow]),
        sequences: Vec::new(),
    };
    for (index, codec) in cache.coders.all.iter().enumerate() {
        put_codec(&mut tensors, &mut head, index, codec);
    }
    for (layer, tables) in options.tables.iter().flatten().enumerate() {
        put_tables(&mut tensors, &layer_name(layer), tables);
    }
    for (sequence, tracks) in ledger.sequences.iter().enumerate() {
        let mut saved = Vec::with_capacity(tracks.len());
        for (layer, (track, shape)) in tracks.iter().zip(&ledger.layers).enumerate() {
            saved.push(put_track(&mut tensors, &track_name(sequence, layer), track, shape)?);
        }
        head.sequences.push(saved);
    }
    let text = serde_json::to_string(&head).map_err(|cause| crate::Error::Metadata {
        key: HEAD.to_owned(),
        want: "text that JSON can hold".to_owned(),
        have: cause.to_string(),
    })?;
    let mut entries = BTreeMap::from([(CACHE.to_owned(), VERSION.to_string()), (HEAD.to_owned(), text)]);
    let sum = digest(&entries, &tensors);
    entries.insert(DIGEST.to_owned(), sum);
    container::write(&entries, tensors.stored().collect())
}

fn singles(numbers: &[f32]) -> Vec<u8> {
    word_bytes(numbers.iter().map(|x| x.to_bits()))
}

/// Rotations and projections: digests of all, and matrices, which not every machine draws alike.
fn put_codec(tensors: &mut Tensors, head: &mut Head, index: usize, codec: &Codec) {
    for rotation in codec.rotations().all() {
        let n = rotation.channels();
        let name = format!("rotation.{n}");
        head.digests.insert(name.clone(), format!("{:016x}", rotation.digest()));
        if let Some(matrix) = rotation.matrix() {
            tensors.put(name, Dtype::F32, &[n, n], singles(matrix));
        }
    }
    let Some(Sketch { projection, .. }) = codec.sketch() else { return };
    let name = format!("projection.{index}");
    head.digests.insert(name.clone(), format!("{:016x}", projection.digest()));
    if let Some(matrix) = projection.matrix() {
        let sizes = [projection.sketch_dim(), projection.head_dim()];
        tensors.put(name, Dtype::F32, &sizes, singles(matrix));
    }
}

fn put_tables(tensors: &mut Tensors, prefix: &str, tables: &Tables) {
    let sizes = [tables.heads, tables.dim];
    tensors.put(format!("{prefix}.mu"), Dtype::F16, &sizes, half_bytes(&tables.mu));
    tensors.put(format!("{prefix}.sigma"), Dtype::F32, &sizes, singles(&tables.sigma));
    let order = tables.order.iter().flat_map(|place| place.to_le_bytes()).collect();
    tensors.put(format!("{prefix}.order"), Dtype::U16, &sizes, order);
}

fn put_track(
    tensors: &mut Tensors,
    prefix: &str,
    track: &HostTrack,
    shape: &LayerShape,
) -> Result<SavedTrack> {
    let sinks = put_tail(tensors, &format!("{prefix}.sinks"), &track.sinks, shape)?;
    let tail = put_tail(tensors, &format!("{prefix}.tail"), &track.tail, shape)?;
    put_coded(tensors, prefix, track, shape);
    if let Some(tables) = &track.extra.tables {
        put_tables(tensors, prefix, tables);
    }
    let energies = &track.extra.energies;
    // Energies of no query are as none.
    let has_energies = energies.iter().any(|energy| energy.count > 0.0);
    if has_energies {
        let numbers = energies.iter().flat_map(|energy| {
            let sums = (0..shape.key_dim).map(|c| energy.sums.get(c).copied().unwrap_or(0.0));
            sums.chain([energy.count])
        });
        let bytes = numbers.flat_map(f64::to_le_bytes).collect();
        tensors.put(format!("{prefix}.energy"), Dtype::F64, &[shape.kv_heads, shape.key_dim + 1], bytes);
    }
    Ok(SavedTrack {
        evicted: track.evicted,
        counted: track.extra.counted,
        runs: track.runs.clone(),
        sinks,
        coded: track.coded.iter().map(|block| [block.start, block.tokens, block.capacity]).collect(),
        tail,
        tables: track.extra.tables.is_some(),
        energies: has_energies,
    })
}

/// Raw rows `[kv_heads, tokens, dim]` of keys and values.
fn put_tail(
    tensors: &mut Tensors,
    prefix: &str,
    tail: &Tail<HostBlock>,
    shape: &LayerShape,
) -> Result<SavedTail> {
    let mut rows: [Vec<Vec<u8>>; 2] = [(); 2].map(|()| vec![Vec::new(); shape.kv_heads]);
    for piece in tail.pieces() {
        for (rows, view) in rows.iter_mut().zip(piece.rows.views(piece.at, piece.tokens)?) {
            for (head, rows) in rows.iter_mut().enumerate() {
                (0..piece.tokens).for_each(|t| rows.extend_from_slice(view.row_bytes(0, head, t)));
            }
        }
    }
    let tokens = tail.end() - tail.first();
    for ((side, dim), rows) in ["keys", "values"].into_iter().zip(shape.dims()).zip(rows) {
        let sizes = [shape.kv_heads, tokens, dim];
        tensors.put(format!("{prefix}.{side}"), to_file_dtype(shape.dtype), &sizes, rows.concat());
    }
    let held = tail.blocks().iter().map(|block| {
        let used = tail.end().saturating_sub(block.start);
        [block.start, block.capacity.min(used + MOST_ROOM)]
    });
    // Whole blocks of reserved room are not remembered.
    let blocks = held.filter(|&[start, _]| start < tail.end()).collect();
    Ok(SavedTail { first: tail.first(), end: tail.end(), blocks })
}

/// The arrays of all coded blocks, `[kv_heads, rows, width]`, block behind block.
fn put_coded(tensors: &mut Tensors, prefix: &str, track: &HostTrack, shape: &LayerShape) {
    let mut gathered: Vec<(String, usize, Dtype, Vec<Vec<u8>>)> = Vec::new();
    for block in &track.coded {
        let mut codes = block.codes.as_ref().clone();
        for (index, array) in codes.arrays().into_iter().enumerate() {
            let dtype = if matches!(array.numbers, Numbers::Words(_)) { Dtype::U32 } else { Dtype::F16 };
            if gathered.len() == index {
                gathered.push((array.name, array.width, dtype, vec![Vec::new(); shape.kv_heads]));
            }
            let Some((_, _, _, heads)) = gathered.get_mut(index) else { continue };
            let room = block.capacity.div_ceil(array.tokens) * array.width;
            let used = block.tokens.div_ceil(array.tokens) * array.width;
            for (head, bytes) in heads.iter_mut().enumerate() {
                let range = head * room..head * room + used;
                match &array.numbers {
                    Numbers::Words(words) => {
                        bytes.extend(word_bytes(words.get(range).unwrap_or_default().iter().copied()));
                    }
                    Numbers::Halves(halves) => {
                        bytes.extend(half_bytes(halves.get(range).unwrap_or_default()));
                    }
                }
            }
        }
    }
    for (name, width, dtype, heads) in gathered {
        let bytes = heads.concat();
        let size = if dtype == Dtype::U32 { 4 } else { size_of::<f16>() };
        let rows = bytes.len() / size / (width * shape.kv_heads).max(1);
        tensors.put(format!("{prefix}.{name}"), dtype, &[shape.kv_heads, rows, width], bytes);
    }
}
