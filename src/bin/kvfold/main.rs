//! The `kvfold` command line: which adapters there are, and what folding a capture saves and costs.

#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::panic, reason = "a test that panics is a test that fails")
)]

mod adapters;
mod arguments;
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
        Command::Adapters(adapters) => adapters::run(&adapters),
        Command::Report(report) => report::run(&report),
        Command::Fold(arguments) => fold::fold(&arguments),
        Command::Unfold(arguments) => fold::unfold(&arguments),
    };
    match output.map(|text| print(&text)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        // The reader has seen enough, as `head` has.
        Ok(Err(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Ok(Err(error)) => fail(&error),
        Err(error) => fail(&error),
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
    // Standard error may be closed; the exit code says it too.
    let _ = writeln!(out, "{style}error:{style:#} {error}");
    ExitCode::FAILURE
}
