//! A folded capture on disk: keys and values as MiniCache pairs, sign planes or QJL's sketches, everything else as it was.
//!
//! [`Store::fold`] makes a store of a [`Capture`], [`Store::unfold`] a capture of it again, whose keys and values are the
//! restored ones. Files are safetensors in a canonical layout that no kernel dictates (`docs/store-format.md`), the same
//! bytes for the same store, under a digest over everything in them. Sequences are folded each by itself, as far as
//! their lengths go; padding is not stored and comes back as zeros.
//!
//! ```
//! use kvfold::capture::{Capture, CaptureInfo, Layer};
//! use kvfold::store::{FoldOptions, Store};
//! use kvfold::{DType, Shape, Tensor};
//!
//! # fn main() -> kvfold::Result<()> {
//! let shape = Shape::new(1, 2, 256, 64)?; // [batch, heads, tokens, head_dim]
//! let ones = Tensor::from_f32(&vec![1.0; shape.elements()], DType::F16, shape)?;
//! let capture = Capture::new(vec![Layer::new(ones.clone(), ones)], CaptureInfo::default())?;
//! let store = Store::fold(&capture, &FoldOptions::default())?;
//! assert!(store.payload_bytes() < store.bytes_before() / 2);
//! let restored = Store::from_bytes(&store.to_bytes()?)?.unfold()?;
//! assert_eq!(restored.tokens(), 256);
//! # Ok(())
//! # }
//! ```

pub(crate) mod file;
mod head;
pub(crate) mod pairs;
mod planes;
mod report;
mod shared;
pub(crate) mod tensors;

use safetensors::Dtype;

pub(crate) use file::STORE;
pub use report::{LayerReport, StoreReport};

use crate::capture::{Capture, CaptureInfo, Layer};
use crate::container::to_file_dtype;
use crate::error::{Error, Result};
use crate::minicache::MergeOptions;
use crate::minicache::cpu::{check_digests, rotation_digests};
use crate::qjl::cache::{Coding, NamedCoding};
use crate::tensor::{DType, Shape, Strides, Tensor, TensorView};
use head::{Head, Method, paired_dims};
use tensors::{Reader, Tensors};

/// The newest version of the format, metadata `kvfold.store`; the only one there is so far.
pub const VERSION: u32 = 1;

/// Restored tensors may be this many times as large as the store's, padding included: far above what folding and real
/// lengths give, it bounds what a hostile file can ask for.
const MAX_GROWTH: usize = 1024;
/// Below this many bytes a restored capture is never too large.
const SMALL: usize = 1 << 24;

/// How a capture is folded.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FoldOptions {
    /// Pairs of neighbouring layers from a share of the depth on (arXiv 2405.14366); other layers stay raw.
    MiniCache {
        /// How pairs are merged. `first_position` is the capture's own `position_start` where it says.
        merge: MergeOptions,
        /// Share of the layers, from the first, that stand alone: 0 to 1.
        start_frac: f64,
    },
    /// Sign planes or QJL's sketches in every layer. Sinks and recent rows stay raw, and, but for sketches of keys as they
    /// are, sequences shorter than [`CALIBRATION_TOKENS`](crate::qjl::planes::CALIBRATION_TOKENS). Where the capture does
    /// not describe its RoPE there is no mean before it: sign planes take means of blocks in its place, sketches none;
    /// [`Store::options`] says so.
    Coded(Coding),
}

impl Default for FoldOptions {
    fn default() -> Self {
        NamedCoding::default().into()
    }
}

impl From<NamedCoding> for FoldOptions {
    fn from(named: NamedCoding) -> Self {
        Self::Coded(named.coding())
    }
}

/// Which of a layer's two cached tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Key,
    Value,
}

impl Part {
    const BOTH: [Self; 2] = [Self::Key, Self::Value];

    /// The prefix of the names of everything stored of a sequence's tensor.
    fn prefix(self, sequence: usize, layer: usize) -> String {
        let part = match self {
            Self::Key => "key",
            Self::Value => "value",
        };
        format!("sequence.{sequence}.layer.{layer}.{part}")
    }

    fn of(self, capture: &Capture, layer: usize) -> Result<&Tensor> {
        let keys = capture.keys(layer)?;
        let values = || capture.layers.get(layer).map_or(keys, |layer| &layer.values);
        Ok(if self == Self::Key { keys } else { values() })
    }
}

/// A folded capture.
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    head: Head,
    info: CaptureInfo,
    tensors: Tensors,
}

