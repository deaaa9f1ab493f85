//! What is known of a head's keys before any is coded: mean, balance, and the order in which channels matter.

#![allow(clippy::indexing_slicing, reason = "shapes are checked on entry; the loops stay inside them")]

use std::ops::Range;

use half::f16;

use super::config::{Centring, PlanesOptions};
use crate::attention::{Rows, heads_ratio};
use crate::error::{Error, Result};
use crate::rope::{Positions, Rope};
use crate::tensor::{Shape, TensorView};

/// Tokens from whose keys tables are made, where nothing else is said: those before this one, less the sinks.
pub const CALIBRATION_TOKENS: usize = 128;

/// Added to every channel's energy, as a share of the head's mean: some heads have channels that are always 0.
const FLOOR: f64 = 1e-4;

/// Static tables of a layer, `[sets, heads, head_dim]` each; one set for each sequence, or one that all share.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tables {
    /// 1, or the batch.
    pub sets: usize,
    /// KV heads.
    pub heads: usize,
    /// Channels of a key.
    pub dim: usize,
    /// Mean key before RoPE; zeros without pre-RoPE centring.
    pub mu: Vec<f16>,
    /// Divisor of keys and factor of queries, 1/16 to 16, the same for both channels of a RoPE pair.
    pub sigma: Vec<f32>,
    /// Channels by falling weight, RoPE pairs together: place `i` of a split code holds channel `order[i]`.
    pub order: Vec<u16>,
}

/// One head's tables.
#[derive(Clone, Copy, Debug)]
pub struct HeadTables<'a> {
    /// Mean key before RoPE.
    pub mu: &'a [f16],
    /// Divisor of keys.
    pub sigma: &'a [f32],
    /// Channels by falling weight.
    pub order: &'a [u16],
}

/// Keys and queries from which tables are made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Calibration<'a> {
    /// After RoPE, `[batch, kv_heads, tokens, head_dim]`.
    pub keys: &'a TensorView<'a>,
    /// Positions of the keys.
    pub positions: Positions<'a>,
    /// The tokens of `keys` that are used; `None` is from the sinks to [`CALIBRATION_TOKENS`].
    pub tokens: Option<Range<usize>>,
    /// After RoPE, not scaled, `[batch, query_heads, queries, head_dim]`, of any tokens: all are used.
    pub queries: Option<&'a TensorView<'a>>,
    /// The model's RoPE; `None` for a model without one.
    pub rope: Option<&'a Rope>,
}

impl<'a> Calibration<'a> {
    /// Keys at their positions, without queries or RoPE.
    #[must_use]
    pub const fn new(keys: &'a TensorView<'a>, positions: Positions<'a>) -> Self {
        Self { keys, positions, tokens: None, queries: None, rope: None }
    }

    /// Sets the tokens whose keys are used.
    #[must_use]
    pub const fn tokens(mut self, tokens: Range<usize>) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// Sets the queries.
    #[must_use]
    pub const fn queries(mut self, queries: &'a TensorView<'a>) -> Self {
        self.queries = Some(queries);
        self
    }

    /// Sets the model's RoPE.
    #[must_use]
    pub const fn rope(mut self, rope: &'a Rope) -> Self {
        self.rope = Some(rope);
        self
    }

    /// The tokens used, checked.
    fn range(&self, options: &PlanesOptions) -> Result<Range<usize>> {
        let have = self.keys.shape().tokens;
        let default = options.sinks as usize..have.min(CALIBRATION_TOKENS);
        let range = self.tokens.clone().unwrap_or(default);
        if range.start < range.end && range.end <= have {
            return Ok(range);
        }
        let want = format!("at least one token within 0..{have}");
        Err(Error::range("calibration tokens", want, format_args!("{}..{}", range.start, range.end)))
    }

