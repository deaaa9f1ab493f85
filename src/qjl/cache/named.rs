//! Codings by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::super::config::{ProjectionKind, by_name};
use super::super::planes::{Centring, Preset};
use super::options::Coding;
use super::sketch::SketchOptions;
use crate::error::{Error, Result};

/// A coding with a name: a [`Preset`] of sign planes, or one of QJL's sketches. In files it is its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum NamedCoding {
    /// Sign planes.
    Planes(Preset),
    /// The original QJL (arXiv 2406.03482): a Gaussian projection, one bit a channel, nothing raw.
    Qjl,
    /// QJL's usable form: an orthogonal projection, four bits a channel, keys less their mean before RoPE, 4 sinks and the
    /// last 64 tokens raw.
    QjlOrth,
}

impl Default for NamedCoding {
    /// [`Preset::Balanced`].
    fn default() -> Self {
        Self::Planes(Preset::default())
    }
}

impl NamedCoding {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Planes(Preset::NearLossless),
        Self::Planes(Preset::Balanced),
        Self::Planes(Preset::Compact),
        Self::Planes(Preset::Extreme),
        Self::QjlOrth,
        Self::Qjl,
    ];

    /// The name in files, options and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Planes(preset) => preset.name(),
            Self::Qjl => "qjl",
            Self::QjlOrth => "qjl-orth",
        }
    }

    /// The options that the name stands for.
    #[must_use]
    pub fn coding(self) -> Coding {
        match self {
            Self::Planes(preset) => Coding::Planes(preset.options()),
            Self::Qjl => Coding::Sketch(SketchOptions::default()),
            Self::QjlOrth => {
                let options = SketchOptions::default().projection(ProjectionKind::Orthogonal).rate(4.0);
                Coding::Sketch(options.centring(Centring::PreRope).sinks(4).recent(64))
            }
        }
    }
}

impl From<Preset> for NamedCoding {
    fn from(preset: Preset) -> Self {
        Self::Planes(preset)
    }
}

impl From<NamedCoding> for String {
    fn from(named: NamedCoding) -> Self {
        named.name().to_owned()
    }
}

impl TryFrom<String> for NamedCoding {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl fmt::Display for NamedCoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for NamedCoding {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        by_name("preset", &Self::ALL, Self::name, name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::CacheOptions;
    use super::*;

    #[test]
    fn names_are_read_back() {
        for named in NamedCoding::ALL {
            assert_eq!(named.to_string().parse::<NamedCoding>().unwrap(), named);
            assert_eq!(CacheOptions::named(named.name()).unwrap(), CacheOptions::new(named.coding()));
            let text = serde_json::to_string(&named).unwrap();
            assert_eq!(text, format!("\"{named}\""));
            assert_eq!(serde_json::from_str::<NamedCoding>(&text).unwrap(), named);
        }
        for preset in Preset::ALL {
            assert!(NamedCoding::ALL.contains(&preset.into()));
            assert_eq!(CacheOptions::named(preset.name()).unwrap(), preset.into());
        }
        assert_eq!(CacheOptions::named("qjl").unwrap(), CacheOptions::qjl());
        assert_eq!("qjl-orth".parse::<CacheOptions>().unwrap(), CacheOptions::qjl_orth());
        let error = CacheOptions::named("tiny").unwrap_err().to_string();
        assert!(error.ends_with("compact, extreme, qjl-orth, qjl, had tiny"), "{error}");
    }
}
