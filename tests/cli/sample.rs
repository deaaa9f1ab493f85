//! The bundled sample: what is known of it must be what is reported.

use serde_json::Value;

use crate::{json, kvfold, sample_report};

fn near(value: &Value, want: f64) {
    let had = value.as_f64().unwrap();
    assert!((had - want).abs() < 5e-4, "{had}, wanted {want}");
}

/// Keys and values of every pair.
fn sides<'a>(report: &'a Value, side: &'static str) -> impl Iterator<Item = &'a Value> {
    report["pairs"].as_array().unwrap().iter().map(move |pair| &pair[side])
}

fn sum(report: &Value, side: &'static str, figure: &str) -> u64 {
    sides(report, side).map(|fold| fold[figure].as_u64().unwrap()).sum()
}

#[test]
fn neighbouring_layers_hardly_resemble_each_other() {
    let report = sample_report();
    assert_eq!(report["shape"], serde_json::json!({"layers": 30, "batch": 1, "tokens": 128}));
    assert_eq!(report["pairs"].as_array().unwrap().len(), 29);
    let cosine = &report["pairs"][27]["keys"]["cosine"];
    near(&cosine["mean"], -0.208);
    near(&cosine["p5"], -0.564);
    near(&cosine["p95"], 0.021);
    // 29 pairs, 3 heads, 128 tokens; one key row, an attention sink, is similar, and stays raw as a sink does.
    assert_eq!((sum(&report, "keys", "rows"), sum(&report, "values", "rows")), (11_136, 11_136));
    assert_eq!((sum(&report, "keys", "above_threshold"), sum(&report, "values", "above_threshold")), (1, 0));
    assert_eq!(report["pairs"][26]["keys"]["above_threshold"], 1);
    assert_eq!((sum(&report, "keys", "retained"), sum(&report, "values", "retained")), (11_136, 11_136));
    for fold in sides(&report, "keys").chain(sides(&report, "values")) {
        assert_eq!(fold["relative_error"], 0.0, "what stays raw is exact");
        assert!(fold["relative_error_merged"].is_null());
        let causes = fold["causes"].as_object().unwrap().values().map(|count| count.as_u64().unwrap());
        assert_eq!(causes.sum::<u64>(), fold["retained"].as_u64().unwrap());
    }
}

#[test]
fn a_rotation_brings_keys_before_rope_together() {
    let report = json(&["--align"]);
    let pairs = report["alignment"].as_array().unwrap();
    assert_eq!(pairs.len(), 29);
    let mean = |part: &str, figure: &str| {
        let figures = pairs.iter().map(|pair| pair[part][figure].as_f64().unwrap());
        figures.sum::<f64>() / pairs.len() as f64
    };
    assert_eq!((&pairs[0]["keys"]["fitted"], &pairs[0]["keys"]["judged"]), (&64.into(), &64.into()));
    assert!(mean("keys_pre_rope", "raw").abs() < 0.1);
    // 64 tokens determine a head's rotation of 64 channels but barely; long captures reach 0.94 for whole tokens.
    assert!(mean("keys_pre_rope", "head") > 0.6, "{}", mean("keys_pre_rope", "head"));
    assert!(mean("keys_pre_rope", "head") > mean("values", "head"));
}

#[test]
fn nothing_merges_and_the_report_says_so() {
    let report = sample_report();
    let totals = &report["totals"];
    assert_eq!(totals["minicache"]["merged"], 0);
    assert_eq!(totals["bytes_before"], 30 * 2 * 3 * 128 * 64 * 2);
    let ratio = totals["ratio"].as_f64().unwrap();
    assert!((0.998..1.0).contains(&ratio), "{ratio}");
    let verdict = report["verdict"].as_str().unwrap();
    assert!(verdict.starts_with("nothing to merge: no key row and no value row"), "{verdict}");
    assert!(verdict.contains("reaches 0.9 outside the first 4 tokens"), "{verdict}");
    let text = kvfold(&["report", "--backend", "cpu"]);
    assert_eq!(text.code, 0);
    assert!(text.out.contains(verdict) && text.out.contains("27/28"), "{}", text.out);
    assert!(text.out.contains("-0.208  -0.564  0.021"), "{}", text.out);
}

#[test]
fn without_sinks_the_similar_row_stays_raw_with_its_page() {
    let report = json(&["--sinks", "0", "--start-frac", "0"]);
    assert_eq!(sum(&report, "keys", "above_threshold"), 1);
    assert_eq!(report["pairs"][26]["keys"]["causes"]["raw_page"], 1);
    let verdict = report["verdict"].as_str().unwrap();
    assert!(verdict.contains("1 because nearly all of their page does"), "{verdict}");
}

#[test]
fn forced_merging_costs_what_it_costs() {
    let report = json(&["--retention", "never"]);
    assert!(report["verdict"].is_null());
    let totals = &report["totals"];
    assert_eq!(totals["minicache"]["merged"], 7 * 2 * 3 * 124);
    assert!(totals["ratio"].as_f64().unwrap() > 1.25);
    for fold in sides(&report, "keys").chain(sides(&report, "values")) {
        let (all, merged) = (&fold["relative_error"], &fold["relative_error_merged"]);
        // Rows at right angles lose at least half of what they are.
        assert!(merged.as_f64().unwrap() > 0.3 && all.as_f64().unwrap() > 0.1, "{fold}");
    }
}

#[test]
fn baselines_order_as_their_bits_do() {
    let report = sample_report();
    for layer in report["layers"].as_array().unwrap() {
        let of = |method: &Value, figure: &str| method[figure].as_f64().unwrap();
        let (qjl, int8, int4) = (&layer["qjl"], &layer["baselines"]["int8"], &layer["baselines"]["int4"]);
        let bits = [qjl, int4, int8].map(|method| of(method, "key_bits_per_channel"));
        assert_eq!(bits, [1.25, 5.0, 8.25]);
        assert!([qjl, int4, int8].is_sorted_by_key(|method| of(method, "score_correlation")), "{layer}");
        assert!([int8, int4, qjl].is_sorted_by_key(|method| of(method, "output_relative_error")), "{layer}");
        // The error of 8 bits is at most half a step of a 127th: far below a hundredth in scores.
        assert!(of(int8, "score_correlation") > 0.999, "{layer}");
    }
    let larger = json(&["--sketch-dim", "512", "--projection", "orthogonal"]);
    for (small, large) in
        report["layers"].as_array().unwrap().iter().zip(larger["layers"].as_array().unwrap())
    {
        assert_eq!(large["qjl"]["key_bits_per_channel"], 8.25);
        let error = |layer: &Value| layer["qjl"]["output_relative_error"].as_f64().unwrap();
        assert!(error(large) < error(small), "{} {}", small["qjl"], large["qjl"]);
    }
}

#[test]
fn a_seed_decides_a_report() {
    let [default, other] = ["42", "7"].map(|seed| json(&["--seed", seed]));
    assert_eq!(default, sample_report());
    assert_ne!(default["layers"][0]["qjl"], other["layers"][0]["qjl"]);
    assert_eq!(default["pairs"], other["pairs"]);
}
