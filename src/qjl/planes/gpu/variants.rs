//! The variants of the planes' kernels.

use super::super::{
    BYTE, CALIBRATION_TOKENS, Centring, CodeLayout, Codec, PlanesOptions, STEPS, Segment, Sketch,
};
use super::rotations::offset_of;
use super::tiles::{TILE, groups};
use crate::attention::Geometry;
use crate::attention::gpu::value_lanes;
use crate::capture::RopeLayout;
use crate::error::Result;
use crate::gpu::{Arithmetic, Const, Kernel, Module, Variant, listed_widths};
use crate::qjl::ProjectionKind;
use crate::tensor::{DType, checked_bytes};

/// What the kernels of one codec are made for.
#[derive(Clone, Copy)]
pub(in crate::qjl) struct Make<'a> {
    pub(in crate::qjl) codec: &'a Codec,
    pub(in crate::qjl) subgroups: Option<u32>,
}

/// RoPE pairs that have angles, and the last that has none.
pub(super) fn pairs(codec: &Codec) -> usize {
    codec.mean_rope().map_or(0, |rope| rope.inv_freq().len()) + 1
}

/// Numbers of a query made ready to be scored: `shaders/planes/sketch.wgsl` lists them.
fn sketch(codec: &Codec) -> usize {
    let groups: usize = codec.keys().segments().iter().map(groups).sum();
    let mean = if codec.block().is_some() { codec.key_dim() } else { 2 * pairs(codec) };
    TILE * groups + 3 + TILE / 4 * groups + 2 * groups + mean
}

/// Bytes of the queries of a call made ready, in fours of each KV head.
pub(in crate::qjl) fn sketch_bytes(codec: &Codec, g: Geometry) -> Result<u64> {
    let fours = g.batch * g.kv_heads * (g.group * g.queries).div_ceil(4);
    Ok(checked_bytes("query sketches", &[fours.max(1), sketch(codec)], 16)? as u64)
}

/// Invocations of a workgroup that attends or scores: enough for all channels of a value, four each.
fn attend_workgroup(codec: &Codec) -> u32 {
    (codec.value_dim().div_ceil(4) as u32).next_power_of_two().clamp(32, 128)
}

/// Tokens that such a workgroup looks at together, four an invocation.
pub(super) fn attend_tokens(codec: &Codec) -> usize {
    4 * attend_workgroup(codec) as usize
}

