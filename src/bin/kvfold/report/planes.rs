//! Presets and their rivals as people read them.

use kvfold::qjl::planes::Centring;
use kvfold::report::{AttentionErrors, MethodFigures, PlanesFigures, TableSource};

use super::tables::{lines, table};
use kvfold::report::counted;

use crate::text::{bytes, figure};

/// What stays raw, what keys are coded against, and where that came from.
pub(super) fn keeping(figures: &PlanesFigures) -> String {
    let source = match figures.tables {
        TableSource::Capture => "of this capture's first tokens",
        TableSource::File => "of another capture",
    };
    let centre = match figures.centring {
        Centring::BlockMean(tokens) => {
            format!("RoPE unknown: sign planes on means of blocks of {tokens} tokens")
        }
        _ => "planes and qjl-orth on means before RoPE".to_owned(),
    };
    let (sinks, recent) = (figures.sinks, figures.recent);
    format!(
        "first {} and last {recent} raw under every method, {centre}, tables {source}",
        counted(sinks.into(), "token")
    )
}

/// One row for each method, and how much of the capture was coded.
pub(super) fn methods(figures: &PlanesFigures) -> String {
    let header = [
        "",
        "key bits",
        "value bits",
        "bytes",
        "vs f16",
        "output error",
        "KL",
        "top-1",
        "no window: error",
        "KL",
        "top-1",
    ];
    let mut table = table(&header, 1);
    let mut rows: Vec<_> = figures.presets.iter().chain(&figures.rivals).map(row).collect();
    // The original QJL is a preset and a rival: one row where both came to the same.
    rows.dedup();
    table.add_rows(rows);
    let (coded, tokens) = (figures.coded_tokens, figures.tokens);
    let mut text = format!("{}\n {coded} of {} are coded", lines(&table), counted(tokens, "token"));
    if 2 * coded < tokens {
        text += ": most stay raw on a capture this short, so judge by bits and by the figures without a window,\n \
                 where sinks alone are raw and all recent tokens are coded (--recent 0)";
    }
    text
}

/// Every layer under the presets, without a window; nothing where there are no queries.
pub(super) fn layers(figures: &PlanesFigures) -> Option<String> {
    let measured = |method: &MethodFigures| method.errors_without_recent.weights_kl.is_some();
    if !figures.presets.iter().any(measured) {
        return None;
    }
    let mut header = vec!["layer".to_owned()];
    for preset in &figures.presets {
        header.extend([format!("{}: error", preset.name), "KL".to_owned(), "top-1".to_owned()]);
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = table(&header, 1);
    for layer in &figures.layers {
        let mut row = vec![layer.layer.to_string()];
        layer.presets.iter().for_each(|method| row.extend(errors(&method.errors_without_recent)));
        table.add_row(row);
    }
    Some(format!(" without a window, layer by layer\n{}", lines(&table)))
}

fn errors(errors: &AttentionErrors) -> [String; 3] {
    let kl = errors.weights_kl.map_or_else(|| "-".to_owned(), |kl| format!("{kl:.4}"));
    [figure(errors.output_relative_error), kl, figure(errors.top1_agreement)]
}

fn row(method: &MethodFigures) -> Vec<String> {
    let mut row = vec![
        method.name.clone(),
        figure(method.key_bits_per_channel),
        figure(method.value_bits_per_channel),
        bytes(method.bytes),
        figure(method.ratio),
    ];
    row.extend(errors(&method.errors));
    row.extend(errors(&method.errors_without_recent));
    row
}