    /// Query heads that share a KV head, after checking all shapes; 0 without queries.
    fn group(&self) -> Result<usize> {
        let keys = self.keys.shape();
        keys.check_dim("calibration keys")?;
        if let Some(rope) = self.rope {
            rope.check_dim(keys.dim)?;
        }
        let Some(queries) = self.queries.map(TensorView::shape) else { return Ok(0) };
        if (queries.batch, queries.dim) != (keys.batch, keys.dim) {
            let want = format!("[{}, heads, tokens, {}] as the keys have", keys.batch, keys.dim);
            return Err(Error::shape("calibration queries", want, queries));
        }
        heads_ratio(queries.heads, keys.heads)
    }
}

impl Tables {
    /// Tables that change nothing: mean 0, no balance, channels in their own order.
    #[must_use]
    pub fn identity(heads: usize, dim: usize) -> Self {
        let order = (0..heads).flat_map(|_| 0..dim as u16).collect();
        Self { sets: 1, heads, dim, mu: vec![f16::ZERO; heads * dim], sigma: vec![1.0; heads * dim], order }
    }

    /// Makes tables, a set for each sequence, in f64. With `k` the keys before RoPE (as cached where the options do not
    /// ask for pre-RoPE centring): `mu` their mean; `ek` the mean of `(k - mu)^2` and `eq` that of `q^2` over the
    /// query heads of a group, averaged over each RoPE pair, plus 1e-4 of its own mean over the head;
    /// `sigma = (ek / eq)^e`, divided by its geometric mean and clipped to 1/16 to 16; channels by falling `ek eq`,
    /// ties in their own order. Without queries `sigma` is 1 and the order that of `ek`. Rows that hold a non-finite
    /// number are left out.
    ///
    /// # Errors
    /// [`Error::Range`] when no token is left to calibrate on or `rotary_dim` is above `head_dim`, [`Error::Shape`] or
    /// [`Error::HeadRatio`] when shapes do not fit.
    pub fn calibrate(from: &Calibration<'_>, options: &PlanesOptions) -> Result<Self> {
        options.validate()?;
        Self::measure(from, options)
    }

    /// [`Tables::calibrate`] by options that a codec has checked.
    pub(super) fn measure(from: &Calibration<'_>, options: &PlanesOptions) -> Result<Self> {
        let (keys, group) = (from.keys.shape(), from.group()?);
        let mut energies = Vec::new();
        if let Some(queries) = from.queries {
            for (b, h) in (0..keys.batch).flat_map(|b| (0..keys.heads).map(move |h| (b, h))) {
                let mut energy = QueryEnergy::default();
                (0..queries.shape().tokens)
                    .for_each(|t| energy.add(queries, b, h * group..(h + 1) * group, t));
                energies.push(energy);
            }
        }
        Self::learn(from, &energies, options)
    }

    /// [`Tables::calibrate`] with the queries' energies, one for each KV head of each sequence; none without queries.
    pub(in crate::qjl) fn learn(
        from: &Calibration<'_>,
        energies: &[QueryEnergy],
        options: &PlanesOptions,
    ) -> Result<Self> {
        let (keys, tokens) = (from.keys.shape(), from.range(options)?);
        let positions = from.positions.resolve(keys.batch, keys.tokens)?;
        let mut tables = Self { sets: keys.batch, ..Self::identity(0, keys.dim) };
        tables.heads = keys.heads;
        for b in 0..keys.batch {
            for h in 0..keys.heads {
                let at = |t: usize| positions[b * keys.tokens + t];
                let (mean, ek) = key_moments(from, options, (b, h), tokens.clone(), at);
                let eq = energies.get(b * keys.heads + h).and_then(QueryEnergy::mean);
                tables.push_head(&mean, ek, eq, options, from.rope);
            }
        }
        Ok(tables)
    }

