//! The `kvfold` command line: which adapters there are, and what folding a capture saves and costs.

#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::panic, reason = "a test that panics is a test that fails")
)]

mod adapters;
mod arguments;
mod doctor;
mod engine;
mod fold;
mod report;
mod text;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anstream::AutoStream;
use clap::Parser;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = match arguments.command {
        Command::Adapters(adapters) => adapters::run(&adapters).map(Outcome::from),
        Command::Doctor(doctor) => doctor::run(&doctor),
        Command::Report(report) => report::run(&report).map(Outcome::from),
        Command::Fold(arguments) => fold::fold(&arguments).map(Outcome::from),
        Command::Unfold(arguments) => fold::unfold(&arguments).map(Outcome::from),
    };
    let Outcome { text, failed } = match output {
        Ok(outcome) => outcome,
        Err(error) => return fail(&error),
    };
    match print(&text) {
        // The reader has seen enough, as `head` has.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => fail(&error),
        _ if failed => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// What a command prints, and whether what it found is a failure.
struct Outcome {
    text: String,
    failed: bool,
}

impl From<String> for Outcome {
    fn from(text: String) -> Self {
        Self { text, failed: false }
    }
}

/// Prints to standard output; colours only where a terminal shows them and nothing forbids them.
fn print(text: &str) -> std::io::Result<()> {
    let choice = AutoStream::choice(&std::io::stdout());
    let mut out = AutoStream::new(std::io::stdout().lock(), choice);
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn fail(error: &dyn std::fmt::Display) -> ExitCode {
    let choice = AutoStream::choice(&std::io::stderr());
    let mut out = AutoStream::new(std::io::stderr().lock(), choice);
    let style = text::ERROR;
    let error = text::plain(&error.to_string());
    // Standard error may be closed; the exit code says it too.
    let _ = writeln!(out, "{style}error:{style:#} {error}");
    ExitCode::FAILURE
}
