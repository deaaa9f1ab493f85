//! What a store says of itself beside its tensors: metadata `kvfold.fold`, one JSON object.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{FoldOptions, Part};
use crate::capture::{Capture, CaptureInfo, MAX_SIZE};
use crate::error::{Error, Result};
use crate::minicache::cpu::rotation_digests;
use crate::minicache::{MergeOptions, Role, pair_layers_depth};
use crate::qjl::ProjectionKind;
use crate::qjl::cache::{Coding, SketchOptions};
use crate::qjl::planes::{Centring, PlanesOptions};
use crate::rope::Rope;
use crate::tensor::DType;

/// The metadata key.
pub(super) const FOLD: &str = "kvfold.fold";
/// Tokens that share a mean where RoPE is not known.
const UNKNOWN_ROPE_BLOCK: u32 = 64;

/// Shapes, element types and method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Head {
    /// Sequences.
    pub(super) batch: usize,
    /// Length of the token axis.
    pub(super) tokens: usize,
    pub(super) layers: Vec<LayerHead>,
    pub(super) method: Method,
}

/// A layer's sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerHead {
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) key_dtype: DType,
    pub(super) value_dtype: DType,
}

impl LayerHead {
    /// Bytes of one token's key and value, all heads.
    pub(super) fn token_bytes(&self) -> usize {
        let one = |dim: usize, dtype: DType| self.heads.saturating_mul(dim * dtype.size());
        one(self.key_dim, self.key_dtype).saturating_add(one(self.value_dim, self.value_dtype))
    }
}

/// How the capture was folded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum Method {
    Minicache {
        merge: MergeOptions,
        start_frac: f64,
        /// Lower and upper layer of each pair.
        pairs: Vec<[usize; 2]>,
        /// Digests of the rotations of coded directions, by their channels.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        rotations: BTreeMap<usize, String>,
    },
    Planes {
        options: PlanesOptions,
        /// Digests of the rotations by their channels.
        rotations: BTreeMap<usize, String>,
    },
    Sketch {
        options: SketchOptions,
        /// Digests of the projections by their channels.
        projections: BTreeMap<usize, String>,
    },
}

impl Method {
    /// A coding before anything is coded.
    fn coded(coding: Coding) -> Self {
        match coding {
            Coding::Planes(options) => Self::Planes { options, rotations: BTreeMap::new() },
            Coding::Sketch(options) => Self::Sketch { options, projections: BTreeMap::new() },
        }
    }

    /// Digests of what layers of so many channels share, to be filled.
    pub(super) fn digests_mut(&mut self) -> Option<&mut BTreeMap<usize, String>> {
        match self {
            Self::Minicache { .. } => None,
            Self::Planes { rotations: digests, .. } | Self::Sketch { projections: digests, .. } => {
                Some(digests)
            }
        }
    }
}

/// Channels of the tensors that are folded in pairs.
pub(super) fn paired_dims(layers: &[LayerHead], pairs: &[[usize; 2]]) -> impl Iterator<Item = usize> {
    pairs
        .iter()
        .filter_map(|[lower, _]| layers.get(*lower))
        .flat_map(|layer| [layer.key_dim, layer.value_dim])
}

impl Head {
    pub(super) fn of(capture: &Capture, options: &FoldOptions) -> Result<Self> {
        let layers = (0..capture.layers.len()).map(|index| {
            let (keys, values) = (Part::Key.of(capture, index)?, Part::Value.of(capture, index)?);
            Ok(LayerHead {
                heads: keys.shape().heads,
                key_dim: keys.shape().dim,
                value_dim: values.shape().dim,
                key_dtype: keys.dtype(),
                value_dtype: values.dtype(),
            })
        });
        let layers: Vec<LayerHead> = layers.collect::<Result<_>>()?;
        let method = match options {
            FoldOptions::MiniCache { merge, start_frac } => {
                merge.validate()?;
                let pairs = pairs(&layers, *start_frac)?;
                let rotations = rotation_digests(paired_dims(&layers, &pairs), merge.planes)?;
                Method::Minicache { merge: merge.clone(), start_frac: *start_frac, pairs, rotations }
            }
            FoldOptions::Coded(coding) => {
                coding.validate()?;
                Method::coded(known_centring(&capture.info, &layers, *coding)?)
            }
        };
        Ok(Self { batch: capture.batch(), tokens: capture.tokens(), layers, method })
    }

