//! A policy chosen from what codes cost on a capture.

use super::policy::{Fold, Policy};
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

impl Policy {
    /// Chooses among `raw` and the presets of sign planes for every layer, from the attention weights of a capture's queries with
    /// all its rows coded but the sinks: for [`Budget::Divergence`] the smallest within the budget, for [`Budget::Ratio`]
    /// whatever keeps the sum over layers least (greedily along each layer's lower convex hull). Every layer says why. Pairs of
    /// MiniCache are not among the choices: [`pair_layers_measured`](crate::minicache::pair_layers_measured) says which
    /// would merge.
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
        let chosen = choose(&layers, budget)?;
        let mut policy = Self::uniform(Fold::Raw, layers.len());
        for ((place, candidates), chosen) in policy.layers.iter_mut().zip(&layers).zip(chosen) {
            if let Some(candidate) = candidates.get(chosen) {
                place.fold = candidate.fold;
                place.reason = Some(reason(candidates, chosen, budget));
            }
        }
        Ok(policy)
    }
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

fn choose(layers: &[Vec<Candidate>], budget: Budget) -> Result<Vec<usize>> {
    match budget {
        Budget::Divergence(most) if most >= 0.0 => Ok(layers.iter().map(|all| within(all, most)).collect()),
        Budget::Ratio(ratio) if ratio >= 1.0 && ratio.is_finite() => least(layers, ratio),
        Budget::Divergence(most) => Err(Error::range("divergence budget", "at least 0 nats", most)),
        Budget::Ratio(ratio) => Err(Error::range("ratio budget", "a number of at least 1", ratio)),
    }
}

/// The fewest bits of a layer whose divergence is within the budget; raw's is.
fn within(candidates: &[Candidate], most: f64) -> usize {
    candidates.iter().rposition(|candidate| candidate.divergence <= most).unwrap_or(0)
}

/// The choice of the least divergence whose bits are within `1 / ratio` of raw's.
fn least(layers: &[Vec<Candidate>], ratio: f64) -> Result<Vec<usize>> {
    let mut chosen = vec![0; layers.len()];
    let bits_of = |chosen: &[usize]| -> f64 {
        layers.iter().zip(chosen).filter_map(|(all, &at)| all.get(at)).map(|candidate| candidate.bits).sum()
    };
    let raw = bits_of(&chosen);
    while bits_of(&chosen) * ratio > raw {
        let steps = layers.iter().zip(&chosen).enumerate();
        let steps =
            steps.filter_map(|(layer, (all, &at))| next(all, at).map(|(to, price)| (layer, to, price)));
        let Some((layer, to, _)) = steps.min_by(|a, b| a.2.total_cmp(&b.2)) else {
            let most = raw / bits_of(&chosen);
            return Err(Error::range(
                "ratio budget",
                format!("at most {most:.3}, all layers extreme"),
                ratio,
            ));
        };
        if let Some(place) = chosen.get_mut(layer) {
            *place = to;
        }
    }
    Ok(chosen)
}

/// The next step down a layer's lower convex hull, and its nats for each bit saved.
fn next(candidates: &[Candidate], at: usize) -> Option<(usize, f64)> {
    let from = candidates.get(at)?;
    let price = |to: &Candidate| (to.divergence - from.divergence) / (from.bits - to.bits);
    let below = candidates.iter().enumerate().skip(at + 1).filter(|(_, to)| to.bits < from.bits);
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
    let rule = match budget {
        Budget::Divergence(most) => format!(", the fewest within {most}"),
        Budget::Ratio(ratio) => format!(", for a ratio of {ratio}"),
    };
    format!("{}{rule}{}", says(had), below.unwrap_or_default())
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

    #[test]
    fn the_fewest_bits_within_a_divergence() {
        let layers = [layer([0.01, 0.1, 1.0]), layer([0.2, 0.3, 0.4]), layer([0.3, 0.05, 0.5])];
        assert_eq!(choose(&layers, Budget::Divergence(0.1)).unwrap(), [2, 0, 2], "fewer bits may be better");
        assert_eq!(choose(&layers, Budget::Divergence(0.0)).unwrap(), [0, 0, 0]);
        assert!(choose(&layers, Budget::Divergence(f64::NAN)).is_err());
    }

    #[test]
    fn the_least_divergence_within_a_ratio() {
        // From 32 bits to 12: the cheap layer goes all the way to 4 before the dear one leaves 8.
        let layers = [layer([0.01, 0.02, 9.0]), layer([0.4, 4.0, 8.0])];
        assert_eq!(choose(&layers, Budget::Ratio(32.0 / 12.0)).unwrap(), [2, 1]);
        assert_eq!(choose(&layers, Budget::Ratio(1.0)).unwrap(), [0, 0]);
        assert_eq!(choose(&layers, Budget::Ratio(8.0)).unwrap(), [3, 3]);
        // 8 bits cost more than 4: nobody stops there.
        assert_eq!(choose(&[layer([0.3, 0.2, 0.9])], Budget::Ratio(2.0)).unwrap(), [2]);
        let error = choose(&layers, Budget::Ratio(8.1)).unwrap_err().to_string();
        assert_eq!(error, "ratio budget: wanted at most 8.000, all layers extreme, had 8.1");
        assert!(choose(&layers, Budget::Ratio(0.5)).is_err());
    }

    #[test]
    fn a_choice_says_why() {
        let text = reason(&layer([0.01, 0.1, 1.0]), 1, Budget::Divergence(0.05));
        let want = "KL 0.0100 nats at 8.00 bits a channel, the fewest within 0.05; 4 bits would be KL 0.1000 nats at 4.00 \
                    bits a channel";
        assert_eq!(text, want);
    }
}