impl Store {
    /// Folds a capture on the CPU.
    ///
    /// # Errors
    /// As [`Capture::check`]; [`Error::MissingTensor`] naming a layer's keys where there are only keys before RoPE;
    /// [`Error::Range`] on options out of range; [`Error::Shape`] on a head dimension above 512; [`Error::Metadata`]
    /// when the capture's own metadata uses a key of the store.
    pub fn fold(capture: &Capture, options: &FoldOptions) -> Result<Self> {
        capture.check()?;
        file::check_free(&capture.info)?;
        let head = Head::of(capture, options)?;
        let mut store = Self { head, info: capture.info.clone(), tensors: Tensors::default() };
        store.keep(capture);
        match &store.head.method {
            Method::Minicache { merge, pairs, .. } => {
                let (merge, pairs) = (merge.clone(), pairs.clone());
                pairs::fold(&mut store, capture, &merge, &pairs)?;
            }
            Method::Planes { options, .. } => {
                let coding = Coding::Planes(*options);
                planes::fold(&mut store, capture, &coding)?;
            }
            Method::Sketch { options, .. } => {
                let coding = Coding::Sketch(*options);
                planes::fold(&mut store, capture, &coding)?;
            }
        }
        store.check_growth()?;
        Ok(store)
    }

    /// Restores the capture: keys and values in the element types that they came in, as
    /// [`minicache::cpu::restore`](crate::minicache::cpu::restore) or
    /// [`planes::cpu::decode_keys`](crate::qjl::planes::cpu::decode_keys) give them (decoded numbers beyond the type's
    /// range are clamped to it), raw rows bit for bit, padding zero; queries, tokens and metadata as they were.
    ///
    /// # Errors
    /// As [`Capture::check`] and [`Store::from_bytes`], when a file's parts, each readable, contradict each other.
    pub fn unfold(&self) -> Result<Capture> {
        let mut reader = self.tensors.reader();
        let mut restored = Restored::new(self)?;
        self.walk(&mut reader, Some(&mut restored))?;
        let (kept, token_ids) = self.kept(&mut reader)?;
        reader.finish()?;
        let mut layers = Vec::with_capacity(kept.len());
        for ([keys, values], Kept { queries, keys_pre_rope }) in restored.layers.into_iter().zip(kept) {
            layers.push(Layer {
                keys: Some(keys.tensor()?),
                values: values.tensor()?,
                queries,
                keys_pre_rope,
            });
        }
        Capture::new(layers, CaptureInfo { token_ids, ..self.info.clone() })
    }

    /// How the capture was folded; of sign planes, the options that took effect.
    #[must_use]
    pub fn options(&self) -> FoldOptions {
        self.head.options()
    }

    /// Bytes of the folded keys and values: all their tensors, tables and rotations in the file.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.tensors.bytes(|name| !is_kept(name))
    }

    /// Bytes of the tensors that a store keeps as they came: queries, keys before RoPE and token ids.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.tensors.bytes(is_kept)
    }

    /// Bytes that the keys and values took, without padding.
    #[must_use]
    pub fn bytes_before(&self) -> usize {
        let tokens: usize = (0..self.head.batch).map(|sequence| self.length(sequence)).sum();
        self.head.layers.iter().map(|layer| layer.token_bytes() * tokens).sum()
    }

    /// Tokens of a sequence.
    fn length(&self, sequence: usize) -> usize {
        let lengths = self.info.lengths.as_deref().unwrap_or(&[]);
        lengths.get(sequence).copied().unwrap_or(self.head.tokens)
    }

    /// The position of a sequence's first token, where the capture says.
    fn start(&self, sequence: usize) -> Option<u32> {
        self.info.position_start.as_ref()?.get(sequence).copied()
    }

    /// `[1, heads, length, dim]` and element type of a sequence's tensor.
    fn rows(&self, part: Part, layer: usize, sequence: usize) -> Result<(Shape, DType)> {
        let (heads, dim, dtype) = self.head.tensor(part, layer)?;
        Ok((Shape::new(1, heads, self.length(sequence), dim)?, dtype))
    }

    /// A sequence's rows of a capture's tensor, padding left out.
    fn view<'a>(&self, tensor: &'a Tensor, sequence: usize) -> Result<TensorView<'a>> {
        sequence_rows(tensor, sequence, self.length(sequence))
    }

    /// Stores a sequence's rows as they are.
    fn put_raw(&mut self, part: Part, layer: usize, sequence: usize, rows: &TensorView<'_>) {
        let shape = rows.shape();
        let name = part.prefix(sequence, layer) + ".rows";
        let sizes = [shape.heads, shape.tokens, shape.dim];
        self.tensors.put(name, to_file_dtype(rows.dtype()), &sizes, rows.to_bytes());
    }

    /// Reads, and so checks, everything folded; restores it where it is to go somewhere.
    fn walk(&self, reader: &mut Reader<'_>, restored: Option<&mut Restored>) -> Result<()> {
        match &self.head.method {
            Method::Minicache { pairs, merge, rotations, .. } => {
                let dims = paired_dims(&self.head.layers, pairs);
                check_digests(rotations, &rotation_digests(dims, merge.planes)?)?;
                pairs::walk(self, merge, pairs, reader, restored)
            }
            Method::Planes { options, rotations } => {
                planes::walk(self, &Coding::Planes(*options), rotations, reader, restored)
            }
            Method::Sketch { options, projections } => {
                planes::walk(self, &Coding::Sketch(*options), projections, reader, restored)
            }
        }
    }

    /// Refuses to restore far more than was stored.
    fn check_growth(&self) -> Result<()> {
        let most = self.tensors.bytes(|_| true).saturating_mul(MAX_GROWTH).max(SMALL);
        let row = self.head.layers.iter().fold(0usize, |sum, layer| sum.saturating_add(layer.token_bytes()));
        let need = row.saturating_mul(self.head.batch).saturating_mul(self.head.tokens);
        if need <= most {
            return Ok(());
        }
        Err(Error::range(
            "restored bytes, padding included",
            format!("at most {most}, {MAX_GROWTH} times the store's"),
            need,
        ))
    }

    /// Stores queries, keys before RoPE and token ids.
    fn keep(&mut self, capture: &Capture) {
        for (index, layer) in capture.layers.iter().enumerate() {
            let kept = [(QUERY, &layer.queries), (KEY_PRE, &layer.keys_pre_rope)];
            for (suffix, tensor) in kept {
                let Some(tensor) = tensor else { continue };
                let Shape { batch, heads, tokens, dim } = tensor.shape();
                let (name, dtype) = (kept_name(index, suffix), to_file_dtype(tensor.dtype()));
                self.tensors.put(name, dtype, &[batch, heads, tokens, dim], tensor.bytes().to_vec());
            }
        }
        if let Some(ids) = self.info.token_ids.take() {
            let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            self.tensors.put(TOKENS.to_owned(), Dtype::I32, &[self.head.batch, self.head.tokens], bytes);
        }
    }

    /// What [`Store::keep`] stored.
    fn kept(&self, reader: &mut Reader<'_>) -> Result<(Vec<Kept>, Option<Vec<i32>>)> {
        let mut layers = Vec::with_capacity(self.head.layers.len());
        for index in 0..self.head.layers.len() {
            layers.push(Kept {
                queries: reader.tensor(&kept_name(index, QUERY))?,
                keys_pre_rope: reader.tensor(&kept_name(index, KEY_PRE))?,
            });
        }
        if !reader.has(TOKENS) {
            return Ok((layers, None));
        }
        let ids = reader.read(TOKENS, Dtype::I32, &[self.head.batch, self.head.tokens])?;
        let ids = ids.as_chunks::<4>().0.iter().map(|&id| i32::from_le_bytes(id));
        Ok((layers, Some(ids.collect())))
    }
}

