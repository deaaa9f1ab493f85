//! `generate`: greedy text on a cache, and how far it is that of raw f16.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::cache::Cache;
use crate::model::Model;
use crate::score::top;
use crate::tokenizer::Tokenizer;

/// A model in the middle of a text, the likeliest next token known.
struct Reader<'a> {
    model: &'a Model,
    cache: Box<dyn Cache>,
    read: usize,
    next: u32,
}

impl<'a> Reader<'a> {
    /// Reads a prompt in one step.
    fn new(model: &'a Model, cache: Box<dyn Cache>, prompt: &[u32]) -> Result<Self> {
        ensure!(!prompt.is_empty(), "prompt: wanted at least 1 token, had none");
        let mut reader = Self { model, cache, read: 0, next: 0 };
        reader.step(prompt)?;
        Ok(reader)
    }

    /// Reads more tokens in one step.
    fn step(&mut self, tokens: &[u32]) -> Result<()> {
        let hidden = self.model.forward(tokens, self.read, self.cache.as_mut())?;
        let last = hidden.narrow(0, tokens.len() - 1, 1)?;
        let logits = self.model.logits(&last)?.flatten_all()?.to_vec1::<f32>()?;
        self.next = top(&logits);
        self.read += tokens.len();
        Ok(())
    }
}

/// What a generation took.
pub(crate) struct Generated {
    pub(crate) tokens: Vec<u32>,
    /// Time of a step of one token, and of the cache in it, means.
    step: Duration,
    cache: Duration,
    /// Time to record one layer's part of a step, where a device does it.
    recording: Option<Duration>,
}

/// Up to `count` likeliest tokens behind a prompt; `show` sees each as it comes.
pub(crate) fn generate(
    model: &Model,
    cache: Box<dyn Cache>,
    prompt: &[u32],
    count: usize,
    end: Option<u32>,
    mut show: impl FnMut(u32, &dyn Cache) -> Result<()>,
) -> Result<Generated> {
    let mut reader = Reader::new(model, cache, prompt)?;
    let (start, spent) = (Instant::now(), reader.cache.spent());
    let recorded = reader.cache.recorded();
    let mut tokens = Vec::new();
    while tokens.len() < count && Some(reader.next) != end {
        let token = reader.next;
        tokens.push(token);
        show(token, reader.cache.as_ref())?;
        reader.step(&[token])?;
    }
    let steps = u32::try_from(tokens.len().max(1))?;
    let layers = u32::try_from(model.layers.len().max(1))?;
    let recording = recorded.zip(reader.cache.recorded());
    Ok(Generated {
        tokens,
        step: start.elapsed() / steps,
        cache: (reader.cache.spent() - spent) / steps,
        recording: recording.map(|(before, after)| (after - before) / steps / layers),
    })
}

impl Generated {
    /// What a step took, in a line.
    pub(crate) fn times(&self) -> String {
        let share = 100.0 * self.cache.as_secs_f64() / self.step.as_secs_f64().max(f64::MIN_POSITIVE);
        let recording = self.recording.map_or_else(String::new, |time| {
            format!(", {:.1} µs of a layer's recording", 1e6 * time.as_secs_f64())
        });
        format!(
            "a step took {:.1} ms, the cache {:.1} ms of it ({share:.0}%){recording}",
            1e3 * self.step.as_secs_f64(),
            1e3 * self.cache.as_secs_f64()
        )
    }
}

/// Of how many tokens of `text`, read one by one behind a prompt, the cache says that they are the likeliest.
pub(crate) fn agreement(model: &Model, cache: Box<dyn Cache>, prompt: &[u32], text: &[u32]) -> Result<usize> {
    let mut reader = Reader::new(model, cache, prompt)?;
    let mut same = 0;
    for &token in text {
        same += usize::from(reader.next == token);
        reader.step(&[token])?;
    }
    Ok(same)
}

/// Where two texts part, counted from 0.
pub(crate) fn divergence(a: &[u32], b: &[u32]) -> Option<usize> {
    let parted = a.iter().zip(b).position(|(a, b)| a != b);
    parted.or_else(|| (a.len() != b.len()).then(|| a.len().min(b.len())))
}

/// Writes a token's bytes; characters that tokens share come out whole once all their bytes are there.
pub(crate) fn show(out: &mut impl Write, tokenizer: &Tokenizer, token: u32) -> Result<()> {
    out.write_all(&tokenizer.bytes(token))?;
    Ok(out.flush()?)
}

/// The first tokens of a text.
pub(crate) fn first(tokens: &[u32], count: usize) -> Result<&[u32]> {
    tokens.get(..count).ok_or_else(|| anyhow!("prompt: wanted {count} tokens, had {}", tokens.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_part_where_they_differ_or_one_ends() {
        assert_eq!(divergence(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(divergence(&[1, 2, 3], &[1, 4, 3]), Some(1));
        assert_eq!(divergence(&[1, 2], &[1, 2, 3]), Some(2));
    }
}