impl Make<'_> {
    /// A segment's channels, bits, words, and rotation.
    fn segment(&self, names: [&'static str; 8], segment: Option<Segment>) -> Vec<Const> {
        let segment = segment.unwrap_or(Segment { channels: 0, planes: 0 });
        let rotation = self.codec.rotations().get(segment.channels).filter(|_| segment.planes > 0);
        let [channels, planes, words, groups_name, at, hadamard, factor, delta] = names;
        let step = STEPS.get(usize::from(segment.planes.max(1)) - 1).copied().unwrap_or(1.0);
        vec![
            Const::U32(channels, segment.channels as u32),
            Const::U32(planes, segment.planes.into()),
            Const::U32(words, segment.words() as u32),
            Const::U32(groups_name, groups(&segment) as u32),
            Const::U32(at, offset_of(self.codec, segment.channels) as u32),
            Const::Bool(hadamard, rotation.is_none_or(|rotation| rotation.signs().is_some())),
            Const::F32(factor, rotation.map_or(1.0, super::super::Rotation::factor).to_bits()),
            Const::F32(delta, step.to_bits()),
        ]
    }

    fn layout(&self, layout: &CodeLayout, centred: bool) -> Vec<Const> {
        const FIRST: [&str; 8] = [
            "FIRST_CHANNELS",
            "FIRST_PLANES",
            "FIRST_WORDS",
            "FIRST_GROUPS",
            "FIRST_AT",
            "FIRST_HADAMARD",
            "FIRST_FACTOR",
            "FIRST_DELTA",
        ];
        const SECOND: [&str; 8] = [
            "SECOND_CHANNELS",
            "SECOND_PLANES",
            "SECOND_WORDS",
            "SECOND_GROUPS",
            "SECOND_AT",
            "SECOND_HADAMARD",
            "SECOND_FACTOR",
            "SECOND_DELTA",
        ];
        let centring = match self.codec.options().centring {
            Centring::BlockMean(_) if centred => 1,
            Centring::PreRope if centred => 2,
            _ => 0,
        };
        let mut constants = vec![
            Const::U32("HEAD_DIM", if centred { self.codec.key_dim() } else { layout.channels() } as u32),
            Const::U32("ROUNDS", self.codec.options().rounds.into()),
            Const::U32("PAIRS", pairs(self.codec) as u32),
            Const::U32("CENTRING", centring),
        ];
        constants.extend(self.segment(FIRST, layout.segments().first().copied()));
        constants.extend(self.segment(SECOND, layout.segments().get(1).copied()));
        constants
    }

    fn finish(&self, kernel: Kernel, modules: &[Module], mut constants: Vec<Const>) -> Variant {
        // Every invocation of a workgroup shares its row.
        if !constants.iter().any(|constant| matches!(constant, Const::U32("LANES", _))) {
            constants.push(Const::U32("LANES", kernel.workgroup()));
        }
        Variant::new(kernel, modules, &constants).with_subgroups(self.subgroups)
    }

    pub(super) fn encode(&self, layout: &CodeLayout, keys: bool, dtype: DType) -> Variant {
        let modules = [
            Module::Float,
            Module::View,
            Module::Load(dtype),
            Module::Scale,
            Module::PlaneChannel,
            Module::PlaneAngle,
            Module::PlaneCentre,
            Module::PlaneRotate,
        ];
        // Small workgroups: between two barriers there is little to do.
        let workgroup = (layout.channels().div_ceil(4) as u32).next_power_of_two().clamp(32, 128);
        let mut constants = self.layout(layout, keys);
        constants.push(Const::U32("LANES", workgroup));
        self.finish(Kernel::PlaneEncode, &modules, constants).with_workgroup(workgroup)
    }

    /// Whether rows of this layout can go to their tiles at once: one segment that Walsh-Hadamard turns, 32 channels an invocation.
    pub(super) fn encodes_tiles(&self, layout: &CodeLayout, keys: bool) -> bool {
        let [segment] = layout.segments() else { return false };
        let signs = self.codec.rotations().get(segment.channels).is_some_and(|r| r.signs().is_some());
        let has_block_means = keys && self.codec.block().is_some();
        // Their codes, and the weights of four rounds, take more workgroup memory than every device has.
        let is_too_large = !keys && segment.channels == 256 && self.codec.options().rounds > 3;
        signs
            && !is_too_large
            && (1..BYTE).contains(&segment.planes)
            && [32, 64, 128, 256].contains(&segment.channels)
            && !has_block_means
    }

    /// Codes rows that start at whole vec4s into their tiles.
    pub(super) fn encode_tiles(&self, layout: &CodeLayout, keys: bool, dtype: DType) -> Variant {
        let modules = [
            Module::Float,
            Module::View,
            Module::Load(dtype),
            Module::Eight,
            Module::Scale,
            Module::PlaneChannel,
            Module::PlaneAngle,
            Module::PlaneCentre,
            Module::PlaneHadamard,
            Module::PlaneGroup,
        ];
        let lanes = (layout.channels() / TILE) as u32;
        let mut constants = self.layout(layout, keys);
        constants.extend([Const::Bool("IS_KEYS", keys), Const::U32("LANES", lanes)]);
        self.finish(Kernel::PlaneEncodeTiles, &modules, constants).with_workgroup(TILE as u32 * lanes)
    }

    /// Moves coded rows to their tiles.
    pub(in crate::qjl) fn tile(&self, layout: &CodeLayout, keys: bool) -> Variant {
        let mut constants = self.layout(layout, keys);
        if !keys {
            // Values are grouped along tokens: each channel is a column.
            constants.retain(|constant| !matches!(constant, Const::U32("FIRST_GROUPS", _)));
            constants.push(Const::U32("FIRST_GROUPS", 1));
        }
        constants.push(Const::Bool("IS_KEYS", keys));
        Variant::new(Kernel::PlaneTile, &[Module::Half, Module::PlaneChannel], &constants)
    }

    pub(super) fn block_means(&self, dtype: DType) -> Variant {
        let modules = [Module::Float, Module::View, Module::Load(dtype), Module::PlaneChannel];
        let constants = vec![Const::U32("HEAD_DIM", self.codec.key_dim() as u32)];
        self.finish(Kernel::PlaneBlockMeans, &modules, constants)
    }

    pub(super) fn calibrate(&self, dtype: DType) -> Variant {
        let modules =
            [Module::Float, Module::View, Module::Load(dtype), Module::PlaneChannel, Module::PlaneAngle];
        let codec = self.codec;
        let mut constants = self.layout(codec.keys(), true);
        constants.extend([
            Const::U32("TOKENS", CALIBRATION_TOKENS as u32),
            Const::U32("ROTARY", codec.rope().map_or(0, crate::rope::Rope::rotary_dim) as u32),
            self.interleaved(),
            Const::Bool("TURNS", codec.mean_rope().is_some()),
            Const::Bool("SPLIT", codec.keys().is_split()),
            Const::F32("EXPONENT", (codec.options().balance.exponent() as f32).to_bits()),
        ]);
        self.finish(Kernel::PlaneCalibrate, &modules, constants)
    }

    fn interleaved(&self) -> Const {
        let rope = self.codec.rope();
        Const::Bool("INTERLEAVED", rope.is_some_and(|rope| *rope.layout() == RopeLayout::Interleaved))
    }

    fn keys(&self) -> Vec<Const> {
        let mut constants = self.layout(self.codec.keys(), true);
        constants.push(Const::U32("SKETCH", sketch(self.codec) as u32));
        constants
    }

    pub(super) fn project(&self, dtype: DType) -> Variant {
        let modules = [
            Module::Float,
            Module::View,
            Module::Load(dtype),
            Module::PlaneChannel,
            Module::PlaneRotate,
            Module::PlaneSketch,
            Module::PlanePrepare,
        ];
        self.finish(Kernel::PlaneProject, &modules, self.preparing())
    }

    fn preparing(&self) -> Vec<Const> {
        let mut constants = self.keys();
        constants.push(self.interleaved());
        constants
    }

    /// What multiplies rows by a projection, and the constants of that.
    fn projecting(&self, sketch: &Sketch) -> (Module, Vec<Const>) {
        let projection = &sketch.projection;
        let mut constants = vec![Const::U32("SKETCH_DIM", projection.sketch_dim() as u32)];
        if projection.kind() != ProjectionKind::Hadamard {
            return (Module::ProjectMatrix, constants);
        }
        let shrink = (1.0 / (projection.head_dim() as f64).sqrt()) as f32;
        constants.push(Const::F32("SHRINK", shrink.to_bits()));
        (Module::ProjectHadamard, constants)
    }

    /// Queries of sketched keys.
    pub(in crate::qjl) fn sketch_queries(&self, sketch: &Sketch, dtype: DType) -> Variant {
        let (multiply, mut constants) = self.projecting(sketch);
        constants.extend(self.preparing());
        constants.push(Const::F32("FACTOR", sketch.factor().to_bits()));
        let modules = [
            Module::Float,
            Module::View,
            Module::Load(dtype),
            Module::PlaneChannel,
            multiply,
            Module::RowPair,
            Module::PlaneSketch,
            Module::PlanePrepare,
        ];
        self.finish(Kernel::Project, &modules, constants)
    }

    /// Sketches keys.
    pub(in crate::qjl) fn quantize(&self, sketch: &Sketch, dtype: DType) -> Variant {
        let (multiply, mut constants) = self.projecting(sketch);
        constants.extend(self.layout(self.codec.keys(), true));
        constants.push(Const::U32("KEY_SCALE", sketch.scale as u32));
        let modules = [
            Module::Float,
            Module::View,
            Module::Load(dtype),
            Module::PlaneChannel,
            Module::PlaneAngle,
            Module::PlaneCentre,
            multiply,
            Module::RowPair,
            Module::Scale,
        ];
        self.finish(Kernel::Quantize, &modules, constants)
    }

    /// What scoring is made of.
    fn scoring(&self, arithmetic: Arithmetic) -> [Module; 10] {
        [
            Module::Float,
            Module::AttentionParams,
            Module::Fours,
            Module::PlaneChannel,
            Module::PlaneAngle,
            Module::PlaneQuads,
            Module::PlaneSketch,
            Module::PlaneScore,
            Module::PlaneDot(arithmetic),
            Module::PlaneMean,
        ]
    }

    /// A kernel whose workgroups hold all channels of a value, four an invocation.
    fn tiled(&self, kernel: Kernel, modules: &[Module], mut constants: Vec<Const>) -> Variant {
        let workgroup = attend_workgroup(self.codec);
        constants.push(Const::U32("LANES", workgroup));
        self.finish(kernel, modules, constants).with_workgroup(workgroup)
    }

    pub(in crate::qjl) fn scores(&self) -> Variant {
        self.tiled(Kernel::PlaneScores, &self.scoring(Arithmetic::Exact), self.keys())
    }

    pub(in crate::qjl) fn attend(&self, arithmetic: Arithmetic) -> Variant {
        let modules = [
            &self.scoring(arithmetic)[..],
            &[Module::Logits, Module::Softmax, Module::PlaneWeigh(arithmetic)],
        ];
        let values = self.codec.values();
        let segment = values.segments().first().copied().unwrap_or(Segment { channels: 1, planes: 1 });
        let mut constants = self.keys();
        let [fours, lanes] = value_lanes(self.codec.value_dim());
        constants.extend([Const::U32("VALUE_PLANES", segment.planes.into()), fours, lanes]);
        self.tiled(Kernel::PlaneAttend, &modules.concat(), constants)
    }

    pub(super) fn unrotate(&self) -> Variant {
        let values = self.codec.values();
        let mut constants = self.layout(values, false);
        let [fours, lanes] = value_lanes(self.codec.value_dim());
        constants.extend([fours, lanes]);
        self.finish(Kernel::PlaneUnrotate, &[Module::Float, Module::Gather, Module::PlaneRotate], constants)
    }
}

