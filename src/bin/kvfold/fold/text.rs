//! `fold` and `unfold` for people.

use std::fmt::Write;
use std::path::Path;

use comfy_table::{CellAlignment, Table};
use kvfold::qjl::planes::Centring;
use kvfold::store::FoldOptions;

use super::Output;
use crate::text::{NOTICE, STRONG, bytes, figure};

/// What `fold` did. `asked` and `took` are the options asked for and those that took effect.
pub(super) fn folded(output: &Output, asked: &FoldOptions, took: &FoldOptions, path: &Path) -> String {
    let mut text = String::new();
    let report = &output.report;
    sizes(&mut text, output);
    line(
        &mut text,
        format_args!(
            "keys {} and values {} relative error",
            figure(report.key_relative_error),
            figure(report.value_relative_error)
        ),
    );
    if let (FoldOptions::Coded(asked), FoldOptions::Coded(took)) = (asked, took)
        && asked.centring() != took.centring()
    {
        let centred = match took.centring() {
            Centring::BlockMean(block) => format!("centred on the means of blocks of {block} tokens"),
            _ => "not centred".to_owned(),
        };
        line(
            &mut text,
            format_args!(
                "{NOTICE}note:{NOTICE:#} the capture does not describe its RoPE: keys are {centred}"
            ),
        );
    }
    line(&mut text, format_args!("\n{}", layers(output)));
    line(
        &mut text,
        format_args!(
            "{} holds {} of them, {} kept as they were, and a header of {}",
            path.display(),
            bytes(report.bytes_after),
            bytes(report.kept_bytes),
            bytes(output.header_bytes)
        ),
    );
    text
}

/// What `unfold` did.
pub(super) fn unfolded(output: &Output, path: &Path) -> String {
    let mut text = String::new();
    sizes(&mut text, output);
    let size = bytes(output.capture_bytes.unwrap_or(0));
    line(&mut text, format_args!("{} holds the restored capture, {size}", path.display()));
    text
}

fn sizes(text: &mut String, output: &Output) {
    let report = &output.report;
    let (before, after) = (bytes(report.bytes_before), bytes(report.bytes_after));
    // Unrounded: a ratio of 0.999 must not read as 1.
    let ratio = report.ratio.map_or_else(|| "-".to_owned(), |ratio| ratio.to_string());
    line(
        text,
        format_args!(
            "{STRONG}{}{STRONG:#}: keys and values of {before} in {after}, ratio {ratio}",
            report.method
        ),
    );
}

fn layers(output: &Output) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["layer", "with", "before", "after", "ratio", "keys", "values"]);
    for layer in &output.report.layers {
        table.add_row([
            layer.layer.to_string(),
            layer.pair.map_or_else(|| "-".to_owned(), |pair| pair.to_string()),
            bytes(layer.bytes_before),
            bytes(layer.bytes_after),
            figure(layer.ratio),
            figure(layer.key_relative_error),
            figure(layer.value_relative_error),
        ]);
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn line(text: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{what}");
}
