//! Sign planes on the CPU in f32: the twins of the kernels, with the same order of operations. No trigonometry: angles
//! come from rows of `(cos, sin)` by [`add_angles`].

#![allow(clippy::indexing_slicing, reason = "shapes are checked on entry; the loops stay inside them")]

use std::ops::Range;

use half::f16;

use super::rows::{Centres, Fields, PlaneKeys, PlaneQueries, PlaneValues, Raw, finish};
use super::{
    BYTE, CodeLayout, Codec, MIN_RMS, PlaneCodes, Rotation, STEP_FACTORS, STEPS, Segment, Stored, Tables,
    check_rows,
};
use crate::attention::{AttendOptions, Rows, attend_rows, dot, score_rows};
use crate::error::Result;
use crate::qjl::cpu::{SketchRows, ValueRows};
use crate::qjl::{MAX_SCALE, NON_FINITE_SCALE};
use crate::rope::{ANGLE_TILE, Positions, Rope, add_angles};
use crate::tensor::TensorView;

/// Codes keys. A row that equals its mean has `nu` 0; a row with a non-finite number has codes 0 and the marker as its
/// `nu`; `nu` above 65504 is clamped. All three are counted. Numbers so large (about 1e18) that their squares leave f32
/// are among the clamped, and their codes mean little.
///
/// With block means, blocks count from the first token given, and a block's mean is that of its finite rows less the
/// sinks; give whole blocks.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::Range`](crate::Error::Range) or
/// [`Error::NonFinite`](crate::Error::NonFinite) when keys, positions or tables do not fit the codec or each other.
pub fn encode_keys(
    codec: &Codec,
    keys: &TensorView<'_>,
    positions: Positions<'_>,
    tables: &Tables,
) -> Result<PlaneCodes> {
    let shape = keys.shape();
    check_rows("keys", codec.key_dim(), shape)?;
    tables.check(shape)?;
    let positions = positions.resolve(shape.batch, shape.tokens)?;
    let means =
        codec.block().map_or_else(Vec::new, |block| block_means(keys, block, codec.options().sinks as usize));
    let centres = Centres::new(codec, shape, &positions, &means, tables);
    let inverse: Vec<f32> = tables.sigma.iter().map(|sigma| 1.0 / sigma).collect();
    let (mut mean, mut weighed) = (vec![0.0; shape.dim], vec![0.0; shape.dim]);
    let prepare = |b: usize, h: usize, t: usize, row: &mut [f32]| {
        centres.read(b, h, t, &mut mean);
        let inverse = &inverse[tables.start(b, h)..];
        for (x, ((k, m), inverse)) in weighed.iter_mut().zip(row.iter().zip(&mean).zip(inverse)) {
            *x = (k - m) * inverse;
        }
        gather(codec, tables.head(b, h).order, &weighed, row);
    };
    let mut codes = if codec.sketch().is_some() {
        sketch(codec, keys, prepare)
    } else {
        encode(codec, keys, codec.keys(), prepare)
    };
    (codes.positions, codes.means) = (positions, means);
    Ok(codes)
}

/// Codes values, which have neither mean nor balance; odd rows as in [`encode_keys`].
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when the values' dimension is not the codec's.
pub fn encode_values(codec: &Codec, values: &TensorView<'_>) -> Result<PlaneCodes> {
    check_rows("values", codec.value_dim(), values.shape())?;
    if codec.sketch().is_some() {
        return Ok(quantize_values(codec, values));
    }
    Ok(encode(codec, values, codec.values(), |_, _, _, _| ()))
}

/// Signs and scalar of every key as [`crate::qjl::cpu::quantize`] has them, of what `prepare` makes of it.
fn sketch(
    codec: &Codec,
    keys: &TensorView<'_>,
    mut prepare: impl FnMut(usize, usize, usize, &mut [f32]),
) -> PlaneCodes {
    let shape = keys.shape();
    let mut codes = PlaneCodes::new(shape, codec.keys());
    let (Some(sketch), [stored]) = (codec.sketch(), codes.segments.as_mut_slice()) else { return codes };
    let mut rows = SketchRows::new(&sketch.projection, sketch.scale);
    let mut row = vec![0.0; shape.dim];
    for (b, h, t) in shape.iter_rows() {
        if keys.read(b, h, t, &mut row).is_some() {
            prepare(b, h, t, &mut row);
        } else {
            row.fill(f32::NAN);
        }
        rows.push(&row, &mut stored.words, &mut stored.nu);
    }
    codes.status = rows.status;
    codes
}

