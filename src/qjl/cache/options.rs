//! What a cache keeps, and how.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::super::planes::{Balance, CALIBRATION_TOKENS, Centring, PlanesOptions, Preset, Tables};
use super::super::projection::{MAX_SKETCH_DIM, Projection};
use super::named::NamedCoding;
use super::sketch::SketchOptions;
use crate::cache::LayerShape;
use crate::error::{Error, Result};
use crate::rope::Rope;

/// Tokens that are coded together: what [`commit`](super::CpuQjlCache::commit) leaves raw beyond the recent ones is fewer.
pub const PAGE: usize = 32;

/// Most tokens that are coded together, where block means make pages longer.
const MAX_PAGE: usize = 4096;

/// How rows are coded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Coding {
    /// Sign planes ([`planes`](super::super::planes)).
    Planes(PlanesOptions),
    /// The original QJL.
    Sketch(SketchOptions),
}

impl Coding {
    /// Checks every number against its range. What depends on a layer's dimensions is checked with them.
    ///
    /// # Errors
    /// [`Error::Range`] naming the option.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Planes(options) => options.validate(),
            Self::Sketch(SketchOptions { centring: Centring::BlockMean(block), .. }) => {
                let want = "none or a mean before RoPE for sketches";
                Err(Error::range("centring", want, format_args!("means of {block} tokens")))
            }
            Self::Sketch(_) => Ok(()),
        }
    }

    /// The same with so many first and last tokens raw.
    #[must_use]
    pub const fn keeping(self, sinks: u32, recent: u32) -> Self {
        match self {
            Self::Planes(options) => Self::Planes(options.sinks(sinks).recent(recent)),
            Self::Sketch(options) => Self::Sketch(options.sinks(sinks).recent(recent)),
        }
    }

    /// What is subtracted from keys.
    #[must_use]
    pub const fn centring(&self) -> Centring {
        match self {
            Self::Planes(options) => options.centring,
            Self::Sketch(options) => options.centring,
        }
    }

    /// The same where nothing is known of the RoPE that keys have been through: in place of their mean before it, sign planes
    /// take means of blocks of so many tokens, and sketches none.
    pub(crate) const fn without_rope(self, block: u32) -> Self {
        match self {
            Self::Planes(options) if matches!(options.centring, Centring::PreRope) => {
                Self::Planes(options.centring(Centring::BlockMean(block)))
            }
            Self::Planes(_) => self,
            Self::Sketch(options) => Self::Sketch(options.centring(Centring::None)),
        }
    }

    /// First tokens that stay raw.
    #[must_use]
    pub const fn sinks(&self) -> u32 {
        match self {
            Self::Planes(options) => options.sinks,
            Self::Sketch(options) => options.sinks,
        }
    }

    /// Last tokens that stay raw.
    #[must_use]
    pub const fn recent(&self) -> u32 {
        match self {
            Self::Planes(options) => options.recent,
            Self::Sketch(options) => options.recent,
        }
    }

    /// Whether rows can only be coded once something is known of a sequence's keys.
    pub(crate) fn needs_tables(&self) -> bool {
        match self {
            Self::Planes(options) => {
                options.centring == Centring::PreRope
                    || options.balance != Balance::None
                    || options.planes_lo.is_some()
            }
            Self::Sketch(options) => options.centring == Centring::PreRope,
        }
    }

    /// Bytes of a coded key or value of one head, whichever is more, at the most.
    pub(crate) fn most_row_bytes(&self, layer: &LayerShape) -> usize {
        let [key_dim, value_dim] = layer.dims();
        match self {
            Self::Planes(options) => options.most_row_bytes(key_dim, value_dim),
            Self::Sketch(options) => {
                let sketch_dim = options.sketch_dim(key_dim).unwrap_or(MAX_SKETCH_DIM);
                // Two scalars at the most.
                (4 * sketch_dim.div_ceil(32)).max(value_dim.next_multiple_of(4)) + 4
            }
        }
    }

    /// Tokens that are coded together: of a page, and at the least.
    pub(crate) fn units(&self) -> Result<[usize; 2]> {
        let Self::Planes(PlanesOptions { centring: Centring::BlockMean(block), .. }) = *self else {
            // Two scalars share a word.
            return Ok([PAGE, 2]);
        };
        // Blocks are coded whole, an even number of rows at a time.
        let block = block as usize;
        let least = if block.is_multiple_of(2) { block } else { 2 * block };
        let page =
            (1..=PAGE).map(|n| n * least).find(|page| page.is_multiple_of(PAGE)).unwrap_or(PAGE * least);
        if page > MAX_PAGE {
            let want = format!("whole pages of at most {MAX_PAGE} tokens, a multiple of {PAGE} too");
            return Err(Error::range("block mean", want, block));
        }
        Ok([page, least])
    }
}

