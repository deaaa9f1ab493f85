//! Kernels, their variants and their WGSL text.
//!
//! A kernel file is plain WGSL. A variant is that file behind the `enable` lines its target wants, a prelude of constants,
//! and common modules chosen by capability. Nothing else is generated; what a browser gets has no comments.

use super::module::{Arithmetic, Module};
#[cfg(not(target_arch = "wasm32"))]
use super::strip;

/// The text of a file of `shaders/`.
macro_rules! wgsl {
    ($path:expr) => {{
        #[cfg(not(target_arch = "wasm32"))]
        const TEXT: &str = include_str!(concat!("../../shaders/", $path, ".wgsl"));
        // Comments are a third of the texts, and a page's reader would wait for them.
        #[cfg(target_arch = "wasm32")]
        const TEXT: &str = {
            const WHOLE: &str = include_str!(concat!("../../shaders/", $path, ".wgsl"));
            const STRIPPED: [u8; $crate::gpu::strip::length(WHOLE)] = $crate::gpu::strip::strip(WHOLE);
            match str::from_utf8(&STRIPPED) {
                Ok(text) => text,
                Err(_) => WHOLE,
            }
        };
        TEXT
    }};
}

pub(super) use wgsl;

/// A kernel: its file, its bindings and its workgroup size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kernel {
    Similarity,
    Threshold,
    Retain,
    Arrange,
    Merge,
    Restore,
    FoldedAttend,
    GroupSimilarity,
    GroupMerge,
    Refill,
    Expand,
    Turn,
    Quantize,
    QuantizeValues,
    Project,
    Append,
    Exact,
    ExactScores,
    Join,
    Combine,
    PlaneEncode,
    PlaneEncodeTiles,
    PlaneTile,
    PlaneBlockMeans,
    PlaneProject,
    PlaneScores,
    PlaneAttend,
    PlaneUnrotate,
    PlaneCalibrate,
    PlaneQueryEnergy,
}

/// How a kernel uses a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Uniform,
    Read,
    Write,
}

/// What is fixed about a kernel, whatever the variant.
pub(crate) struct Spec {
    /// Folder of the file, below `shaders/`.
    folder: &'static str,
    /// Name of the file, of the entry point, of the twin and of the recorder.
    pub(crate) name: &'static str,
    source: &'static str,
    /// Bindings of group 0, in order.
    pub(crate) bindings: &'static [Access],
    /// Invocations of a workgroup, where a variant does not say otherwise.
    workgroup: u32,
}

use Access::{Read, Uniform, Write};

macro_rules! spec {
    ($folder:literal, $name:literal, $workgroup:literal, $bindings:expr) => {
        Spec {
            folder: $folder,
            name: $name,
            source: wgsl!(concat!($folder, "/", $name)),
            bindings: $bindings,
            workgroup: $workgroup,
        }
    };
}

impl Kernel {
    /// Invocations of a workgroup, where a variant does not say otherwise.
    pub(crate) fn workgroup(self) -> u32 {
        self.spec().workgroup
    }

