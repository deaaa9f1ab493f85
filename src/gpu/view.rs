//! Host buffers seen as tensors.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::{Caps, Gpu, Window};
use crate::error::{Error, Result};
use crate::tensor::{DType, Shape, Strides};

/// Part of a host's buffer seen as `[batch, heads, tokens, dim]`: borrowed by a cheap clone, never copied.
#[derive(Clone, Debug)]
pub struct KvView {
    buffer: wgpu::Buffer,
    dtype: DType,
    shape: Shape,
    offset: usize,
    strides: Strides,
}

/// How an operation uses a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ViewUse {
    Read,
    Write,
}

/// A view bound to a kernel: the window of its buffer, and the element offset and strides within it.
#[derive(Clone, Debug)]
pub(crate) struct BoundView {
    pub(crate) window: Window,
    /// Offset of the first element, then batch, head and token strides, in elements of the window.
    pub(crate) layout: [u32; 4],
    /// Whether every row starts at an even element and has an even number of them.
    pub(crate) paired: bool,
    /// Whether every row starts at 16 bytes and has eights of elements.
    pub(crate) vectors: bool,
}

/// A host's tensor that a kernel reads row by row: `View` of shaders.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct InputParams {
    pub(crate) rows: u32,
    pub(crate) tokens: u32,
    pub(crate) heads: u32,
    padding: u32,
    layout: [u32; 4],
}

/// A host's tensor that a kernel writes word by word: `Output` of shaders/common/output.wgsl.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct OutputParams {
    pub(crate) words: u32,
    rows: u32,
    tokens: u32,
    heads: u32,
    pitch: u32,
    contiguous: u32,
    padding: [u32; 2],
    layout: [u32; 4],
}

impl OutputParams {
    /// Whether every row starts at 16 bytes, as elements of `dtype` do.
    pub(crate) fn start_at_vectors(&self, dtype: DType) -> bool {
        start_at_vectors(self.layout, dtype)
    }
}

impl KvView {
    /// A contiguous tensor at the start of `buffer`.
    #[must_use]
    pub fn new(buffer: &wgpu::Buffer, dtype: DType, shape: Shape) -> Self {
        Self { buffer: buffer.clone(), dtype, shape, offset: 0, strides: Strides::contiguous(shape) }
    }

    /// The same view, its first element at `offset`, counted in elements from the start of the buffer.
    #[must_use]
    pub fn at(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }

    /// The same view with other distances between batch entries, heads and tokens, in elements.
    #[must_use]
    pub fn strides(mut self, strides: Strides) -> Self {
        self.strides = strides;
        self
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

    /// The buffer.
    #[must_use]
    pub const fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Tokens of one sequence: `[1, heads, tokens, dim]`.
    pub(crate) fn part(&self, sequence: usize, first: usize, tokens: usize) -> Self {
        self.cut(sequence..sequence + 1, first..first.saturating_add(tokens))
    }

    /// Tokens of some sequences: `[sequences, heads, tokens, dim]`.
    pub(crate) fn cut(&self, sequences: Range<usize>, tokens: Range<usize>) -> Self {
        let offset = sequences.start.saturating_mul(self.strides.batch);
        let offset = offset.saturating_add(tokens.start.saturating_mul(self.strides.tokens));
        let shape = Shape { batch: sequences.len(), tokens: tokens.len(), ..self.shape };
        Self { offset: self.offset.saturating_add(offset), shape, ..self.clone() }
    }

    /// Whether any tokens of it can be written without the others, by whole words.
    pub(crate) fn can_be_cut(&self) -> bool {
        self.dtype == DType::F32 || self.begins_at_words()
    }

    /// Whether the elements follow each other without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.strides == Strides::contiguous(self.shape)
    }

