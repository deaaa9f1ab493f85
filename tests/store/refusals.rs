//! Files that must be refused, each with its error and the name of what is wrong.

use kvfold::minicache::{DirectionPlanes, MergeOptions, Retention};
use kvfold::qjl::cache::NamedCoding;
use kvfold::store::{FoldOptions, Store};
use kvfold::{Capture, Error};
use safetensors::Dtype;

use crate::made::{Part, Parts, Sizes, file};

fn minicache() -> FoldOptions {
    let merge = MergeOptions::default().retention(Retention::Cosine(0.9));
    FoldOptions::MiniCache { merge, start_frac: 0.0 }
}

/// Every method, with its kinds of tensors.
fn every() -> [FoldOptions; 4] {
    [minicache(), FoldOptions::default(), NamedCoding::QjlOrth.into(), NamedCoding::Qjl.into()]
}

/// The error of a file, which must carry this code and say all of these words.
#[track_caller]
fn refused(file: &[u8], code: &str, words: &[&str]) -> Error {
    let Err(error) = Store::from_bytes(file) else { panic!("read") };
    let text = error.to_string();
    assert_eq!(error.code(), code, "{text}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    error
}

#[test]
fn truncated_files_are_refused_wherever_they_end() {
    for options in every() {
        let whole = file(&options);
        for end in (0..whole.len()).step_by(whole.len() / 200).chain([whole.len() - 1]) {
            let error = Store::from_bytes(&whole[..end]).unwrap_err();
            assert!(["safetensors", "too_short"].contains(&error.code()), "{end}: {error}");
        }
    }
}

#[test]
fn flipped_bits_are_refused_or_mean_the_same() {
    for options in every() {
        let whole = file(&options);
        let store = Store::from_bytes(&whole).unwrap();
        let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let step = (whole.len() / 300).max(1);
        for (at, bit) in (0..whole.len()).step_by(step).zip((0..8).cycle()) {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            match Store::from_bytes(&flipped) {
                Ok(same) => assert!(at < data && same == store, "byte {at}"),
                Err(error) => assert!(at < data || error.code() == "digest", "byte {at}: {error}"),
            }
        }
    }
}

#[test]
fn what_is_no_store_is_refused() {
    refused(b"", "safetensors", &["0 bytes"]);
    refused(b"The lighthouse keeper's daughter", "safetensors", &["32 bytes"]);
    let capture = Sizes::default().capture().to_bytes().unwrap();
    refused(&capture, "metadata", &["kvfold.store", "a store of version 1 to 1", "no such entry"]);
    let error = Capture::from_bytes(&file(&minicache())).unwrap_err();
    assert!(error.to_string().contains("kvfold unfold"), "{error}");
}

#[test]
fn other_versions_are_refused_before_anything_else() {
    let mut parts = Parts::of(&file(&minicache()));
    for version in ["2", "0", "-1", "one", ""] {
        parts.metadata.insert("kvfold.store".to_owned(), version.to_owned());
        refused(&parts.unsigned(parts.metadata.clone()), "metadata", &["kvfold.store", "version 1 to 1"]);
    }
}

#[test]
fn the_digest_is_over_metadata_names_types_shapes_and_bytes() {
    let parts = Parts::of(&file(&FoldOptions::default()));
    Store::from_bytes(&parts.file()).unwrap();
    let damaged = |change: &dyn Fn(&mut Parts)| {
        let mut parts = parts.clone();
        change(&mut parts);
        refused(&parts.unsigned(parts.metadata.clone()), "digest", &["damaged"]);
    };
    damaged(&|parts| drop(parts.metadata.insert("model".to_owned(), "other".to_owned())));
    damaged(&|parts| drop(parts.tensors.pop_first()));
    damaged(&|parts| parts.tensors.get_mut("tokens").unwrap().shape = vec![130]);
    damaged(&|parts| parts.tensors.get_mut("tokens").unwrap().dtype = Dtype::U32);
    let mut missing = parts.metadata.clone();
    missing.remove("kvfold.digest");
    refused(&parts.unsigned(missing), "metadata", &["kvfold.digest", "no such entry"]);
}

#[test]
fn missing_and_unknown_tensors_are_named() {
    for options in every() {
        let parts = Parts::of(&file(&options));
        for name in parts.tensors.keys().filter(|name| !(name.starts_with("layer.") || *name == "tokens")) {
            let mut parts = parts.clone();
            parts.tensors.remove(name);
            refused(&parts.file(), "missing_tensor", &[name]);
        }
        let mut more = parts.clone();
        more.tensors.insert("layer.9.key".to_owned(), parts.tensors["tokens"].clone());
        refused(&more.file(), "unknown_tensor", &["layer.9.key"]);
    }
}

#[test]
fn wrong_types_and_shapes_are_named() {
    for options in every() {
        let parts = Parts::of(&file(&options));
        for name in parts.tensors.keys().filter(|name| !name.starts_with("layer.")) {
            let mut typed = parts.clone();
            let part = typed.tensors.get_mut(name).unwrap();
            part.dtype = if part.bytes.len().is_multiple_of(8) { Dtype::I64 } else { Dtype::I8 };
            let size = part.dtype.bitsize() / 8;
            part.shape = vec![part.bytes.len() / size];
            refused(&typed.file(), "dtype", &[name]);
            let mut shaped = parts.clone();
            let part = shaped.tensors.get_mut(name).unwrap();
            part.shape.push(1);
            refused(&shaped.file(), "shape", &[name]);
        }
    }
}

/// A file whose description is changed.
fn described(options: &FoldOptions, from: &str, to: &str) -> Vec<u8> {
    let mut parts = Parts::of(&file(options));
    let text = parts.metadata.get_mut("kvfold.fold").unwrap();
    assert!(text.contains(from), "{text}");
    *text = text.replacen(from, to, 1);
    parts.file()
}

#[test]
fn hostile_sizes_cost_nothing() {
    for options in every() {
        for (from, to, code) in [
            ("\"batch\":1,", "\"batch\":65536,", "metadata"), // position_start has one number
            ("\"batch\":1,", "\"batch\":18446744073709551615,", "metadata"),
            ("\"batch\":1,", "\"batch\":0,", "metadata"),
            ("\"tokens\":130,", "\"tokens\":4611686018427387904,", "metadata"),
            ("\"tokens\":130,", "\"tokens\":4294967295,", "range"),
            ("\"heads\":1,", "\"heads\":65536,", if options == minicache() { "metadata" } else { "range" }),
            (
                "\"key_dim\":12,",
                "\"key_dim\":65536,",
                if options == minicache() { "metadata" } else { "range" },
            ),
            ("\"key_dim\":12,", "\"key_dim\":-1,", "metadata"),
            ("\"layers\":[", "\"layers\":[],\"more\":[", "metadata"),
            ("{", "[", "metadata"),
        ] {
            let error = Store::from_bytes(&described(&options, from, to)).unwrap_err();
            assert_eq!(error.code(), code, "{to}: {error}");
        }
    }
    let deep = "[".repeat(100_000);
    refused(&described(&minicache(), "{", &deep), "metadata", &["kvfold.fold"]);
    let mut padded = Parts::of(&file(&minicache()));
    let text = padded.metadata.get_mut("kvfold.fold").unwrap();
    *text = text.replacen("\"tokens\":130,", "\"tokens\":1000000000,", 1);
    padded.metadata.insert("lengths".to_owned(), "[130]".to_owned());
    refused(&padded.file(), "range", &["restored bytes", "1024 times"]);
}

#[test]
fn directions_in_codes_that_cannot_be_are_refused() {
    let merge = MergeOptions::default().planes(DirectionPlanes::default());
    let options = FoldOptions::MiniCache { merge, start_frac: 0.0 };
    assert!(Store::from_bytes(&file(&options)).is_ok());
    for (from, to, code, told) in [
        ("\"seed\":7", "\"seed\":8", "digest", "rotation of 12 channels"),
        ("\"rounds\":1", "\"rounds\":0", "range", "planes.rounds"),
        ("\"bits\":3", "\"bits\":200", "range", "planes.bits"),
        ("\"mode\":\"shared\"", "\"mode\":\"anchor\"", "range", "Anchor"),
        (",\"rotations\":{\"12\":", ",\"rotations\":{\"13\":", "digest", "none"),
    ] {
        refused(&described(&options, from, to), code, &[told]);
    }
    // Codes of other bits are of another length.
    refused(&described(&options, "\"bits\":3", "\"bits\":5"), "shape", &["slots"]);
}

#[test]
fn pairs_and_options_that_cannot_be_are_refused() {
    for pairs in ["[[1,0]]", "[[0,0]]", "[[0,2]]", "[[0,1],[0,1]]", "[[0,18446744073709551615]]"] {
        let file = described(&minicache(), "\"pairs\":[[0,1]]", &format!("\"pairs\":{pairs}"));
        refused(&file, "metadata", &["kvfold.fold", "pairs of layers"]);
    }
    refused(&described(&minicache(), "\"slerp_t\":0.5", "\"slerp_t\":2"), "range", &["slerp_t"]);
    refused(
        &described(&FoldOptions::default(), "\"value_planes\":3", "\"value_planes\":9"),
        "range",
        &["value_planes"],
    );
    let seed = described(&FoldOptions::default(), "\"seed\":7", "\"seed\":8");
    refused(&seed, "digest", &["rotation.16"]);
    let qjl = NamedCoding::Qjl.into();
    refused(&described(&qjl, "\"rate\":1.0", "\"rate\":1e300"), "range", &["sketch rate", "1e300"]);
    refused(&described(&qjl, "\"rate\":1.0", "\"rate\":2.0"), "shape", &["projection.12", "24, 12"]);
    refused(
        &described(&qjl, "\"centring\":\"none\"", "\"centring\":{\"block-mean\":64}"),
        "range",
        &["centring"],
    );
    refused(
        &described(&qjl, "\"projections\":{", "\"projections\":{},\"x\":{"),
        "metadata",
        &["kvfold.fold"],
    );
    refused(
        &described(&qjl, "\"projection\":\"gaussian\"", "\"projection\":\"loaded\""),
        "range",
        &["projection", "loaded"],
    );
    refused(
        &described(&qjl, "\"projections\":{", "\"projections\":{\"64\":\"0\","),
        "missing_tensor",
        &["projection.64"],
    );
    let more = described(&FoldOptions::default(), "\"rotations\":{", "\"rotations\":{\"64\":\"0\",");
    refused(&more, "metadata", &["kvfold.fold", "one for 64 channels"]);
    let gaussian = described(&qjl, "\"projection\":\"gaussian\"", "\"projection\":\"orthogonal\"");
    refused(&gaussian, "digest", &["projection.12"]);
    let mut undrawn = Parts::of(&file(&qjl));
    let text = undrawn.metadata.get_mut("kvfold.fold").unwrap();
    let start = text.find("\"projections\":{").unwrap() + "\"projections\":{".len();
    text.replace_range(start..start + text[start..].find('}').unwrap(), "");
    refused(&undrawn.file(), "metadata", &["kvfold.fold", "projection of 12 channels", "none"]);
}

#[test]
fn bitmaps_and_tables_that_cannot_be_are_refused() {
    let change = |options: &FoldOptions, name: &str, change: &dyn Fn(&mut Part)| {
        let mut parts = Parts::of(&file(options));
        change(parts.tensors.get_mut(name).unwrap());
        parts.file()
    };
    let key = |suffix: &str| format!("sequence.0.layer.0.key.{suffix}");
    // The last of five pages has two rows.
    let beyond = change(&minicache(), &key("retained"), &|part| *part.bytes.last_mut().unwrap() = 0x80);
    refused(&beyond, "shape", &["retained, page 4", "2 rows"]);
    let raw = change(&minicache(), &key("raw_pages"), &|part| part.bytes[0] = 2);
    refused(&raw, "shape", &["retained, page 0"]);
    let fewer = change(&minicache(), &key("retained"), &|part| part.bytes[..4].fill(0));
    refused(&fewer, "shape", &["side"]);
    let planes = FoldOptions::default();
    let order = change(&planes, &key("order"), &|part| part.bytes.fill(0));
    refused(&order, "range", &["order"]);
    let sigma = change(&planes, &key("sigma"), &|part| part.bytes.fill(0));
    refused(&sigma, "range", &["balance"]);
    let mu = change(&planes, &key("mu"), &|part| part.bytes.fill(0xff));
    refused(&mu, "non_finite", &["tables"]);
    let matrix = change(&planes, "rotation.12", &|part| part.bytes.fill(0xff));
    refused(&matrix, "non_finite", &["rotation.12"]);
    let matrix = change(&planes, "rotation.12", &|part| part.bytes.fill(0));
    refused(&matrix, "digest", &["rotation.12"]);
    let qjl = NamedCoding::QjlOrth.into();
    let matrix = change(&qjl, "projection.12", &|part| part.bytes.fill(0xff));
    refused(&matrix, "non_finite", &["projection.12"]);
    let matrix = change(&qjl, "projection.12", &|part| part.bytes.fill(0));
    refused(&matrix, "digest", &["projection.12"]);
    let twos: Vec<u8> = [2f32.to_le_bytes(); 12].concat();
    let weighed = change(&qjl, &key("sigma"), &|part| part.bytes.clone_from(&twos));
    refused(&weighed, "range", &["sigma of a sketch", "had 2"]);
}

#[test]
fn captures_that_cannot_be_folded_are_refused() {
    let mut capture = Sizes::default().capture();
    capture.info.extra.insert("kvfold.digest".to_owned(), "0".to_owned());
    let error = Store::fold(&capture, &minicache()).unwrap_err();
    assert!(matches!(&error, Error::Metadata { key, .. } if key == "kvfold.digest"), "{error}");
    let mut capture = Sizes::default().capture();
    let keys = capture.layers[1].keys.take();
    capture.layers[1].keys_pre_rope = keys;
    let error = Store::fold(&capture, &minicache()).unwrap_err();
    assert!(matches!(&error, Error::MissingTensor { tensor, .. } if tensor == "layer.1.key"), "{error}");
    let capture = Sizes::default().capture();
    let merge = MergeOptions::default();
    let error = Store::fold(&capture, &FoldOptions::MiniCache { merge, start_frac: 2.0 }).unwrap_err();
    assert_eq!(error.code(), "range");
}
