//! Coded rows in canonical form: the codes of the rows between sinks and recent ones, those rows themselves, tables, and
//! the rotations or projections that are matrices.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use safetensors::Dtype;

use super::head::FOLD;
use super::pairs::each_part;
use super::shared::{Given, codecs, shared};
use super::tensors::{Reader, Tensors, half_bytes, word_bytes};
use super::{Part, Restored, Store, sequence_rows};
use crate::capture::Capture;
use crate::container::to_file_dtype;
use crate::error::{Error, Result};
use crate::qjl::Counts;
use crate::qjl::cache::Coding;
use crate::qjl::planes::{
    CALIBRATION_TOKENS, Calibration, Centring, CodeLayout, Codec, PlaneCodes, SegmentCodes, Tables, cpu,
};
use crate::rope::Positions;
use crate::tensor::{DType, Shape, TensorView, encode};

/// The rows of a sequence that are coded; none where it is too short for tables.
fn coded(codec: &Codec, length: usize) -> Range<usize> {
    if codec.keeps_tables() && length < CALIBRATION_TOKENS {
        return 0..0;
    }
    let options = codec.options();
    let start = (options.sinks as usize).min(length);
    start..length.saturating_sub(options.recent as usize).max(start)
}

/// Codes every sequence of every layer.
pub(super) fn fold(store: &mut Store, capture: &Capture, coding: &Coding) -> Result<()> {
    let codecs = codecs(store, coding, &Given::default())?;
    for (layer, codec) in codecs.iter().enumerate() {
        for shared in shared(codec) {
            let [rows, channels] = shared.sizes();
            let Some(digests) = store.head.method.digests_mut() else { continue };
            if digests.contains_key(&channels) {
                continue;
            }
            digests.insert(channels, shared.digest());
            if let Some(matrix) = shared.matrix() {
                let bytes = word_bytes(matrix.iter().map(|x| x.to_bits()));
                store.tensors.put(shared.name(), Dtype::F32, &[rows, channels], bytes);
            }
        }
        for sequence in 0..store.head.batch {
            fold_sequence(store, capture, codec, layer, sequence)?;
        }
    }
    Ok(())
}

fn fold_sequence(
    store: &mut Store,
    capture: &Capture,
    codec: &Codec,
    layer: usize,
    sequence: usize,
) -> Result<()> {
    let keys = store.view(capture.keys(layer)?, sequence)?;
    let values = store.view(Part::Value.of(capture, layer)?, sequence)?;
    let range = coded(codec, keys.shape().tokens);
    if !range.is_empty() {
        let start = [store.start(sequence).unwrap_or(0)];
        let positions = Positions::Start(&start);
        let mut calibration = Calibration::new(&keys, positions);
        let queries = queries(capture, layer, sequence)?;
        calibration.queries = queries.as_ref();
        calibration.rope = codec.rope();
        let tables = if codec.keeps_tables() {
            codec.calibrate(&calibration)?
        } else {
            Tables::identity(keys.shape().heads, keys.shape().dim)
        };
        let key_codes = cpu::encode_keys(codec, &keys, positions, &tables)?;
        let prefix = Part::Key.prefix(sequence, layer);
        put_codes(&mut store.tensors, &prefix, &key_codes, block(codec), &range);
        if codec.keeps_tables() {
            put_tables(&mut store.tensors, &prefix, &tables);
        }
        let value_codes = cpu::encode_values(codec, &values)?;
        put_codes(&mut store.tensors, &Part::Value.prefix(sequence, layer), &value_codes, None, &range);
    }
    for (part, rows) in [(Part::Key, keys), (Part::Value, values)] {
        let raw = without(&rows, &range);
        let Shape { heads, tokens, dim, .. } = rows.shape();
        let sizes = [heads, tokens - range.len(), dim];
        let name = part.prefix(sequence, layer) + ".rows";
        store.tensors.put(name, to_file_dtype(rows.dtype()), &sizes, raw);
    }
    Ok(())
}

/// A sequence's captured queries, those at padding left out.
fn queries(capture: &Capture, layer: usize, sequence: usize) -> Result<Option<TensorView<'_>>> {
    let Some((range, tensor)) = capture.query_positions(layer, sequence).zip(capture.queries(layer).ok())
    else {
        return Ok(None);
    };
    let tokens = capture.length(sequence).saturating_sub(range.start).min(tensor.shape().tokens);
    (tokens > 0).then(|| sequence_rows(tensor, sequence, tokens)).transpose()
}

/// Bytes of all rows but those of the range, `[heads, tokens, dim]`.
fn without(rows: &TensorView<'_>, range: &Range<usize>) -> Vec<u8> {
    let raw = rows.shape().iter_rows().filter(|(_, _, token)| !range.contains(token));
    raw.flat_map(|(b, h, t)| rows.row_bytes(b, h, t)).copied().collect()
}

fn block(codec: &Codec) -> Option<usize> {
    match codec.options().centring {
        Centring::BlockMean(tokens) => Some(tokens as usize),
        _ => None,
    }
}