/// Bytes and scale of every value as [`crate::qjl::cpu::quantize_values`] has them.
fn quantize_values(codec: &Codec, values: &TensorView<'_>) -> PlaneCodes {
    let shape = values.shape();
    let mut codes = PlaneCodes::new(shape, codec.values());
    let [stored] = codes.segments.as_mut_slice() else { return codes };
    let (mut rows, mut row) = (ValueRows::default(), vec![0.0; shape.dim]);
    for (b, h, t) in shape.iter_rows() {
        values.read_row(b, h, t, &mut row);
        rows.push(&row, &mut stored.words, &mut stored.nu);
    }
    codes.status = rows.status;
    codes
}

/// Estimated scores, the mean's part included, neither scaled nor masked: `[batch, query_heads, queries, tokens]`; 0
/// for a masked key and for a query that holds a non-finite number. Every key is scored by its code.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio),
/// [`Error::Range`](crate::Error::Range) or [`Error::NonFinite`](crate::Error::NonFinite) when queries, codes and
/// tables do not fit each other.
pub fn scores(
    codec: &Codec,
    queries: &TensorView<'_>,
    keys: &PlaneCodes,
    tables: &Tables,
) -> Result<Vec<f32>> {
    let geometry = codec.check_scores(queries.shape(), keys, tables)?;
    let fields = Fields::new(codec);
    let queries = PlaneQueries { codec, queries, tables, group: geometry.group, fields };
    let centres = Centres::new(codec, keys.shape, &keys.positions, &keys.means, tables);
    score_rows(geometry, &queries, &PlaneKeys { codes: keys, centres, fields, raw: None })
}

/// Attention, `[batch, query_heads, queries, value_dim]`: sinks and the recent tokens of each sequence by their raw
/// rows, all others by their codes, in one softmax; masks and odd rows as in [`crate::attention`]. `lengths` has one
/// length per sequence (default: all tokens).
///
/// # Errors
/// As [`scores`].
pub fn attend(
    codec: &Codec,
    queries: &TensorView<'_>,
    store: &Stored<'_>,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f32>> {
    let geometry = codec.check_attend(queries.shape(), store)?;
    let length = geometry.lengths(lengths)?;
    let fields = Fields::new(codec);
    let queries = PlaneQueries { codec, queries, tables: store.tables, group: geometry.group, fields };
    let codes = store.key_codes;
    let centres = Centres::new(codec, codes.shape, &codes.positions, &codes.means, store.tables);
    let raw = |rows| Raw { codec, rows, length: &length };
    let keys = PlaneKeys { codes, centres, fields, raw: Some(raw(store.keys)) };
    let values = PlaneValues { codes: store.value_codes, raw: Some(raw(store.values)) };
    let mut parts = attend_rows(geometry, &queries, &keys, &values, lengths, options)?;
    let mut out = Vec::with_capacity(geometry.output(store.values.shape().dim)?.elements());
    for parts in parts.chunks_exact_mut(values.width()) {
        finish(codec, parts, &mut out);
    }
    Ok(out)
}

/// The keys that codes stand for, `[batch, heads, tokens, head_dim]`; zeros for a masked row. Of signs of a projection `S` it is
/// `g/m nu S^T s`, whose product with a query is the query's estimated score.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::Range`](crate::Error::Range) or
/// [`Error::NonFinite`](crate::Error::NonFinite) when codes and tables do not fit the codec or each other.
pub fn decode_keys(codec: &Codec, keys: &PlaneCodes, tables: &Tables) -> Result<Vec<f32>> {
    let shape = keys.shape;
    codec.check_scores(shape, keys, tables)?;
    let centres = Centres::new(codec, shape, &keys.positions, &keys.means, tables);
    let (mut code, mut mean) = (vec![0.0; keys.layout.channels()], vec![0.0; shape.dim]);
    let mut x = vec![0.0; shape.dim];
    let mut out = Vec::with_capacity(shape.elements());
    for (b, h, t) in shape.iter_rows() {
        mean.fill(0.0);
        if decode_row(codec, keys, shape.row(b, h, t), &mut code) {
            match codec.sketch() {
                Some(sketch) => sketch.restore(&code, &mut x),
                None => x.copy_from_slice(&code),
            }
            centres.read(b, h, t, &mut mean);
            let tables = tables.head(b, h);
            for (i, x) in x.iter().enumerate() {
                let c = if codec.keys().is_split() { usize::from(tables.order[i]) } else { i };
                mean[c] += tables.sigma[c] * x;
            }
        }
        out.extend_from_slice(&mean);
    }
    Ok(out)
}

