//! Captures: the bundled sample, round trips of random ones, and a corpus of files that must be refused by name.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that panics is a test that fails"
)]

mod files;
mod refusals;
mod round_trip;

use kvfold::capture::{Capture, RopeLayout};
use kvfold::{DType, Error, Shape};
use safetensors::SafeTensors;

use files::{file, good, sample, zeros};

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
        // We print a whole number without the ".0" that Python gives it.
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
    assert_eq!(error.to_string(), "layer.0.key: wanted in the file, had only layer.0.key_pre, layer.0.value");
    assert_eq!(
        capture.queries(7).unwrap_err().to_string(),
        "layer.7.query: wanted in the file, had only 1 layers"
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
