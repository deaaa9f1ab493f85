//! A real model whose attention runs through kvfold's caches: Llamas and Gemma 3 from GGUF files, their weights in f32, so
//! that what differs between two runs is the cache alone.

#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that panics is a test that fails")
)]

mod baseline;
mod cache;
mod generate;
mod gguf;
mod gpu;
mod model;
mod perplexity;
mod presets;
mod score;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvfold::fold::{Budget, Policy};
use kvfold::{Capture, attention};

use gguf::Gguf;
use model::Model;
use presets::Place;
use tokenizer::Tokenizer;

/// Runs a language model with its KV cache in kvfold.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Score a text on caches, each against raw f16: nats a token, top-1 agreement, KL divergence, bytes, tokens per second
    Perplexity(Perplexity),
    /// Stream greedy text, with the cache's memory; then say how far it is that of raw f16
    Generate(Generate),
    /// Choose how to keep every layer from what codes cost on a capture, and print the policy, which `--preset` takes as a file
    Plan(Plan),
}

/// What every command takes.
#[derive(Args)]
struct Common {
    /// GGUF file of a Llama or of Gemma 3; engine/fetch gets one of either
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Run the caches on the GPU; KVFOLD_ADAPTER picks an adapter by part of its name
    #[arg(long)]
    gpu: bool,
    /// How the GPU attends to sign planes
    #[arg(long, value_enum, default_value_t, requires = "gpu")]
    precision: Precision,
}

impl Common {
    fn place(&self) -> Place {
        let precision = match self.precision {
            Precision::Auto => attention::Precision::Auto,
            Precision::Exact => attention::Precision::Exact,
            Precision::Fast => attention::Precision::Fast,
        };
        if self.gpu { Place::Device(precision) } else { Place::Host }
    }
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Precision {
    /// Fast where the device multiplies bytes natively
    #[default]
    Auto,
    /// In f32
    Exact,
    /// Queries and weights in 8 bits
    Fast,
}

#[derive(Args)]
struct Perplexity {
    #[command(flatten)]
    common: Common,
    /// Text file that is scored
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens read before any is scored
    #[arg(long, default_value_t = 1024)]
    prefix: usize,
    /// Tokens of the text that are read, as many as it has where it has fewer
    #[arg(long, default_value_t = 1792)]
    tokens: usize,
    /// Presets, or policies as JSON files; `all` for every preset
    #[arg(long = "preset", value_name = "NAME", default_value = "balanced", value_delimiter = ',')]
    presets: Vec<String>,
    /// Read the prefix in one step, as an engine reads a prompt, so that its own rows see no folded ones. Otherwise the cache is
    /// folded from the first token on, and errors add up over the whole text
    #[arg(long)]
    whole_prefix: bool,
}

#[derive(Args)]
struct Generate {
    #[command(flatten)]
    common: Common,
    /// Text to go on from
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "It is a truth universally acknowledged, that",
        conflicts_with = "prompt_file"
    )]
    prompt: String,
    /// File to take the prompt from instead
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Tokens of the prompt; all of them otherwise
    #[arg(long, value_name = "N")]
    prompt_tokens: Option<usize>,
    /// Tokens to make
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// A preset, or a policy as a JSON file
    #[arg(long, value_name = "NAME", default_value = "balanced")]
    preset: String,
    /// Also generate on raw f16, and compare: how many of its tokens the preset finds likeliest when it reads them, and where
    /// the two texts part
    #[arg(long)]
    compare: bool,
}