/// The values that codes stand for, `[batch, heads, tokens, head_dim]`; zeros for a masked row.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when the codes do not fit the codec.
pub fn decode_values(codec: &Codec, values: &PlaneCodes) -> Result<Vec<f32>> {
    codec.check_codes("value codes", (codec.values(), codec.value_dim()), values)?;
    let mut row = vec![0.0; values.shape.dim];
    let mut out = Vec::with_capacity(values.shape.elements());
    for index in 0..values.shape.rows() {
        if !decode_row(codec, values, index, &mut row) {
            row.fill(0.0);
        }
        out.extend_from_slice(&row);
    }
    Ok(out)
}

/// `R^T (nu L)` of every segment, of signs of a projection `nu L`; false where the row is masked.
fn decode_row(codec: &Codec, codes: &PlaneCodes, index: usize, row: &mut [f32]) -> bool {
    let mut nu = [0.0; 2];
    if read_codes(codes, index, row, &mut nu).is_none() {
        return false;
    }
    for ((segment, channels), nu) in spans(codes.layout.segments()).zip(nu) {
        row[channels.clone()].iter_mut().for_each(|c| *c = nu * level(segment.planes, *c));
        if let Some(rotation) = rotation(codec, segment) {
            rotation.apply_transposed(&mut row[channels]);
        }
    }
    true
}

/// Codes of every row; `prepare` makes of a finite row what is rotated.
fn encode(
    codec: &Codec,
    rows: &TensorView<'_>,
    layout: &CodeLayout,
    mut prepare: impl FnMut(usize, usize, usize, &mut [f32]),
) -> PlaneCodes {
    let shape = rows.shape();
    let mut codes = PlaneCodes::new(shape, layout);
    let (mut row, mut chosen) = (vec![0.0; shape.dim], vec![0; shape.dim]);
    for (b, h, t) in shape.iter_rows() {
        let finite = rows.read(b, h, t, &mut row).is_some();
        if finite {
            prepare(b, h, t, &mut row);
            codes.status.zero += u32::from(row.iter().all(|&x| x == 0.0));
        } else {
            codes.status.non_finite += 1;
        }
        let mut overflow = false;
        for ((segment, channels), stored) in spans(codes.layout.segments()).zip(&mut codes.segments) {
            let Some(rotation) = rotation(codec, segment) else { continue };
            let chosen = &mut chosen[channels.clone()];
            if finite {
                let nu = encode_segment(rotation, segment.planes, &mut row[channels], chosen);
                overflow |= nu > MAX_SCALE;
                stored.nu.push(f16::from_f32(nu.min(MAX_SCALE)));
            } else {
                chosen.fill(0);
                stored.nu.push(NON_FINITE_SCALE);
            }
            pack(chosen, segment.planes, &mut stored.words);
        }
        codes.status.overflow += u32::from(overflow);
    }
    codes
}

/// Rotates `row`, chooses its codes, and gives `nu`; infinity where the sum of squares leaves f32.
pub(crate) fn encode_segment(rotation: &Rotation, planes: u8, row: &mut [f32], codes: &mut [u8]) -> f32 {
    rotation.apply(row);
    let squares = dot(row, row);
    if !squares.is_finite() {
        codes.fill(1 << (planes - 1));
        return f32::INFINITY;
    }
    if planes == 1 {
        codes.iter_mut().zip(row.iter()).for_each(|(c, &y)| *c = u8::from(y >= 0.0));
        return squares.sqrt() / (row.len() as f32).sqrt();
    }
    let rms = (squares / row.len() as f32).sqrt().max(MIN_RMS);
    let half = f32::from(1u8 << (planes - 1));
    let top = top_code(planes);
    let code = |y: f32, inverse: f32| (floor((y * inverse).clamp(-half, half)) + half).clamp(0.0, top);
    let (mut best, mut chosen, mut length) = (-1.0, 0.0, 1.0);
    for factor in STEP_FACTORS {
        let inverse = 1.0 / (factor * STEPS[usize::from(planes) - 1] * rms);
        let (mut along, mut levels) = (0.0, 0.0);
        for &y in row.iter() {
            let level = 2.0 * code(y, inverse) - top;
            along += y * level;
            levels += level * level;
        }
        let fit = along * along / levels;
        if fit > best {
            (best, chosen, length) = (fit, inverse, levels);
        }
    }
    codes.iter_mut().zip(row.iter()).for_each(|(c, &y)| *c = code(y, chosen) as u8);
    squares.sqrt() / length.sqrt()
}

/// `floor` of a number that an `i32` can hold, which vectorises where the processor has no instruction for it.
fn floor(x: f32) -> f32 {
    let whole = x as i32 as f32;
    if whole > x { whole - 1.0 } else { whole }
}

/// The largest code of so many bits, `2^b - 1`.
pub(super) fn top_code(planes: u8) -> f32 {
    ((1u32 << planes) - 1) as f32
}

