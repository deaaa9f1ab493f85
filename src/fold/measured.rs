//! A policy chosen from what codes cost on a capture.

use super::pairs::{self, Pair};
use super::policy::{Fold, LayerPolicy, Policy};
use crate::capture::Capture;
use crate::error::{Error, Result};
use crate::qjl::cache::{CacheOptions, Coding};
use crate::report::{LayerMethods, MethodFigures, PlanesFigures};

/// What a policy may take, or may cost.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Budget {
    /// Coded rows take at most `1 / ratio` of their bytes in f16, with as little divergence as can be.
    Ratio(f64),
    /// No layer's attention weights diverge by more nats (KL), in as few bytes as can be.
    Divergence(f64),
}

impl Budget {
    /// What it asked of a choice, behind that.
    pub(super) fn rule(self) -> String {
        match self {
            Self::Divergence(most) => format!(", the fewest within {most}"),
            Self::Ratio(ratio) => format!(", for a ratio of {ratio}"),
        }
    }
}

/// One way of keeping a layer.
#[derive(Clone, Debug, PartialEq)]
struct Candidate {
    fold: Fold,
    name: String,
    /// Bits of a token.
    bits: f64,
    /// KL of the attention weights in nats, no recent token raw.
    divergence: f64,
}

/// One way of keeping a unit: a layer, or two that could be a pair.
#[derive(Clone, Debug, PartialEq)]
struct Way {
    /// Of every layer which of its candidates; nothing where the two are a pair.
    picks: Vec<usize>,
    /// Of a token of all its layers.
    bits: f64,
    /// Sum over layers.
    divergence: f64,
    /// The layer's that diverges most.
    worst: f64,
}

/// Layers that are decided together.
struct Unit {
    first: usize,
    pair: Option<Pair>,
    ways: Vec<Way>,
}

impl Policy {
    /// Chooses among `raw` and the presets of sign planes for every layer, from the attention weights of a capture's queries with
    /// all its rows coded but the sinks: for [`Budget::Divergence`] the smallest within the budget, for [`Budget::Ratio`]
    /// whatever keeps the sum over layers least (greedily along each layer's lower convex hull). Every layer says why. Neighbouring
    /// layers without windows, an even one and the next, may also become a pair of MiniCache, at a cosine of 0.99, where at least
    /// half of their rows merge.
    ///
    /// # Errors
    /// [`Error::Range`] on a budget that cannot be, naming what can; [`Error::MissingTensor`] when a layer has no queries; what
    /// [`report`](crate::report::report()) says of the capture.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn measured(capture: &Capture, budget: Budget) -> Result<Self> {
        use crate::report::{Engine, PlanesRequest, ReportOptions, report_blocking};
        let options = ReportOptions::default().planes(PlanesRequest::default());
        let report = report_blocking(capture, &options, &Engine::Cpu, &mut |_| true)?;
        let figures =
            report.planes.ok_or_else(|| Error::range("report", "figures of sign planes", "none"))?;
        Self::from_figures(&figures, capture, budget)
    }

    /// [`measured`](Self::measured), from figures that a report has of the capture.
    ///
    /// # Errors
    /// As [`measured`](Self::measured).
    pub fn from_figures(figures: &PlanesFigures, capture: &Capture, budget: Budget) -> Result<Self> {
        let channels = |index: usize| {
            let layer = capture.layers.get(index);
            layer.map_or([0, 0], |layer| {
                [layer.key_dim(), layer.value_dim()].map(|dim| dim * layer.kv_heads())
            })
        };
        let layers: Vec<Vec<Candidate>> =
            (figures.layers.iter().map(|layer| candidates(layer, channels(layer.layer))))
                .collect::<Result<_>>()?;
        let units = units(&layers, pairs::measured(capture)?);
        let ways: Vec<&[Way]> = units.iter().map(|unit| unit.ways.as_slice()).collect();
        let mut policy = Self::uniform(Fold::Raw, layers.len());
        for (unit, chosen) in units.iter().zip(choose(&ways, budget)?) {
            let Some(way) = unit.ways.get(chosen) else { continue };
            let places = policy.layers.iter_mut().skip(unit.first);
            if let Some(pair) = unit.pair.as_ref().filter(|_| way.picks.is_empty()) {
                for (place, upper) in places.zip([false, true]) {
                    let reason = Some(pair.reason(upper, budget));
                    *place = LayerPolicy { fold: Fold::Minicache(unit.first), reason };
                }
                policy.minicache = pairs::options();
                continue;
            }
            for ((place, all), &pick) in places.zip(layers.iter().skip(unit.first)).zip(&way.picks) {
                if let Some(candidate) = all.get(pick) {
                    let reason = Some(reason(all, pick, budget));
                    *place = LayerPolicy { fold: candidate.fold, reason };
                }
            }
        }
        Ok(policy)
    }
}

