//! Files that are wrong, and captures that are right but odd.

use kvfold::capture::CaptureInfo;
use kvfold::{Capture, DType, Shape, Tensor};
use serde_json::Value;

use crate::made::{File, Sizes, capture, layer};
use crate::{command, fails, finish, json, kvfold};

const SAMPLE: &[u8] = include_bytes!("../../web/samples/smollm2_prose_s128.safetensors");

/// A file on which a report fails, saying these words.
#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) {
    let file = File::new(bytes);
    let path = file.as_ref() as &std::ffi::OsStr;
    fails(&["report".as_ref(), "--backend".as_ref(), "cpu".as_ref(), path], 1, words);
}

#[test]
fn files_that_are_no_captures_are_named_faults() {
    refused(b"The lighthouse keeper's daughter counted the ships.\n", &["not a readable safetensors file"]);
    refused(b"", &["not a readable safetensors file of 0 bytes"]);
    refused(&SAMPLE[..SAMPLE.len() / 2], &["layer.", "needs", "bytes"]);
    fails(&["report", "no/such/file"], 1, &["no/such/file"]);
    fails(&["report", "."], 1, &["error:"]);
    let mut broken = capture(vec![layer(1, DType::F32, Sizes::default())]);
    let shape = broken.layers[0].values.shape();
    let mut numbers = broken.layers[0].values.view().to_f32();
    numbers[70] = f32::NAN;
    broken.layers[0].values = Tensor::from_f32(&numbers, DType::F32, shape).unwrap();
    refused(&broken.to_bytes().unwrap(), &["layer.0.value", "finite", "NaN", "70"]);
}

