//! What caches are walked through with.

use kvfold::DType;
use kvfold::cache::LayerShape;
use kvfold::capture::RopeLayout;
use kvfold::qjl::KeyScale;
use kvfold::qjl::ProjectionKind;
use kvfold::qjl::cache::{CacheOptions, Coding, SketchOptions};
use kvfold::qjl::planes::{Balance, Centring, PlanesOptions, Preset};
use kvfold::rope::Rope;

use crate::cache_model::walk::Setting;

fn rope(dim: usize, rotary: usize) -> Rope {
    Rope::from_theta(dim, rotary, 10_000.0, RopeLayout::HalfSplit).unwrap()
}

fn setting(layers: Vec<LayerShape>, options: CacheOptions) -> Setting {
    // Logits of some tens in f32, whose last bits are worth 4e-6 each, under an exponential.
    Setting { layers, group: 2, sequences: 2, options, queries: true, odd: 0, tolerance: 1e-4 }
}

/// Presets, centrings, capacities, odd rows.
pub fn settings() -> Vec<Setting> {
    let layer = |dtype| LayerShape::new(2, 16, dtype);
    let both = vec![layer(DType::F16), LayerShape::new(1, 16, DType::F16).value_dim(24)];
    let planes = |options: PlanesOptions| CacheOptions::new(Coding::Planes(options));
    let small = PlanesOptions::default().recent(8);
    let sketch =
        SketchOptions::default().projection(ProjectionKind::Orthogonal).rate(2.0).sinks(3).recent(10);
    let mut all = vec![
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
    ];
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
    all
}

trait IntoOptions {
    fn into_options(self) -> CacheOptions;
}

impl IntoOptions for PlanesOptions {
    fn into_options(self) -> CacheOptions {
        CacheOptions::new(Coding::Planes(self))
    }
}
