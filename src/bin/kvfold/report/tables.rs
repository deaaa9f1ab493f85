//! A report as people read it.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::{CellAlignment, ColumnConstraint, Table};
use kvfold::minicache::{Mode, Retention};
use kvfold::report::{FoldFigures, KeyFigures, LayerFigures, OptionsEcho, Pair, Report, counted};

use super::planes;
use crate::text::{NOTICE, STRONG, bytes, figure, plain};

/// The whole report.
pub(crate) fn report(report: &Report, source: &str, took: Duration) -> String {
    let mut text = header(report, source);
    let mut section = |title: &str, rest: &str, body: &str| {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n{STRONG}{title}{STRONG:#}  {rest}\n{body}\n");
    };
    if !report.pairs.is_empty() {
        section("MiniCache", &folding(&report.options), &pairs(&report.pairs));
    }
    section("QJL", &sketching(report), &layers(&report.layers));
    if let Some(figures) = &report.planes {
        let tables = [Some(planes::methods(figures)), planes::layers(figures)];
        section(
            "Presets",
            &planes::keeping(figures),
            tables.map(Option::unwrap_or_default).join("\n").trim_end(),
        );
    }
    section("Totals", &format!("in {:.1} s", took.as_secs_f64()), &totals(report));
    if let Some(verdict) = &report.verdict {
        let _ = writeln!(text, "\n{NOTICE}{verdict}{NOTICE:#}");
    }
    text
}

fn header(report: &Report, source: &str) -> String {
    let on = match &report.adapter {
        None => "the CPU twins".to_owned(),
        Some(adapter) => {
            let software = if report.software { ", software" } else { "" };
            format!("{} ({}{software})", plain(adapter), report.backend)
        }
    };
    let why = report.fallback.as_ref().map(|why| format!(" ({})", plain(why))).unwrap_or_default();
    let model = report.model.as_ref().map(|model| format!(", {}", plain(model))).unwrap_or_default();
    let source = plain(source);
    let shape = report.shape;
    let sizes = [
        counted(shape.layers as u64, "layer"),
        counted(shape.batch as u64, "sequence"),
        counted(shape.tokens as u64, "token"),
        bytes(report.totals.bytes.bytes_before),
    ];
    format!(
        "{STRONG}kvfold {}{STRONG:#} on {on}{why}\n{source}{model}: {}\n",
        report.version,
        sizes.join(", ")
    )
}

/// The options of MiniCache in words.
fn folding(options: &OptionsEcho) -> String {
    let mode = match options.mode {
        Mode::Shared => "neighbouring layers on shared directions",
        Mode::Anchor => "upper layers on the lower layer's rows",
        Mode::Compat => "the original's numbers, which save nothing",
    };
    let raw = match options.retention {
        Retention::Cosine(x) => format!("raw below cosine {x}"),
        Retention::Range(x) => format!("raw in the lowest {x} of the cosines' range"),
        Retention::Fraction(x) => format!("the least similar {x} raw"),
        Retention::Never => "none raw by rule".to_owned(),
    };
    let arc = if options.mode == Mode::Anchor { String::new() } else { format!(", t {}", options.slerp_t) };
    let coded = options.direction_bits.map(|bits| format!(" in {} a channel", counted(bits.into(), "bit")));
    let coded = coded.unwrap_or_default();
    format!("{mode}{coded}{arc}, {raw}, first {} raw", counted(options.sinks.into(), "token"))
}

/// The options of QJL in words.
fn sketching(report: &Report) -> String {
    let options = &report.options;
    let mut dims: Vec<usize> = report.layers.iter().map(|layer| layer.qjl.sketch_dim).collect();
    dims.sort_unstable();
    dims.dedup();
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!(
        "keys as {} signs of a {} projection and a scalar ({}), values in 8 bits",
        dims.join(" or "),
        options.projection,
        options.key_scale
    )
}

/// A table without frames whose numbers stand flush right.
pub(super) fn table(header: &[&str], left: usize) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.iter().copied());
    for (index, column) in table.column_iter_mut().enumerate() {
        if index >= left {
            column.set_cell_alignment(CellAlignment::Right);
        }
        column.set_constraint(ColumnConstraint::ContentWidth);
    }
    table
}

