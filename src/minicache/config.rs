//! What to merge and what to keep raw.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::qjl::planes::MAX_PLANES;

/// How a pair of layers is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Both layers live on one direction, each with its own magnitude (MiniCache, section 3.2).
    #[default]
    Shared,
    /// The lower layer stays exact and *is* the direction; the upper layer stores the ratio of the norms.
    /// The case `t = 0` of the interpolation, without rounding the lower layer.
    Anchor,
    /// The numbers of `MiniCacheKVCache` (VeloxQuant-MLX): the lower layer passes through untouched, the upper is
    /// rebuilt in f16 from the interpolated direction. Two directions per row must then be kept, so nothing is saved.
    /// The upper layer's raw rows are kept in f16 too: of f32 or bf16 they are rounded, and infinite above 65504.
    Compat,
}

/// Which rows are kept raw for both layers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retention {
    /// Rows whose cosine is not at least this threshold, in `[-1, 1]`.
    Cosine(f32),
    /// Rows with `c < c_min + gamma (c_max - c_min)` over the candidates of their sequence, `gamma` in `[0, 1]`
    /// (MiniCache, section 3.3).
    Range(f32),
    /// The `ceil(rho n)` least similar of a sequence's `n` candidates, `rho` in `[0, 1]`; ties by lower row index.
    Fraction(f32),
    /// None.
    Never,
}

impl Default for Retention {
    fn default() -> Self {
        Self::Cosine(0.9)
    }
}

/// How shared directions are coded: rotated, and each channel kept in a few bits, as [sign planes](crate::qjl::planes) keep a
/// row that is not centred. The code's scalar goes into the layers' magnitudes, so that it takes no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct DirectionPlanes {
    /// Bits of a channel, 1 to 5. 3 by default.
    pub bits: u8,
    /// Rounds of the rotation, 1 to 4. 1 by default.
    pub rounds: u8,
    /// Seed of the rotation. 7 by default.
    pub seed: u64,
}

impl Default for DirectionPlanes {
    fn default() -> Self {
        Self { bits: 3, rounds: 1, seed: 7 }
    }
}

impl DirectionPlanes {
    /// Sets [`bits`](Self::bits).
    #[must_use]
    pub const fn bits(mut self, bits: u8) -> Self {
        self.bits = bits;
        self
    }

    /// Sets [`rounds`](Self::rounds).
    #[must_use]
    pub const fn rounds(mut self, rounds: u8) -> Self {
        self.rounds = rounds;
        self
    }

    /// Sets [`seed`](Self::seed).
    #[must_use]
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    pub(super) fn validate(&self, mode: Mode) -> Result<()> {
        if !(1..=MAX_PLANES).contains(&self.bits) {
            return Err(Error::range("planes.bits", format!("1 to {MAX_PLANES}"), self.bits));
        }
        if !(1..=4).contains(&self.rounds) {
            return Err(Error::range("planes.rounds", "1 to 4", self.rounds));
        }
        // Anchor's direction is a layer as it came, and Compat's rows are not directions.
        if mode != Mode::Shared {
            return Err(Error::range("mode of coded directions", "Shared", format_args!("{mode:?}")));
        }
        Ok(())
    }
}

/// Options of [`merge`](crate::minicache::cpu::merge).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct MergeOptions {
    /// How the pair is stored. Shared by default.
    pub mode: Mode,
    /// Which rows stay raw. `Cosine(0.9)` by default.
    pub retention: Retention,
    /// Where on the arc from the lower (0) to the upper (1) direction the shared one lies; 0.5 by default. Not used by
    /// [`Mode::Anchor`].
    pub slerp_t: f32,
    /// Tokens at the start of each sequence that always stay raw (attention sinks). 4 by default.
    pub sinks: u32,
    /// Position in its sequence of the first token of the call, the same for every sequence. 0 by default.
    pub first_position: u32,
    /// A page that would keep more than this share of its rows raw stays two raw pages. 0.9 by default.
    pub raw_page_share: f32,
    /// How directions are coded; in f16 where they are not, as by default. [`Mode::Shared`] alone has directions to code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planes: Option<DirectionPlanes>,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Shared,
            retention: Retention::default(),
            slerp_t: 0.5,
            sinks: 4,
            first_position: 0,
            raw_page_share: 0.9,
            planes: None,
        }
    }
}

impl MergeOptions {
    /// Sets [`mode`](Self::mode).
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets [`retention`](Self::retention).
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Sets [`slerp_t`](Self::slerp_t).
    #[must_use]
    pub fn slerp_t(mut self, t: f32) -> Self {
        self.slerp_t = t;
        self
    }

    /// Sets [`sinks`](Self::sinks).
    #[must_use]
    pub fn sinks(mut self, sinks: u32) -> Self {
        self.sinks = sinks;
        self
    }

    /// Sets [`first_position`](Self::first_position).
    #[must_use]
    pub fn first_position(mut self, position: u32) -> Self {
        self.first_position = position;
        self
    }

    /// Sets [`raw_page_share`](Self::raw_page_share).
    #[must_use]
    pub fn raw_page_share(mut self, share: f32) -> Self {
        self.raw_page_share = share;
        self
    }

    /// Sets [`planes`](Self::planes).
    #[must_use]
    pub fn planes(mut self, planes: DirectionPlanes) -> Self {
        self.planes = Some(planes);
        self
    }