    pub(crate) fn spec(self) -> &'static Spec {
        match self {
            Self::Similarity => &spec!("minicache", "similarity", 128, &[Uniform, Read, Read, Write]),
            Self::Threshold => &spec!("minicache", "threshold", 256, &[Uniform, Read, Write]),
            Self::Retain => &spec!("minicache", "retain", 128, &[Uniform, Read, Read, Write, Write, Write]),
            Self::Arrange => &spec!("minicache", "arrange", 256, &[Uniform, Read, Write, Write]),
            Self::Merge => &spec!("minicache", "merge", 128, &[Uniform, Read, Read, Read, Read, Write]),
            Self::FoldedAttend => {
                &spec!("minicache", "attend", 64, &[Uniform, Read, Read, Read, Read, Write])
            }
            Self::GroupSimilarity => {
                &spec!("minicache", "group_similarity", 128, &[Uniform, Read, Write, Write])
            }
            Self::GroupMerge => &spec!("minicache", "group_merge", 128, &[Uniform, Read, Read, Read, Write]),
            Self::Restore => &spec!("minicache", "restore", 128, &[Uniform, Read, Write]),
            Self::Refill => &spec!("minicache", "refill", 128, &[Uniform, Read, Read, Write]),
            Self::Expand => &spec!("minicache", "expand", 128, &[Uniform, Read, Write, Read]),
            Self::Turn => &spec!("minicache", "turn", 128, &[Uniform, Read, Write, Read]),
            Self::Quantize => {
                &spec!("qjl", "quantize", 128, &[Uniform, Read, Read, Read, Read, Read, Write, Write])
            }
            Self::QuantizeValues => &spec!("qjl", "quantize_values", 128, &[Uniform, Read, Write, Write]),
            Self::Project => &spec!("qjl", "project", 128, &[Uniform, Read, Read, Read, Write]),
            Self::ExactScores => &spec!("attention", "exact_scores", 128, &[Uniform, Read, Read, Write]),
            Self::Exact => &spec!("attention", "exact", 64, &[Uniform, Read, Read, Read, Read, Write]),
            Self::Append => &spec!("common", "append", 128, &[Uniform, Read, Write]),
            Self::Join => &spec!("common", "join", 256, &[Uniform, Read, Read, Read, Read, Write]),
            Self::Combine => &spec!("common", "combine", 128, &[Uniform, Read, Read, Write]),
            Self::PlaneEncode => {
                &spec!("planes", "encode", 128, &[Uniform, Read, Read, Read, Read, Read, Write, Write])
            }
            Self::PlaneEncodeTiles => {
                &spec!("planes", "encode_tiles", 128, &[Uniform, Read, Read, Read, Read, Read, Write, Write])
            }
            Self::PlaneTile => &spec!("planes", "tile", 128, &[Uniform, Read, Write]),
            Self::PlaneBlockMeans => &spec!("planes", "block_means", 128, &[Uniform, Read, Write]),
            Self::PlaneProject => &spec!("planes", "project", 128, &[Uniform, Read, Read, Read, Write]),
            Self::PlaneScores => &spec!("planes", "scores", 32, &[Uniform, Read, Read, Read, Read, Write]),
            Self::PlaneAttend => {
                &spec!("planes", "attend", 32, &[Uniform, Read, Read, Read, Read, Read, Read, Write])
            }
            Self::PlaneUnrotate => {
                &spec!("planes", "unrotate", 256, &[Uniform, Read, Read, Read, Read, Write])
            }
            Self::PlaneCalibrate => {
                &spec!("planes", "calibrate", 128, &[Uniform, Read, Read, Read, Read, Write])
            }
            Self::PlaneQueryEnergy => &spec!("planes", "query_energy", 128, &[Uniform, Read, Write]),
        }
    }
}

/// Who will read the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// naga, natively: `enable subgroups;` is refused there.
    Native,
    /// A browser: every extension must be enabled.
    Web,
}

/// Constants of more letters are hashed in a label, which names files.
const READABLE: usize = 120;