    fn push_head(
        &mut self,
        mean: &[f64],
        ek: Vec<f64>,
        eq: Option<Vec<f64>>,
        options: &PlanesOptions,
        rope: Option<&Rope>,
    ) {
        let units = units(mean.len(), rope);
        let ek = level(ek, &units);
        let eq = eq.map(|eq| level(eq, &units));
        let centred = options.centring == Centring::PreRope;
        let largest = f16::MAX.to_f64();
        let mu = mean.iter().map(|m| if centred { m.clamp(-largest, largest) } else { 0.0 });
        self.mu.extend(mu.map(f16::from_f64));
        let exponent = options.balance.exponent();
        let logs: Vec<f64> = match &eq {
            Some(eq) => ek.iter().zip(eq).map(|(k, q)| exponent * (k / q).ln()).collect(),
            None => vec![0.0; ek.len()],
        };
        let centre = logs.iter().sum::<f64>() / logs.len() as f64;
        self.sigma.extend(logs.iter().map(|log| (log - centre).exp().clamp(1.0 / 16.0, 16.0) as f32));
        let weight = |c: usize| ek[c] * eq.as_ref().map_or(1.0, |eq| eq[c]);
        let mut sorted = units;
        sorted.sort_by(|a, b| weight(b.0).total_cmp(&weight(a.0)));
        self.order.extend(sorted.iter().flat_map(|&(a, b)| [Some(a), b]).flatten().map(|c| c as u16));
    }

    /// The tables of a head; the shared set's where there is one set.
    #[must_use]
    pub fn head(&self, batch: usize, head: usize) -> HeadTables<'_> {
        let start = self.start(batch, head);
        let range = start..start + self.dim;
        HeadTables {
            mu: &self.mu[range.clone()],
            sigma: &self.sigma[range.clone()],
            order: &self.order[range],
        }
    }

    /// Where a head's tables start.
    pub(super) fn start(&self, batch: usize, head: usize) -> usize {
        let set = if self.sets == 1 { 0 } else { batch };
        (set * self.heads + head) * self.dim
    }

    /// Bytes stored.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.mu.as_slice())
            + size_of_val(self.sigma.as_slice())
            + size_of_val(self.order.as_slice())
    }

    /// Checks that the tables are whole and for keys of this shape, and every order a permutation.
    ///
    /// # Errors
    /// [`Error::Shape`] naming what does not fit, [`Error::NonFinite`] on a mean or a balance that is not finite,
    /// [`Error::Range`] on a balance that is not above 0 or an order that is no permutation.
    pub fn check(&self, keys: Shape) -> Result<()> {
        let count = self.sets * self.heads * self.dim;
        let whole = [self.mu.len(), self.sigma.len(), self.order.len()].iter().all(|&n| n == count);
        if !whole || (self.heads, self.dim) != (keys.heads, keys.dim) || ![1, keys.batch].contains(&self.sets)
        {
            let want = format!("[1 or {}, {}, {}]", keys.batch, keys.heads, keys.dim);
            let have = format!(
                "[{}, {}, {}] of {} means, {} balances, {} places",
                self.sets,
                self.heads,
                self.dim,
                self.mu.len(),
                self.sigma.len(),
                self.order.len()
            );
            return Err(Error::shape("plane tables", want, have));
        }
        let numbers = self.mu.iter().map(|m| m.to_f32()).chain(self.sigma.iter().copied());
        if let Some((index, value)) = numbers.enumerate().find(|(_, x)| !x.is_finite()) {
            return Err(Error::NonFinite { what: "plane tables".to_owned(), index, value });
        }
        if let Some(sigma) = self.sigma.iter().find(|&&sigma| sigma <= 0.0) {
            return Err(Error::range("plane tables' balance", "numbers above 0", sigma));
        }
        for order in self.order.chunks(self.dim.max(1)) {
            let mut sorted = order.to_vec();
            sorted.sort_unstable();
            if sorted.iter().enumerate().any(|(i, &c)| i != usize::from(c)) {
                return Err(Error::range(
                    "plane tables' order",
                    format!("each of {} channels once", self.dim),
                    "another",
                ));
            }
        }
        Ok(())
    }
}

