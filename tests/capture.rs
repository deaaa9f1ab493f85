//! Captures: the bundled sample, round trips of random ones, and a corpus of files that must be refused by name.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use kvfold::capture::{Capture, CaptureInfo, Layer, ReadOptions, RopeLayout};
use kvfold::{DType, Error, Shape, Tensor};
use proptest::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("web/samples/smollm2_prose_s128.safetensors")
}

/// A tensor of a file under construction.
type Part = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn zeros(name: &'static str, shape: [usize; 4]) -> Part {
    (name, Dtype::F16, shape.to_vec(), vec![0; shape.iter().product::<usize>() * 2])
}

fn of(name: &'static str, dtype: Dtype, numbers: &[u8]) -> Part {
    (name, dtype, vec![1, 1, 1, numbers.len() * 8 / dtype.bitsize()], numbers.to_vec())
}

/// Two layers, three sequences of six tokens, two KV heads, four query heads, keys of eight channels and values of six.
fn good() -> Vec<Part> {
    vec![
        zeros("layer.0.key", [3, 2, 6, 8]),
        zeros("layer.0.value", [3, 2, 6, 6]),
        zeros("layer.0.query", [3, 4, 2, 8]),
        zeros("layer.1.key", [3, 2, 6, 8]),
        zeros("layer.1.value", [3, 2, 6, 6]),
        zeros("layer.1.query", [3, 4, 2, 8]),
    ]
}

/// `good` with one tensor replaced by, or added as, another.
fn with(part: Part) -> Vec<Part> {
    let mut parts = without(part.0);
    parts.push(part);
    parts
}

fn without(name: &str) -> Vec<Part> {
    good().into_iter().filter(|part| part.0 != name).collect()
}

/// A file as the safetensors crate writes it.
fn file(parts: &[Part], metadata: &[(&str, &str)]) -> Vec<u8> {
    let views = parts
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    let metadata: HashMap<_, _> =
        metadata.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())).collect();
    safetensors::serialize(views, Some(metadata).filter(|all| !all.is_empty())).unwrap()
}

/// A file of this header, whatever it says, and this many zero bytes of data.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

