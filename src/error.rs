//! One error type for the whole library: a variant per cause, each naming what was wanted and what was had.

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong. Bad input is always one of these; nothing panics on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The product of a shape's sizes does not fit this machine's address space.
    #[error("{what}: a size of [{sizes}] overflows the address space")]
    Overflow {
        /// What was being measured.
        what: String,
        /// The factors, comma separated.
        sizes: String,
    },
    /// Two shapes that must agree do not, or a shape is not what the operation takes.
    #[error("{what}: wanted {want}, had {have}")]
    Shape {
        /// The tensor or argument.
        what: String,
        /// The shape wanted.
        want: String,
        /// The shape had.
        have: String,
    },
    /// An element type is not what the operation takes.
    #[error("{what}: wanted element type {want}, had {have}")]
    DType {
        /// The tensor or argument.
        what: String,
        /// The type or types wanted.
        want: String,
        /// The type had.
        have: String,
    },
    /// An option lies outside its range.
    #[error("{what}: wanted {want}, had {have}")]
    Range {
        /// The option.
        what: &'static str,
        /// The range wanted.
        want: String,
        /// The value had.
        have: String,
    },
    /// The query heads are not a multiple of the KV heads.
    #[error("query heads: wanted a multiple of the {kv_heads} KV heads, had {query_heads}")]
    HeadRatio {
        /// Query heads had.
        query_heads: usize,
        /// KV heads, of which the query heads must be a multiple.
        kv_heads: usize,
    },
    /// A buffer or slice is shorter than its shape needs.
    #[error("{what}: needs {need} bytes, has {have}")]
    TooShort {
        /// The buffer.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Bytes had.
        have: u64,
    },
    /// An offset or stride does not allow whole 32-bit words to be written.
    #[error("{what}: wanted {want}, had {have}")]
    Alignment {
        /// The view.
        what: String,
        /// The alignment wanted.
        want: String,
        /// What was had.
        have: String,
    },
    /// A value that must be finite is not.
    #[error("{what}: wanted finite numbers, had {value} at element {index}")]
    NonFinite {
        /// The tensor.
        what: String,
        /// Index of the first offending element in row-major order.
        index: usize,
        /// What stands there.
        value: f32,
    },
    /// A capture or store lacks a tensor.
    #[error("{tensor}: wanted in the file, had only {have}")]
    MissingTensor {
        /// The tensor's name.
        tensor: String,
        /// What the capture holds.
        have: String,
    },
    /// A capture or store holds a tensor whose name is not part of the format.
    #[error("{tensor}: not a tensor of the format, which has {want}")]
    UnknownTensor {
        /// The tensor's name.
        tensor: String,
        /// The names the format has.
        want: String,
    },
    /// A metadata entry of a capture or store cannot be understood.
    #[error("metadata {key}: wanted {want}, had {have:?}")]
    Metadata {
        /// The metadata key.
        key: String,
        /// The form wanted.
        want: String,
        /// The text had.
        have: String,
    },
    /// A file is not safetensors, or is damaged.
    #[error("not a readable safetensors file of {bytes} bytes: {cause}")]
    Safetensors {
        /// Length of the data.
        bytes: usize,
        /// What the safetensors reader says.
        cause: safetensors::SafeTensorError,
    },
    /// What a file holds is not what its digest was made of: it was damaged or changed.
    #[error("{what}: damaged, the digest says {want}, the contents give {have}")]
    Digest {
        /// What is damaged.
        what: String,
        /// The digest that was written.
        want: String,
        /// The digest of what was read.
        have: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {cause}")]
    Io {
        /// The file.
        path: String,
        /// What the operating system says.
        cause: std::io::Error,
    },
    /// No adapter of the kind asked for answers.
    #[error("no adapter: wanted {want}, had {have}")]
    NoAdapter {
        /// The backend or kind asked for.
        want: String,
        /// The adapters that exist, or the reason why there are none.
        have: String,
    },
    /// The adapter computes nothing (a null or no-op implementation).
    #[error("adapter {name}: wanted one that computes, had the no-op backend")]
    NullAdapter {
        /// The adapter's name.
        name: String,
    },
    /// An adapter refused to give a device.
    #[error("adapter {adapter} gave no device: {cause}")]
    NoDevice {
        /// The adapter's name.
        adapter: String,
        /// What wgpu says.
        cause: String,
    },
    /// The work does not fit a limit of the device.
    #[error("{what}: needs {need}, the device has {have}")]
    Limit {
        /// The limit.
        what: &'static str,
        /// What the work needs.
        need: u64,
        /// What the device has.
        have: u64,
    },
    /// A cache was given rows out of order: an upper layer's before its lower's, or another number of them.
    #[error("{what}: wanted {want}, had {have}")]
    Order {
        /// The layer and sequence.
        what: String,
        /// What must come next.
        want: String,
        /// What came.
        have: String,
    },
    /// A cache that may not allocate has no room left for rows.
    #[error("{what}: needs room for {need} tokens, has {have}; reserve it first")]
    Capacity {
        /// The layer and sequence.
        what: String,
        /// Tokens to take.
        need: usize,
        /// Tokens there is room for.
        have: usize,
    },
    /// A host buffer lacks a usage flag.
    #[error("{what}: wanted a buffer with usage {want}, had {have}")]
    Usage {
        /// The view.
        what: String,
        /// The usage flags wanted.
        want: String,
        /// The usage flags had.
        have: String,
    },
    /// wgpu or the driver refused a shader, pipeline, buffer or command.
    #[error("the device refused {what}: {cause}")]
    Device {
        /// What was being made.
        what: String,
        /// What wgpu says.
        cause: String,
    },
    /// The device ran out of memory.
    #[error("{what}: needs {need} bytes, the device is out of memory")]
    OutOfMemory {
        /// The buffer.
        what: String,
        /// Bytes asked for.
        need: u64,
    },
    /// The device was lost. Buffers on it are gone; rebuild from saved bytes.
    #[error("the device was lost: {cause}")]
    DeviceLost {
        /// What wgpu says.
        cause: String,
    },
    /// Work was cancelled by the caller's progress callback.
    #[error("cancelled after {done} of {of} steps")]
    Cancelled {
        /// Steps done.
        done: usize,
        /// Steps there were.
        of: usize,
    },
}

