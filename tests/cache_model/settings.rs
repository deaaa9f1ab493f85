//! What caches are walked through with.

use kvfold::cache::LayerShape;
use kvfold::capture::RopeLayout;
use kvfold::qjl::KeyScale;
use kvfold::qjl::ProjectionKind;
use kvfold::qjl::cache::{CacheOptions, Coding, SketchOptions};
use kvfold::qjl::planes::{Balance, Calibration, Centring, PlanesOptions, Preset, Tables};
use kvfold::rope::{Positions, Rope};
use kvfold::{DType, Shape, Tensor};

use crate::cache_model::walk::Setting;
use crate::numbers::Random;

fn rope(dim: usize, rotary: usize) -> Rope {
    Rope::from_theta(dim, rotary, 10_000.0, RopeLayout::HalfSplit).unwrap()
}

fn setting(layers: Vec<LayerShape>, options: CacheOptions) -> Setting {
    // Logits of some tens in f32, whose last bits are worth 4e-6 each, under an exponential.
    Setting { layers, group: 2, sequences: 2, options, queries: true, odd: 0, tolerance: 1e-4 }
}

/// Tables of a layer from 200 made keys and queries.
fn tables(layer: LayerShape, rope: &Rope, options: &PlanesOptions) -> Tables {
    let mut random = Random(layer.kv_heads as u64);
    let mut rows = |heads| {
        let shape = Shape::new(1, heads, 200, layer.key_dim).unwrap();
        let numbers: Vec<f32> =
            (0..shape.elements()).map(|i| (random.normal() + (i % 3) as f64) as f32).collect();
        Tensor::from_f32(&numbers, DType::F32, shape).unwrap()
    };
    let (keys, queries) = (rows(layer.kv_heads), rows(2 * layer.kv_heads));
    let (keys, queries) = (keys.view(), queries.view());
    let from = Calibration::new(&keys, Positions::Start(&[7])).queries(&queries).rope(rope);
    Tables::calibrate(&from, options).unwrap()
}

/// Caches whose tables are of a calibration: of split planes, and of sketches, which have a mean alone.
fn calibrated(layers: &[LayerShape]) -> [CacheOptions; 2] {
    let rope = rope(16, 16);
    let tables =
        |options: &PlanesOptions| layers.iter().map(|&layer| tables(layer, &rope, options)).collect();
    let compact = Preset::Compact.options();
    let planes = CacheOptions::from(Preset::Compact).rope(rope.clone()).tables(tables(&compact));
    let mean = compact.balance(Balance::None);
    [planes, CacheOptions::qjl_orth().rope(rope.clone()).tables(tables(&mean))]
}

/// Presets, centrings, capacities, projections, tables of a calibration, odd rows.
pub fn settings() -> Vec<Setting> {
    let layer = |dtype| LayerShape::new(2, 16, dtype);
    let both = vec![layer(DType::F16), LayerShape::new(1, 16, DType::F16).value_dim(24)];
    let planes = |options: PlanesOptions| CacheOptions::new(Coding::Planes(options));
    let small = PlanesOptions::default().recent(8);
    let sketch =
        SketchOptions::default().projection(ProjectionKind::Orthogonal).rate(2.0).sinks(3).recent(10);
    let hadamard = SketchOptions::default().projection(ProjectionKind::Hadamard).scale(KeyScale::Mse);
    let mut all: Vec<Setting> =
        calibrated(&both).into_iter().map(|options| setting(both.clone(), options)).collect();
    all.extend([
        setting(vec![layer(DType::F16)], CacheOptions::new(Coding::Sketch(hadamard.rate(1.5).recent(5)))),
        setting(both.clone(), CacheOptions::from(Preset::Balanced).rope(rope(16, 16))),
        setting(
            both.clone(),
            CacheOptions::from(Preset::Compact).ropes(vec![Some(rope(16, 16)), Some(rope(16, 8))]),
        ),
        setting(vec![layer(DType::F32)], planes(small).capacity(160)),
        setting(
            vec![layer(DType::Bf16)],
            planes(small.sinks(4)).rope(rope(16, 16)).capacity(140).pin_sinks(true),
        ),
        setting(vec![layer(DType::F16)], planes(small.centring(Centring::BlockMean(24)))),
        setting(
            vec![layer(DType::F16)],
            planes(small.centring(Centring::None).balance(Balance::None).sinks(0)).capacity(20),
        ),
        setting(vec![layer(DType::F32)], CacheOptions::qjl()),
        setting(vec![layer(DType::F16)], CacheOptions::qjl().capacity(5)),
        setting(both.clone(), CacheOptions::qjl_orth().rope(rope(16, 16))),
        setting(
            both,
            CacheOptions::new(Coding::Sketch(sketch.scale(KeyScale::Unbiased))).capacity(77).pin_sinks(true),
        ),
    ]);
    let mut odd = setting(vec![layer(DType::F32)], planes(small).rope(rope(16, 16)));
    (odd.odd, odd.sequences, odd.queries) = (4, 3, false);
    all.push(odd);
    let mut odd = setting(vec![layer(DType::F16)], CacheOptions::qjl_orth().rope(rope(16, 8)));
    (odd.odd, odd.group) = (4, 3);
    all.push(odd);
    all
}

/// Every width and group that a kernel treats apart.
pub fn widths() -> Vec<Setting> {
    let mut all = Vec::new();
    for (dim, group) in [(1, 1), (48, 3), (64, 7), (80, 8), (96, 1), (128, 3), (256, 1), (511, 1)] {
        let options: CacheOptions = PlanesOptions::default().recent(16).into_options();
        let options = if dim > 1 { options.rope(rope(dim, dim & !1)) } else { options };
        let mut one = setting(vec![LayerShape::new(1, dim, DType::F16)], options);
        (one.group, one.sequences) = (group, 2);
        all.push(one);
    }
    for (dim, group) in [(48, 7), (80, 3), (511, 1)] {
        let layer = LayerShape::new(1, dim, DType::F16).value_dim(dim - 1);
        let mut one = setting(vec![layer], CacheOptions::qjl_orth().rope(rope(dim, dim & !1)));
        one.group = group;
        all.push(one);
    }
    all
}

/// One sequence that takes no rows but those that room was reserved for.
pub fn fixed() -> Vec<Setting> {
    let layers = vec![LayerShape::new(2, 16, DType::F16), LayerShape::new(1, 16, DType::F16).value_dim(24)];
    [CacheOptions::default().rope(rope(16, 16)), CacheOptions::qjl()]
        .map(|options| Setting { sequences: 1, ..setting(layers.clone(), options.fixed(true)) })
        .into()
}

/// Three sequences, for lengths that differ.
pub fn three() -> Vec<Setting> {
    let layer = LayerShape::new(2, 16, DType::F16);
    let rope = rope(16, 16);
    [CacheOptions::default().rope(rope.clone()), CacheOptions::qjl_orth().rope(rope), CacheOptions::qjl()]
        .map(|options| Setting { sequences: 3, ..setting(vec![layer], options) })
        .into()
}

trait IntoOptions {
    fn into_options(self) -> CacheOptions;
}

impl IntoOptions for PlanesOptions {
    fn into_options(self) -> CacheOptions {
        CacheOptions::new(Coding::Planes(self))
    }
}