/// Mean key and mean squared distance from it, per channel.
fn key_moments(
    from: &Calibration<'_>,
    options: &PlanesOptions,
    (b, h): (usize, usize),
    tokens: Range<usize>,
    position: impl Fn(usize) -> u32,
) -> (Vec<f64>, Vec<f64>) {
    let dim = from.keys.shape().dim;
    let rope = from.rope.filter(|_| options.centring == Centring::PreRope);
    let rows: Vec<Vec<f64>> = tokens
        .filter_map(|t| {
            let mut row = read(from.keys, b, h, t)?;
            if let Some(rope) = rope {
                unrotate(rope, &mut row, position(t));
            }
            Some(row)
        })
        .collect();
    let mean = |f: &dyn Fn(&[f64], usize) -> f64| -> Vec<f64> {
        let count = rows.len().max(1) as f64;
        (0..dim).map(|c| rows.iter().map(|row| f(row, c)).sum::<f64>() / count).collect()
    };
    let centre = if options.centring == Centring::None { vec![0.0; dim] } else { mean(&|row, c| row[c]) };
    let energy = mean(&|row, c| (row[c] - centre[c]).powi(2));
    (centre, energy)
}

/// Squares of every channel of the finite queries of one KV head, summed token by token.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::qjl) struct QueryEnergy {
    pub(in crate::qjl) sums: Vec<f64>,
    pub(in crate::qjl) count: f64,
}

impl QueryEnergy {
    /// Adds the queries of one token, of these query heads.
    pub(in crate::qjl) fn add(&mut self, queries: &TensorView<'_>, b: usize, heads: Range<usize>, t: usize) {
        self.sums.resize(queries.shape().dim, 0.0);
        for row in heads.filter_map(|h| read(queries, b, h, t)) {
            self.sums.iter_mut().zip(row).for_each(|(sum, q)| *sum += q * q);
            self.count += 1.0;
        }
    }

    /// The mean square of every channel; `None` where there was no query.
    fn mean(&self) -> Option<Vec<f64>> {
        (self.count > 0.0).then(|| self.sums.iter().map(|sum| sum / self.count).collect())
    }
}

fn read(tensor: &TensorView<'_>, b: usize, h: usize, t: usize) -> Option<Vec<f64>> {
    let mut row = vec![0.0; tensor.shape().dim];
    tensor.read(b, h, t, &mut row)?;
    Some(row.into_iter().map(f64::from).collect())
}

fn unrotate(rope: &Rope, row: &mut [f64], position: u32) {
    for ((a, b), frequency) in rope.pairs().zip(rope.inv_freq()) {
        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
        (row[a], row[b]) = (row[a] * cos + row[b] * sin, row[b] * cos - row[a] * sin);
    }
}

/// What is ordered and balanced as one: RoPE pairs, then channels that do not turn, each alone.
fn units(dim: usize, rope: Option<&Rope>) -> Vec<(usize, Option<usize>)> {
    let turned = rope.map_or(0, Rope::rotary_dim);
    let pairs = rope.into_iter().flat_map(Rope::pairs).map(|(a, b)| (a, Some(b)));
    pairs.chain((turned..dim).map(|c| (c, None))).collect()
}

/// Averages an energy over each unit and adds the floor. A head without any energy counts as even.
fn level(mut energy: Vec<f64>, units: &[(usize, Option<usize>)]) -> Vec<f64> {
    for &(a, b) in units {
        let Some(b) = b else { continue };
        let mean = (energy[a] + energy[b]) / 2.0;
        (energy[a], energy[b]) = (mean, mean);
    }
    let mean = energy.iter().sum::<f64>() / energy.len() as f64;
    if mean > 0.0 {
        energy.iter_mut().for_each(|e| *e += FLOOR * mean);
    } else {
        energy.fill(1.0);
    }
    energy
}