/// A table's lines without the blanks at their ends.
pub(super) fn lines(table: &Table) -> String {
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn pairs(pairs: &[Pair]) -> String {
    let header = ["layers", "", "cosine", "p5", "p95", "retained", "rows", "rel. error", "before", "after"];
    let mut table = table(&header, 2);
    let mut skipped = Vec::new();
    for pair in pairs {
        match pair {
            Pair::Folded(pair) => {
                let layers = format!("{}/{}", pair.lower, pair.upper);
                table.add_row(fold_row(layers, "K", &pair.keys));
                table.add_row(fold_row(String::new(), "V", &pair.values));
            }
            Pair::Skipped(pair) => {
                skipped.push(format!(" {}/{} skipped: {}", pair.lower, pair.upper, pair.skipped));
            }
        }
    }
    let mut text = if skipped.len() < pairs.len() { vec![lines(&table)] } else { Vec::new() };
    text.extend(skipped);
    text.join("\n")
}

fn fold_row(layers: String, kind: &str, fold: &FoldFigures) -> [String; 10] {
    [
        layers,
        kind.to_owned(),
        figure(fold.cosine.mean),
        figure(fold.cosine.p5),
        figure(fold.cosine.p95),
        fold.retained.to_string(),
        fold.rows.to_string(),
        figure(fold.relative_error),
        bytes(fold.bytes_before),
        bytes(fold.bytes_after),
    ]
}

fn layers(layers: &[LayerFigures]) -> String {
    let header = [
        "layer",
        "",
        "bits/channel",
        "score corr.",
        "output error",
        "int8 corr.",
        "error",
        "int4 corr.",
        "error",
    ];
    let mut table = table(&header, 2);
    for layer in layers {
        let [int8, int4] = [layer.baselines.int8, layer.baselines.int4];
        let mut row =
            vec![layer.layer.to_string(), heads(layer), figure(layer.qjl.figures.key_bits_per_channel)];
        for KeyFigures { score_correlation, output_relative_error, .. } in [layer.qjl.figures, int8, int4] {
            row.extend([figure(score_correlation), figure(output_relative_error)]);
        }
        table.add_row(row);
    }
    let bits = |of: fn(&LayerFigures) -> Option<f64>| figure(layers.iter().find_map(of));
    let int8 = bits(|layer| layer.baselines.int8.key_bits_per_channel);
    let int4 = bits(|layer| layer.baselines.int4.key_bits_per_channel);
    format!("{}\n int8 keys take {int8} bits per channel, int4 keys {int4}", lines(&table))
}

/// `9/3 heads of 64`: query heads, KV heads, channels of keys and, where they differ, of values.
fn heads(layer: &LayerFigures) -> String {
    let shape = layer.shape;
    let queries = shape.query_heads.map(|heads| format!("{heads}/")).unwrap_or_default();
    let values =
        if shape.value_dim == shape.key_dim { String::new() } else { format!("/{}", shape.value_dim) };
    format!("{queries}{} heads of {}{values}", shape.kv_heads, shape.key_dim)
}

fn totals(report: &Report) -> String {
    let totals = &report.totals;
    let (minicache, qjl) = (&totals.minicache, &totals.qjl);
    let mut table = table(&["", "before", "after", "ratio", ""], 1);
    let plan = format!(
        "{} from {} of the depth, {} of {} rows merged",
        counted(minicache.planned_pairs as u64, "pair"),
        report.options.start_frac,
        minicache.merged,
        minicache.rows
    );
    let projection = format!("all layers, {} of projection included", bytes(qjl.projection_bytes));
    for (name, sizes, what) in [("MiniCache", minicache.bytes, plan), ("QJL", qjl.bytes, projection)] {
        let ratio = sizes.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.4}"));
        table.add_row([name.to_owned(), bytes(sizes.bytes_before), bytes(sizes.bytes_after), ratio, what]);
    }
    if let Some(column) = table.column_mut(4) {
        column.set_cell_alignment(CellAlignment::Left);
    }
    lines(&table)
}
