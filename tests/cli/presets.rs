//! Sign planes in a report: presets and rivals on the bundled sample, and captures that tables cannot be made from.

use std::ffi::OsStr;
use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::made::{File, Sizes, capture, layer};
use crate::{fails, json as report, kvfold, sample_report};
use kvfold::DType;

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");

/// Every preset and rival on the bundled sample; made once, for it takes longest.
fn all() -> &'static Value {
    static REPORT: LazyLock<Value> = LazyLock::new(|| report(&["--preset", "all"])["planes"].take());
    &REPORT
}

fn method<'a>(planes: &'a Value, name: &str) -> &'a Value {
    let mut methods = ["presets", "rivals"].iter().flat_map(|kind| planes[kind].as_array().unwrap());
    methods.find(|method| method["name"] == name).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn bits_are_those_of_the_preset_table() {
    let planes = all();
    assert_eq!((&planes["centring"], &planes["tables"]), (&json!("pre-rope"), &json!("capture")));
    assert_eq!((&planes["tokens"], &planes["coded_tokens"]), (&json!(128), &json!(60)));
    // Keys and values of 64 channels: the preset table; 8-bit and grouped codes with their scales and zeros.
    for (name, key, value) in [
        ("near-lossless", 4.25, 4.25),
        ("balanced", 3.25, 3.25),
        ("compact", 2.5, 3.25),
        ("extreme", 1.25, 2.25),
        ("qjl-orth", 4.25, 8.25),
        ("qjl", 1.25, 8.25),
        ("int8", 8.25, 8.25),
        ("int4", 5.0, 5.0),
        ("kivi4", 5.0, 5.0),
        ("kivi2", 3.0, 3.0),
    ] {
        let method = method(planes, name);
        assert_eq!(
            (number(&method["key_bits_per_channel"]), number(&method["value_bits_per_channel"])),
            (key, value)
        );
        let parts = ["code_bytes", "raw_bytes", "table_bytes", "rotation_bytes"];
        let sum: u64 = parts.iter().map(|part| method[part].as_u64().unwrap()).sum();
        assert_eq!(method["bytes"], sum, "{name}");
        // 30 layers of 3 heads of keys and values of 64 channels are 23,040 bytes a token; 68 tokens raw.
        assert_eq!((&method["f16_bytes"], &method["raw_bytes"]), (&json!(128 * 23_040), &json!(68 * 23_040)));
        if !name.starts_with("kivi") {
            let bits = 60.0 * 30.0 * 3.0 * 64.0 * (key + value);
            assert_eq!(number(&method["code_bytes"]), bits / 8.0, "{name}");
        }
    }
}

#[test]
fn more_planes_cost_less_attention_and_signs_alone_most() {
    let planes = all();
    for window in ["errors", "errors_without_recent"] {
        let of = |name: &str, figure: &str| number(&method(planes, name)[window][figure]);
        for names in ["near-lossless", "balanced", "compact", "extreme"].windows(2) {
            assert!(of(names[0], "weights_kl") < of(names[1], "weights_kl"), "{window} {names:?}");
            assert!(
                of(names[0], "output_relative_error") < of(names[1], "output_relative_error"),
                "{window} {names:?}"
            );
        }
        assert!(of("balanced", "weights_kl") < of("qjl-orth", "weights_kl"), "{window}");
        assert!(of("qjl-orth", "weights_kl") < of("qjl", "weights_kl") / 10.0, "{window}");
        assert!(of("int8", "weights_kl") < of("int4", "weights_kl"), "{window}");
        assert!(of("kivi4", "weights_kl") < of("kivi2", "weights_kl"), "{window}");
        assert!(of("near-lossless", "top1_agreement") > of("qjl", "top1_agreement"), "{window}");
    }
    let balanced = method(planes, "balanced");
    assert!(
        number(&balanced["errors"]["weights_kl"]) < number(&balanced["errors_without_recent"]["weights_kl"])
    );
}