/// Of `[heads, tokens, width]` those tokens.
fn cut<'a, T>(
    all: &'a [T],
    tokens: usize,
    width: usize,
    range: &Range<usize>,
) -> impl Iterator<Item = &'a T> + use<'a, T> {
    let (start, count) = (range.start * width, range.len() * width);
    all.chunks_exact((tokens * width).max(1)).flat_map(move |head| head.iter().skip(start).take(count))
}

/// `[heads, tokens, width]` that holds `part` at those tokens and zeros elsewhere: the inverse of [`cut`].
fn widen<T: Copy + Default>(
    part: &[T],
    (heads, tokens, width): (usize, usize, usize),
    range: &Range<usize>,
) -> Vec<T> {
    let mut all = vec![T::default(); heads * tokens * width];
    let count = (range.len() * width).max(1);
    for (head, part) in all.chunks_exact_mut((tokens * width).max(1)).zip(part.chunks_exact(count)) {
        head.iter_mut().skip(range.start * width).zip(part).for_each(|(to, from)| *to = *from);
    }
    all
}

fn put_codes(
    tensors: &mut Tensors,
    prefix: &str,
    codes: &PlaneCodes,
    block: Option<usize>,
    range: &Range<usize>,
) {
    let Shape { heads, tokens, dim, .. } = codes.shape;
    let count = range.len();
    for (index, (segment, stored)) in codes.layout.segments().iter().zip(&codes.segments).enumerate() {
        if segment.planes == 0 {
            continue;
        }
        let width = segment.words();
        let words = cut(&stored.words, tokens, width, range).copied();
        tensors.put(format!("{prefix}.codes.{index}"), Dtype::U32, &[heads, count, width], word_bytes(words));
        let nu = half_bytes(cut(&stored.nu, tokens, 1, range));
        tensors.put(format!("{prefix}.nu.{index}"), Dtype::F16, &[heads, count], nu);
    }
    if let Some(block) = block {
        let (all, used) = (tokens.div_ceil(block), range.end.div_ceil(block));
        let means = half_bytes(cut(&codes.means, all, dim, &(0..used)));
        tensors.put(format!("{prefix}.means"), Dtype::F16, &[heads, used, dim], means);
    }
}

fn put_tables(tensors: &mut Tensors, prefix: &str, tables: &Tables) {
    let sizes = [tables.heads, tables.dim];
    tensors.put(format!("{prefix}.mu"), Dtype::F16, &sizes, half_bytes(&tables.mu));
    let sigma = word_bytes(tables.sigma.iter().map(|sigma| sigma.to_bits()));
    tensors.put(format!("{prefix}.sigma"), Dtype::F32, &sizes, sigma);
    let order = tables.order.iter().flat_map(|channel| channel.to_le_bytes()).collect();
    tensors.put(format!("{prefix}.order"), Dtype::U16, &sizes, order);
}

/// Reads every sequence of every layer, and restores it where it is to go somewhere.
pub(super) fn walk(
    store: &Store,
    coding: &Coding,
    digests: &BTreeMap<usize, String>,
    reader: &mut Reader<'_>,
    mut restored: Option<&mut Restored>,
) -> Result<()> {
    let given = Given::read(coding, digests, reader)?;
    if let Coding::Sketch(_) = coding {
        store.head.check_digests(digests)?;
    }
    let codecs = codecs(store, coding, &given)?;
    let mut seen = BTreeSet::new();
    for shared in codecs.iter().flat_map(|codec| shared(codec)) {
        // Layers of so many channels share one.
        let [_, channels] = shared.sizes();
        if !seen.insert(channels) {
            continue;
        }
        let (want, have) = (digests.get(&channels), shared.digest());
        if want != Some(&have) {
            let want = want.cloned().unwrap_or_else(|| "none".to_owned());
            return Err(Error::Digest { what: shared.name(), want, have });
        }
    }
    if let Some(channels) = digests.keys().find(|channels| !seen.contains(channels)) {
        let want = "digests of what layers have alone".to_owned();
        return Err(Error::Metadata {
            key: FOLD.to_owned(),
            want,
            have: format!("one for {channels} channels"),
        });
    }
    for sequence in 0..store.head.batch {
        for (layer, part) in each_part(store.head.layers.len()) {
            let Some(codec) = codecs.get(layer) else { continue };
            walk_rows(store, codec, (part, layer, sequence), reader, restored.as_deref_mut())?;
        }
    }
    Ok(())
}

