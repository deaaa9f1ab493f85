//! The variants of QJL's kernels.

use super::super::{KeyScale, ProjectionKind};
use crate::attention::gpu::{FLASH, flash_constants};
use crate::gpu::{Const, Kernel, Module, Variant};
use crate::tensor::DType;

/// Lanes that share a row in `quantize_values`.
pub(super) const VALUE_ROW_LANES: u32 = 16;
/// Invocations of a workgroup, all of which share a row or a tile in the other kernels.
pub(super) const WORKGROUP: u32 = 128;

/// `quantize` and `project`, which multiply rows by the projection.
pub(super) fn projecting_variant(
    kernel: Kernel,
    kind: ProjectionKind,
    [head_dim, sketch_dim]: [usize; 2],
    dtype: DType,
    scale: KeyScale,
) -> Variant {
    let mut constants = vec![
        Const::U32("HEAD_DIM", head_dim as u32),
        Const::U32("SKETCH_DIM", sketch_dim as u32),
        Const::U32("LANES", WORKGROUP),
    ];
    let project = if kind == ProjectionKind::Hadamard {
        let shrink = (1.0 / (head_dim as f64).sqrt()) as f32;
        constants.push(Const::F32("SHRINK", shrink.to_bits()));
        Module::ProjectHadamard
    } else {
        Module::ProjectMatrix
    };
    let mut modules = vec![Module::Float, Module::View, Module::Load(dtype), project, Module::RowPair];
    if kernel == Kernel::Quantize {
        constants.push(Const::U32("KEY_SCALE", scale as u32));
        modules.push(Module::Scale);
    }
    Variant::new(kernel, &modules, &constants)
}

pub(super) fn quantize_values_variant(value_dim: usize, dtype: DType) -> Variant {
    let constants = [Const::U32("HEAD_DIM", value_dim as u32), Const::U32("LANES", VALUE_ROW_LANES)];
    let modules = [Module::Float, Module::View, Module::Load(dtype), Module::Scale];
    Variant::new(Kernel::QuantizeValues, &modules, &constants)
}

pub(super) fn scores_variant(sketch_dim: usize) -> Variant {
    let constants = [Const::U32("SKETCH_DIM", sketch_dim as u32)];
    Variant::new(Kernel::Scores, &[Module::Half, Module::SketchDot], &constants)
}

pub(super) fn attend_variant(sketch_dim: usize, value_dim: usize) -> Variant {
    let constants =
        [&[Const::U32("SKETCH_DIM", sketch_dim as u32)], flash_constants(value_dim).as_slice()].concat();
    Variant::new(
        Kernel::Attend,
        &[&[Module::Float, Module::Half, Module::SketchDot, Module::AttentionParams][..], &FLASH].concat(),
        &constants,
    )
}

/// Every variant some adapter can take, for a selection of dimensions.
pub(crate) fn variants() -> Vec<Variant> {
    let widths = [None, Some(4), Some(8), Some(32), Some(64)];
    let mut variants = Vec::new();
    let mut add =
        |variant: Variant| variants.extend(widths.map(|width| variant.clone().with_subgroups(width)));
    for [head_dim, sketch_dim] in [[1usize, 1usize], [64, 64], [80, 320], [128, 8192], [511, 33], [512, 512]]
    {
        for dtype in DType::ALL {
            let kinds = [ProjectionKind::Gaussian, ProjectionKind::Hadamard];
            for kind in
                kinds.into_iter().filter(|k| *k != ProjectionKind::Hadamard || head_dim.is_power_of_two())
            {
                let dims = [head_dim, sketch_dim];
                for scale in [KeyScale::Norm, KeyScale::Mse, KeyScale::Unbiased] {
                    add(projecting_variant(Kernel::Quantize, kind, dims, dtype, scale));
                }
                add(projecting_variant(Kernel::Project, kind, dims, dtype, KeyScale::Norm));
            }
            add(quantize_values_variant(head_dim, dtype));
        }
        add(attend_variant(sketch_dim, head_dim));
        add(scores_variant(sketch_dim));
    }
    variants
}
