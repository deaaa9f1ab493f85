//! `kvfold report --align`.

use kvfold::align::{Aligned as Figures, Alignment};
use kvfold::report::Report;
use serde::Serialize;

use super::tables::{lines, table};
use crate::text::{STRONG, figure};

/// A report and, where it was asked for, the alignment of its layers.
#[derive(Serialize)]
pub(super) struct Aligned<'a> {
    #[serde(flatten)]
    pub(super) report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) alignment: Option<Vec<Alignment>>,
}

/// Mean cosines as they stand and after rotation, pair by pair.
pub(super) fn section(alignment: &[Alignment]) -> String {
    let header =
        ["layers", "keys", "token", "head", "before RoPE", "token", "head", "values", "token", "head"];
    let mut table = table(&header, 1);
    for pair in alignment {
        let cosines = |figures: Option<Figures>| {
            let of = |pick: fn(&Figures) -> Option<f64>| figure(figures.as_ref().and_then(pick));
            [of(|f| f.raw), of(|f| f.token), of(|f| f.head)]
        };
        let mut row = vec![format!("{} {}", pair.lower, pair.upper)];
        row.extend([pair.keys, pair.keys_pre_rope, pair.values].into_iter().flat_map(cosines));
        table.add_row(row);
    }
    let fitted = alignment.iter().find_map(|pair| pair.values).map_or((0, 0), |f| (f.fitted, f.judged));
    format!(
        "\n{STRONG}Alignment{STRONG:#}  mean cosine of neighbouring layers as they stand, and after the best rotation of whole \
         tokens or of every head\n{}\n fitted to {} tokens, judged on the {} after them; with fewer than a rotation has channels the \
         fit says little\n",
        lines(&table),
        fitted.0,
        fitted.1
    )
}