/// A value of the prelude.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Const {
    U32(&'static str, u32),
    Bool(&'static str, bool),
    /// A finite f32, by its bits.
    F32(&'static str, u32),
}

/// A kernel made for one set of constants and capabilities: the key of its pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    kernel: Kernel,
    modules: Vec<Module>,
    constants: Vec<Const>,
    /// Smallest subgroup size, where shuffles are used.
    subgroups: Option<u32>,
    /// Invocations of a workgroup, where they are not the kernel's own.
    workgroup: Option<u32>,
}

impl Variant {
    pub(crate) fn new(kernel: Kernel, modules: &[Module], constants: &[Const]) -> Self {
        Self {
            kernel,
            modules: modules.to_vec(),
            constants: constants.to_vec(),
            subgroups: None,
            workgroup: None,
        }
    }

    /// The variant that reduces by shuffles; `smallest` is the smallest subgroup the adapter may choose.
    pub(crate) fn with_subgroups(mut self, smallest: Option<u32>) -> Self {
        self.subgroups = smallest;
        self
    }

    /// The variant with so many invocations in a workgroup.
    pub(crate) fn with_workgroup(mut self, invocations: u32) -> Self {
        self.workgroup = Some(invocations);
        self
    }

    pub(crate) fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Invocations of a workgroup.
    pub(crate) fn workgroup(&self) -> u32 {
        self.workgroup.unwrap_or_else(|| self.kernel.spec().workgroup)
    }

    /// Every variant that some adapter can take, for a selection of head dimensions: what a shader lint must see.
    #[must_use]
    pub fn every() -> Vec<Self> {
        let mut every = [
            super::block::variants(),
            crate::attention::gpu::variants(),
            crate::minicache::gpu::variants(),
            crate::qjl::gpu::variants(),
            crate::qjl::planes::gpu::variants(),
        ]
        .concat();
        every.sort_unstable();
        every.dedup();
        every
    }

    /// Whether this variant needs no optional feature of a device.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.subgroups.is_none()
    }

    /// A name that no other variant has, of letters, digits, `_` and `-`.
    #[must_use]
    pub fn label(&self) -> String {
        let spec = self.kernel.spec();
        let constants: String = self
            .constants
            .iter()
            .map(|constant| match constant {
                Const::U32(name, value) => format!("-{name}_{value}").to_lowercase(),
                Const::Bool(name, value) => format!("-{name}_{value}").to_lowercase(),
                Const::F32(name, bits) => format!("-{name}_{bits:x}").to_lowercase(),
            })
            .collect();
        let mut label = format!("{}-{}", spec.folder, spec.name);
        if constants.len() <= READABLE {
            label += &constants;
        } else {
            // FNV-1a; the text's own prelude says what the constants are.
            let hash = constants.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
            label += &format!("-{hash:016x}");
        }
        for module in &self.modules {
            match module {
                Module::Load(dtype) | Module::Bits(dtype) => label += &format!("-{dtype}"),
                Module::PlaneDot(Arithmetic::Fast) => label += "-fast",
                _ => {}
            }
        }
        if let Some(invocations) = self.workgroup {
            label += &format!("-workgroup_{invocations}");
        }
        if let Some(size) = self.subgroups {
            label += &format!("-subgroups_{size}");
        }
        label
    }

    /// Folder and name of the kernel's file in `shaders/`; kernels of two folders may share a name.
    #[must_use]
    pub fn file(&self) -> (&'static str, &'static str) {
        let spec = self.kernel.spec();
        (spec.folder, spec.name)
    }

    /// Name of the entry point.
    #[must_use]
    pub fn entry_point(&self) -> &'static str {
        self.kernel.spec().name
    }

    /// The whole WGSL text.
    #[must_use]
    pub fn source(&self, target: Target) -> String {
        let spec = self.kernel.spec();
        let mut text = String::new();
        if self.subgroups.is_some() && target == Target::Web {
            text += "enable subgroups;\n";
        }
        text += &format!("const WORKGROUP: u32 = {}u;\n", self.workgroup());
        if let Some(smallest) = self.subgroups {
            text += &format!("const SUBGROUP_MIN: u32 = {smallest}u;\n");
        }
        for constant in &self.constants {
            text += &match constant {
                Const::U32(name, value) => format!("const {name}: u32 = {value}u;\n"),
                Const::Bool(name, value) => format!("const {name}: bool = {value};\n"),
                Const::F32(name, bits) => {
                    // As f64, whose shortest text never rounds up past the largest f32.
                    format!("const {name}: f32 = {:e};\n", f64::from(f32::from_bits(*bits)))
                }
            };
        }
        let shared = [wgsl!("common/invocation"), wgsl!("common/reduce_shared")];
        let by_subgroup = [wgsl!("common/invocation_subgroups"), wgsl!("common/reduce_subgroups")];
        let [invocation, reduce] = if self.subgroups.is_some() { by_subgroup } else { shared };
        text += wgsl!("common/place");
        text += invocation;
        if self.constants.iter().any(|constant| matches!(constant, Const::U32("LANES", _))) {
            text += reduce;
        }
        for module in &self.modules {
            text += module.source();
        }
        text += spec.source;
        #[cfg(not(target_arch = "wasm32"))]
        if target == Target::Web {
            text = strip::stripped(&text);
        }
        text
    }
}