/// Layers by themselves, and two by two where they could be a pair.
fn units(layers: &[Vec<Candidate>], pairs: Vec<Pair>) -> Vec<Unit> {
    let mut pairs = pairs.into_iter().peekable();
    let (mut units, mut first) = (Vec::new(), 0);
    while first < layers.len() {
        let pair = pairs.next_if(|pair| pair.lower == first && first + 1 < layers.len());
        let end = first + 1 + usize::from(pair.is_some());
        let ways = ways(layers.get(first..end).unwrap_or_default(), pair.as_ref());
        units.push(Unit { first, pair, ways });
        first = end;
    }
    units
}

/// The ways of keeping layers together, by falling bits.
fn ways(layers: &[Vec<Candidate>], pair: Option<&Pair>) -> Vec<Way> {
    let mut all = vec![Way { picks: Vec::new(), bits: 0.0, divergence: 0.0, worst: 0.0 }];
    for candidates in layers {
        let with = |way: &Way, (pick, candidate): (usize, &Candidate)| Way {
            picks: way.picks.iter().copied().chain([pick]).collect(),
            bits: way.bits + candidate.bits,
            divergence: way.divergence + candidate.divergence,
            worst: way.worst.max(candidate.divergence),
        };
        let each = all.iter().flat_map(|way| candidates.iter().enumerate().map(move |each| with(way, each)));
        all = each.collect();
    }
    all.extend(pair.map(|pair| {
        let [below, above] = pair.divergences;
        Way { picks: Vec::new(), bits: pair.bits, divergence: below + above, worst: below.max(above) }
    }));
    all.sort_by(|a, b| b.bits.total_cmp(&a.bits));
    all
}

/// The ways of keeping a layer, by falling bits, each with less than the one before.
fn candidates(layer: &LayerMethods, [keys, values]: [usize; 2]) -> Result<Vec<Candidate>> {
    let raw = Candidate {
        fold: Fold::Raw,
        name: "raw".to_owned(),
        bits: 16.0 * (keys + values) as f64,
        divergence: 0.0,
    };
    let mut all = vec![raw];
    for method in &layer.presets {
        let MethodFigures { key_bits_per_channel: Some(key), value_bits_per_channel: Some(value), .. } =
            *method
        else {
            continue;
        };
        let divergence = method.errors_without_recent.weights_kl.ok_or_else(|| Error::MissingTensor {
            tensor: format!("layer.{}.query", layer.layer),
            have: "keys and values, by which attention cannot be measured".to_owned(),
        })?;
        let coding: Coding = CacheOptions::named(&method.name)?.coding;
        let bits = key * keys as f64 + value * values as f64;
        all.push(Candidate { fold: Fold::Coded(coding), name: method.name.clone(), bits, divergence });
    }
    all.sort_by(|a, b| b.bits.total_cmp(&a.bits));
    Ok(all)
}

fn choose(units: &[&[Way]], budget: Budget) -> Result<Vec<usize>> {
    match budget {
        Budget::Divergence(most) if most >= 0.0 => Ok(units.iter().map(|ways| within(ways, most)).collect()),
        Budget::Ratio(ratio) if ratio >= 1.0 && ratio.is_finite() => least(units, ratio),
        Budget::Divergence(most) => Err(Error::range("divergence budget", "at least 0 nats", most)),
        Budget::Ratio(ratio) => Err(Error::range("ratio budget", "a number of at least 1", ratio)),
    }
}

/// The fewest bits whose divergence is within the budget in every layer; raw's is.
fn within(ways: &[Way], most: f64) -> usize {
    ways.iter().rposition(|way| way.worst <= most).unwrap_or(0)
}

/// The choice of the least divergence whose bits are within `1 / ratio` of raw's.
fn least(units: &[&[Way]], ratio: f64) -> Result<Vec<usize>> {
    let mut chosen = vec![0; units.len()];
    let bits_of = |chosen: &[usize]| -> f64 {
        units.iter().zip(chosen).filter_map(|(ways, &at)| ways.get(at)).map(|way| way.bits).sum()
    };
    let raw = bits_of(&chosen);
    while bits_of(&chosen) * ratio > raw {
        let steps = units.iter().zip(&chosen).enumerate();
        let steps =
            steps.filter_map(|(unit, (ways, &at))| next(ways, at).map(|(to, price)| (unit, to, price)));
        let Some((unit, to, _)) = steps.min_by(|a, b| a.2.total_cmp(&b.2)) else {
            let most = raw / bits_of(&chosen);
            return Err(Error::range(
                "ratio budget",
                format!("at most {most:.3}, all layers extreme"),
                ratio,
            ));
        };
        if let Some(place) = chosen.get_mut(unit) {
            *place = to;
        }
    }
    Ok(chosen)
}