/// The first tokens of one sequence of a tensor, `[1, heads, tokens, dim]`.
fn sequence_rows(tensor: &Tensor, sequence: usize, tokens: usize) -> Result<TensorView<'_>> {
    let (full, dtype) = (tensor.shape(), tensor.dtype());
    let strides = Strides::contiguous(full);
    let bytes = tensor.bytes().get(sequence * strides.batch * dtype.size()..).unwrap_or_default();
    TensorView::strided(bytes, dtype, Shape { batch: 1, tokens, ..full }, strides)
}

const QUERY: &str = "query";
const KEY_PRE: &str = "key_pre";
const TOKENS: &str = "tokens";

fn kept_name(layer: usize, suffix: &str) -> String {
    format!("layer.{layer}.{suffix}")
}

/// Whether a tensor of this name is kept as it came.
fn is_kept(name: &str) -> bool {
    name == TOKENS || name.starts_with("layer.")
}

/// A layer's tensors that are kept as they came.
struct Kept {
    queries: Option<Tensor>,
    keys_pre_rope: Option<Tensor>,
}

/// Keys and values of all layers while they are restored.
struct Restored {
    layers: Vec<[Blank; 2]>,
}

/// A tensor of zeros that rows are put into.
struct Blank {
    bytes: Vec<u8>,
    dtype: DType,
    shape: Shape,
}

impl Blank {
    fn new(store: &Store, part: Part, layer: usize) -> Result<Self> {
        let (heads, dim, dtype) = store.head.tensor(part, layer)?;
        let shape = Shape::new(store.head.batch, heads, store.head.tokens, dim)?;
        Ok(Self { bytes: vec![0; shape.bytes(dtype)], dtype, shape })
    }

    fn tensor(self) -> Result<Tensor> {
        Tensor::new(self.bytes, self.dtype, self.shape)
    }
}

impl Restored {
    fn new(store: &Store) -> Result<Self> {
        let blank =
            |layer| Ok([Blank::new(store, Part::Key, layer)?, Blank::new(store, Part::Value, layer)?]);
        Ok(Self { layers: (0..store.head.layers.len()).map(blank).collect::<Result<_>>()? })
    }

    /// Puts a sequence's rows, `[heads, length, dim]`, where they belong.
    fn put(&mut self, part: Part, layer: usize, sequence: usize, rows: &[u8]) {
        let Some([keys, values]) = self.layers.get_mut(layer) else { return };
        let Blank { bytes, dtype, shape } = if part == Part::Key { keys } else { values };
        let head = shape.tokens * shape.dim * dtype.size();
        let length = rows.len() / shape.heads;
        if head == 0 || length == 0 {
            return;
        }
        let places = bytes.chunks_exact_mut(head).skip(sequence * shape.heads);
        for (place, rows) in places.zip(rows.chunks_exact(length)) {
            place.iter_mut().zip(rows).for_each(|(to, from)| *to = *from);
        }
    }
}
