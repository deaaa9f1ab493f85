//! Files and captures that must be refused, each with its error, the name of what is wrong, what was wanted and had.

use half::{bf16, f16};
use kvfold::Error;
use kvfold::capture::{Capture, CaptureInfo, ReadOptions};
use safetensors::{Dtype, SafeTensorError};

use crate::files::{Part, file, good, of, raw, sample, with, without, zeros};

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

/// Where a file's header ends and its data begins.
fn header_end(file: &[u8]) -> usize {
    8 + usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap()
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
    let header = header_end(&whole);
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
        ("sliding_window", &["[null]", "[4, 0]"], "null or at least 1 for each of 2 layers"),
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

#[test]
fn every_flipped_bit_of_a_header_is_refused_or_harmless() {
    let whole = file(&good(), &[("lengths", "[6, 6, 6]"), ("query_positions", "4..6")]);
    for bit in 0..8 * header_end(&whole) {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        if let Ok(capture) = Capture::from_bytes(&flipped) {
            assert!(capture.to_bytes().is_ok(), "bit {bit}");
        }
    }
}