/// A terminal obeys no file: whatever text of it is printed, its commands are written out.
#[test]
fn texts_of_a_capture_command_no_terminal() {
    let mut named = capture(vec![layer(1, DType::F16, Sizes { tokens: 3, queries: 1, ..Sizes::default() })]);
    named.info.model = Some("owl\x1b[2J\u{9b}31m\rno cache\u{202e}".to_owned());
    let file = File::of(&named);
    let header = br#"{"layer.0.\u001b]0;owl\u0007":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}}"#;
    let odd = File::new(&[&(header.len() as u64).to_le_bytes(), header.as_slice(), &[0; 4]].concat());
    let report = |file: &File, json: bool| {
        let mut command = command(&["report", "--backend", "cpu"]);
        // Styles are our own, and are printed as to a terminal.
        command.env("CLICOLOR_FORCE", "1").arg(file).args(json.then_some("--json"));
        finish(command)
    };
    let (text, json, error) = (report(&file, false), report(&file, true), report(&odd, false));
    assert!(text.out.contains(r"owl\u{1b}[2J\u{9b}31m\rno cache\u{202e}:"), "{:?}", text.out);
    assert!(json.out.contains(r#""owl\u001b[2J\u009b31m\rno cache\u202e""#), "{:?}", json.out);
    assert_eq!(serde_json::from_str::<Value>(&json.out).unwrap()["model"], named.info.model.unwrap());
    assert!(error.err.contains(r"layer.0.\u{1b}]0;owl\u{7}: not a tensor"), "{:?}", error.err);
    for printed in [&text.out, &json.out, &error.err] {
        let ours = printed
            .replace("\x1b[0m", "")
            .replace("\x1b[1m", "")
            .replace("\x1b[33m", "")
            .replace("\x1b[31m", "");
        assert!(!ours.contains(|c: char| c != '\n' && (c.is_control() || c == '\u{202e}')), "{ours:?}");
    }
}

#[test]
fn keys_before_rope_alone_are_not_enough() {
    let whole = layer(1, DType::F16, Sizes { queries: 0, ..Sizes::default() });
    let pre = kvfold::capture::Layer::pre_rope(whole.keys.unwrap(), whole.values);
    refused(&capture(vec![pre]).to_bytes().unwrap(), &["layer.0.key:", "layer.0.key_pre"]);
}

#[test]
fn a_head_dimension_beyond_the_kernels_is_an_error() {
    let wide = layer(1, DType::F16, Sizes { key_dim: 520, tokens: 3, queries: 1, ..Sizes::default() });
    refused(&capture(vec![wide]).to_bytes().unwrap(), &["512", "520"]);
}

#[test]
fn a_hadamard_projection_needs_a_power_of_two() {
    let file = File::of(&capture(vec![layer(1, DType::F16, Sizes { key_dim: 48, ..Sizes::default() })]));
    let path = file.as_ref() as &std::ffi::OsStr;
    let arguments = ["report".as_ref(), path, "--projection".as_ref(), "hadamard".as_ref()];
    fails(&arguments, 1, &["power of two", "48"]);
    assert_eq!(
        json(&[path, "--projection".as_ref(), "orthogonal".as_ref()])["options"]["projection"],
        "orthogonal"
    );
}

/// The text of a report, which must be one whatever the capture.
fn text(file: &File) -> String {
    let path = file.as_ref() as &std::ffi::OsStr;
    let run = kvfold(&["report".as_ref(), "--backend".as_ref(), "cpu".as_ref(), path]);
    assert_eq!((run.code, run.err.as_str()), (0, ""));
    run.out
}

#[test]
fn a_capture_without_tokens_has_no_figures() {
    let empty = layer(1, DType::F16, Sizes { tokens: 0, queries: 0, ..Sizes::default() });
    let file = File::of(&capture(vec![empty.clone(), empty]));
    let report = json(&[&file]);
    let keys = &report["pairs"][0]["keys"];
    assert_eq!((&keys["rows"], &keys["bytes_after"]), (&Value::from(0), &Value::from(0)));
    assert!(keys["cosine"]["mean"].is_null() && keys["relative_error"].is_null());
    assert!(report["layers"][0]["qjl"]["key_bits_per_channel"].is_null());
    assert!(report["totals"]["ratio"].is_null());
    assert_eq!(report["verdict"], "nothing to merge: the capture holds no tokens");
    assert!(text(&file).contains("0 tokens"));
}

#[test]
fn one_layer_has_no_pairs_and_right_totals() {
    let only = layer(1, DType::F16, Sizes::default());
    let file = File::of(&capture(vec![only.clone()]));
    let report = json(&[&file]);
    assert_eq!(report["pairs"], serde_json::json!([]));
    assert_eq!(report["totals"]["bytes_before"], only.bytes());
    assert_eq!(
        (&report["totals"]["ratio"], &report["layers"][0]["bytes"]),
        (&1.0.into(), &only.bytes().into())
    );
    assert_eq!(report["verdict"], "nothing to merge: the plan pairs none of the 1 layer");
    assert!(text(&file).contains("1 layer, 1 sequence"));
}

#[test]
fn layers_without_queries_have_bits_but_no_fidelity() {
    let file = File::of(&capture(vec![layer(1, DType::F32, Sizes { queries: 0, ..Sizes::default() })]));
    let report = json(&[&file]);
    for figures in [&report["layers"][0]["qjl"], &report["layers"][0]["baselines"]["int4"]] {
        assert!(figures["score_correlation"].is_null() && figures["output_relative_error"].is_null());
        assert!(figures["key_bits_per_channel"].as_f64().unwrap() > 1.0);
    }
    assert!(report["layers"][0]["shape"]["query_heads"].is_null());
    text(&file);
}

#[test]
fn layers_that_are_no_pair_are_skipped_with_the_numbers() {
    let wide = Sizes { heads: 4, ..Sizes::default() };
    let deep = Sizes { key_dim: 192, value_dim: 128, ..wide };
    let file = File::of(&capture(vec![
        layer(1, DType::F16, Sizes::default()),
        layer(2, DType::F16, wide),
        layer(3, DType::F16, deep),
        layer(4, DType::Bf16, deep),
        layer(5, DType::Bf16, deep),
    ]));
    let report = json(&[&file]);
    let reasons: Vec<_> =
        report["pairs"].as_array().unwrap().iter().map(|pair| pair["skipped"].as_str()).collect();
    let want = [
        Some("KV heads differ: 2 below, 4 above"),
        Some("head dimensions of keys differ: 32 below, 192 above"),
        Some("element types of keys differ: f16 below, bf16 above"),
        None,
    ];
    assert_eq!(reasons, want);
    assert_eq!(report["layers"][4]["shape"]["value_dim"], 128);
    // One projection for each head dimension among the layers: 32 x 32 and 192 x 192 numbers of 4 bytes.
    assert_eq!(report["totals"]["qjl"]["projection_bytes"], 4 * (32 * 32 + 192 * 192));
    let text = text(&file);
    assert!(text.contains("0/1 skipped: KV heads differ") && text.contains("4/4 heads of 192/128"), "{text}");
}

#[test]
fn similar_layers_merge() {
    let lower = layer(1, DType::F16, Sizes::default());
    let scaled = |tensor: &Tensor| {
        let numbers: Vec<f32> = tensor.view().to_f32().iter().map(|x| 3.0 * x).collect();
        Tensor::from_f32(&numbers, DType::F16, tensor.shape()).unwrap()
    };
    let mut upper = kvfold::capture::Layer::new(scaled(lower.keys.as_ref().unwrap()), scaled(&lower.values));
    upper.queries.clone_from(&lower.queries);
    let file = File::of(&capture(vec![lower, upper]));
    let path = file.as_ref() as &std::ffi::OsStr;
    let report = json(&[path, "--start-frac".as_ref(), "0".as_ref()]);
    assert!(report["verdict"].is_null());
    let keys = &report["pairs"][0]["keys"];
    assert_eq!(
        (&keys["rows"], &keys["above_threshold"], &keys["retained"]),
        (&80.into(), &80.into(), &8.into())
    );
    assert_eq!(keys["causes"]["sink"], 8);
    // Direction, magnitude and result are rounded to f16, each to half of 2^-10 at most.
    let error = keys["relative_error_merged"].as_f64().unwrap();
    assert!(error > 0.0 && error < 1.5 * 2f64.powi(-10), "{error}");
    assert!(report["totals"]["ratio"].as_f64().unwrap() > 1.4);
}

/// Sequences of different lengths give the sums of each by itself, whatever stands in the padding.
#[test]
fn padding_counts_nowhere() {
    let lengths = [40, 0, 13];
    let sizes = Sizes { batch: 3, queries: 0, ..Sizes::default() };
    let layers: Vec<_> = (1..3).map(|seed| layer(seed, DType::F16, sizes)).collect();
    let mut info = CaptureInfo::default();
    info.lengths = Some(lengths.to_vec());
    let ragged = File::of(&Capture::new(layers.clone(), info).unwrap());
    let options = ["--threshold", "0", "--start-frac", "0"];
    let report = |file: &File| {
        let mut arguments = vec![file.as_ref()];
        arguments.extend(options.iter().map(std::ffi::OsStr::new));
        json(&arguments)
    };
    let alone = |sequence: usize| {
        let cut = |tensor: &Tensor| {
            let shape = Shape::new(1, 2, lengths[sequence], tensor.shape().dim).unwrap();
            let rows =
                shape.iter_rows().flat_map(|(_, h, t)| tensor.view().row_bytes(sequence, h, t).to_vec());
            Tensor::new(rows.collect(), DType::F16, shape).unwrap()
        };
        let layers = layers
            .iter()
            .map(|layer| kvfold::capture::Layer::new(cut(layer.keys.as_ref().unwrap()), cut(&layer.values)));
        report(&File::of(&capture(layers.collect())))
    };
    let (whole, parts) = (report(&ragged), [0, 2].map(alone));
    let sum =
        |path: &str| parts.iter().map(|part| part.pointer(path).unwrap().as_u64().unwrap()).sum::<u64>();
    let counts = [
        "/pairs/0/keys/rows",
        "/pairs/0/keys/above_threshold",
        "/pairs/0/keys/retained",
        "/pairs/0/keys/causes/sink",
        "/pairs/0/values/retained",
        "/pairs/0/values/bytes_before",
        "/pairs/0/values/bytes_after",
        "/layers/0/bytes",
        "/layers/0/qjl/key_bytes",
        "/layers/1/qjl/value_bytes",
        "/totals/bytes_before",
        "/totals/bytes_after",
    ];
    for path in counts {
        assert_eq!(whole.pointer(path).unwrap(), &Value::from(sum(path)), "{path}");
    }
    assert_eq!(whole["pairs"][0]["keys"]["rows"], 2 * 53);
    // Means weigh by rows.
    let mean = |report: &Value| report["pairs"][0]["keys"]["cosine"]["mean"].as_f64().unwrap();
    let want = (40.0 * mean(&parts[0]) + 13.0 * mean(&parts[1])) / 53.0;
    assert!((mean(&whole) - want).abs() < 1e-9);
}

/// Queries stand where the capture says: one that may not see a key is no judge of it.
#[test]
fn queries_are_masked_by_their_positions() {
    let sizes = Sizes { queries: 4, ..Sizes::default() };
    let whole = layer(1, DType::F32, sizes);
    let at = |range: std::ops::Range<usize>, spoiled: usize| {
        let mut layer = whole.clone();
        let keys = layer.keys.take().unwrap();
        let mut numbers = keys.view().to_f32();
        for (row, (_, _, token)) in numbers.chunks_mut(32).zip(keys.shape().iter_rows()) {
            if token >= spoiled {
                row.fill(0.5);
            }
        }
        layer.keys = Some(Tensor::from_f32(&numbers, DType::F32, keys.shape()).unwrap());
        let mut info = CaptureInfo::default();
        info.query_positions = Some(range);
        json(&[&File::of(&Capture::new(vec![layer], info).unwrap())])["layers"].clone()
    };
    assert_eq!(at(10..14, 40), at(10..14, 14), "keys after the last query are seen by none");
    assert_ne!(at(10..14, 40), at(10..14, 13), "the last query sees itself");
    assert_ne!(at(10..14, 40), at(36..40, 40));
}
