//! The variants of MiniCache's kernels.

use super::super::config::{DirectionPlanes, Mode};
use super::super::folded::{Layout, PAGE};
use super::{CAUSES, LANES, TOTALS_AT};
use crate::attention::gpu::flash_variant;
use crate::gpu::{Const, Kernel, Module, Variant, listed_widths};
use crate::qjl::planes::Rotation;
use crate::tensor::{DType, Shape};

fn mode_constants(mode: Mode) -> Const {
    Const::U32("MODE", mode as u32)
}

/// The norms that may merge.
fn storable(layout: &Layout) -> [Const; 2] {
    let [least, most] = layout.storable().map(f32::to_bits);
    [Const::F32("MAGNITUDE_MIN", least), Const::F32("MAGNITUDE_MAX", most)]
}

pub(super) fn similarity_variant(layout: &Layout, aligned: bool) -> Variant {
    let [least, most] = storable(layout);
    let constants = [
        least,
        most,
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("LANES", LANES),
        Const::Bool("ALIGNED", aligned),
        Const::F32("DTYPE_MAX", layout.dtype.largest().to_bits()),
        mode_constants(layout.mode),
    ];
    let modules = [
        Module::Float,
        Module::Load(layout.dtype),
        Module::Pair,
        Module::MiniCacheRow,
        Module::MiniCacheMeasure,
        Module::Slerp,
    ];
    Variant::new(Kernel::Similarity, &modules, &constants)
}

pub(super) fn threshold_variant(mode: Mode, fraction: bool) -> Variant {
    let constants = [Const::Bool("FRACTION", fraction), mode_constants(mode)];
    Variant::new(Kernel::Threshold, &[Module::Float, Module::MiniCacheRow], &constants)
}

fn page_constant() -> Const {
    Const::U32("PAGE", PAGE as u32)
}

pub(super) fn retain_variant(mode: Mode) -> Variant {
    let constants = [page_constant(), Const::U32("CAUSES", CAUSES), mode_constants(mode)];
    Variant::new(Kernel::Retain, &[Module::Float, Module::MiniCacheRow], &constants)
}

/// Layers folded together, and side rows of a retained row of them.
fn layer_constants(layout: &Layout) -> [Const; 2] {
    [
        Const::U32("LAYERS", layout.layers as u32),
        Const::U32("SIDE_PER_RETAINED", layout.side_per_retained() as u32),
    ]
}

pub(super) fn arrange_variant(layout: &Layout) -> Variant {
    let [layers, side] = layer_constants(layout);
    let constants =
        [page_constant(), Const::U32("TOTALS_AT", TOTALS_AT), layers, side, mode_constants(layout.mode)];
    Variant::new(Kernel::Arrange, &[Module::MiniCacheRow], &constants)
}

pub(super) fn group_similarity_variant(layout: &Layout) -> Variant {
    let [least, most] = storable(layout);
    let constants = [
        least,
        most,
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("LANES", LANES),
        Const::U32("LAYERS", layout.layers as u32),
        Const::F32("DTYPE_MAX", layout.dtype.largest().to_bits()),
        mode_constants(layout.mode),
    ];
    let load = [Module::Float, Module::Load(layout.dtype), Module::Pair];
    let modules = [&load[..], &[Module::MiniCacheRow, Module::MiniCacheMeasure, Module::Slerp]].concat();
    Variant::new(Kernel::GroupSimilarity, &modules, &constants)
}

/// `merge`, `group_merge` and `restore`, which write and read a store; the first and the last by whole vec4s where rows and
/// sections start at such ones.
pub(super) fn store_variant(kernel: Kernel, layout: &Layout, vectors: bool) -> Variant {
    let [layers, side] = layer_constants(layout);
    let mut constants = vec![
        page_constant(),
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("SLOT_WORDS", layout.slot_words() as u32),
        Const::U32("SIDE_WORDS", layout.side_words() as u32),
        Const::Bool("SLOT_IS_INPUT", layout.slot_dtype() == layout.dtype),
        layers,
        side,
        mode_constants(layout.mode),
    ];
    if kernel == Kernel::GroupMerge {
        constants.push(Const::U32("MAGNITUDES", layout.magnitudes_per_slot() as u32));
    } else {
        // For the name alone, in which modules do not stand.
        constants.push(Const::Bool("VECTORS", vectors));
    }
    let modules = [
        Module::Float,
        Module::Load(layout.dtype),
        Module::Bits(layout.dtype),
        Module::MiniCacheRow,
        Module::MiniCachePage,
    ];
    let access: &[Module] = match (kernel, vectors) {
        (Kernel::Restore, false) => {
            &[Module::MiniCacheStored, Module::OutputParams, Module::Output, Module::RestoreWords]
        }
        (Kernel::Restore, true) => {
            &[Module::MiniCacheStored, Module::OutputParams, Module::MiniCacheEights, Module::RestoreEights]
        }
        (Kernel::Merge, true) => &[Module::MiniCacheEights, Module::MergeEights, Module::MiniCacheWrite],
        (Kernel::Merge, false) => &[Module::MiniCacheWritePairs, Module::MergePairs, Module::MiniCacheWrite],
        _ => &[Module::MiniCacheWritePairs, Module::MiniCacheWrite],
    };
    Variant::new(kernel, &[&modules, access].concat(), &constants)
}

