//! Presets, options, and the layout of a code: which channels get how many bits.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::super::config::by_name;
use crate::error::{Error, Result};
use crate::rope::Rope;

/// Most bits of a code.
pub const MAX_PLANES: u8 = 5;

/// Smallest `head_dim` that is split in two halves; below it a half has too few channels for a scale of its own.
const MIN_SPLIT_DIM: usize = 16;

/// Bits of the least uniform preset, which takes the place of a split below [`MIN_SPLIT_DIM`].
const LEAST_UNIFORM: u8 = 3;

/// A choice of bits for keys and values. Bits and ratios to f16 are at `head_dim` 64 / 128, overheads included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Preset {
    /// Keys 4 bits, values 4: 8.5 / 8.25 bits together, 3.76 / 3.88 times smaller.
    NearLossless,
    /// Keys 3 bits, values 3: 6.5 / 6.25 bits, 4.92 / 5.12 times smaller.
    #[default]
    Balanced,
    /// Keys 3 bits in the half of channels that matters most and 1 in the other, values 3: 5.75 / 5.375 bits, 5.57 /
    /// 5.95 times smaller.
    Compact,
    /// Keys 2 bits in the half of channels that matters most and none in the other, values 2: 3.5 / 3.25 bits, 9.1 /
    /// 9.8 times smaller.
    Extreme,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 4] = [Self::NearLossless, Self::Balanced, Self::Compact, Self::Extreme];

    /// The name in files, options and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NearLossless => "near-lossless",
            Self::Balanced => "balanced",
            Self::Compact => "compact",
            Self::Extreme => "extreme",
        }
    }

    /// The options that the preset stands for.
    #[must_use]
    pub const fn options(self) -> PlanesOptions {
        let (planes_hi, planes_lo, value_planes) = match self {
            Self::NearLossless => (4, None, 4),
            Self::Balanced => (3, None, 3),
            Self::Compact => (3, Some(1), 3),
            Self::Extreme => (2, Some(0), 2),
        };
        PlanesOptions {
            planes_hi,
            planes_lo,
            value_planes,
            sinks: 4,
            recent: 64,
            centring: Centring::PreRope,
            balance: Balance::Half,
            rounds: 1,
            seed: 7,
        }
    }
}

impl std::fmt::Display for Preset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        by_name("preset", &Self::ALL, Self::name, name)
    }
}

/// What is subtracted from keys before they are coded, and added to scores again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Centring {
    /// Nothing.
    None,
    /// The mean of every so many consecutive keys, kept in f16: for models whose RoPE is not known.
    BlockMean(u32),
    /// A head's mean key before RoPE, turned to each token's position: no bytes per token.
    #[default]
    PreRope,
}

/// How channels are weighed before the rotation: `k / sigma` against `q * sigma`, `sigma = (E k^2 / E q^2)^e`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Balance {
    /// `sigma = 1`.
    None,
    /// `e = 1/8`.
    #[default]
    Half,
    /// `e = 1/4`, which makes both sides equally large.
    Full,
}

impl Balance {
    /// The exponent `e`.
    #[must_use]
    pub const fn exponent(self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Half => 0.125,
            Self::Full => 0.25,
        }
    }
}

/// How keys and values are coded. [`PlanesOptions::default`] is [`Preset::Balanced`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanesOptions {
    /// Bits of a key's channel, 1 to 5: of all, or of the half that matters most.
    pub planes_hi: u8,
    /// Bits of a key's channels in the other half, 0 to 5; `None` codes all channels alike. Below 16 channels there
    /// is no split: all get 3 bits, or `planes_hi` if that is more.
    pub planes_lo: Option<u8>,
    /// Bits of a value's channel, 1 to 5.
    pub value_planes: u8,
    /// First tokens that stay raw, and out of every mean.
    pub sinks: u32,
    /// Last tokens that stay raw.
    pub recent: u32,
    /// What is subtracted from keys.
    pub centring: Centring,
    /// How channels are weighed.
    pub balance: Balance,
    /// Rounds of random signs and Walsh-Hadamard, 1 to 4. Where the width is no power of two a matrix takes their place.
    pub rounds: u8,
    /// Seed of the rotations.
    pub seed: u64,
}

