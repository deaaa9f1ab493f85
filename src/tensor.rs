//! Shapes, element types and borrowed or owned host tensors. Every overflow check of the library lives here.
//!
//! Every tensor is `[batch, heads, tokens, dim]`; a *row* is the `dim` numbers of one batch entry, head and token.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Largest `dim` the kernels take.
pub const MAX_HEAD_DIM: usize = 512;

/// Element type of keys, values and queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The largest finite number of this type.
    #[must_use]
    pub fn largest(self) -> f32 {
        match self {
            Self::F16 => f16::MAX.to_f32(),
            Self::Bf16 => bf16::MAX.to_f32(),
            Self::F32 => f32::MAX,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// `[batch, heads, tokens, dim]`. [`Shape::new`] checks that the bytes of a tensor of this shape fit `isize` at four bytes an
/// element; of a shape put together by hand the products saturate, and whatever takes it says [`Error::Overflow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// KV heads, or query heads for queries and outputs.
    pub heads: usize,
    /// Tokens of the longest sequence.
    pub tokens: usize,
    /// Channels of one head.
    pub dim: usize,
}

impl Shape {
    /// A shape whose sizes multiply without overflow.
    ///
    /// # Errors
    /// [`Error::Overflow`] when `batch * heads * tokens * dim * 4` does not fit `isize`.
    pub fn new(batch: usize, heads: usize, tokens: usize, dim: usize) -> Result<Self> {
        checked_bytes("tensor", &[batch, heads, tokens, dim], 4)?;
        Ok(Self { batch, heads, tokens, dim })
    }

    /// Rows: `batch * heads * tokens`.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.batch.saturating_mul(self.heads).saturating_mul(self.tokens)
    }

    /// Elements: `rows * dim`.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.rows().saturating_mul(self.dim)
    }

    /// Bytes of a contiguous tensor of this shape.
    #[must_use]
    pub const fn bytes(&self, dtype: DType) -> usize {
        self.elements().saturating_mul(dtype.size())
    }

    /// Index of a row: `(batch * heads + head) * tokens + token`.
    #[must_use]
    pub const fn row(&self, batch: usize, head: usize, token: usize) -> usize {
        (batch * self.heads + head) * self.tokens + token
    }

    /// All rows in order, as `(batch, head, token)`.
    pub fn iter_rows(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.batch)
            .flat_map(move |b| (0..self.heads).flat_map(move |h| (0..self.tokens).map(move |t| (b, h, t))))
    }

    /// Checks that a head dimension is one the kernels take: 1 to [`MAX_HEAD_DIM`].
    ///
    /// # Errors
    /// [`Error::Shape`] naming `what`.
    pub fn check_dim(&self, what: &str) -> Result<()> {
        if (1..=MAX_HEAD_DIM).contains(&self.dim) {
            return Ok(());
        }
        Err(Error::shape(what, format_args!("a head dimension of 1 to {MAX_HEAD_DIM}"), self.dim))
    }

    /// Checks that this shape equals `want`.
    ///
    /// # Errors
    /// [`Error::Shape`] naming `what`.
    pub fn check_equal(&self, what: &str, want: Self) -> Result<()> {
        if *self == want { Ok(()) } else { Err(Error::shape(what, want, self)) }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}, {}, {}, {}]", self.batch, self.heads, self.tokens, self.dim)
    }
}

/// `sizes[0] * sizes[1] * ... * element`, if it fits `isize`.
pub(crate) fn checked_bytes(what: &str, sizes: &[usize], element: usize) -> Result<usize> {
    sizes
        .iter()
        .try_fold(element, |product, &size| product.checked_mul(size))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| Error::Overflow {
            what: what.to_owned(),
            sizes: sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        })
}

/// Distances in elements from one batch entry, head or token to the next. Channels are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strides {
    /// From one batch entry to the next.
    pub batch: usize,
    /// From one head to the next.
    pub heads: usize,
    /// From one token to the next.
    pub tokens: usize,
}

impl Strides {
    /// The strides of a contiguous tensor.
    #[must_use]
    pub const fn contiguous(shape: Shape) -> Self {
        let heads = shape.tokens.saturating_mul(shape.dim);
        Self { batch: shape.heads.saturating_mul(heads), heads, tokens: shape.dim }
    }