/// The level that a code stands for: odd, or the signed byte itself.
pub(crate) fn level(planes: u8, code: f32) -> f32 {
    if planes == BYTE {
        return f32::from((code as u8).cast_signed());
    }
    2.0 * code - top_code(planes)
}

/// The segments with their channels in a row of code.
pub(super) fn spans(segments: &[Segment]) -> impl Iterator<Item = (Segment, Range<usize>)> {
    segments.iter().scan(0, |start, &segment| {
        let from = *start;
        *start += segment.channels;
        Some((segment, from..*start))
    })
}

/// A segment's rotation; `None` where it has no bits.
pub(super) fn rotation(codec: &Codec, segment: Segment) -> Option<&Rotation> {
    codec.rotations().get(segment.channels).filter(|_| segment.planes > 0)
}

/// `to[i] = from[order[i]]` where keys are split, else `to = from`.
pub(super) fn gather(codec: &Codec, order: &[u16], from: &[f32], to: &mut [f32]) {
    if codec.keys().is_split() {
        to.iter_mut().zip(order).for_each(|(to, &c)| *to = from[usize::from(c)]);
    } else {
        to.copy_from_slice(from);
    }
}

/// Appends codes of `planes` bits, least significant bit first, on fresh words.
pub(crate) fn pack(codes: &[u8], planes: u8, words: &mut Vec<u32>) {
    let (mut word, mut filled) = (0u64, 0);
    for &code in codes {
        word |= u64::from(code) << filled;
        filled += u32::from(planes);
        if filled >= 32 {
            words.push(word as u32);
            word >>= 32;
            filled -= 32;
        }
    }
    if filled > 0 {
        words.push(word as u32);
    }
}

/// Reads the codes of a row and the `nu` of its segments; `None` where it is marked, which leaves both half read.
pub(super) fn read_codes(codes: &PlaneCodes, index: usize, row: &mut [f32], nu: &mut [f32]) -> Option<()> {
    for (((segment, channels), stored), nu) in spans(codes.layout.segments()).zip(&codes.segments).zip(nu) {
        *nu = 0.0;
        if segment.planes == 0 {
            row[channels].fill(0.0);
            continue;
        }
        *nu = Some(stored.nu[index].to_f32()).filter(|nu| nu.is_finite())?;
        let words = &stored.words[index * segment.words()..(index + 1) * segment.words()];
        unpack(words, segment.planes, &mut row[channels]);
    }
    Some(())
}

/// Codes of `planes` bits as numbers, what [`pack`] has packed.
pub(crate) fn unpack(words: &[u32], planes: u8, row: &mut [f32]) {
    let (bits, mask) = (u32::from(planes), (1u64 << planes) - 1);
    let (mut words, mut word, mut left) = (words.iter(), 0u64, 0);
    for x in row {
        if left < bits {
            word |= u64::from(words.next().copied().unwrap_or(0)) << left;
            left += 32;
        }
        *x = (word & mask) as u8 as f32;
        word >>= bits;
        left -= bits;
    }
}

/// Means of blocks of keys in f16, `[batch, heads, blocks, dim]`.
fn block_means(keys: &TensorView<'_>, block: usize, sinks: usize) -> Vec<f16> {
    let shape = keys.shape();
    let (mut row, mut sum) = (vec![0.0; shape.dim], vec![0.0; shape.dim]);
    let mut means = Vec::new();
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
        for start in (0..shape.tokens).step_by(block) {
            sum.fill(0.0);
            let mut count = 0.0f32;
            for t in start.max(sinks)..(start + block).min(shape.tokens) {
                if keys.read(b, h, t, &mut row).is_some() {
                    sum.iter_mut().zip(&row).for_each(|(sum, k)| *sum += k);
                    count += 1.0;
                }
            }
            let mean = |sum: &f32| f16::from_f32((sum / count.max(1.0)).clamp(-MAX_SCALE, MAX_SCALE));
            means.extend(sum.iter().map(mean));
        }
    }
    means
}

/// `(cos, sin)` of every pair at every position, from a coarse row for each tile of positions and a fine row inside it.
pub(super) fn token_angles(rope: &Rope, positions: &[u32]) -> Vec<[f32; 2]> {
    let fine: Vec<Vec<[f32; 2]>> = (0..ANGLE_TILE).map(|offset| rope.angles(offset)).collect();
    let mut angles = Vec::with_capacity(positions.len() * rope.inv_freq().len());
    let (mut tile, mut coarse) = (0, rope.angles(0));
    for &position in positions {
        let (start, offset) = (position - position % ANGLE_TILE, position % ANGLE_TILE);
        if start != tile {
            (tile, coarse) = (start, rope.angles(start));
        }
        angles.extend(coarse.iter().zip(&fine[offset as usize]).map(|(&c, &f)| add_angles(c, f)));
    }
    angles
}
