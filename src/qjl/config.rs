//! Choices of the sketch: which random rows, and which scalar stands beside the signs.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How the rows of the projection `S` are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProjectionKind {
    /// Independent N(0, 1) entries: the paper's form (QJL, arXiv 2406.03482, section 3).
    Gaussian,
    /// Haar-random orthogonal rows in blocks of `head_dim`, each of norm `sqrt(head_dim)`: less variance, no more bits.
    Orthogonal,
    /// Two rounds of random signs and Walsh-Hadamard in blocks of `head_dim`, a power of two: no matrix is stored.
    Hadamard,
    /// A matrix given as data.
    Loaded,
}

impl ProjectionKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Gaussian, Self::Orthogonal, Self::Hadamard, Self::Loaded];

    /// The name in files, options and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "gaussian",
            Self::Orthogonal => "orthogonal",
            Self::Hadamard => "hadamard",
            Self::Loaded => "loaded",
        }
    }
}

impl std::fmt::Display for ProjectionKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ProjectionKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        by_name("projection", &Self::ALL, Self::name, name)
    }
}

/// The scalar `nu` stored with each key's signs. With `y = S k` and estimate `g/m * nu * <S q, sign(y)>`:
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyScale {
    /// `nu = |k|`, `g` the projection's factor: unbiased over random `S` (QJL, arXiv 2406.03482, lemma 3.2).
    #[default]
    Norm,
    /// `nu = sum |y| / m`, `g = 1`: the least-squares fit of `k` where `S` is one orthogonal block.
    Mse,
    /// `nu = sum y^2 / sum |y|`, `g = 1`: with orthogonal blocks, no shrinking along `k` itself (RaBitQ, arXiv 2405.12497).
    Unbiased,
}

impl KeyScale {
    /// All scales.
    pub const ALL: [Self; 3] = [Self::Norm, Self::Mse, Self::Unbiased];

    /// The name in files, options and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Mse => "mse",
            Self::Unbiased => "unbiased",
        }
    }
}

impl std::fmt::Display for KeyScale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KeyScale {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        by_name("key scale", &Self::ALL, Self::name, name)
    }
}

pub(super) fn by_name<T: Copy>(
    what: &'static str,
    all: &[T],
    name_of: fn(T) -> &'static str,
    name: &str,
) -> Result<T> {
    all.iter().copied().find(|&item| name_of(item) == name).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|&item| name_of(item)).collect();
        Error::range(what, format!("one of {}", names.join(", ")), name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_same_in_text_and_in_files() {
        for kind in ProjectionKind::ALL {
            assert_eq!(kind.to_string().parse::<ProjectionKind>().unwrap(), kind);
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        }
        for scale in KeyScale::ALL {
            assert_eq!(scale.to_string().parse::<KeyScale>().unwrap(), scale);
            assert_eq!(serde_json::to_string(&scale).unwrap(), format!("\"{scale}\""));
        }
        let error = "norms".parse::<KeyScale>().unwrap_err().to_string();
        assert_eq!(error, "key scale: wanted one of norm, mse, unbiased, had norms");
    }
}
