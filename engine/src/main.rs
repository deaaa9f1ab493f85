//! A real model whose attention runs through kvfold's caches: Llamas from GGUF files, their weights in f32, so that what differs
//! between two runs is the cache alone.

mod baseline;
mod cache;
mod gguf;
mod model;
mod perplexity;
mod presets;
mod score;
mod tokenizer;

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use gguf::Gguf;
use model::Model;
use tokenizer::Tokenizer;

/// Runs a Llama with its KV cache in kvfold.
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
}

/// What every command takes.
#[derive(Args)]
struct Common {
    /// GGUF file of a Llama; engine/fetch gets one
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Run the caches on the GPU (set VK_DRIVER_FILES or WGPU_ADAPTER_NAME for another than the best)
    #[arg(long)]
    gpu: bool,
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

fn load(path: &Path) -> Result<(Model, Tokenizer)> {
    let mut file = Gguf::open(path)?;
    let tokenizer = Tokenizer::from_gguf(&file)?;
    Ok((Model::from_gguf(&mut file)?, tokenizer))
}

fn perplexity(arguments: &Perplexity) -> Result<()> {
    let (model, tokenizer) = load(&arguments.common.model)?;
    let text = std::fs::read_to_string(&arguments.text);
    let text = text.with_context(|| arguments.text.display().to_string())?;
    let mut tokens = tokenizer.encode(&text)?;
    tokens.truncate(arguments.tokens);
    let request = perplexity::Request {
        tokens: &tokens,
        prefix: arguments.prefix,
        whole_prefix: arguments.whole_prefix,
    };
    let mut out = stdout().lock();
    writeln!(out, "{} tokens, {} of them scored", tokens.len(), request.targets().len())?;
    let scored = |name: &str| {
        let cache = presets::cache(name, &model.config, arguments.common.gpu)?;
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

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Perplexity(arguments) => perplexity(&arguments),
    }
}