    /// Elements from the first to one past the last that a tensor of this shape touches; 0 when it is empty.
    ///
    /// # Errors
    /// [`Error::Overflow`] when the extent does not fit the address space.
    pub fn extent(&self, shape: Shape) -> Result<usize> {
        if shape.elements() == 0 {
            return Ok(0);
        }
        let overflow = || Error::Overflow {
            what: "strided tensor".to_owned(),
            sizes: format!("{shape} by strides [{}, {}, {}]", self.batch, self.heads, self.tokens),
        };
        let last = [(shape.batch, self.batch), (shape.heads, self.heads), (shape.tokens, self.tokens)];
        last.iter()
            .try_fold(shape.dim, |sum, &(size, stride)| (size - 1).checked_mul(stride)?.checked_add(sum))
            .filter(|&extent| extent.checked_mul(4).is_some_and(|bytes| isize::try_from(bytes).is_ok()))
            .ok_or_else(overflow)
    }
}

/// A host tensor, borrowed: little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    bytes: &'a [u8],
    dtype: DType,
    shape: Shape,
    strides: Strides,
}

impl<'a> TensorView<'a> {
    /// A contiguous tensor at the start of `bytes`.
    ///
    /// # Errors
    /// [`Error::TooShort`] when `bytes` holds less than the shape needs.
    pub fn new(bytes: &'a [u8], dtype: DType, shape: Shape) -> Result<Self> {
        Self::strided(bytes, dtype, shape, Strides::contiguous(shape))
    }

    /// A tensor with gaps or another order of batch, heads and tokens.
    ///
    /// # Errors
    /// [`Error::TooShort`] when `bytes` ends before the last element, [`Error::Overflow`] when it cannot be addressed.
    pub fn strided(bytes: &'a [u8], dtype: DType, shape: Shape, strides: Strides) -> Result<Self> {
        let need = strides.extent(shape)? * dtype.size();
        if bytes.len() < need {
            return Err(Error::TooShort {
                what: format!("tensor {shape}"),
                need: need as u64,
                have: bytes.len() as u64,
            });
        }
        Ok(Self { bytes, dtype, shape, strides })
    }

    /// `[batch, heads, tokens, dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Tokens of one sequence, `[1, heads, tokens, dim]`; the caller keeps inside the shape.
    pub(crate) fn part(&self, sequence: usize, first: usize, tokens: usize) -> Self {
        let skipped = (sequence * self.strides.batch + first * self.strides.tokens) * self.dtype.size();
        let shape = Shape { batch: 1, tokens, ..self.shape };
        Self { bytes: self.bytes.get(skipped..).unwrap_or(&[]), shape, ..*self }
    }

    /// The little-endian bytes of a row; empty outside the shape.
    #[must_use]
    pub fn row_bytes(&self, batch: usize, head: usize, token: usize) -> &'a [u8] {
        let inside = batch < self.shape.batch && head < self.shape.heads && token < self.shape.tokens;
        if !inside {
            return &[];
        }
        let start = batch * self.strides.batch + head * self.strides.heads + token * self.strides.tokens;
        let size = self.dtype.size();
        self.bytes.get(start * size..(start + self.shape.dim) * size).unwrap_or(&[])
    }

    /// Reads a row as f32 into `row`, which has `dim` elements; outside the shape `row` is left as it is.
    pub fn read_row(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) {
        decode(self.row_bytes(batch, head, token), self.dtype, row);
    }

    /// The whole tensor as f32 in row-major order.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.shape.elements()];
        if self.shape.dim > 0 {
            for ((b, h, t), row) in self.shape.iter_rows().zip(all.chunks_exact_mut(self.shape.dim)) {
                self.read_row(b, h, t, row);
            }
        }
        all
    }

    /// The whole tensor as contiguous bytes in row-major order.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.shape.bytes(self.dtype));
        for (b, h, t) in self.shape.iter_rows() {
            all.extend_from_slice(self.row_bytes(b, h, t));
        }
        all
    }
}

/// A host tensor, owned and contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    bytes: Vec<u8>,
    dtype: DType,
    shape: Shape,
}

impl Tensor {
    /// A tensor of these little-endian bytes.
    ///
    /// # Errors
    /// [`Error::Shape`] when the byte count is not exactly the shape's.
    pub fn new(bytes: Vec<u8>, dtype: DType, shape: Shape) -> Result<Self> {
        if bytes.len() != shape.bytes(dtype) {
            let want = format!("{} bytes for {shape} {dtype}", shape.bytes(dtype));
            return Err(Error::shape("tensor", want, format_args!("{} bytes", bytes.len())));
        }
        Ok(Self { bytes, dtype, shape })
    }

