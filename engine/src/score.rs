//! How a text fares on a cache: nats of every scored token, and how they differ from those of another cache.

use anyhow::{Result, anyhow, ensure};

/// Tokens that a cache's pages hold: steps end where pages may be folded.
const PAGE: usize = 32;
/// Sinks of the presets: coded pages begin behind them, MiniCache's with the first token.
const SINKS: usize = 4;

/// Where the steps of a text of `tokens` tokens end. Pages are folded at the end of a step, so steps that end wherever a page can
/// be whole give every token the very cache that it would see were they taken one by one. With `whole` the prefix is one step,
/// as an engine takes a prompt.
pub(crate) fn step_ends(tokens: usize, prefix: usize, whole: bool) -> Vec<usize> {
    let folds = |&end: &usize| end.is_multiple_of(PAGE) || end % PAGE == SINKS;
    let ends = (1..tokens).filter(folds).filter(|&end| !whole || end > prefix);
    let mut ends: Vec<usize> = ends.chain([prefix, tokens]).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// Log probabilities of the vocabulary at every scored position.
#[derive(Default)]
pub(crate) struct Predictions {
    width: usize,
    log_probs: Vec<f32>,
}

impl Predictions {
    /// Adds a row of logits.
    pub(crate) fn push(&mut self, logits: &[f32]) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        self.width = logits.len();
        self.log_probs.extend(logits.iter().map(|&x| (f64::from(x) - log_sum) as f32));
    }

    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.log_probs.chunks_exact(self.width.max(1))
    }

    /// Nats of the tokens that came.
    pub(crate) fn nats(&self, targets: &[u32]) -> Result<Vec<f64>> {
        ensure!(
            self.rows().len() == targets.len(),
            "wanted {} scored tokens, had {}",
            targets.len(),
            self.rows().len()
        );
        let each =
            self.rows().zip(targets).map(|(row, &target)| row.get(target as usize).map(|&x| -f64::from(x)));
        each.map(|nats| nats.ok_or_else(|| anyhow!("a token outside the vocabulary"))).collect()
    }
}

/// The likeliest token of a row, the first of equals.
pub(crate) fn top(row: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, &x) in (0..).zip(row) {
        if x > best.1 {
            best = (index, x);
        }
    }
    best.0
}

/// A mean with its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mean {
    pub(crate) mean: f64,
    pub(crate) error: f64,
}

impl Mean {
    /// Of numbers taken as independent.
    pub(crate) fn of(numbers: &[f64]) -> Self {
        let n = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / n;
        let squares: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        Self { mean, error: (squares / (n - 1.0) / n).sqrt() }
    }
}

/// What a cache changed, against another on the same text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Difference {
    /// Nats more per token, paired.
    pub(crate) nats: Mean,
    /// Share of positions whose likeliest token stays the same.
    pub(crate) top1: f64,
    /// KL divergence from the other's predictions.
    pub(crate) divergence: Mean,
}

impl Difference {
    pub(crate) fn of(had: &Predictions, raw: &Predictions, targets: &[u32]) -> Result<Self> {
        let (own, other) = (had.nats(targets)?, raw.nats(targets)?);
        let nats: Vec<f64> = own.iter().zip(&other).map(|(had, raw)| had - raw).collect();
        let same = had.rows().zip(raw.rows()).filter(|(had, raw)| top(had) == top(raw)).count();
        let divergence: Vec<f64> = had.rows().zip(raw.rows()).map(|(had, raw)| kl(raw, had)).collect();
        Ok(Self {
            nats: Mean::of(&nats),
            top1: same as f64 / targets.len() as f64,
            divergence: Mean::of(&divergence),
        })
    }
}

/// `KL(p || q)` of log probabilities.
fn kl(p: &[f32], q: &[f32]) -> f64 {
    p.iter().zip(q).map(|(&p, &q)| f64::from(p).exp() * (f64::from(p) - f64::from(q))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_end_where_pages_can_be_folded() {
        assert_eq!(step_ends(70, 40, false), [4, 32, 36, 40, 64, 68, 70]);
        assert_eq!(step_ends(70, 40, true), [40, 64, 68, 70]);
        assert_eq!(step_ends(33, 32, true), [32, 33]);
    }

    #[test]
    fn two_tokens_by_hand() {
        // Probabilities 3/4 and 1/4 against 1/2 and 1/2.
        let rows = |logits: &[f32]| {
            let mut rows = Predictions::default();
            logits.chunks(2).for_each(|row| rows.push(row));
            rows
        };
        let (three, one) = (3.0f32.ln() + 5.0, 5.0);
        let (had, raw) = (rows(&[three, one, one, three]), rows(&[1.0, 1.0, 2.0, 2.0]));
        let difference = Difference::of(&had, &raw, &[0, 0]).unwrap();
        // -ln(3/4) + ln(1/2) and -ln(1/4) + ln(1/2).
        let [low, high] = [-(1.5f64.ln()), 2.0f64.ln()];
        assert!((difference.nats.mean - (low + high) / 2.0).abs() < 1e-6);
        assert!(
            (difference.nats.error - (high - low) / 2.0).abs() < 1e-6,
            "two numbers: half their distance"
        );
        assert_eq!(difference.top1, 0.5, "the first of equals counts as the likeliest");
        let want = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        assert!((difference.divergence.mean - want).abs() < 1e-6);
        assert!(had.nats(&[0]).is_err() && had.nats(&[0, 2]).is_err());
    }
}
