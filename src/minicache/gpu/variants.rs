//! The variants of MiniCache's kernels.

use super::super::config::Mode;
use super::super::folded::{Layout, PAGE};
use super::{CAUSES, LANES, TOTALS_AT};
use crate::gpu::{Const, Kernel, Module, Variant};
use crate::tensor::{DType, Shape};

fn mode_constants(mode: Mode) -> Const {
    Const::U32("MODE", mode as u32)
}

pub(super) fn similarity_variant(layout: &Layout, aligned: bool) -> Variant {
    let constants = [
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("LANES", LANES),
        Const::Bool("ALIGNED", aligned),
        Const::F32("DTYPE_MAX", layout.dtype.largest().to_bits()),
        mode_constants(layout.mode),
    ];
    let modules =
        [Module::Float, Module::Load(layout.dtype), Module::Pair, Module::MiniCacheRow, Module::Slerp];
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

fn side_per_retained(layout: &Layout) -> Const {
    Const::U32("SIDE_PER_RETAINED", if layout.reuses_slots() { 1 } else { 2 })
}

pub(super) fn arrange_variant(layout: &Layout) -> Variant {
    let constants = [
        page_constant(),
        Const::U32("TOTALS_AT", TOTALS_AT),
        side_per_retained(layout),
        mode_constants(layout.mode),
    ];
    Variant::new(Kernel::Arrange, &[Module::MiniCacheRow], &constants)
}

/// `merge` and `restore`, which write and read a store.
pub(super) fn store_variant(kernel: Kernel, layout: &Layout) -> Variant {
    let constants = [
        page_constant(),
        Const::U32("HEAD_DIM", layout.shape.dim as u32),
        Const::U32("SLOT_WORDS", layout.slot_words() as u32),
        Const::U32("SIDE_WORDS", layout.side_words() as u32),
        Const::Bool("SLOT_IS_INPUT", layout.slot_dtype() == layout.dtype),
        side_per_retained(layout),
        mode_constants(layout.mode),
    ];
    let modules = [
        Module::Float,
        Module::Load(layout.dtype),
        Module::Bits(layout.dtype),
        Module::MiniCacheRow,
        Module::MiniCachePage,
    ];
    let output: &[Module] = if kernel == Kernel::Restore { &[Module::Output] } else { &[] };
    Variant::new(kernel, &[&modules, output].concat(), &constants)
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
        let layout = Layout { shape, dtype, mode };
        variants.extend([Kernel::Merge, Kernel::Restore].map(|kernel| store_variant(kernel, &layout)));
        variants.push(arrange_variant(&layout));
        for aligned in [false, dim % 2 == 0] {
            let variant = similarity_variant(&layout, aligned);
            let widths = [None, Some(4), Some(8), Some(32)];
            variants.extend(widths.map(|width| variant.clone().with_subgroups(width)));
        }
    }
    variants
}
