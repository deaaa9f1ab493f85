//! `perplexity`: a text scored on several caches, each against raw f16.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::cache::{Bytes, Cache};
use crate::model::Model;
use crate::score::{Difference, Mean, Predictions, step_ends};

/// What is scored.
pub(crate) struct Request<'a> {
    pub(crate) tokens: &'a [u32],
    /// Tokens that are read before any is scored.
    pub(crate) prefix: usize,
    /// Whether the prefix is one step.
    pub(crate) whole_prefix: bool,
}

impl Request<'_> {
    /// The tokens scored: those behind the first after the prefix, which a cache that holds the prefix predicts.
    pub(crate) fn targets(&self) -> &[u32] {
        self.tokens.get(self.prefix + 1..).unwrap_or_default()
    }
}

/// A text on one cache.
pub(crate) struct Scored {
    pub(crate) predictions: Predictions,
    pub(crate) bytes: Bytes,
    /// Of all steps, and of the cache in them.
    pub(crate) took: Duration,
    pub(crate) spent: Duration,
}

/// Reads a text on a cache.
pub(crate) fn score(model: &Model, request: &Request<'_>, mut cache: Box<dyn Cache>) -> Result<Scored> {
    let Request { tokens, prefix, .. } = *request;
    ensure!(
        (1..tokens.len().saturating_sub(2)).contains(&prefix),
        "prefix: wanted 1 to {} of the text's {} tokens, had {prefix}",
        tokens.len().saturating_sub(3),
        tokens.len()
    );
    let mut predictions = Predictions::default();
    let (start, mut from) = (Instant::now(), 0);
    // The last token predicts nothing that is there.
    for end in step_ends(tokens.len() - 1, prefix, request.whole_prefix) {
        let hidden = model.forward(tokens.get(from..end).unwrap_or_default(), from, cache.as_mut())?;
        let first = from.max(prefix);
        if first < end {
            let rows = model.logits(&hidden.narrow(0, first - from, end - first)?)?.to_vec2::<f32>()?;
            rows.iter().for_each(|row| predictions.push(row));
        }
        from = end;
    }
    Ok(Scored { predictions, bytes: cache.bytes(), took: start.elapsed(), spent: cache.spent() })
}

/// The heading of the table that [`line`] makes lines of.
pub(crate) fn heading(out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "{:<23} {:>16} {:>9} {:>7} {:>15} {:>11} {:>7} {:>13} {:>6}",
        "preset", "nats over raw", "ppl", "top-1", "KL", "KV bytes", "ratio", "cache tok/s", "share"
    )?;
    Ok(())
}

/// A preset's line.
pub(crate) fn line(
    out: &mut impl Write,
    name: &str,
    request: &Request<'_>,
    scored: &Scored,
    raw: Option<&Scored>,
) -> Result<()> {
    let nats = Mean::of(&scored.predictions.nats(request.targets())?).mean;
    let read = (request.tokens.len() - 1) as f64;
    let speed = read / scored.spent.as_secs_f64();
    let share = 100.0 * scored.spent.as_secs_f64() / scored.took.as_secs_f64();
    let (over, top1, kl) = match raw {
        None => (format!("{nats:.4} in all"), "-".to_owned(), "-".to_owned()),
        Some(raw) => {
            let d = Difference::of(&scored.predictions, &raw.predictions, request.targets())?;
            let kl = format!("{:.4} ±{:.4}", d.divergence.mean, d.divergence.error);
            (format!("{:+.4} ±{:.4}", d.nats.mean, d.nats.error), format!("{:.1}%", 100.0 * d.top1), kl)
        }
    };
    writeln!(
        out,
        "{name:<23} {over:>16} {:>9.3} {top1:>7} {kl:>15} {:>11} {:>7.4} {speed:>13.1} {share:>5.0}%",
        nats.exp(),
        scored.bytes.needed,
        scored.bytes.ratio()
    )?;
    out.flush()?;
    Ok(())
}
