//! Bytes of the whole cache, and the sentence that says why nothing merges.

use super::options::ReportOptions;
use super::types::{
    Bytes, Causes, FoldFigures, LayerFigures, MiniCacheTotals, Pair, PairFigures, QjlTotals, Totals,
};
use crate::error::Result;
use crate::minicache::{Retention, Role, pair_layers_depth};

/// For every layer, whether the plan folds it onto the one below.
pub(super) fn plan(layers: usize, start_frac: f64) -> Result<Vec<bool>> {
    let roles = pair_layers_depth(layers, start_frac, 2)?;
    Ok(roles.iter().map(|layer| layer.role == Role::Merge).collect())
}

impl Pair {
    /// The figures, unless the pair was skipped.
    #[must_use]
    pub fn folded(&self) -> Option<&PairFigures> {
        match self {
            Self::Folded(figures) => Some(figures),
            Self::Skipped(_) => None,
        }
    }

    /// Whether the plan behind the totals pairs these two layers.
    #[must_use]
    pub fn planned(&self) -> bool {
        match self {
            Self::Folded(figures) => figures.planned,
            Self::Skipped(pair) => pair.planned,
        }
    }
}

/// Keys and values of the planned pairs that were folded.
fn planned(pairs: &[Pair]) -> impl Iterator<Item = &FoldFigures> {
    let folded = pairs.iter().filter(|pair| pair.planned()).filter_map(Pair::folded);
    folded.flat_map(|pair| [&pair.keys, &pair.values])
}

pub(super) fn totals(pairs: &[Pair], layers: &[LayerFigures], projection_bytes: u64) -> Totals {
    let before: u64 = layers.iter().map(|layer| layer.bytes).sum();
    let sum = |of: fn(&FoldFigures) -> u64| planned(pairs).map(of).sum::<u64>();
    let alone = before - sum(|fold| fold.bytes_before).min(before);
    let bytes = Bytes::new(before, alone + sum(|fold| fold.bytes_after));
    let rows = sum(|fold| fold.rows);
    let in_plan = || pairs.iter().filter(|pair| pair.planned());
    let minicache = MiniCacheTotals {
        bytes,
        planned_pairs: in_plan().count(),
        skipped_pairs: in_plan().filter(|pair| pair.folded().is_none()).count(),
        rows,
        merged: rows - sum(|fold| fold.retained),
    };
    let coded: u64 = layers.iter().map(|layer| layer.qjl.key_bytes + layer.qjl.value_bytes).sum();
    let qjl = QjlTotals { bytes: Bytes::new(before, coded + projection_bytes), projection_bytes };
    Totals { bytes, minicache, qjl }
}

/// Why nothing merges; `None` where something does.
pub(super) fn verdict(
    pairs: &[Pair],
    totals: &MiniCacheTotals,
    layers: usize,
    options: &ReportOptions,
) -> Option<String> {
    if totals.merged > 0 {
        return None;
    }
    let cause = if totals.bytes.bytes_before == 0 {
        "the capture holds no tokens".to_owned()
    } else if totals.planned_pairs == 0 {
        format!("the plan pairs none of the {}", counted(layers as u64, "layer"))
    } else if totals.skipped_pairs == totals.planned_pairs {
        format!("the {} of the plan cannot be folded", counted(totals.planned_pairs as u64, "pair"))
    } else {
        all_raw(pairs, options)
    };
    Some(format!("nothing to merge: {cause}"))
}

/// Why all rows of the plan stay raw.
fn all_raw(pairs: &[Pair], options: &ReportOptions) -> String {
    let sum = |of: fn(&Causes) -> u64| planned(pairs).map(|fold| of(&fold.causes)).sum::<u64>();
    let (rule, sink) = (sum(|c| c.rule), sum(|c| c.sink));
    let others = [
        (sum(|c| c.raw_page), "because nearly all of their page does"),
        (sum(|c| c.antiparallel), "for want of a common direction"),
        (sum(|c| c.range), "since a number would leave its type's range"),
        (sum(|c| c.non_finite), "since a number is not finite"),
    ];
    let mut parts = Vec::new();
    match options.merge.retention {
        Retention::Cosine(threshold) if others.iter().all(|&(rows, _)| rows == 0) => {
            let outside = match options.merge.sinks {
                0 => String::new(),
                sinks => format!(" outside the first {}", counted(sinks.into(), "token")),
            };
            return format!(
                "no key row and no value row of the planned pairs reaches {threshold}{outside} ({rule} rows below it, \
                 {sink} kept as attention sinks)"
            );
        }
        Retention::Cosine(threshold) => parts.push((rule, format!("below {threshold}"))),
        Retention::Range(_) | Retention::Fraction(_) => {
            parts.push((rule, "by the retention rule".to_owned()))
        }
        Retention::Never => {}
    }
    parts.push((sink, "as attention sinks".to_owned()));
    parts.extend(others.map(|(rows, why)| (rows, why.to_owned())));
    let told = parts.into_iter().filter(|&(rows, _)| rows > 0).map(|(rows, why)| format!("{rows} {why}"));
    format!("all rows of the planned pairs stay raw: {}", told.collect::<Vec<_>>().join(", "))
}

/// `1 layer`, `2 layers`: a count as the verdict writes it.
#[must_use]
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let texts = [0, 1, 2].map(|count| counted(count, "layer"));
        assert_eq!(texts, ["0 layers", "1 layer", "2 layers"]);
    }
}
