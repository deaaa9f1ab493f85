//! `kvfold report`.

mod align;
mod planes;
mod tables;

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvfold::report::{Progress, report_blocking, report_or_cpu_blocking};
use kvfold::{Capture, Result};

use crate::arguments::ReportArguments;
use crate::engine;
use crate::text;

/// The capture that a report without a file measures: SmolLM2-135M-Instruct on 128 tokens of prose.
pub(crate) static SAMPLE: &[u8] = include_bytes!("../../../web/samples/smollm2_prose_s128.safetensors");

/// Measures a capture and gives what is to be printed.
pub(crate) fn run(arguments: &ReportArguments) -> Result<String> {
    let mut options = arguments.options();
    let capture = match &arguments.file {
        Some(path) => Capture::open(path)?,
        None => Capture::from_bytes(SAMPLE)?,
    };
    if let (Some(planes), Some(path)) = (&mut options.planes, arguments.calibrate()) {
        planes.calibration = Some(Arc::new(Capture::open(path)?));
    }
    let choice = engine::choose(&arguments.engine)?;
    let start = Instant::now();
    let bar = bar(arguments.json);
    let mut progress = |Progress { done, of, .. }: Progress| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        true
    };
    let measure = if choice.auto { report_or_cpu_blocking } else { report_blocking };
    let report = measure(&capture, &options, &choice.engine, &mut progress);
    bar.finish_and_clear();
    let mut report = report?;
    report.fallback = report.fallback.or(choice.fallback);
    let alignment = match arguments.align {
        true => Some(kvfold::align::align(&capture, &mut |_| true)?),
        false => None,
    };
    if arguments.json {
        return Ok(text::json(&align::Aligned { report: &report, alignment }));
    }
    let source = arguments.file.as_deref().map_or_else(|| "the bundled sample".into(), Path::to_string_lossy);
    let alignment = alignment.map(|alignment| align::section(&alignment)).unwrap_or_default();
    Ok(tables::report(&report, &source, start.elapsed()) + &alignment)
}

/// A bar on a terminal. Where JSON goes to a pipe, another program has the terminal.
fn bar(json: bool) -> ProgressBar {
    let shown = std::io::stderr().is_terminal() && (!json || std::io::stdout().is_terminal());
    let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} pairs and layers, {elapsed}");
    let bar = ProgressBar::with_draw_target(Some(0), target);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