impl Error {
    /// A short name that stays the same between versions, for programs that must tell causes apart.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Overflow { .. } => "overflow",
            Self::Shape { .. } => "shape",
            Self::DType { .. } => "dtype",
            Self::Range { .. } => "range",
            Self::HeadRatio { .. } => "head_ratio",
            Self::TooShort { .. } => "too_short",
            Self::Alignment { .. } => "alignment",
            Self::NonFinite { .. } => "non_finite",
            Self::MissingTensor { .. } => "missing_tensor",
            Self::UnknownTensor { .. } => "unknown_tensor",
            Self::Metadata { .. } => "metadata",
            Self::Safetensors { .. } => "safetensors",
            Self::Digest { .. } => "digest",
            Self::Io { .. } => "io",
            Self::NoAdapter { .. } => "no_adapter",
            Self::NullAdapter { .. } => "null_adapter",
            Self::NoDevice { .. } => "no_device",
            Self::Limit { .. } => "limit",
            Self::Order { .. } => "order",
            Self::Capacity { .. } => "capacity",
            Self::Usage { .. } => "usage",
            Self::Device { .. } => "device",
            Self::OutOfMemory { .. } => "out_of_memory",
            Self::DeviceLost { .. } => "device_lost",
            Self::Cancelled { .. } => "cancelled",
        }
    }

    pub(crate) fn shape(what: impl Into<String>, want: impl ToString, have: impl ToString) -> Self {
        Self::Shape { what: what.into(), want: want.to_string(), have: have.to_string() }
    }

    pub(crate) fn range(what: &'static str, want: impl Into<String>, have: impl ToString) -> Self {
        Self::Range { what, want: want.into(), have: have.to_string() }
    }
}