/// The error of a file, which must carry this code and say all of these words.
#[track_caller]
fn refused(file: &[u8], code: &str, words: &[&str]) -> Error {
    let error = match Capture::from_bytes(file) {
        Err(error) => error,
        Ok(capture) => panic!("read as {:?}", capture.info),
    };
    let text = error.to_string();
    assert_eq!(error.code(), code, "{text}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    error
}

#[track_caller]
fn refused_metadata(key: &str, text: &str, want: &str) {
    let error = refused(&file(&good(), &[(key, text)]), "metadata", &[key, want]);
    assert!(matches!(&error, Error::Metadata { key: named, .. } if named == key), "{error}");
}

#[test]
fn the_bundled_sample_is_what_its_model_cached() {
    let capture = Capture::open(sample()).unwrap();
    assert_eq!((capture.layers.len(), capture.batch(), capture.tokens()), (30, 1, 128));
    for (index, layer) in capture.layers.iter().enumerate() {
        assert_eq!((layer.kv_heads(), layer.query_heads(), layer.tokens()), (3, Some(9), 128));
        assert_eq!((layer.key_dim(), layer.value_dim(), layer.bytes()), (64, 64, 2 * 3 * 128 * 64 * 2));
        assert_eq!(capture.keys(index).unwrap().dtype(), DType::F16);
        assert_eq!(capture.queries(index).unwrap().shape(), Shape::new(1, 9, 32, 64).unwrap());
        assert_eq!(capture.query_positions(index, 0), Some(96..128));
    }
    assert_eq!(capture.bytes(), 30 * 2 * 3 * 128 * 64 * 2);

    let info = &capture.info;
    assert_eq!(info.attn_scale, Some(0.125));
    assert_eq!(info.rope_layout, Some(RopeLayout::HalfSplit));
    assert_eq!(info.rope_theta.as_deref(), Some(&[1e5; 30][..]));
    assert_eq!(info.sliding_window, [None; 30]);
    assert_eq!(info.token_ids.as_ref().map(Vec::len), Some(128));
    assert_eq!(info.extra["n_kv_heads"], "3");
    // theta^(-2 i / 64) at i = 16 is 1e5^-0.5; one rounding to f32 is at most 2^-24 of it.
    let inv_freq = capture.inv_freq(29).unwrap();
    assert_eq!((inv_freq.len(), inv_freq[0]), (32, 1.0));
    assert!((f64::from(inv_freq[16]) * 1e5f64.sqrt() - 1.0).abs() < 1e-7);
}

#[test]
fn a_rewritten_sample_keeps_every_number_and_every_word() {
    let capture = Capture::open(sample()).unwrap();
    let file = capture.to_bytes().unwrap();
    assert_eq!(
        file,
        Capture::open(sample()).unwrap().to_bytes().unwrap(),
        "the same capture gives the same bytes"
    );
    assert_eq!(Capture::from_bytes(&file).unwrap(), capture);

    // The crate's own reader agrees with ours about what we wrote.
    let theirs = SafeTensors::deserialize(&file).unwrap();
    let original = std::fs::read(sample()).unwrap();
    for (name, tensor) in SafeTensors::deserialize(&original).unwrap().tensors() {
        assert_eq!(theirs.tensor(&name).unwrap(), tensor, "{name}");
    }
    let words = |file| SafeTensors::read_metadata(file).unwrap().1.metadata().clone().unwrap();
    let mut expected = words(&original);
    expected.insert("kvfold.capture".to_owned(), "1".to_owned());
    expected.insert("rope_layout".to_owned(), "half-split".to_owned());
    for (key, text) in words(&file) {
        let same = |text: &str| text.replace(".0", "");
        assert_eq!(same(&text), same(&expected.remove(&key).unwrap()), "{key}");
    }
    assert!(expected.is_empty(), "lost {expected:?}");
}

#[test]
fn files_are_saved_and_errors_name_the_path() {
    let path = std::env::temp_dir().join(format!("kvfold-capture-{}.safetensors", std::process::id()));
    let capture = Capture::from_bytes(&file(&good(), &[])).unwrap();
    capture.save(&path).unwrap();
    assert_eq!(Capture::open(&path).unwrap(), capture);
    std::fs::remove_file(&path).unwrap();
    for error in [Capture::open(&path).unwrap_err(), capture.save(path.join("inside")).unwrap_err()] {
        assert!(
            matches!(&error, Error::Io { path: named, .. } if named.contains("kvfold-capture-")),
            "{error}"
        );
    }
}

#[test]
fn keys_before_rope_are_never_taken_for_keys() {
    let parts = [zeros("layer.0.key_pre", [1, 3, 4, 8]), zeros("layer.0.value", [1, 3, 4, 6])];
    let capture = Capture::from_bytes(&file(&parts, &[("rope_theta", "[10000.0]")])).unwrap();
    let layer = &capture.layers[0];
    assert_eq!((layer.key_dim(), layer.bytes()), (8, 3 * 4 * (8 + 6) * 2));
    let error = capture.keys(0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer.0.key: wanted in the capture, had only layer.0.key_pre, layer.0.value"
    );
    assert_eq!(
        capture.queries(7).unwrap_err().to_string(),
        "layer.7.query: wanted in the capture, had only 1 layers"
    );
    assert_eq!(capture.query_positions(0, 0), None);
    assert_eq!(Capture::from_bytes(&capture.to_bytes().unwrap()).unwrap(), capture);
}

#[test]
fn no_tokens_and_no_queries_are_a_capture() {
    let parts = [zeros("layer.0.key", [2, 1, 0, 8]), zeros("layer.0.value", [2, 1, 0, 8])];
    let capture = Capture::from_bytes(&file(&parts, &[("lengths", "[0, 0]")])).unwrap();
    assert_eq!((capture.tokens(), capture.bytes(), capture.length(1)), (0, 0, 0));
    assert_eq!(Capture::from_bytes(&capture.to_bytes().unwrap()).unwrap(), capture);
}

#[test]
fn queries_without_positions_are_the_last_of_each_sequence() {
    let capture = Capture::from_bytes(&file(&good(), &[("lengths", "[6, 2, 5]")])).unwrap();
    let positions = |sequence| capture.query_positions(1, sequence).unwrap();
    assert_eq!([positions(0), positions(1), positions(2)], [4..6, 0..2, 3..5]);
    let stated = Capture::from_bytes(&file(&good(), &[("query_positions", "1..3")])).unwrap();
    assert_eq!(stated.query_positions(1, 2), Some(1..3));
}

#[test]
fn one_value_may_stand_for_all() {
    let metadata =
        [("position_start", "7"), ("rope_theta", "5e5"), ("sliding_window", "4"), ("n_heads", "[4, 4]")];
    let info = Capture::from_bytes(&file(&good(), &metadata)).unwrap().info;
    assert_eq!(info.position_start, Some(vec![7; 3]));
    assert_eq!(info.rope_theta, Some(vec![5e5; 2]));
    assert_eq!(info.sliding_window, [Some(4); 2]);
    let windows =
        Capture::from_bytes(&file(&good(), &[("sliding_window", "[null, 4]")])).unwrap().info.sliding_window;
    assert_eq!(windows, [None, Some(4)]);
}

#[test]
fn a_capture_of_the_first_layers_may_describe_the_whole_model() {
    let metadata =
        [("n_layers", "3"), ("rope_theta", "[1e4, 1e6, 1e4]"), ("sliding_window", "[512, null, 512]")];
    let capture = Capture::from_bytes(&file(&good(), &metadata)).unwrap();
    assert_eq!(capture.info.model_layers, Some(3));
    assert_eq!(capture.inv_freq(1).unwrap()[1], 1e6f64.powf(-0.25) as f32);
    assert_eq!(capture.inv_freq(2), None, "a layer that was not captured");
}

#[test]
fn what_is_no_safetensors_file_is_refused() {
    let causes = |file: &[u8]| match refused(file, "safetensors", &[&format!("file of {} bytes", file.len())])
    {
        Error::Safetensors { cause, .. } => cause,
        other => panic!("{other}"),
    };
    assert!(matches!(causes(b""), SafeTensorError::HeaderTooSmall));
    assert!(matches!(causes(b"{}"), SafeTensorError::HeaderTooSmall));
    assert!(matches!(causes(b"The lighthouse keeper's daughter"), SafeTensorError::HeaderTooLarge));
    assert!(matches!(causes(&[0xff; 64]), SafeTensorError::HeaderTooLarge));
    assert!(matches!(causes(&raw("[]", 0)), SafeTensorError::InvalidHeaderDeserialization(_)));
    assert!(matches!(causes(&raw("", 0)), SafeTensorError::InvalidHeaderDeserialization(_)));
    let deep = "[".repeat(100_000);
    assert!(matches!(causes(&raw(&deep, 0)), SafeTensorError::InvalidHeaderDeserialization(_)));
    let mut latin1 = raw("{\"x\":1}", 0);
    latin1[10] = 0xe9;
    assert!(matches!(causes(&latin1), SafeTensorError::InvalidHeader(_)));

    let mut flipped = file(&good(), &[]);
    flipped[1] ^= 0x80;
    refused(&flipped, "too_short", &["safetensors header: needs 33", &format!("has {}", flipped.len() - 8)]);
    flipped[1] ^= 0x80;
    flipped[0] ^= 0x08;
    causes(&flipped);
}

#[test]
fn a_file_cut_anywhere_names_what_is_cut() {
    let whole = file(&good(), &[]);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for end in 0..whole.len() {
        let error = Capture::from_bytes(&whole[..end]).unwrap_err();
        match error {
            Error::Safetensors { bytes, cause: SafeTensorError::HeaderTooSmall } => {
                assert!(bytes == end && end < 8)
            }
            Error::TooShort { ref what, need, have } if what == "safetensors header" => {
                assert_eq!((need, have), (header as u64 - 8, end as u64 - 8));
            }
            Error::TooShort { ref what, need, have } => {
                assert!(end >= header && what.starts_with("layer.") && have < need, "{error} at {end}");
                let part = good().into_iter().find(|part| part.0 == what).unwrap();
                assert_eq!(need, part.3.len() as u64);
            }
            other => panic!("{other} at {end}"),
        }
    }
    let cut = std::fs::read(sample()).unwrap();
    refused(&cut[..cut.len() / 2], "too_short", &["layer.21.value: needs 49152 bytes, has 44236"]);
    let longer = [whole.as_slice(), b"!"].concat();
    let (want, have) = (whole.len() - header, longer.len() - header);
    refused(&longer, "shape", &[&format!("safetensors data: wanted {want} bytes, had {have} bytes")]);
}

#[test]
fn headers_that_contradict_themselves_are_refused() {
    let tensor = |name: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"F16","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let header = |parts: &[String]| format!("{{{}}}", parts.join(","));
    let key = tensor("layer.0.key", "[1,1,1,2]", "[0,4]");
    let value = |offsets| tensor("layer.0.value", "[1,1,1,2]", offsets);
    assert!(Capture::from_bytes(&raw(&header(&[key.clone(), value("[4,8]")]), 8)).is_ok());

    let twice = header(&[key.clone(), value("[4,8]"), key.clone()]);
    refused(&raw(&twice, 8), "safetensors", &["`layer.0.key` stands twice"]);
    let metadata = r#""__metadata__":{"model":"a","model":"b"}"#.to_owned();
    refused(&raw(&header(&[metadata]), 0), "safetensors", &["`model` stands twice"]);
    let metadata = r#""__metadata__":{"lengths":[1]}"#.to_owned();
    refused(&raw(&header(&[metadata]), 0), "safetensors", &["`lengths`", "expected a string"]);
    let unknown = r#"{"layer.0.key":{"dtype":"F17","shape":[1,1,1,2],"data_offsets":[0,4]}}"#;
    refused(&raw(unknown, 4), "safetensors", &["`layer.0.key`", "F17"]);

    for offsets in ["[2,6]", "[6,10]"] {
        let odd = header(&[key.clone(), value(offsets)]);
        refused(&raw(&odd, 10), "safetensors", &["invalid offset for tensor `layer.0.value`"]);
    }
    let odd = header(&[key.clone(), value("[4,2]")]);
    refused(&raw(&odd, 8), "shape", &["layer.0.value: wanted 4 bytes", "had data from 4 to 2"]);
    let odd = header(&[tensor("layer.0.key", "[1,1,1,3]", "[0,4]")]);
    refused(
        &raw(&odd, 4),
        "shape",
        &["layer.0.key: wanted 6 bytes for F16 [1, 1, 1, 3]", "had data from 0 to 4"],
    );
    let sub = r#"{"layer.0.key":{"dtype":"F4","shape":[1,1,1,2],"data_offsets":[0,1]}}"#;
    refused(&raw(sub, 1), "dtype", &["layer.0.key", "whole bytes", "F4"]);
}

#[test]
fn sizes_beyond_the_address_space_neither_overflow_nor_allocate() {
    let tensor = |i: usize, shape: &str, start: u64, end: u64| {
        format!(r#""layer.{i}.key":{{"dtype":"F16","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    let huge = format!("{{{}}}", tensor(0, "[4294967296,4294967296,4294967296,2]", 0, 4));
    refused(&raw(&huge, 4), "overflow", &["layer.0.key", "4294967296, 4294967296, 4294967296, 2"]);
    // Sixteen tensors that are each legal, and end eight bytes before 2^64: adding the header's length overflows.
    let size = 1u64 << 60;
    let many = (0..16u64).map(|i| {
        let short = if i == 15 { 8 } else { 0 };
        let end = i * size + (size - short);
        tensor(i as usize, &format!("[{}]", (size - short) / 2), i * size, end)
    });
    let many = format!("{{{}}}", many.collect::<Vec<_>>().join(","));
    refused(&raw(&many, 0), "too_short", &["layer.0.key: needs 1152921504606846976 bytes, has 0"]);
    // No tokens: a shape of any size takes no bytes.
    for shape in ["[1152921504606846976,1,0,1]", "[1,65537,0,1]", "[1,1,0,65537]"] {
        let text = shape.replace(',', ", ");
        let empty =
            format!("{{{},{}}}", tensor(0, shape, 0, 0), tensor(0, shape, 0, 0).replace("key", "value"));
        refused(&raw(&empty, 0), "shape", &["layer.0.key", "1 to 65536", &text]);
    }
    let wide = tensor(0, "[4611686018427387904,1,0,1]", 0, 0);
    refused(&raw(&format!("{{{wide}}}"), 0), "overflow", &["layer.0.key", "4611686018427387904, 1, 0, 1"]);
    let index = tensor(usize::MAX, "[1,1,1,2]", 0, 4);
    refused(
        &raw(&format!("{{{index}}}"), 4),
        "missing_tensor",
        &["layer.0.value", "layer 18446744073709551615"],
    );
}

#[test]
fn wrong_and_missing_names_are_named() {
    for name in [
        "layer.0.keys",
        "layers.0.key",
        "layer.00.key",
        "layer.+1.key",
        "layer.-1.key",
        "layer.key",
        "layer.0.key.x",
        "layer.99999999999999999999.key",
        "Tokens",
        "",
    ] {
        refused(
            &file(&with(zeros(name, [3, 2, 6, 8])), &[]),
            "unknown_tensor",
            &[name, "layer.{i}.key", "tokens"],
        );
    }
    let missing = |parts: &[Part], words: &[&str]| {
        refused(&file(parts, &[]), "missing_tensor", words);
    };
    missing(&[], &["layer.0.value", "0 layers"]);
    missing(&without("layer.0.value"), &["layer.0.value", "layer.0.key, layer.0.query"]);
    missing(&without("layer.1.key"), &["layer.1.key", "layer.1.value"]);
    missing(&good()[3..], &["layer.0.value", "layer 1"]);
    let gap: Vec<Part> = with(zeros("layer.3.value", [3, 2, 6, 6]));
    missing(&gap, &["layer.2.value", "layer 3 after layer 1"]);
}

#[test]
fn shapes_that_disagree_are_named() {
    let cases: [(Part, &str, &str); 13] = [
        (zeros("layer.1.value", [2, 2, 6, 6]), "[3, *, 6, *] as layer.0.value", "[2, 2, 6, 6]"),
        (zeros("layer.1.value", [3, 2, 5, 6]), "[3, *, 6, *] as layer.0.value", "[3, 2, 5, 6]"),
        (zeros("layer.1.key", [2, 2, 6, 8]), "[3, 2, 6, 8]", "[2, 2, 6, 8]"),
        (zeros("layer.1.key", [3, 1, 6, 8]), "[3, 2, 6, 8]", "[3, 1, 6, 8]"),
        (zeros("layer.1.key", [3, 2, 7, 8]), "[3, 2, 6, 8]", "[3, 2, 7, 8]"),
        (zeros("layer.1.key_pre", [3, 2, 6, 4]), "[3, 2, 6, 8]", "[3, 2, 6, 4]"),
        (zeros("layer.1.query", [2, 4, 2, 8]), "[3, a multiple of 2, at most 6, 8]", "[2, 4, 2, 8]"),
        (zeros("layer.1.query", [3, 3, 2, 8]), "[3, a multiple of 2, at most 6, 8]", "[3, 3, 2, 8]"),
        (zeros("layer.1.query", [3, 4, 7, 8]), "[3, a multiple of 2, at most 6, 8]", "[3, 4, 7, 8]"),
        (zeros("layer.1.query", [3, 4, 2, 6]), "[3, a multiple of 2, at most 6, 8]", "[3, 4, 2, 6]"),
        (zeros("layer.1.query", [3, 0, 2, 8]), "batch, heads and head_dim of 1 to 65536", "[3, 0, 2, 8]"),
        (zeros("layer.1.value", [3, 2, 6, 0]), "batch, heads and head_dim of 1 to 65536", "[3, 2, 6, 0]"),
        (("layer.1.key", Dtype::F16, vec![6, 8], vec![0; 96]), "[batch, heads, tokens, head_dim]", "[6, 8]"),
    ];
    for (part, want, have) in cases {
        let name = part.0;
        refused(&file(&with(part), &[]), "shape", &[name, &format!("wanted {want}"), &format!("had {have}")]);
    }
    let ids = |shape: &[usize]| {
        let bytes = vec![0; shape.iter().product::<usize>() * 4];
        file(&with(("tokens", Dtype::I32, shape.to_vec(), bytes)), &[])
    };
    assert_eq!(Capture::from_bytes(&ids(&[3, 6])).unwrap().info.token_ids, Some(vec![0; 18]));
    for (shape, have) in [(&[6][..], "[6]"), (&[18], "[18]"), (&[6, 3], "[6, 3]"), (&[3, 6, 1], "[3, 6, 1]")]
    {
        refused(&ids(shape), "shape", &["tokens: wanted [3, 6]", have]);
    }
}

#[test]
fn element_types_other_than_floats_are_refused() {
    let part = ("layer.1.key", Dtype::I64, vec![3, 2, 6, 8], vec![0; 288 * 8]);
    refused(&file(&with(part), &[]), "dtype", &["layer.1.key", "F16, BF16 or F32", "I64"]);
    let part = ("layer.1.key", Dtype::F64, vec![3, 2, 6, 8], vec![0; 288 * 8]);
    refused(&file(&with(part), &[]), "dtype", &["layer.1.key", "F16, BF16 or F32", "F64"]);
    let part = ("tokens", Dtype::I64, vec![3, 6], vec![0; 18 * 8]);
    refused(&file(&with(part), &[]), "dtype", &["tokens", "I32", "I64"]);
}

#[test]
fn numbers_that_are_not_finite_are_refused_unless_asked_for() {
    let f16s = [f16::ONE, f16::MAX, f16::NAN].map(f16::to_le_bytes).concat();
    let bf16s = [bf16::MIN, bf16::NEG_INFINITY, bf16::NAN].map(bf16::to_le_bytes).concat();
    let f32s = [f32::MAX, f32::MIN_POSITIVE, f32::INFINITY].map(f32::to_le_bytes).concat();
    let fine = [0; 6];
    let cases = [
        (of("layer.0.key", Dtype::F16, &f16s), of("layer.0.value", Dtype::F16, &fine), "NaN at element 2"),
        (of("layer.0.key", Dtype::F16, &fine), of("layer.0.value", Dtype::BF16, &bf16s), "-inf at element 1"),
        (of("layer.0.key", Dtype::F16, &fine), of("layer.0.value", Dtype::F32, &f32s), "inf at element 2"),
    ];
    for (key, value, words) in cases {
        let name = if words.starts_with("NaN") { "layer.0.key" } else { "layer.0.value" };
        let bytes = file(&[key, value], &[]);
        refused(&bytes, "non_finite", &[name, "wanted finite numbers", words]);
        let capture =
            Capture::from_bytes_with(&bytes, ReadOptions::default().allow_non_finite(true)).unwrap();
        let again = capture.to_bytes().unwrap();
        refused(&again, "non_finite", &[name, words]);
    }
}

#[test]
fn other_versions_are_refused() {
    for version in ["2", "4294967296", "0", "-1", "1.0", "one", ""] {
        refused_metadata("kvfold.capture", version, "a version of 1 to 1");
    }
    assert!(Capture::from_bytes(&file(&good(), &[("kvfold.capture", "1")])).is_ok());
    // The version is looked at first: what a newer file means is not ours to judge.
    refused(
        &file(&with(zeros("layer.0.sink", [1, 1, 1, 1])), &[("kvfold.capture", "2")]),
        "metadata",
        &["had \"2\""],
    );
}

#[test]
fn metadata_that_cannot_be_read_is_refused() {
    for (key, texts, want) in [
        ("n_layers", &["two", "-1", "2.0"][..], "a whole number"),
        ("attn_scale", &["big", "", "0,125"], "a number"),
        ("query_positions", &["4-6", "4..", "..6", "4..=6", "-1..2", "a..b"], "start..end"),
        ("lengths", &["6", "[6, 6", "[6, -1, 6]", "[6, 6, null]"], "a JSON list"),
        ("position_start", &["x", "-1", "[1, 2, 4294967296]"], "a whole number, or a JSON list"),
        ("rotary_dim", &["x", "-2", "8.0"], "a whole number"),
        ("inv_freq", &["1.0", "[1, NaN]", "{}"], "a JSON list of numbers"),
        ("rope_theta", &["x", "[null, 1e4]"], "a number, or a JSON list"),
        ("sliding_window", &["x", "[-1, 2]", "[\"4\", 4]"], "tokens or null"),
        ("n_kv_heads", &["two", "[2, null]"], "a whole number, or a JSON list"),
    ] {
        for text in texts {
            refused_metadata(key, text, want);
        }
    }
}

#[test]
fn metadata_that_contradicts_the_tensors_is_refused() {
    for (key, texts, want) in [
        ("n_layers", &["1", "0"][..], "at least the 2 layers captured"),
        ("attn_scale", &["0", "-0.125", "inf", "NaN"], "a finite number above 0"),
        (
            "query_positions",
            &["3..6", "0..0", "5..7", "6..4"],
            "2 positions, the tokens of the queries, within 0..6",
        ),
        ("lengths", &["[6, 6]", "[6, 6, 7]", "[]"], "3 numbers of 0 to 6"),
        ("lengths", &["[6, 1, 6]"], "at least the 2 tokens of the queries"),
        ("position_start", &["[0]", "[0, 0, 4294967291]"], "3 numbers that leave 6 positions within 32 bits"),
        ("rotary_dim", &["10", "3"], "an even number of at most the 8 channels"),
        ("inv_freq", &["[1, 1, 1, 1, 1]", "[1e39]"], "at most 4 finite numbers"),
        (
            "rope_theta",
            &["[1e4]", "[1e4, 0]", "[1e4, 1e4, 1e4]"],
            "a finite number above 0 for each of 2 layers",
        ),
        ("sliding_window", &["[null]", "[4, 0]", "[]x"], ""),
        ("n_kv_heads", &["3", "[2, 3]"], "2, as the tensors have"),
        ("n_kv_heads", &["[2]"], "a number for each of 2 layers"),
        ("n_heads", &["2"], "4, as the tensors have"),
        ("head_dim", &["6"], "8, as the tensors have"),
        ("seq_len", &["7"], "6, as the tensors have"),
        ("query_scaled", &["true", "yes"], "false"),
        ("key_rope_applied", &["false"], "true"),
        ("key_pre_rope_applied", &["True"], "false"),
        ("shape", &["[B,S,H,D]"], "[B,H,S,D]"),
    ] {
        for text in texts {
            refused_metadata(key, text, want);
        }
    }
    let metadata = [("rotary_dim", "4"), ("inv_freq", "[1, 0.5, 0.25]")];
    refused(&file(&good(), &metadata), "metadata", &["inv_freq: wanted 2 finite numbers"]);
    let no_queries: Vec<Part> = good().into_iter().filter(|part| !part.0.ends_with("query")).collect();
    let error = refused(&file(&no_queries, &[("query_positions", "4..6")]), "metadata", &["query_positions"]);
    assert!(error.to_string().contains("wanted 0 positions"), "{error}");
}

#[test]
fn a_capture_that_was_changed_is_checked_before_it_is_written() {
    let capture = Capture::from_bytes(&file(&good(), &[])).unwrap();
    let mut odd = capture.clone();
    odd.layers[1].keys = odd.layers[0].queries.clone();
    assert_eq!(odd.to_bytes().unwrap_err().code(), "shape");
    let mut odd = capture.clone();
    odd.layers[1].keys = None;
    assert_eq!(odd.to_bytes().unwrap_err().code(), "missing_tensor");
    let mut odd = capture.clone();
    odd.info.token_ids = Some(vec![1; 17]);
    let error = odd.to_bytes().unwrap_err().to_string();
    assert_eq!(error, "tokens: wanted [3, 6], had 17 ids");
    let mut odd = capture.clone();
    odd.info.extra.insert("attn_scale".to_owned(), "1".to_owned());
    let error = odd.to_bytes().unwrap_err().to_string();
    assert_eq!(error, "metadata attn_scale: wanted a key without a field of its own, had \"1\"");
    assert_eq!(Capture::new(Vec::new(), CaptureInfo::default()).unwrap_err().code(), "missing_tensor");
}

fn tensor(shape: [usize; 4], dtype: DType, seed: u64) -> Tensor {
    let shape = Shape::new(shape[0], shape[1], shape[2], shape[3]).unwrap();
    // A multiplicative hash: numbers of both signs and many sizes, all finite in every type.
    let number = |i: usize| {
        let hash = (i as u64 ^ seed.rotate_left(20)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        f32::from_bits((hash >> 32) as u32 & 0x87ff_ffff | 0x3800_0000)
    };
    let numbers: Vec<f32> = (0..shape.elements()).map(number).collect();
    Tensor::from_f32(&numbers, dtype, shape).unwrap()
}

prop_compose! {
    fn layer(batch: usize, tokens: usize, count: usize)(
        heads in 1..4usize, ratio in 1..4usize, key_dim in 1..10usize, value_dim in 1..10usize,
        dtypes in prop::array::uniform4(prop::sample::select(&DType::ALL[..])), seed: u64,
        queries: bool, held in 0..3u8,
    ) -> Layer {
        let keys = || tensor([batch, heads, tokens, key_dim], dtypes[0], seed);
        let pre = || tensor([batch, heads, tokens, key_dim], dtypes[1], !seed);
        let values = tensor([batch, heads, tokens, value_dim], dtypes[2], seed >> 1);
        let mut layer = if held == 0 { Layer::pre_rope(pre(), values) } else { Layer::new(keys(), values) };
        if held == 1 {
            layer.keys_pre_rope = Some(pre());
        }
        layer.queries = queries.then(|| tensor([batch, heads * ratio, count, key_dim], dtypes[3], seed >> 2));
        layer
    }
}

prop_compose! {
    fn sizes()(batch in 1..4usize, tokens in 0..9usize)(
        batch in Just(batch), tokens in Just(tokens), count in 0..=tokens, layers in 1..5usize,
    ) -> (usize, usize, usize, usize) {
        (batch, tokens, count, layers)
    }
}

fn capture() -> impl Strategy<Value = Capture> {
    let finite = || any::<f32>().prop_filter("finite", |n| n.is_finite() && *n != 0.0);
    sizes().prop_flat_map(move |(batch, tokens, count, layers)| {
        let texts = (prop::option::of(".{0,8}"), prop::collection::btree_map("x[a-z]{1,5}", ".{0,12}", 0..4));
        let numbers = (
            prop::option::of(finite().prop_map(f32::abs)),
            prop::option::of(prop::collection::vec(count..=tokens, batch)),
            prop::option::of(prop::collection::vec(0..1000u32, batch)),
            prop::option::of(prop::collection::vec(finite().prop_map(f32::abs), layers)),
            prop::option::of(prop::collection::vec(any::<i32>(), batch * tokens)),
        );
        let windows =
            prop_oneof![Just(Vec::new()), prop::collection::vec(prop::option::of(1..5000u32), layers)];
        let layout = prop::option::of(prop::sample::select(vec![
            RopeLayout::HalfSplit,
            RopeLayout::Interleaved,
            RopeLayout::Other("multi-axis".to_owned()),
        ]));
        let rope = (prop::collection::vec(finite(), 0..5), any::<bool>(), any::<bool>());
        let layers = prop::collection::vec(layer(batch, tokens, count), layers);
        (layers, texts, numbers, windows, layout, rope, 0..=tokens - count, any::<bool>()).prop_map(
            move |(
                layers,
                texts,
                numbers,
                windows,
                layout,
                (mut inv_freq, rotary, frequencies),
                start,
                stated,
            )| {
                let mut info = CaptureInfo::default();
                (info.model, info.extra) = texts;
                (info.attn_scale, info.lengths, info.position_start, info.rope_theta, info.token_ids) =
                    numbers;
                (info.sliding_window, info.rope_layout) = (windows, layout);
                let pairs = layers.iter().map(Layer::key_dim).min().unwrap() / 2;
                inv_freq.truncate(pairs);
                info.rotary_dim = rotary.then_some(2 * inv_freq.len());
                info.inv_freq = frequencies.then_some(inv_freq);
                let queried = layers.iter().any(|layer| layer.queries.is_some());
                info.query_positions = (queried && stated).then_some(start..start + count);
                Capture::new(layers, info).unwrap()
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn what_is_written_is_read_again(capture in capture()) {
        let file = capture.to_bytes().unwrap();
        let again = Capture::from_bytes(&file).unwrap();
        prop_assert_eq!(&again, &capture);
        prop_assert_eq!(again.to_bytes().unwrap(), file);
    }

    #[test]
    fn one_damaged_byte_never_panics(at in 0..4096usize, bits in 1..=255u8) {
        let mut file = file(&good(), &[("lengths", "[6, 6, 6]"), ("query_positions", "4..6")]);
        let at = at % file.len();
        file[at] ^= bits;
        if let Ok(capture) = Capture::from_bytes(&file) {
            prop_assert!(capture.to_bytes().is_ok());
        }
    }
}
