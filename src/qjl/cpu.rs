//! QJL on the CPU in f32: the twins of the kernels in `shaders/qjl/`, same names, same order of operations.

use half::f16;

use super::{
    Counts, KeyScale, MAX_SCALE, NON_FINITE_SCALE, Projection, QuantizedValues, SketchedKeys,
    check_projection,
};
use crate::attention::{AttendOptions, Geometry, Rows, attend_rows, score_rows};
use crate::error::Result;
use crate::tensor::{TensorView, checked_bytes};

/// Smallest scale of values that are not all zero, f16's smallest normal number: below it the scale would keep too few
/// bits, and some GPUs flush it to zero.
const MIN_VALUE_SCALE: f32 = 6.103_515_6e-5;

/// Largest code of a value.
const MAX_CODE: f32 = 127.0;

/// Sketches keys: bit `j` is 1 iff `(S k)_j >= 0`, beside `nu` as `scale` says, rounded to f16. A row of zeros has
/// `nu` 0; a row with a non-finite number has bits 0 and the marker; `nu` above 65504 is clamped. All three are counted.
/// Numbers so large (about 1e36) that `S k` leaves f32 are among the clamped, and their bits mean little.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when the keys' dimension is not the projection's.
pub fn quantize(keys: &TensorView<'_>, projection: &Projection, scale: KeyScale) -> Result<SketchedKeys> {
    let shape = keys.shape();
    let sketch_dim = projection.sketch_dim();
    check_projection(shape, sketch_dim, projection)?;
    checked_bytes("sketched keys", &[shape.rows(), sketch_dim.div_ceil(32)], 4)?;
    let mut sketch =
        SketchedKeys { shape, sketch_dim, words: Vec::new(), scale: Vec::new(), status: Counts::default() };
    sketch.words.reserve_exact(shape.rows() * sketch.words_per_row());
    sketch.scale.reserve_exact(shape.rows());
    let (mut row, mut rows) = (vec![0.0; shape.dim], SketchRows::new(projection, scale));
    for (b, h, t) in shape.iter_rows() {
        keys.read_row(b, h, t, &mut row);
        rows.push(&row, &mut sketch.words, &mut sketch.scale);
    }
    sketch.status = rows.status;
    Ok(sketch)
}

/// Estimated scores `g/m * nu * <S q, s>`, neither scaled nor masked: `[batch, query_heads, queries, tokens]`; 0 for
/// a masked key and for a query that holds a non-finite number. `scale` must be what the keys were sketched with.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) or [`Error::HeadRatio`](crate::Error::HeadRatio) when shapes do not fit.
pub fn scores(
    queries: &TensorView<'_>,
    keys: &SketchedKeys,
    projection: &Projection,
    scale: KeyScale,
) -> Result<Vec<f32>> {
    let (geometry, queries, keys) = sketch_rows(queries, keys, projection, scale)?;
    score_rows(geometry, &queries, &keys)
}

/// Codes value rows in 8 bits: the stored scale is `max|v| / 127` rounded to f16, at least 2^-14, and the codes are
/// `v / scale` with that rounded scale, rounded half to even, -127 to 127. A row of zeros has scale 0; a row with a
/// non-finite number has codes 0 and the marker; a scale above 65504 is clamped. All three are counted.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when `value_dim` is not 1 to 512.
pub fn quantize_values(values: &TensorView<'_>) -> Result<QuantizedValues> {
    let shape = values.shape();
    shape.check_dim("values")?;
    let mut codes =
        QuantizedValues { shape, words: Vec::new(), scale: Vec::new(), status: Counts::default() };
    codes.words.reserve_exact(shape.rows() * codes.words_per_row());
    codes.scale.reserve_exact(shape.rows());
    let (mut row, mut rows) = (vec![0.0; shape.dim], ValueRows::default());
    for (b, h, t) in shape.iter_rows() {
        values.read_row(b, h, t, &mut row);
        rows.push(&row, &mut codes.words, &mut codes.scale);
    }
    codes.status = rows.status;
    Ok(codes)
}