#[test]
fn one_preset_and_no_window_as_asked() {
    let report = report(&["--preset", "compact", "--recent", "0", "--calibrate", SAMPLE]);
    let planes = &report["planes"];
    let names: Vec<&Value> = planes["presets"].as_array().unwrap().iter().map(|p| &p["name"]).collect();
    assert_eq!(names, [&json!("compact")]);
    assert_eq!((&planes["tables"], &planes["coded_tokens"]), (&json!("file"), &json!(124)));
    let compact = method(planes, "compact");
    assert_eq!(compact["errors"], compact["errors_without_recent"]);
    // The same capture gives the same tables.
    assert_eq!(compact["errors"], method(all(), "compact")["errors_without_recent"]);
}

/// The preset goes the way of all codecs, the rival that of QJL's own operations.
#[test]
fn the_original_as_a_preset_is_the_original_as_a_rival() {
    let planes = report(&["--preset", "qjl"])["planes"].take();
    let (preset, rival) = (&planes["presets"][0], &planes["rivals"][0]);
    for size in ["bytes", "code_bytes", "key_bits_per_channel", "value_bits_per_channel"] {
        assert_eq!(preset[size], rival[size], "{size}");
    }
    for figure in ["output_relative_error", "weights_kl", "top1_agreement"] {
        let [a, b] = [preset, rival].map(|method| number(&method["errors_without_recent"][figure]));
        // Sums in f32 in two orders.
        assert!((a - b).abs() <= 1e-5 * a, "{figure}: {a} {b}");
    }
    let text = kvfold(&["report", "--backend", "cpu", "--preset", "qjl"]).out;
    let (_, table) = text.split_once("Presets").unwrap();
    assert_eq!(table.lines().filter(|line| line.trim_start().starts_with("qjl ")).count(), 1, "{text}");
}

#[test]
fn what_does_not_fit_is_named() {
    let small = File::of(&capture(vec![layer(1, DType::F16, Sizes::default())]));
    let small = small.as_ref();
    let mut arguments: Vec<&OsStr> =
        ["report", "--backend", "cpu", "--preset", "all", "--calibrate"].map(OsStr::new).to_vec();
    arguments.push(small);
    fails(&arguments, 1, &["calibration layers: wanted 30, had 1"]);
    fails(&["report", "--preset", "tiny"], 2, &["near-lossless, balanced"]);
    fails(
        &["report", "--backend", "cpu", "--preset", "all", "--calibrate", "no such file"],
        1,
        &["no such file"],
    );
}

#[test]
fn a_model_whose_rope_is_not_known_is_told_so() {
    let sizes = Sizes { tokens: 300, key_dim: 64, value_dim: 48, ..Sizes::default() };
    let file = File::of(&capture(vec![layer(1, DType::F16, sizes), layer(2, DType::F16, sizes)]));
    let planes: [&OsStr; 3] = ["--preset".as_ref(), "all".as_ref(), file.as_ref()];
    let report = report(&planes);
    assert_eq!(report["planes"]["centring"], json!({"block-mean": 64}));
    let balanced = method(&report["planes"], "balanced");
    assert_eq!(balanced["key_bits_per_channel"], json!(3.5));
    let mut arguments: Vec<&OsStr> = ["report", "--backend", "cpu"].map(OsStr::new).to_vec();
    arguments.extend(planes);
    let text = kvfold(&arguments).out;
    assert!(text.contains("RoPE unknown: sign planes on means of blocks of 64 tokens"), "{text}");
    assert!(!text.contains("most stay raw"), "{text}");
    let text = kvfold(&["report", "--backend", "cpu", "--preset", "compact"]).out;
    assert!(text.contains("60 of 128 tokens are coded: most stay raw"), "{text}");
    let (_, layers) = text.split_once("layer by layer\n layer  compact: error      KL  top-1\n").unwrap();
    assert_eq!(layers.lines().take_while(|line| line.starts_with(' ')).count(), 30, "{text}");
}

#[test]
fn a_report_has_a_preset_unless_there_is_to_be_none() {
    let planes = &sample_report()["planes"];
    assert_eq!(planes["presets"][0], *method(all(), "balanced"));
    assert_eq!(planes["presets"].as_array().unwrap().len(), 1);
    assert_eq!(report(&["--preset", "none"])["planes"], Value::Null);
    for unread in [["--recent", "4"], ["--calibrate", SAMPLE]] {
        let arguments = ["report", "--preset", "none", unread[0], unread[1]];
        fails(&arguments, 2, &[unread[0], "--preset other than none"]);
    }
}