/// The next step down a unit's lower convex hull, and its nats for each bit saved.
fn next(ways: &[Way], at: usize) -> Option<(usize, f64)> {
    let from = ways.get(at)?;
    let price = |to: &Way| (to.divergence - from.divergence) / (from.bits - to.bits);
    let below = ways.iter().enumerate().skip(at + 1).filter(|(_, to)| to.bits < from.bits);
    below.map(|(index, to)| (index, price(to))).min_by(|a, b| a.1.total_cmp(&b.1))
}

fn reason(candidates: &[Candidate], chosen: usize, budget: Budget) -> String {
    let (raw, Some(had)) = (candidates.first().map_or(1.0, |raw| raw.bits), candidates.get(chosen)) else {
        return String::new();
    };
    let says = |candidate: &Candidate| {
        let bits = 16.0 * candidate.bits / raw;
        format!("KL {:.4} nats at {bits:.2} bits a channel", candidate.divergence)
    };
    let below = candidates.get(chosen + 1).map(|next| format!("; {} would be {}", next.name, says(next)));
    format!("{}{}{}", says(had), budget.rule(), below.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layer of 16, 8, 4 and 2 bits.
    fn layer(divergences: [f64; 3]) -> Vec<Candidate> {
        let candidate = |(bits, divergence): (f64, f64)| Candidate {
            fold: Fold::Raw,
            name: format!("{bits} bits"),
            bits,
            divergence,
        };
        let all = [16.0, 8.0, 4.0, 2.0].into_iter().zip([0.0].into_iter().chain(divergences));
        all.map(candidate).collect()
    }

    /// What is chosen of layers that are each a unit.
    fn chosen(layers: &[Vec<Candidate>], budget: Budget) -> Result<Vec<usize>> {
        let ways: Vec<Vec<Way>> = layers.chunks(1).map(|layer| ways(layer, None)).collect();
        choose(&ways.iter().map(Vec::as_slice).collect::<Vec<_>>(), budget)
    }

    #[test]
    fn the_fewest_bits_within_a_divergence() {
        let layers = [layer([0.01, 0.1, 1.0]), layer([0.2, 0.3, 0.4]), layer([0.3, 0.05, 0.5])];
        assert_eq!(chosen(&layers, Budget::Divergence(0.1)).unwrap(), [2, 0, 2], "fewer bits may be better");
        assert_eq!(chosen(&layers, Budget::Divergence(0.0)).unwrap(), [0, 0, 0]);
        assert!(chosen(&layers, Budget::Divergence(f64::NAN)).is_err());
    }

    #[test]
    fn the_least_divergence_within_a_ratio() {
        // From 32 bits to 12: the cheap layer goes all the way to 4 before the dear one leaves 8.
        let layers = [layer([0.01, 0.02, 9.0]), layer([0.4, 4.0, 8.0])];
        assert_eq!(chosen(&layers, Budget::Ratio(32.0 / 12.0)).unwrap(), [2, 1]);
        assert_eq!(chosen(&layers, Budget::Ratio(1.0)).unwrap(), [0, 0]);
        assert_eq!(chosen(&layers, Budget::Ratio(8.0)).unwrap(), [3, 3]);
        // 8 bits cost more than 4: nobody stops there.
        assert_eq!(chosen(&[layer([0.3, 0.2, 0.9])], Budget::Ratio(2.0)).unwrap(), [2]);
        let error = chosen(&layers, Budget::Ratio(8.1)).unwrap_err().to_string();
        assert_eq!(error, "ratio budget: wanted at most 8.000, all layers extreme, had 8.1");
        assert!(chosen(&layers, Budget::Ratio(0.5)).is_err());
    }

    #[test]
    fn two_layers_decided_together_fare_as_apart_unless_they_are_a_pair() {
        let layers = [layer([0.01, 0.02, 9.0]), layer([0.4, 4.0, 8.0])];
        let together = ways(&layers, None);
        for budget in
            [1.3, 32.0 / 12.0, 4.0, 8.0].map(Budget::Ratio).into_iter().chain([Budget::Divergence(0.4)])
        {
            let at = choose(&[&together], budget).unwrap()[0];
            assert_eq!(together[at].picks, chosen(&layers, budget).unwrap(), "{budget:?}");
        }
        let way = |bits, divergence| Way { picks: Vec::new(), bits, divergence, worst: divergence };
        let with = |pair: Way| {
            let mut all = together.clone();
            all.push(pair);
            all.sort_by(|a, b| b.bits.total_cmp(&a.bits));
            let at = choose(&[&all], Budget::Ratio(2.0)).unwrap()[0];
            all[at].picks.is_empty()
        };
        assert!(with(way(16.0, 0.01)) && !with(way(16.0, 5.0)), "a pair is chosen where it costs less");
    }

    #[test]
    fn a_choice_says_why() {
        let text = reason(&layer([0.01, 0.1, 1.0]), 1, Budget::Divergence(0.05));
        let want = "KL 0.0100 nats at 8.00 bits a channel, the fewest within 0.05; 4 bits would be KL 0.1000 nats at 4.00 \
                    bits a channel";
        assert_eq!(text, want);
    }
}