impl Default for PlanesOptions {
    fn default() -> Self {
        Preset::default().options()
    }
}

impl PlanesOptions {
    /// Sets the bits of all channels of a key.
    #[must_use]
    pub const fn key_planes(mut self, planes: u8) -> Self {
        (self.planes_hi, self.planes_lo) = (planes, None);
        self
    }

    /// Bytes of a coded key or value, whichever is more, at the most: codes in whole groups, scalars, and a token's share of a
    /// block mean.
    pub(in crate::qjl) fn most_row_bytes(&self, key_dim: usize, value_dim: usize) -> usize {
        let key = [false, true].map(|paired| CodeLayout::of_keys(self, key_dim, paired).grouped_bytes());
        let mean = match self.centring {
            Centring::BlockMean(block) => (2 * key_dim + 2).div_ceil(block.max(1) as usize),
            _ => 0,
        };
        // Values are grouped along tokens, four channels side by side.
        let value = usize::from(self.value_planes) * value_dim.div_ceil(4).div_ceil(2) + 2;
        value.max(key.into_iter().max().unwrap_or(0) + mean)
    }

    /// Sets the bits of the half of a key's channels that matters most, and of the other.
    #[must_use]
    pub const fn split(mut self, hi: u8, lo: u8) -> Self {
        (self.planes_hi, self.planes_lo) = (hi, Some(lo));
        self
    }

    /// Sets the bits of a value's channels.
    #[must_use]
    pub const fn value_planes(mut self, planes: u8) -> Self {
        self.value_planes = planes;
        self
    }

    /// Sets how many first tokens stay raw.
    #[must_use]
    pub const fn sinks(mut self, tokens: u32) -> Self {
        self.sinks = tokens;
        self
    }

    /// Sets how many last tokens stay raw.
    #[must_use]
    pub const fn recent(mut self, tokens: u32) -> Self {
        self.recent = tokens;
        self
    }

    /// Sets what is subtracted from keys.
    #[must_use]
    pub const fn centring(mut self, centring: Centring) -> Self {
        self.centring = centring;
        self
    }

    /// Sets how channels are weighed.
    #[must_use]
    pub const fn balance(mut self, balance: Balance) -> Self {
        self.balance = balance;
        self
    }

    /// Sets the rounds of a rotation.
    #[must_use]
    pub const fn rounds(mut self, rounds: u8) -> Self {
        self.rounds = rounds;
        self
    }

    /// Sets the seed of the rotations.
    #[must_use]
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Checks every option.
    ///
    /// # Errors
    /// [`Error::Range`] naming the option.
    pub fn validate(&self) -> Result<()> {
        let planes = [
            ("planes_hi", 1, self.planes_hi),
            ("planes_lo", 0, self.planes_lo.unwrap_or(0)),
            ("value_planes", 1, self.value_planes),
        ];
        for (what, least, have) in planes {
            if !(least..=MAX_PLANES).contains(&have) {
                return Err(Error::range(what, format!("{least} to {MAX_PLANES}"), have));
            }
        }
        if !(1..=4).contains(&self.rounds) {
            return Err(Error::range("rounds", "1 to 4", self.rounds));
        }
        if self.centring == Centring::BlockMean(0) {
            return Err(Error::range("block mean", "at least 1 token", 0));
        }
        Ok(())
    }
}

/// Channels that share one rotation and one scalar, and the bits of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Channels, `n`.
    pub channels: usize,
    /// Bits of a channel, `b`; at 0 the segment stores nothing, not even a scalar.
    pub planes: u8,
}

impl Segment {
    /// 32-bit words of a row, `ceil(b n / 32)`.
    #[must_use]
    pub const fn words(&self) -> usize {
        (self.channels * self.planes as usize).div_ceil(32)
    }

    /// Bits of a row: its words, and 16 of the scalar.
    #[must_use]
    pub const fn bits(&self) -> usize {
        if self.planes == 0 { 0 } else { 32 * self.words() + 16 }
    }
}

/// The segments of a row's code, one or two, the channels of the first ahead of those of the second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeLayout {
    segments: Vec<Segment>,
}