/// The rows that coded values stand for, `[batch, heads, tokens, value_dim]`; zeros for a masked row.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when the codes do not fit their shape.
pub fn dequantize_values(values: &QuantizedValues) -> Result<Vec<f32>> {
    values.check()?;
    let mut numbers = vec![0.0; values.shape.elements()];
    if values.shape.dim > 0 {
        for ((b, h, t), row) in values.shape.iter_rows().zip(numbers.chunks_exact_mut(values.shape.dim)) {
            let scale = values.read(b, h, t, row).unwrap_or(0.0);
            row.iter_mut().for_each(|x| *x *= scale);
        }
    }
    Ok(numbers)
}

/// Attention over sketched keys and coded values: `[batch, query_heads, queries, value_dim]`; masks and odd rows as
/// in [`crate::attention`]. `lengths` has one length per sequence (default: all tokens).
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or
/// [`Error::Range`](crate::Error::Range) when shapes, lengths or options do not fit.
pub fn attend(
    queries: &TensorView<'_>,
    keys: &SketchedKeys,
    values: &QuantizedValues,
    projection: &Projection,
    key_scale: KeyScale,
    lengths: Option<&[u32]>,
    options: &AttendOptions<'_>,
) -> Result<Vec<f32>> {
    let (geometry, queries, keys) = sketch_rows(queries, keys, projection, key_scale)?;
    geometry.check_values(values.shape)?;
    values.check()?;
    attend_rows(geometry, &queries, &keys, values, lengths, options)
}

/// Sketches rows one after the other.
pub(super) struct SketchRows<'a> {
    projection: &'a Projection,
    scale: KeyScale,
    y: Vec<f32>,
    pub(super) status: Counts,
}

impl<'a> SketchRows<'a> {
    pub(super) fn new(projection: &'a Projection, scale: KeyScale) -> Self {
        Self { projection, scale, y: vec![0.0; projection.sketch_dim()], status: Counts::default() }
    }

    /// Appends a row's signs and scalar.
    pub(super) fn push(&mut self, row: &[f32], words: &mut Vec<u32>, scales: &mut Vec<f16>) {
        let class = RowClass::of(row);
        let nu = if let RowClass::Finite { largest } = class {
            self.projection.project(row, &mut self.y);
            key_scale(self.scale, row, largest, &self.y)
        } else {
            self.y.fill(if class == RowClass::Zero { 0.0 } else { -1.0 });
            0.0
        };
        words.extend(self.y.chunks(32).map(pack_signs));
        scales.push(store_scale(class, nu, 0.0, &mut self.status));
    }
}

/// Codes values in bytes one after the other.
#[derive(Default)]
pub(super) struct ValueRows {
    pub(super) status: Counts,
}

impl ValueRows {
    /// Appends a row's codes and scale.
    pub(super) fn push(&mut self, row: &[f32], words: &mut Vec<u32>, scales: &mut Vec<f16>) {
        let class = RowClass::of(row);
        let largest = if let RowClass::Finite { largest } = class { largest } else { 0.0 };
        let stored = store_scale(class, largest / MAX_CODE, MIN_VALUE_SCALE, &mut self.status);
        let scale = stored.to_f32();
        let code = |v: f32| match class {
            RowClass::Finite { .. } => (v / scale).round_ties_even().clamp(-MAX_CODE, MAX_CODE) as i8,
            RowClass::Zero | RowClass::NonFinite => 0,
        };
        words.extend(row.chunks(4).map(|four| {
            four.iter().rev().fold(0, |word, &v| word << 8 | u32::from(code(v).cast_unsigned()))
        }));
        scales.push(stored);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum RowClass {
    NonFinite,
    Zero,
    Finite { largest: f32 },
}

impl RowClass {
    fn of(row: &[f32]) -> Self {
        if !row.iter().all(|x| x.is_finite()) {
            return Self::NonFinite;
        }
        let largest = row.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        if largest > 0.0 { Self::Finite { largest } } else { Self::Zero }
    }
}

/// A finite row's scale from `least` up, clamped to f16's range; 0 for zeros, the marker for non-finite rows.
fn store_scale(class: RowClass, scale: f32, least: f32, status: &mut Counts) -> f16 {
    match class {
        RowClass::NonFinite => {
            status.non_finite += 1;
            NON_FINITE_SCALE
        }
        RowClass::Zero => {
            status.zero += 1;
            f16::ZERO
        }
        // NaN: the sums of a finite row overflowed, infinity over infinity.
        RowClass::Finite { .. } if scale > MAX_SCALE || scale.is_nan() => {
            status.overflow += 1;
            f16::MAX
        }
        RowClass::Finite { .. } => f16::from_f32(scale.max(least)),
    }
}

/// `nu` of a finite key that is not zero.
fn key_scale(scale: KeyScale, key: &[f32], largest: f32, y: &[f32]) -> f32 {
    let total = || y.iter().map(|y| y.abs()).sum::<f32>();
    match scale {
        KeyScale::Norm => largest * key.iter().map(|k| (k / largest) * (k / largest)).sum::<f32>().sqrt(),
        KeyScale::Mse => total() / y.len() as f32,
        KeyScale::Unbiased => {
            let (squares, total) = (y.iter().map(|y| y * y).sum::<f32>(), total());
            if total == 0.0 { 0.0 } else { squares / total }
        }
    }
}

/// Up to 32 signs in a word, least significant bit first, 1 for numbers at or above 0.
fn pack_signs(numbers: &[f32]) -> u32 {
    numbers.iter().rev().fold(0, |word, &y| word << 1 | u32::from(y >= 0.0))
}

/// Queries as `S q`.
pub(super) struct SketchedQueries<'a> {
    pub(super) queries: &'a TensorView<'a>,
    pub(super) projection: &'a Projection,
}

impl Rows for SketchedQueries<'_> {
    fn width(&self) -> usize {
        self.projection.sketch_dim()
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        let mut query = vec![0.0; self.queries.shape().dim];
        let weight = self.queries.read(batch, head, token, &mut query);
        self.projection.project(&query, row);
        weight
    }
}