    pub(super) fn options(&self) -> FoldOptions {
        match &self.method {
            Method::Minicache { merge, start_frac, .. } => {
                FoldOptions::MiniCache { merge: merge.clone(), start_frac: *start_frac }
            }
            Method::Planes { options, .. } => FoldOptions::Coded(Coding::Planes(*options)),
            Method::Sketch { options, .. } => FoldOptions::Coded(Coding::Sketch(*options)),
        }
    }

    /// Heads, channels and element type of a layer's tensor.
    pub(super) fn tensor(&self, part: Part, layer: usize) -> Result<(usize, usize, DType)> {
        let Some(head) = self.layers.get(layer) else {
            return Err(Error::range("layer", format!("below {}", self.layers.len()), layer));
        };
        Ok(match part {
            Part::Key => (head.heads, head.key_dim, head.key_dtype),
            Part::Value => (head.heads, head.value_dim, head.value_dtype),
        })
    }

    /// Checks that there is a digest for the keys of every layer, before anything is drawn for them.
    pub(super) fn check_digests(&self, digests: &BTreeMap<usize, String>) -> Result<()> {
        match self.layers.iter().find(|layer| !digests.contains_key(&layer.key_dim)) {
            None => Ok(()),
            Some(layer) => Err(Error::Metadata {
                key: FOLD.to_owned(),
                want: format!("the digest of a projection of {} channels", layer.key_dim),
                have: "none".to_owned(),
            }),
        }
    }

    /// Reads the JSON and checks it by itself.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let wrong =
            |want: &str, have: String| Error::Metadata { key: FOLD.to_owned(), want: want.to_owned(), have };
        let head: Self = serde_json::from_str(text)
            .map_err(|cause| wrong("the JSON object of a store", format!("{}: {cause}", excerpt(text))))?;
        let sizes = head.layers.iter().flat_map(|layer| [layer.heads, layer.key_dim, layer.value_dim]);
        if let Some(size) = sizes.chain([head.batch]).find(|size| !(1..=MAX_SIZE).contains(size)) {
            let want = format!("batch, heads and head_dim of 1 to {MAX_SIZE}");
            return Err(wrong(&want, size.to_string()));
        }
        if head.layers.is_empty() {
            return Err(wrong("at least one layer", "0".to_owned()));
        }
        match &head.method {
            Method::Minicache { merge, pairs, .. } => {
                merge.validate()?;
                let mut seen = BTreeSet::new();
                for &[lower, upper] in pairs {
                    let alike = lower < upper
                        && head.layers.get(lower).is_some_and(|layer| head.layers.get(upper) == Some(layer));
                    if !(alike && seen.insert(lower) && seen.insert(upper)) {
                        let want = "pairs of layers of equal shapes and types, each layer in one at most";
                        return Err(wrong(want, format!("{lower} with {upper}")));
                    }
                }
            }
            Method::Planes { options, .. } => options.validate()?,
            Method::Sketch { options, .. } => {
                Coding::Sketch(*options).validate()?;
                if options.projection == ProjectionKind::Loaded {
                    return Err(Error::range(
                        "projection",
                        "gaussian, orthogonal or hadamard",
                        options.projection,
                    ));
                }
            }
        }
        Ok(head)
    }

    pub(super) fn render(&self) -> String {
        // Text keys and finite numbers always serialise.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The first characters of a text, for an error.
fn excerpt(text: &str) -> String {
    const SHOWN: usize = 40;
    let mut shown: String = text.chars().take(SHOWN).collect();
    if shown.len() < text.len() {
        shown.push_str("...");
    }
    shown
}

/// The pairs that the depth plan gives, less those whose layers differ.
fn pairs(layers: &[LayerHead], start_frac: f64) -> Result<Vec<[usize; 2]>> {
    let plan = pair_layers_depth(layers.len(), start_frac, 2)?;
    let uppers = plan.iter().enumerate().filter(|(_, role)| role.role == Role::Merge).map(|(upper, _)| upper);
    let pair = |upper: usize| {
        let lower = upper.checked_sub(1)?;
        (layers.get(lower) == layers.get(upper)).then_some([lower, upper])
    };
    Ok(uppers.filter_map(pair).collect())
}

/// The coding, without a mean before RoPE where a layer's RoPE is not described.
fn known_centring(info: &CaptureInfo, layers: &[LayerHead], coding: Coding) -> Result<Coding> {
    if coding.centring() == Centring::PreRope {
        for (index, layer) in layers.iter().enumerate() {
            if Rope::from_info(info, index, layer.key_dim)?.is_none() {
                return Ok(coding.without_rope(UNKNOWN_ROPE_BLOCK));
            }
        }
    }
    Ok(coding)
}