impl CodeLayout {
    /// The layout of keys. A split gives the first segment `ceil(pairs / 2)` RoPE pairs where RoPE turns all channels,
    /// else `ceil(head_dim / 2)` channels.
    #[must_use]
    pub fn keys(options: &PlanesOptions, head_dim: usize, rope: Option<&Rope>) -> Self {
        Self::of_keys(options, head_dim, rope.is_some_and(|rope| rope.rotary_dim() == head_dim))
    }

    /// The layout of keys all of whose channels RoPE turns in pairs, or not.
    fn of_keys(options: &PlanesOptions, head_dim: usize, paired: bool) -> Self {
        let all = |planes| Self::uniform(head_dim, planes);
        let Some(lo) = options.planes_lo else { return all(options.planes_hi) };
        if head_dim < MIN_SPLIT_DIM {
            return all(options.planes_hi.max(LEAST_UNIFORM));
        }
        let hi = if paired { 2 * (head_dim / 2).div_ceil(2) } else { head_dim.div_ceil(2) };
        let segments = vec![
            Segment { channels: hi, planes: options.planes_hi },
            Segment { channels: head_dim - hi, planes: lo },
        ];
        Self { segments }
    }

    /// The layout of values: one segment.
    #[must_use]
    pub fn values(options: &PlanesOptions, head_dim: usize) -> Self {
        Self::uniform(head_dim, options.value_planes)
    }

    /// Bytes of a row as attention reads it: codes in groups of 32 channels, and scalars.
    fn grouped_bytes(&self) -> usize {
        let coded = self.segments.iter().filter(|segment| segment.planes > 0);
        coded.map(|segment| 4 * usize::from(segment.planes) * segment.channels.div_ceil(32) + 2).sum()
    }

    /// One segment.
    pub(super) fn uniform(channels: usize, planes: u8) -> Self {
        Self { segments: vec![Segment { channels, planes }] }
    }

    /// The segments.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Whether there are two segments, whose channels stand in the tables' order.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.segments.len() > 1
    }

    /// Channels of a row.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.segments.iter().map(|segment| segment.channels).sum()
    }

    /// Bits of a row: words with their unused bits, and scalars.
    #[must_use]
    pub fn bits(&self) -> usize {
        self.segments.iter().map(Segment::bits).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::RopeLayout;

    #[test]
    fn names_are_the_same_in_text_and_in_files() {
        for preset in Preset::ALL {
            assert_eq!(preset.to_string().parse::<Preset>().unwrap(), preset);
            assert_eq!(serde_json::to_string(&preset).unwrap(), format!("\"{preset}\""));
            assert!(preset.options().validate().is_ok());
        }
        assert!("tiny".parse::<Preset>().unwrap_err().to_string().contains("near-lossless, balanced"));
    }

    #[test]
    fn options_out_of_range_are_named() {
        let options = PlanesOptions::default();
        let refused = [
            (options.key_planes(0), "planes_hi"),
            (options.key_planes(6), "planes_hi"),
            (options.split(3, 6), "planes_lo"),
            (options.value_planes(0), "value_planes"),
            (options.rounds(0), "rounds"),
            (options.rounds(5), "rounds"),
            (options.centring(Centring::BlockMean(0)), "block mean"),
        ];
        for (options, what) in refused {
            assert!(options.validate().unwrap_err().to_string().starts_with(what), "{what}");
        }
    }

    #[test]
    fn splits_keep_pairs_whole() {
        let widths = |dim, rope: Option<&Rope>| -> Vec<usize> {
            let layout = CodeLayout::keys(&Preset::Compact.options(), dim, rope);
            layout.segments().iter().map(|segment| segment.channels).collect()
        };
        let rope = |rotary| Rope::from_theta(rotary, rotary, 1e4, RopeLayout::HalfSplit).unwrap();
        assert_eq!(widths(50, Some(&rope(50))), [26, 24], "25 pairs");
        assert_eq!(widths(50, Some(&rope(20))), [25, 25], "partly turned");
        assert_eq!(widths(511, None), [256, 255]);
        assert_eq!(widths(15, None), [15]);
        let small = CodeLayout::keys(&Preset::Extreme.options(), 8, None);
        assert_eq!(small.segments(), [Segment { channels: 8, planes: 3 }]);
        assert_eq!(CodeLayout::keys(&Preset::Extreme.options(), 64, None).bits(), 80);
    }
}