/// Keys as `+-1` with the weight `g/m * nu`.
pub(super) struct SignRows<'a> {
    keys: &'a SketchedKeys,
    factor: f32,
}

impl<'a> SignRows<'a> {
    pub(super) fn new(keys: &'a SketchedKeys, projection: &Projection, scale: KeyScale) -> Self {
        let gain = match scale {
            KeyScale::Norm => projection.factor(),
            KeyScale::Mse | KeyScale::Unbiased => 1.0,
        };
        Self { keys, factor: gain / keys.sketch_dim as f32 }
    }
}

impl Rows for SignRows<'_> {
    fn width(&self) -> usize {
        self.keys.sketch_dim
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        let index = self.keys.shape.row(batch, head, token);
        let words = row_words(&self.keys.words, self.keys.words_per_row(), index);
        for (signs, word) in row.chunks_mut(32).zip(words) {
            for (j, sign) in signs.iter_mut().enumerate() {
                // 1.0 with its sign bit taken from the inverted code.
                *sign = f32::from_bits(1.0f32.to_bits() | ((!word >> j & 1) << 31));
            }
        }
        Some(self.factor * row_scale(&self.keys.scale, index)?)
    }
}

/// Values as codes with their scale as the weight.
impl Rows for QuantizedValues {
    fn width(&self) -> usize {
        self.shape.dim
    }

    fn read(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) -> Option<f32> {
        let index = self.shape.row(batch, head, token);
        let words = row_words(&self.words, self.words_per_row(), index);
        for (four, word) in row.chunks_mut(4).zip(words) {
            for (x, byte) in four.iter_mut().zip(word.to_le_bytes()) {
                *x = f32::from(byte.cast_signed());
            }
        }
        row_scale(&self.scale, index)
    }
}

fn row_words(words: &[u32], per_row: usize, index: usize) -> &[u32] {
    words.get(index * per_row..(index + 1) * per_row).unwrap_or(&[])
}

/// A row's scale; `None` where the row is marked.
fn row_scale(scale: &[f16], index: usize) -> Option<f32> {
    scale.get(index).map(|scale| scale.to_f32()).filter(|scale| scale.is_finite())
}

fn sketch_rows<'a>(
    queries: &'a TensorView<'a>,
    keys: &'a SketchedKeys,
    projection: &'a Projection,
    scale: KeyScale,
) -> Result<(Geometry, SketchedQueries<'a>, SignRows<'a>)> {
    let geometry = Geometry::of(queries.shape(), keys.shape)?;
    check_projection(keys.shape, keys.sketch_dim, projection)?;
    keys.check()?;
    let keys = SignRows::new(keys, projection, scale);
    Ok((geometry, SketchedQueries { queries, projection }, keys))
}