/// Options of a cache. The default is [`Preset::Balanced`] for a model without RoPE, growing without end.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CacheOptions {
    /// How rows are coded.
    pub coding: Coding,
    /// The model's RoPE: none, one for all layers, or one for each.
    pub ropes: Vec<Option<Rope>>,
    /// The projection of sketches, in place of a drawn one.
    pub projection: Option<Projection>,
    /// Tables of every layer from a calibration, one set each; where there are none, each sequence makes its own from its
    /// first tokens, and until there are 128 of them all its rows stay raw.
    pub tables: Option<Vec<Tables>>,
    /// Tokens of a sequence that are kept; older ones leave. `None` keeps all.
    pub capacity: Option<usize>,
    /// Whether the first tokens that stay raw never leave, and no sliding window hides them
    /// ([`AttendOptions::window`](crate::attention::AttendOptions::window)).
    pub pin_sinks: bool,
    /// Whether `append` may not allocate, but for a block that forks share: it then says [`Error::Capacity`] where nothing was
    /// reserved. Coding makes blocks all the same.
    pub fixed: bool,
}

impl Default for CacheOptions {
    fn default() -> Self {
        NamedCoding::default().into()
    }
}

impl From<NamedCoding> for CacheOptions {
    fn from(named: NamedCoding) -> Self {
        Self::new(named.coding())
    }
}

impl From<Preset> for CacheOptions {
    fn from(preset: Preset) -> Self {
        NamedCoding::from(preset).into()
    }
}

impl FromStr for CacheOptions {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::named(name)
    }
}

impl CacheOptions {
    /// Rows coded like this, growing without end.
    #[must_use]
    pub const fn new(coding: Coding) -> Self {
        Self {
            coding,
            ropes: Vec::new(),
            projection: None,
            tables: None,
            capacity: None,
            pin_sinks: false,
            fixed: false,
        }
    }

    /// [`NamedCoding::Qjl`].
    #[must_use]
    pub fn qjl() -> Self {
        NamedCoding::Qjl.into()
    }

    /// [`NamedCoding::QjlOrth`].
    #[must_use]
    pub fn qjl_orth() -> Self {
        NamedCoding::QjlOrth.into()
    }

    /// The options of a coding by its name.
    ///
    /// # Errors
    /// [`Error::Range`] naming all codings.
    pub fn named(name: &str) -> Result<Self> {
        name.parse::<NamedCoding>().map(Self::from)
    }

    /// Sets one RoPE for all layers.
    #[must_use]
    pub fn rope(mut self, rope: Rope) -> Self {
        self.ropes = vec![Some(rope)];
        self
    }

    /// Sets the RoPE of every layer.
    #[must_use]
    pub fn ropes(mut self, ropes: Vec<Option<Rope>>) -> Self {
        self.ropes = ropes;
        self
    }

    /// Sets the projection of sketches.
    #[must_use]
    pub fn projection(mut self, projection: Projection) -> Self {
        self.projection = Some(projection);
        self
    }

    /// Sets the tables of every layer.
    #[must_use]
    pub fn tables(mut self, tables: Vec<Tables>) -> Self {
        self.tables = Some(tables);
        self
    }