pub(super) fn query_energy_variant(dim: usize, dtype: DType) -> Variant {
    let constants = [Const::U32("HEAD_DIM", dim as u32), Const::U32("LANES", 128)];
    Variant::new(Kernel::PlaneQueryEnergy, &[Module::Float, Module::View, Module::Load(dtype)], &constants)
}

/// Every variant some adapter can take, for a selection of dimensions and options.
pub(crate) fn variants() -> Vec<Variant> {
    use super::super::Preset;
    let mut all = Vec::new();
    let options = |centring| PlanesOptions::default().centring(centring);
    let mut codecs: Vec<Codec> = Vec::new();
    for [key_dim, value_dim] in [[1, 1], [64, 64], [128, 128], [192, 128], [256, 32], [80, 80], [512, 511]] {
        let rope =
            crate::rope::Rope::from_theta(key_dim, key_dim & !1, 1e4, crate::capture::RopeLayout::HalfSplit)
                .ok();
        let presets = Preset::ALL.map(|preset| preset.options());
        let others = [options(Centring::None), options(Centring::BlockMean(64))];
        codecs.extend(
            presets
                .into_iter()
                .chain(others)
                .filter_map(|o| Codec::new(o, key_dim, value_dim, rope.clone()).ok()),
        );
    }
    // The most rounds, at the most channels that are coded into tiles: what takes most workgroup memory.
    codecs.extend(
        [3, 4].into_iter().filter_map(|r| Codec::new(options(Centring::None).rounds(r), 256, 256, None).ok()),
    );
    for codec in &codecs {
        for subgroups in listed_widths(&[4, 8, 32], codec.key_dim()) {
            let make = Make { codec, subgroups };
            for dtype in DType::ALL {
                let whole = [(codec.keys(), true), (codec.values(), false)];
                let whole = whole.into_iter().filter(|&(layout, keys)| make.encodes_tiles(layout, keys));
                all.extend(whole.map(|(layout, keys)| make.encode_tiles(layout, keys, dtype)));
                all.extend([
                    make.encode(codec.keys(), true, dtype),
                    make.encode(codec.values(), false, dtype),
                    make.block_means(dtype),
                    make.project(dtype),
                    make.calibrate(dtype),
                    query_energy_variant(codec.key_dim(), dtype).with_subgroups(subgroups),
                ]);
            }
            all.extend([Arithmetic::Exact, Arithmetic::Fast].map(|arithmetic| make.attend(arithmetic)));
            all.extend([make.scores(), make.unrotate()]);
            all.extend([make.tile(codec.keys(), true), make.tile(codec.values(), false)]);
        }
    }
    all
}