    /// Rounds f32 numbers to `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`] when the count is not exactly the shape's.
    pub fn from_f32(numbers: &[f32], dtype: DType, shape: Shape) -> Result<Self> {
        if numbers.len() != shape.elements() {
            return Err(Error::shape(
                "tensor",
                format_args!("{} numbers for {shape}", shape.elements()),
                numbers.len(),
            ));
        }
        let mut bytes = Vec::with_capacity(shape.bytes(dtype));
        encode(numbers, dtype, &mut bytes);
        Self::new(bytes, dtype, shape)
    }

    /// A borrowed view of the whole tensor.
    #[must_use]
    pub fn view(&self) -> TensorView<'_> {
        TensorView {
            bytes: &self.bytes,
            dtype: self.dtype,
            shape: self.shape,
            strides: Strides::contiguous(self.shape),
        }
    }

    /// `[batch, heads, tokens, dim]`.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The little-endian bytes in row-major order.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Numbers converted at once: a slice takes the processor's own instruction, a single f16 a look at whether it is there.
const SLICE: usize = 64;

/// Reads little-endian `bytes` of `dtype` into `numbers`, as many as both hold.
pub(crate) fn decode(bytes: &[u8], dtype: DType, numbers: &mut [f32]) {
    let pairs = bytes.as_chunks::<2>().0;
    match dtype {
        DType::F16 => {
            let mut halves = [f16::ZERO; SLICE];
            for (numbers, pairs) in numbers.chunks_mut(SLICE).zip(pairs.chunks(SLICE)) {
                let count = numbers.len().min(pairs.len());
                let (numbers, _) = numbers.split_at_mut(count);
                let (halves, _) = halves.split_at_mut(count);
                halves.iter_mut().zip(pairs).for_each(|(half, &b)| *half = f16::from_le_bytes(b));
                halves.convert_to_f32_slice(numbers);
            }
        }
        DType::Bf16 => numbers.iter_mut().zip(pairs).for_each(|(n, &b)| *n = bf16::from_le_bytes(b).to_f32()),
        DType::F32 => {
            numbers.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(n, &b)| *n = f32::from_le_bytes(b));
        }
    }
}

/// Appends `numbers`, rounded to nearest even, as little-endian `dtype`.
pub(crate) fn encode(numbers: &[f32], dtype: DType, bytes: &mut Vec<u8>) {
    match dtype {
        DType::F16 => {
            let mut halves = [f16::ZERO; SLICE];
            for numbers in numbers.chunks(SLICE) {
                let (halves, _) = halves.split_at_mut(numbers.len());
                halves.convert_from_f32_slice(numbers);
                bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
            }
        }
        DType::Bf16 => {
            numbers.iter().for_each(|&n| bytes.extend_from_slice(&bf16::from_f32(n).to_le_bytes()))
        }
        DType::F32 => numbers.iter().for_each(|&n| bytes.extend_from_slice(&n.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_overflow_are_refused_with_their_sizes() {
        let error = Shape::new(usize::MAX / 8, 3, 1, 64).unwrap_err();
        assert!(error.to_string().contains(&format!("{}, 3, 1, 64", usize::MAX / 8)), "{error}");
        assert!(Shape::new(0, 3, 0, 64).is_ok());
    }

    #[test]
    fn strided_rows_are_read_where_they_stand() {
        // [1, 2, 2, 1] stored token-major with a gap: element (h, t) at 3 t + h.
        let numbers: Vec<f32> = (0..5u8).map(f32::from).collect();
        let shape = Shape::new(1, 2, 2, 1).unwrap();
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let strides = Strides { batch: 99, heads: 1, tokens: 3 };
        let view = TensorView::strided(&bytes, DType::F32, shape, strides).unwrap();
        assert_eq!(view.to_f32(), [0.0, 3.0, 1.0, 4.0]);
        let short = TensorView::strided(&bytes[..19], DType::F32, shape, strides).unwrap_err();
        assert!(matches!(short, Error::TooShort { need: 20, have: 19, .. }), "{short}");
    }

    #[test]
    fn every_type_survives_a_round_trip() {
        let shape = Shape::new(1, 1, 2, 3).unwrap();
        let numbers = [0.0, -1.5, 2.0, 65504.0, 0.25, -0.0];
        for dtype in DType::ALL {
            let tensor = Tensor::from_f32(&numbers, dtype, shape).unwrap();
            let expected: &[f32] = match dtype {
                DType::Bf16 => &[0.0, -1.5, 2.0, 65536.0, 0.25, -0.0],
                _ => &numbers,
            };
            assert_eq!(tensor.view().to_f32(), expected, "{dtype}");
            assert_eq!(tensor.view().to_bytes(), tensor.bytes());
        }
    }
}