    /// Checks every number against its range.
    ///
    /// # Errors
    /// [`Error::Range`] naming the option.
    pub fn validate(&self) -> Result<()> {
        if let Some(planes) = &self.planes {
            planes.validate(self.mode)?;
        }
        within("slerp_t", self.slerp_t, 0.0, 1.0)?;
        within("raw_page_share", self.raw_page_share, 0.0, 1.0)?;
        match self.retention {
            Retention::Cosine(threshold) => within("threshold", threshold, -1.0, 1.0),
            Retention::Range(gamma) => within("gamma", gamma, 0.0, 1.0),
            Retention::Fraction(rho) => within("rho", rho, 0.0, 1.0),
            Retention::Never => Ok(()),
        }
    }

    /// Tokens of this call that are sinks: those at positions below [`sinks`](Self::sinks).
    #[must_use]
    pub fn sink_tokens(&self) -> u32 {
        self.sinks.saturating_sub(self.first_position)
    }

    /// The largest number of raw rows that a page of `rows` may hold and still be folded.
    #[must_use]
    pub fn raw_limit(&self, rows: usize) -> u32 {
        (self.raw_page_share * rows as f32) as u32
    }
}

fn within(what: &'static str, value: f32, low: f32, high: f32) -> Result<()> {
    if value >= low && value <= high {
        Ok(())
    } else {
        Err(Error::range(what, format!("{low} to {high}"), value))
    }
}

/// Why a row is kept raw. The first cause that applies, in this order, is the one counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A number of either layer's row is not finite.
    NonFinite,
    /// The row is an attention sink.
    Sink,
    /// The retention rule says so.
    Rule,
    /// The rows have no common direction: nearly opposite, or (Anchor) a zero lower row under another.
    Antiparallel,
    /// A magnitude, or a restored number, would leave the range of its type.
    Range,
}

impl Cause {
    const ALL: [Self; 5] = [Self::NonFinite, Self::Sink, Self::Rule, Self::Antiparallel, Self::Range];

    /// The cause that kernels and files name by number, `None` for a merged row.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get((code as usize).checked_sub(1)?).copied()
    }

    /// The number of a cause, 0 for a merged row.
    pub(crate) fn code(cause: Option<Self>) -> u32 {
        cause.map_or(0, |cause| cause as u32 + 1)
    }
}

/// How many rows were merged and how many were kept raw, by first [`Cause`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows merged.
    pub merged: u32,
    /// Rows raw because a number was not finite.
    pub non_finite: u32,
    /// Rows raw because they are attention sinks.
    pub sink: u32,
    /// Rows raw because the retention rule says so.
    pub rule: u32,
    /// Rows raw because they have no common direction.
    pub antiparallel: u32,
    /// Rows raw because a number would leave its type's range.
    pub range: u32,
}

impl Counts {
    /// Rows kept raw, whatever the cause.
    #[must_use]
    pub const fn retained(&self) -> u32 {
        self.non_finite + self.sink + self.rule + self.antiparallel + self.range
    }

    /// Both together.
    pub(crate) const fn plus(&self, other: &Self) -> Self {
        Self {
            merged: self.merged + other.merged,
            non_finite: self.non_finite + other.non_finite,
            sink: self.sink + other.sink,
            rule: self.rule + other.rule,
            antiparallel: self.antiparallel + other.antiparallel,
            range: self.range + other.range,
        }
    }

    pub(crate) fn add(&mut self, cause: Option<Cause>) {
        let count = match cause {
            None => &mut self.merged,
            Some(Cause::NonFinite) => &mut self.non_finite,
            Some(Cause::Sink) => &mut self.sink,
            Some(Cause::Rule) => &mut self.rule,
            Some(Cause::Antiparallel) => &mut self.antiparallel,
            Some(Cause::Range) => &mut self.range,
        };
        *count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_name_the_range() {
        let cases = [
            (MergeOptions::default().slerp_t(1.5), "slerp_t: wanted 0 to 1, had 1.5"),
            (MergeOptions::default().slerp_t(f32::NAN), "slerp_t: wanted 0 to 1, had NaN"),
            (
                MergeOptions::default().retention(Retention::Cosine(1.01)),
                "threshold: wanted -1 to 1, had 1.01",
            ),
            (MergeOptions::default().retention(Retention::Range(-0.1)), "gamma: wanted 0 to 1, had -0.1"),
            (MergeOptions::default().retention(Retention::Fraction(2.0)), "rho: wanted 0 to 1, had 2"),
            (MergeOptions::default().raw_page_share(7.0), "raw_page_share: wanted 0 to 1, had 7"),
            (
                MergeOptions::default().planes(DirectionPlanes::default().bits(6)),
                "planes.bits: wanted 1 to 5, had 6",
            ),
            (
                MergeOptions::default().planes(DirectionPlanes::default().rounds(0)),
                "planes.rounds: wanted 1 to 4, had 0",
            ),
            (
                MergeOptions::default().planes(DirectionPlanes::default()).mode(Mode::Anchor),
                "mode of coded directions: wanted Shared, had Anchor",
            ),
        ];
        for (options, message) in cases {
            assert_eq!(options.validate().unwrap_err().to_string(), message);
        }
        assert!(MergeOptions::default().validate().is_ok());
    }

    #[test]
    fn sinks_count_from_the_start_of_the_sequence() {
        assert_eq!(MergeOptions::default().sink_tokens(), 4);
        assert_eq!(MergeOptions::default().first_position(3).sink_tokens(), 1);
        assert_eq!(MergeOptions::default().first_position(9).sink_tokens(), 0);
    }
}