pub(super) fn attend_variant(keys: &Layout, value_dim: usize, queries: DType) -> Variant {
    let values = Layout { shape: Shape { dim: value_dim, ..keys.shape }, ..*keys };
    let rows = [&attend_modules(keys.dtype)[..], &[Module::MiniCacheWhole]].concat();
    let constants = attend_constants(keys, &values);
    flash_variant(Kernel::FoldedAttend, &rows, [keys.shape.dim, value_dim], queries, &constants)
}

/// Attention over coded directions, of values the coded ones or the raw ones; queries come turned.
pub(super) fn attend_coded_variant(keys: &Layout, value_dim: usize, coded_values: bool) -> Variant {
    let values = Layout { shape: Shape { dim: value_dim, ..keys.shape }, ..*keys };
    let mut constants = attend_constants(keys, &values);
    constants.extend([
        level_unit("KEY_LEVEL_UNIT", keys),
        level_unit("VALUE_LEVEL_UNIT", &values),
        Const::U32("KEY_DIM", keys.shape.dim as u32),
        Const::U32("BITS", bits(keys)),
        Const::Bool("CODED_VALUES", coded_values),
    ]);
    let rows = [&attend_modules(keys.dtype)[..], &[Module::MiniCacheLevels, Module::MiniCacheCoded]].concat();
    let dims = [2 * half_width(keys.shape.dim), value_dim];
    flash_variant(Kernel::FoldedAttend, &rows, dims, DType::F32, &constants)
}

fn attend_constants(keys: &Layout, values: &Layout) -> Vec<Const> {
    let mut constants = vec![
        page_constant(),
        Const::U32("KEY_SLOT_WORDS", keys.slot_words() as u32),
        Const::U32("KEY_SIDE_WORDS", keys.side_words() as u32),
        Const::U32("VALUE_SLOT_WORDS", values.slot_words() as u32),
        Const::U32("VALUE_SIDE_WORDS", values.side_words() as u32),
        Const::Bool("SLOT_IS_INPUT", keys.slot_dtype() == keys.dtype),
        mode_constants(keys.mode),
    ];
    constants.extend(layer_constants(keys));
    constants
}

const fn attend_modules(dtype: DType) -> [Module; 7] {
    [
        Module::Float,
        Module::Load(dtype),
        Module::Bits(dtype),
        Module::Eight,
        Module::MiniCacheRow,
        Module::MiniCachePage,
        Module::MiniCacheStored,
    ]
}

/// Channels of a turned query in either basis: whole eights.
pub(super) const fn half_width(dim: usize) -> usize {
    dim.next_multiple_of(8)
}

fn level_unit(name: &'static str, layout: &Layout) -> Const {
    Const::F32(name, layout.level_unit().to_bits())
}

fn bits(layout: &Layout) -> u32 {
    layout.planes.map_or(0, |planes| planes.bits.into())
}

/// What names the sections of a store, and the constants of that.
fn sections(layout: &Layout) -> ([Module; 2], Vec<Const>) {
    let mut constants = vec![mode_constants(layout.mode)];
    constants.extend(layer_constants(layout));
    ([Module::MiniCacheRow, Module::MiniCachePage], constants)
}

/// Puts other slots into a store: codes, with their scalars, or directions.
pub(super) fn refill_variant(layout: &Layout, codes: bool) -> Variant {
    let (modules, mut constants) = sections(layout);
    constants.extend([Const::Bool("CODES", codes), level_unit("LEVEL_UNIT", layout)]);
    Variant::new(Kernel::Refill, &modules, &constants)
}

/// What a rotation of `channels` needs, of whatever rows.
fn rotation_constants(rotation: &Rotation, rounds: u8) -> [Const; 4] {
    [
        Const::U32("HEAD_DIM", rotation.channels() as u32),
        Const::U32("ROUNDS", rounds.into()),
        Const::Bool("HADAMARD", rotation.signs().is_some()),
        Const::F32("FACTOR", rotation.factor().to_bits()),
    ]
}

