//! Keys and values of a real model, SmolLM2-135M over 128 tokens of prose (web/samples).

use kvfold::minicache::{MergeOptions, Row, cpu};
use kvfold::{Capture, Tensor};

pub(crate) fn sample() -> Capture {
    let path = format!("{}/web/samples/smollm2_prose_s128.safetensors", env!("CARGO_MANIFEST_DIR"));
    Capture::open(path).unwrap()
}

/// Neighbouring layers' keys, or values.
pub(crate) fn neighbours(capture: &Capture, values: bool) -> Vec<[&Tensor; 2]> {
    let tensor =
        |layer: usize| if values { &capture.layers[layer].values } else { capture.keys(layer).unwrap() };
    (1..capture.layers.len()).map(|upper| [tensor(upper - 1), tensor(upper)]).collect()
}

fn measured([lower, upper]: [&Tensor; 2]) -> Vec<Row> {
    cpu::similarity(&lower.view(), &upper.view(), &MergeOptions::default()).unwrap()
}

/// The value at share `p` of a sorted list, interpolated.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let at = p * (sorted.len() - 1) as f64;
    let low = sorted[at as usize];
    low + (at - at.floor()) * (sorted[(at as usize + 1).min(sorted.len() - 1)] - low)
}

#[test]
fn deep_keys_of_neighbouring_layers_are_not_similar() {
    let capture = sample();
    let mut cosines: Vec<f64> =
        measured(neighbours(&capture, false)[27]).iter().map(|row| f64::from(row.cosine)).collect();
    cosines.sort_by(f64::total_cmp);
    let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
    let figures = [mean, percentile(&cosines, 0.05), percentile(&cosines, 0.95)];
    // Figures known to three decimals.
    for (have, want) in figures.into_iter().zip([-0.208, -0.564, 0.021]) {
        assert!((have - want).abs() <= 5e-4, "{figures:?}");
    }
}

#[test]
fn one_key_row_in_all_is_above_the_default_threshold_and_it_is_a_sink() {
    let capture = sample();
    let mut rows = [0, 0];
    let mut above = Vec::new();
    for (kind, values) in [false, true].into_iter().enumerate() {
        for (lower, pair) in neighbours(&capture, values).into_iter().enumerate() {
            let found = measured(pair);
            rows[kind] += found.len();
            for ((_, head, token), row) in pair[0].shape().iter_rows().zip(found) {
                if row.cosine >= 0.9 {
                    above.push((values, lower, head, token));
                }
            }
        }
    }
    assert_eq!(rows, [11_136; 2]);
    assert_eq!(above, [(false, 26, 2, 0)]);
}

#[test]
fn by_default_nothing_merges_and_nothing_is_lost_but_the_page_table() {
    let capture = sample();
    for values in [false, true] {
        for [lower, upper] in neighbours(&capture, values) {
            let folded = cpu::merge(&lower.view(), &upper.view(), &MergeOptions::default()).unwrap();
            assert_eq!(folded.totals.counts.merged, 0);
            let ratio = folded.layout.bytes_before() as f64 / folded.bytes() as f64;
            assert!(ratio >= 0.998, "{ratio}");
        }
    }
}