/// One sequence's tensor.
fn walk_rows(
    store: &Store,
    codec: &Codec,
    (part, layer, sequence): (Part, usize, usize),
    reader: &mut Reader<'_>,
    restored: Option<&mut Restored>,
) -> Result<()> {
    let (shape, dtype) = store.rows(part, layer, sequence)?;
    let prefix = part.prefix(sequence, layer);
    let range = coded(codec, shape.tokens);
    let sizes = [shape.heads, shape.tokens - range.len(), shape.dim];
    let raw = reader.read(&format!("{prefix}.rows"), to_file_dtype(dtype), &sizes)?;
    if range.is_empty() {
        if let Some(restored) = restored {
            restored.put(part, layer, sequence, raw);
        }
        return Ok(());
    }
    let layout = if part == Part::Key { codec.keys() } else { codec.values() };
    let block = block(codec).filter(|_| part == Part::Key);
    // Nothing is read or decoded for rows that stay raw, but where blocks are counted from the first token.
    let window = if block.is_some() { 0..range.end } else { range.clone() };
    let inside = range.start - window.start..window.len();
    let mut codes =
        read_codes(reader, &prefix, Shape { tokens: window.len(), ..shape }, layout, block, &inside)?;
    let decoded = if part == Part::Key {
        let start = [store.start(sequence).unwrap_or(0)];
        let positions = Positions::Start(&start).resolve(1, shape.tokens)?;
        codes.positions = positions.get(window.clone()).unwrap_or_default().to_vec();
        let tables = if codec.keeps_tables() {
            read_tables(reader, &prefix, shape, codec)?
        } else {
            Tables::identity(shape.heads, shape.dim)
        };
        restored.is_some().then(|| cpu::decode_keys(codec, &codes, &tables))
    } else {
        restored.is_some().then(|| cpu::decode_values(codec, &codes))
    };
    if let Some((restored, numbers)) = restored.zip(decoded) {
        let decoded = Decoded { numbers: numbers?, window, range };
        restored.put(part, layer, sequence, &decoded.with_raw(dtype, shape, raw));
    }
    Ok(())
}

/// Rows of the tokens of a window, of which those of the range were coded.
struct Decoded {
    numbers: Vec<f32>,
    window: Range<usize>,
    range: Range<usize>,
}

impl Decoded {
    /// All rows in their element type: decoded ones within the range, raw ones outside.
    fn with_raw(mut self, dtype: DType, shape: Shape, raw: &[u8]) -> Vec<u8> {
        let largest = dtype.largest();
        self.numbers.iter_mut().for_each(|x| *x = x.clamp(-largest, largest));
        let mut bytes = Vec::with_capacity(shape.bytes(dtype));
        let mut raw = raw.chunks_exact(shape.dim * dtype.size());
        for (_, head, token) in shape.iter_rows() {
            if self.range.contains(&token) {
                let row = head * self.window.len() + token - self.window.start;
                let numbers = self.numbers.get(row * shape.dim..(row + 1) * shape.dim);
                encode(numbers.unwrap_or_default(), dtype, &mut bytes);
            } else {
                bytes.extend_from_slice(raw.next().unwrap_or_default());
            }
        }
        bytes
    }
}

/// The codes of a window's tokens, of which those of the range are stored.
fn read_codes(
    reader: &mut Reader<'_>,
    prefix: &str,
    shape: Shape,
    layout: &CodeLayout,
    block: Option<usize>,
    range: &Range<usize>,
) -> Result<PlaneCodes> {
    let Shape { heads, tokens, dim, .. } = shape;
    let count = range.len();
    let mut segments: Vec<SegmentCodes> = layout.segments().iter().map(|_| SegmentCodes::default()).collect();
    for (index, (segment, codes)) in layout.segments().iter().zip(&mut segments).enumerate() {
        if segment.planes == 0 {
            continue;
        }
        let width = segment.words();
        let words = reader.words(&format!("{prefix}.codes.{index}"), &[heads, count, width])?;
        codes.words = widen(&words, (heads, tokens, width), range);
        let nu = reader.halves(&format!("{prefix}.nu.{index}"), &[heads, count])?;
        codes.nu = widen(&nu, (heads, tokens, 1), range);
    }
    let mut means = Vec::new();
    if let Some(block) = block {
        means = reader.halves(&format!("{prefix}.means"), &[heads, tokens.div_ceil(block), dim])?;
        if let Some((index, mean)) = means.iter().enumerate().find(|(_, mean)| !mean.is_finite()) {
            let value = mean.to_f32();
            return Err(Error::NonFinite { what: format!("{prefix}.means"), index, value });
        }
    }
    Ok(PlaneCodes {
        shape,
        layout: layout.clone(),
        segments,
        positions: Vec::new(),
        means,
        status: Counts::default(),
    })
}

fn read_tables(reader: &mut Reader<'_>, prefix: &str, shape: Shape, codec: &Codec) -> Result<Tables> {
    let sizes = [shape.heads, shape.dim];
    let tables = Tables {
        sets: 1,
        heads: shape.heads,
        dim: shape.dim,
        mu: reader.halves(&format!("{prefix}.mu"), &sizes)?,
        sigma: reader.singles(&format!("{prefix}.sigma"), &sizes)?,
        order: reader.shorts(&format!("{prefix}.order"), &sizes)?,
    };
    tables.check(shape)?;
    // Sketches weigh no channels.
    match tables.sigma.iter().find(|&&sigma| sigma != 1.0) {
        Some(sigma) if codec.projection().is_some() => Err(Error::range("sigma of a sketch", "1", sigma)),
        _ => Ok(tables),
    }
}