/// Takes codes back to directions.
pub(super) fn expand_variant(layout: &Layout, rotation: &Rotation, rounds: u8) -> Variant {
    let (sections, mut constants) = sections(layout);
    constants.extend([
        Const::U32("CODE_WORDS", layout.slot_words() as u32),
        Const::U32("BITS", bits(layout)),
        level_unit("LEVEL_UNIT", layout),
    ]);
    constants.extend(rotation_constants(rotation, rounds));
    let modules = [&sections[..], &[Module::MiniCacheLevels, Module::PlaneRotate]].concat();
    Variant::new(Kernel::Expand, &modules, &constants)
}

/// Turns queries.
pub(super) fn turn_variant(queries: DType, rotation: &Rotation, rounds: u8) -> Variant {
    let mut constants = vec![Const::U32("WIDTH", half_width(rotation.channels()) as u32)];
    constants.extend(rotation_constants(rotation, rounds));
    let modules = [Module::Float, Module::View, Module::Load(queries), Module::PlaneRotate];
    Variant::new(Kernel::Turn, &modules, &constants)
}

/// A variant without subgroups, and with those that are listed.
fn widened<'a>(variant: &'a Variant, sizes: &[u32], dim: usize) -> impl Iterator<Item = Variant> + use<'a> {
    listed_widths(sizes, dim).into_iter().map(|width| variant.clone().with_subgroups(width))
}

/// Whether vec4s are taken, as rows of this length allow.
fn listed_vectors(dim: usize) -> impl Iterator<Item = bool> {
    [false, true].into_iter().filter(move |vectors| !vectors || dim.is_multiple_of(8))
}

/// `merge` and `restore` of a pair.
fn pair_store_variants(layout: &Layout) -> impl Iterator<Item = Variant> + use<'_> {
    listed_vectors(layout.shape.dim).flat_map(|vectors| {
        [Kernel::Merge, Kernel::Restore].map(|kernel| store_variant(kernel, layout, vectors))
    })
}

/// Every variant some adapter can take, for a selection of head dimensions.
pub(crate) fn variants() -> Vec<Variant> {
    let modes = [Mode::Shared, Mode::Anchor, Mode::Compat];
    let mut variants: Vec<Variant> = modes.iter().map(|&mode| retain_variant(mode)).collect();
    variants.extend(modes.iter().flat_map(|&mode| [false, true].map(|f| threshold_variant(mode, f))));
    for (dim, dtype, mode) in [1, 64, 80, 511, 512]
        .into_iter()
        .flat_map(|dim| DType::ALL.map(|dtype| (dim, dtype)))
        .flat_map(|(dim, dtype)| modes.map(|mode| (dim, dtype, mode)))
    {
        let shape = Shape { batch: 1, heads: 1, tokens: PAGE, dim };
        let layout = Layout { shape, dtype, mode, layers: 2, planes: None, apart: false };
        variants.extend(pair_store_variants(&layout));
        variants.push(arrange_variant(&layout));
        for layers in [3, 8].into_iter().filter(|_| mode != Mode::Compat) {
            let layout = Layout { layers, ..layout };
            variants.push(store_variant(Kernel::GroupMerge, &layout, false));
            variants.extend(listed_vectors(dim).map(|v| store_variant(Kernel::Restore, &layout, v)));
            variants.push(arrange_variant(&layout));
            variants.extend(widened(&group_similarity_variant(&layout), &[8, 32], dim));
        }
        for queries in [dtype, DType::F32] {
            variants.extend(widened(&attend_variant(&layout, dim, queries), &[8, 32], dim));
        }
        if mode == Mode::Shared {
            variants.extend(coded_variants(layout));
        }
        for aligned in [false, dim % 2 == 0] {
            variants.extend(widened(&similarity_variant(&layout, aligned), &[4, 8, 32], dim));
        }
    }
    variants
}

/// What coded directions take.
fn coded_variants(layout: Layout) -> Vec<Variant> {
    let (dim, mut variants) = (layout.shape.dim, Vec::new());
    let planes = DirectionPlanes::default();
    let rotation = Rotation::shared(dim, planes.rounds, planes.seed);
    for bits in [1, 3, 5] {
        let layout = layout.coded(Some(planes.bits(bits)));
        variants.extend([
            refill_variant(&layout, true),
            refill_variant(&layout.whole(), false),
            expand_variant(&layout, &rotation, planes.rounds),
            turn_variant(layout.dtype, &rotation, planes.rounds),
        ]);
        variants.extend(pair_store_variants(&layout.whole()));
        variants.extend(widened(&similarity_variant(&layout, dim % 2 == 0), &[4, 8, 32], dim));
        for coded_values in [false, true] {
            variants.extend(widened(&attend_coded_variant(&layout, dim, coded_values), &[8, 32], dim));
        }
    }
    variants
}