    /// Sets how many tokens of a sequence are kept.
    #[must_use]
    pub const fn capacity(mut self, tokens: usize) -> Self {
        self.capacity = Some(tokens);
        self
    }

    /// Sets whether the first tokens that stay raw never leave, nor are hidden by a window.
    #[must_use]
    pub const fn pin_sinks(mut self, pin: bool) -> Self {
        self.pin_sinks = pin;
        self
    }

    /// Sets whether `append` may not allocate.
    #[must_use]
    pub const fn fixed(mut self, fixed: bool) -> Self {
        self.fixed = fixed;
        self
    }

    /// The RoPE of a layer.
    pub(crate) fn layer_rope(&self, layer: usize) -> Option<&Rope> {
        let only = if self.ropes.len() == 1 { self.ropes.first() } else { None };
        only.or_else(|| self.ropes.get(layer)).and_then(Option::as_ref)
    }

    /// Whether sequences make tables of their own.
    pub(crate) fn learns(&self) -> bool {
        self.coding.needs_tables() && self.tables.is_none()
    }

    /// Checks the options for a cache of so many layers.
    ///
    /// # Errors
    /// [`Error::Range`] or [`Error::Shape`] naming the option.
    pub(crate) fn check(&self, layers: usize) -> Result<()> {
        self.coding.validate()?;
        self.coding.units()?;
        if self.ropes.len() > 1 && self.ropes.len() != layers {
            return Err(Error::shape("ropes", format_args!("none, one or {layers}"), self.ropes.len()));
        }
        if let Some(tables) = self.tables.as_ref().filter(|tables| tables.len() != layers) {
            return Err(Error::shape("tables", format_args!("{layers}, one for each layer"), tables.len()));
        }
        let sinks = self.coding.sinks() as usize;
        if self.learns() && sinks >= CALIBRATION_TOKENS {
            let want = format!("below the {CALIBRATION_TOKENS} tokens that tables are made from");
            return Err(Error::range("sinks", want, sinks));
        }
        let Some(capacity) = self.capacity else { return Ok(()) };
        let least = if self.learns() { CALIBRATION_TOKENS } else { 1 };
        let least = least.max(if self.pin_sinks { sinks + 1 } else { 1 });
        if capacity < least {
            return Err(Error::range(
                "capacity",
                format!("at least {least} tokens with these options"),
                capacity,
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_whole_blocks() {
        let units =
            |block| Coding::Planes(PlanesOptions::default().centring(Centring::BlockMean(block))).units();
        assert_eq!(CacheOptions::default().coding.units().unwrap(), [32, 2]);
        assert_eq!(units(64).unwrap(), [64, 64]);
        assert_eq!(units(24).unwrap(), [96, 24]);
        assert_eq!(units(33).unwrap(), [1056, 66]);
        assert!(units(1001).unwrap_err().to_string().starts_with("block mean"));
    }

    #[test]
    fn options_that_do_not_fit_are_named() {
        let small = CacheOptions::default().capacity(127);
        assert!(small.check(2).unwrap_err().to_string().starts_with("capacity: wanted at least 128"));
        assert!(CacheOptions::qjl().capacity(1).check(2).is_ok());
        assert!(CacheOptions::qjl().capacity(0).check(2).is_err());
        assert!(CacheOptions::default().ropes(vec![None; 3]).check(2).is_err());
        assert!(CacheOptions::default().tables(Vec::new()).check(2).is_err());
        let sketch = |options| CacheOptions::new(Coding::Sketch(options));
        let pinned = sketch(SketchOptions::default().sinks(4)).capacity(4).pin_sinks(true);
        assert!(pinned.check(1).unwrap_err().to_string().contains("at least 5"));
        let blocks = sketch(SketchOptions::default().centring(Centring::BlockMean(64)));
        let error = blocks.check(1).unwrap_err().to_string();
        assert!(error.ends_with("a mean before RoPE for sketches, had means of 64 tokens"), "{error}");
    }
}
