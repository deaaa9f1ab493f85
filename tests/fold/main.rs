//! The cache of a whole model on the host.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that panics fails; its modules are shared"
)]

#[path = "../folded/mod.rs"]
mod folded;
#[path = "../random/mod.rs"]
mod numbers;

use folded::{Rows, Subject, model, policy};
use kvfold::attention::AttendOptions;
use kvfold::cache::Step;
use kvfold::fold::{Budget, CpuFoldedCache, Fold, Policy};
use kvfold::report::{Engine, PlanesRequest, ReportOptions, report_blocking};
use kvfold::{Capture, Error, Result, Tensor};

struct Host(CpuFoldedCache);

impl Subject for Host {
    fn append(&mut self, layer: usize, rows: &Rows) -> Result<()> {
        let (keys, values, queries) = (rows.keys.view(), rows.values.view(), rows.queries.view());
        self.0.append(layer, &Step::new(&keys, &values).queries(&queries))
    }

    fn attend(&mut self, layer: usize, queries: &Tensor, options: &AttendOptions<'_>) -> Result<Vec<f32>> {
        self.0.attend(layer, &queries.view(), options)
    }

    fn commit(&mut self) -> Result<()> {
        self.0.commit()
    }

    fn len(&self, sequence: usize) -> Result<usize> {
        self.0.len(sequence)
    }

    fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.0.trim(sequence, tokens)
    }

    fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.0.fork(sequence)
    }

    fn gather(&mut self, sources: &[u32]) -> Result<()> {
        self.0.gather(sources)
    }

    fn bytes(&self) -> [u64; 2] {
        [self.0.payload_bytes(), self.0.raw_bytes()]
    }

    fn tokens(&self, layer: usize) -> [usize; 2] {
        let report = self.0.report();
        [report.layers[layer].tokens, report.layers[layer].folded]
    }

    fn save(&self) -> Result<Vec<u8>> {
        self.0.save()
    }

    fn load(&self, file: &[u8]) -> Result<Self> {
        CpuFoldedCache::load(file).map(Self)
    }
}

fn host() -> Host {
    Host(CpuFoldedCache::new(model(), policy(), 1).unwrap())
}

#[test]
fn every_layer_attends_as_it_would_alone() {
    // All layers but the first run the very same code; the first adds in the order of other tiles, where a sum of at most
    // 40 weights and values is off by 40 roundings of 2^-24.
    folded::every_layer_attends_as_it_would_alone(host(), 1e-5);
}

#[test]
fn sequences_are_those_of_all_layers() {
    folded::sequences_are_those_of_all_layers(host(), f64::MIN_POSITIVE);
}

#[test]
fn a_loaded_cache_goes_on_bit_for_bit() {
    folded::a_loaded_cache_goes_on(host());
}

#[test]
fn a_report_says_what_is_kept_how() {
    let text = host().0.report().to_string();
    for line in ["layer 0: raw, 0 of 0 tokens folded, window 40", "layers 2 to 3: minicache 7", "ratio"] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn layers_that_there_are_not_are_named() {
    let Host(cache) = host();
    let queries = Tensor::from_f32(&[0.0; 64], kvfold::DType::F32, kvfold::Shape::new(1, 4, 1, 16).unwrap());
    let error = cache.attend(6, &queries.unwrap().view(), &AttendOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "layer: wanted below the cache's 6 layers, had 6");
    assert!(CpuFoldedCache::new(model(), Policy::named("raw", 5).unwrap(), 1).is_err());
}

#[test]
fn a_policy_is_measured_on_a_capture_and_explains_itself() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");
    let mut capture = Capture::open(path).unwrap();
    capture.layers.truncate(2);
    let options = ReportOptions::default().planes(PlanesRequest::default());
    let report = report_blocking(&capture, &options, &Engine::Cpu, &mut |_| true).unwrap();
    let figures = report.planes.unwrap();
    let chosen = |budget| Policy::from_figures(&figures, &capture, budget).unwrap();
    let (close, wide) = (chosen(Budget::Divergence(0.01)), chosen(Budget::Divergence(10.0)));
    let extreme = Policy::named("extreme", 2).unwrap();
    for ((close, wide), extreme) in close.layers.iter().zip(&wide.layers).zip(&extreme.layers) {
        assert_eq!(wide.fold, extreme.fold, "10 nats allow anything");
        assert_ne!(close.fold, extreme.fold, "2 bits do not stay within a hundredth of a nat");
        assert!(close.reason.as_ref().is_some_and(|reason| reason.contains("the fewest within 0.01")));
    }
    let small = chosen(Budget::Ratio(5.0));
    assert!(small.layers.iter().all(|layer| layer.fold != Fold::Raw), "{small:?}");
    assert_eq!(Policy::from_json(&small.to_json()).unwrap(), small);

    capture.layers.truncate(1);
    let measured = Policy::measured(&capture, Budget::Divergence(0.01)).unwrap();
    assert_eq!(measured.layers, close.layers[..1]);
    (capture.layers[0].queries, capture.info.query_positions) = (None, None);
    let error = Policy::measured(&capture, Budget::Ratio(2.0)).unwrap_err();
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
}