#[derive(Args)]
struct Plan {
    /// Capture of the model with queries (docs/capture-format.md)
    #[arg(long, value_name = "FILE")]
    capture: PathBuf,
    /// The ratio to f16 that coded rows must have
    #[arg(long, value_name = "RATIO", required_unless_present = "divergence", conflicts_with = "divergence")]
    ratio: Option<f64>,
    /// The most that any layer's attention weights may diverge, in nats
    #[arg(long, value_name = "NATS")]
    divergence: Option<f64>,
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn load(path: &Path) -> Result<(Model, Tokenizer)> {
    let mut file = Gguf::open(path)?;
    let tokenizer = Tokenizer::from_gguf(&file)?;
    Ok((Model::from_gguf(&mut file)?, tokenizer))
}

fn perplexity(arguments: &Perplexity) -> Result<()> {
    let (model, tokenizer) = load(&arguments.common.model)?;
    let mut tokens = tokenizer.encode(&read_text(&arguments.text)?)?;
    tokens.truncate(arguments.tokens);
    let request = perplexity::Request {
        tokens: &tokens,
        prefix: arguments.prefix,
        whole_prefix: arguments.whole_prefix,
    };
    let mut out = stdout().lock();
    writeln!(out, "{} tokens, {} of them scored", tokens.len(), request.targets().len())?;
    let scored = |name: &str| {
        let cache = presets::cache(name, &model.config, arguments.common.place())?;
        perplexity::score(&model, &request, cache).with_context(|| format!("preset {name}"))
    };
    perplexity::heading(&mut out)?;
    let raw = scored("raw")?;
    perplexity::line(&mut out, "raw", &request, &raw, None)?;
    let all = presets::ALL.map(str::to_owned);
    let names = if arguments.presets == ["all"] { &all[..] } else { &arguments.presets };
    for name in names.iter().filter(|name| *name != "raw") {
        perplexity::line(&mut out, name, &request, &scored(name)?, Some(&raw))?;
    }
    Ok(())
}

fn generate(arguments: &Generate) -> Result<()> {
    let (model, tokenizer) = load(&arguments.common.model)?;
    let text = match &arguments.prompt_file {
        Some(path) => read_text(path)?,
        None => arguments.prompt.clone(),
    };
    let tokens = tokenizer.encode(&text)?;
    let prompt = generate::first(&tokens, arguments.prompt_tokens.unwrap_or(tokens.len()))?;
    let make = |name: &str| presets::cache(name, &model.config, arguments.common.place());
    let mut out = stdout().lock();
    let mut memory = cache::Bytes::default();
    let (count, end) = (arguments.tokens, tokenizer.end);
    let generated =
        generate::generate(&model, make(&arguments.preset)?, prompt, count, end, |token, cache| {
            memory = cache.bytes();
            generate::show(&mut out, &tokenizer, token)
        })?;
    let (read, made) = (prompt.len(), generated.tokens.len());
    writeln!(out, "\n\n{}: {read} tokens read, {made} made; {}", arguments.preset, generated.times())?;
    let cache::Bytes { held, needed, raw } = memory;
    writeln!(
        out,
        "KV cache: {needed} bytes needed, {held} held, for {raw} of f16: ratio {:.3}",
        memory.ratio()
    )?;
    if !arguments.compare {
        return Ok(());
    }
    let raw = generate::generate(&model, make("raw")?, prompt, count, end, |_, _| Ok(()))?;
    let same = generate::agreement(&model, make(&arguments.preset)?, prompt, &raw.tokens)?;
    writeln!(
        out,
        "reading raw f16's text, {same} of its {} tokens are the likeliest here too",
        raw.tokens.len()
    )?;
    match generate::divergence(&generated.tokens, &raw.tokens) {
        Some(token) => writeln!(out, "the two texts part at token {token}")?,
        None => writeln!(out, "the two texts are the same")?,
    }
    writeln!(out, "raw: {}", raw.times())?;
    Ok(())
}

fn plan(arguments: &Plan) -> Result<()> {
    let capture = Capture::open(&arguments.capture)?;
    let budget = match (arguments.ratio, arguments.divergence) {
        (Some(ratio), _) => Budget::Ratio(ratio),
        (None, nats) => Budget::Divergence(nats.unwrap_or_default()),
    };
    writeln!(stdout(), "{}", Policy::measured(&capture, budget)?.to_json())?;
    Ok(())
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Perplexity(arguments) => perplexity(&arguments),
        Command::Generate(arguments) => generate(&arguments),
        Command::Plan(arguments) => plan(&arguments),
    }
}