    /// The smallest window of the buffer that shows the view, as a kernel's binding.
    ///
    /// # Errors
    /// [`Error::TooShort`] when the buffer ends before the last element, [`Error::Usage`] when it is no storage buffer,
    /// [`Error::Limit`] when the window exceeds what one binding can show, [`Error::Alignment`] when whole words cannot be
    /// written.
    pub(crate) fn bind(&self, what: &str, usage: ViewUse, gpu: &Gpu) -> Result<BoundView> {
        if !self.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            let have = format!("{:?}", self.buffer.usage());
            return Err(Error::Usage { what: what.to_owned(), want: "STORAGE".to_owned(), have });
        }
        let size = self.dtype.size() as u64;
        let extent = self.strides.extent(self.shape)? as u64;
        let end = (self.offset as u64).saturating_add(extent).saturating_mul(size);
        if end > self.buffer.size() {
            return Err(Error::TooShort { what: what.to_owned(), need: end, have: self.buffer.size() });
        }
        let paired = self.is_paired();
        if usage == ViewUse::Write {
            self.check_writable(what, paired)?;
        }
        let window = window(&self.buffer, self.offset as u64 * size, end, gpu.caps())?;
        let first = (self.offset as u64 * size - window.offset) / size;
        // Kernels count elements of the window in 32 bits.
        index32((first + extent) as usize)?;
        let mut layout = [0; 4];
        let numbers =
            [first, self.strides.batch as u64, self.strides.heads as u64, self.strides.tokens as u64];
        // A stride over a single entry may be anything; it is never used.
        let used = [true, self.shape.batch > 1, self.shape.heads > 1, self.shape.tokens > 1];
        for ((slot, number), used) in layout.iter_mut().zip(numbers).zip(used) {
            let limit =
                || Error::Limit { what: "32-bit element index", need: number, have: u64::from(u32::MAX) };
            *slot = if used { u32::try_from(number).map_err(|_| limit())? } else { 0 };
        }
        let vectors = self.shape.dim.is_multiple_of(8) && start_at_vectors(layout, self.dtype);
        Ok(BoundView { window, layout, paired, vectors })
    }

    /// Checks that a view can take scores: contiguous f32 of this shape.
    pub(crate) fn check_scores(&self, shape: Shape) -> Result<()> {
        self.shape.check_equal("scores", shape)?;
        if self.dtype != DType::F32 {
            let (want, have) = (DType::F32.to_string(), self.dtype.to_string());
            return Err(Error::DType { what: "scores".to_owned(), want, have });
        }
        if !self.is_contiguous() {
            let (want, have) = ("no gaps".to_owned(), "other strides".to_owned());
            return Err(Error::Alignment { what: "scores".to_owned(), want, have });
        }
        Ok(())
    }

    /// Binds a view that a kernel reads row by row.
    pub(crate) fn bind_input(&self, what: &str, gpu: &Gpu) -> Result<(Window, InputParams)> {
        let bound = self.bind(what, ViewUse::Read, gpu)?;
        let [rows, tokens, heads] = self.sizes()?;
        Ok((bound.window, InputParams { rows, tokens, heads, padding: 0, layout: bound.layout }))
    }

    /// Binds a view that a kernel writes word by word.
    pub(crate) fn bind_output(&self, what: &str, gpu: &Gpu) -> Result<(Window, OutputParams)> {
        let bound = self.bind(what, ViewUse::Write, gpu)?;
        let [rows, tokens, heads] = self.sizes()?;
        let contiguous = self.is_contiguous();
        let per_word = 4 / self.dtype.size();
        let pitch = if contiguous { self.shape.dim } else { self.shape.dim.next_multiple_of(per_word) };
        let params = OutputParams {
            words: index32((self.shape.rows() * pitch).div_ceil(per_word))?,
            rows,
            tokens,
            heads,
            pitch: index32(pitch)?,
            contiguous: u32::from(contiguous),
            padding: [0; 2],
            layout: bound.layout,
        };
        Ok((bound.window, params))
    }

    /// Rows, tokens and heads as a kernel takes them.
    fn sizes(&self) -> Result<[u32; 3]> {
        Ok([index32(self.shape.rows())?, index32(self.shape.tokens)?, index32(self.shape.heads)?])
    }

    fn is_paired(&self) -> bool {
        self.begins_at_words() && self.shape.dim.is_multiple_of(2)
    }

    /// Whether every row begins at an even element.
    fn begins_at_words(&self) -> bool {
        let strides = [self.offset, self.strides.batch, self.strides.heads, self.strides.tokens];
        strides.iter().all(|n| n.is_multiple_of(2))
    }

    /// Kernels write whole 32-bit words: a 16-bit output starts at one, and is contiguous or has even strides.
    fn check_writable(&self, what: &str, paired: bool) -> Result<()> {
        if self.dtype == DType::F32 || paired {
            return Ok(());
        }
        if self.begins_at_words() || self.is_contiguous() && self.offset.is_multiple_of(2) {
            return Ok(());
        }
        let strides = [self.strides.batch, self.strides.heads, self.strides.tokens];
        Err(Error::Alignment {
            what: what.to_owned(),
            want: "an even offset, and no gaps or even strides".to_owned(),
            have: format!("offset {}, strides {strides:?}", self.offset),
        })
    }
}

/// Whether an offset and strides are of whole vec4s.
fn start_at_vectors(layout: [u32; 4], dtype: DType) -> bool {
    layout.iter().all(|n| n.is_multiple_of((16 / dtype.size()) as u32))
}

/// A number that a kernel keeps in 32 bits.
pub(crate) fn index32(number: usize) -> Result<u32> {
    let limit = || Error::Limit { what: "32-bit index", need: number as u64, have: u64::from(u32::MAX) };
    u32::try_from(number).map_err(|_| limit())
}

/// The window from byte `start` to `end` of a buffer, widened to what a binding allows.
fn window(buffer: &wgpu::Buffer, start: u64, end: u64, caps: &Caps) -> Result<Window> {
    let offset = start - start % u64::from(caps.min_storage_buffer_offset_alignment);
    let size = (end - offset).next_multiple_of(4).max(4).min(buffer.size() - offset);
    let have = caps.max_storage_buffer_binding_size;
    if size > have {
        return Err(Error::Limit { what: "bytes of one binding", need: size, have });
    }
    Ok(Window { buffer: buffer.clone(), offset, size })
}
