//! The variants of QJL's kernels.

use std::sync::Arc;

use super::super::planes::gpu::Make;
use super::super::planes::{Centring, Codec, Sketch};
use super::super::{KeyScale, Projection, ProjectionKind};
use crate::gpu::{Arithmetic, Const, Kernel, Module, Variant, listed_widths};
use crate::rope::Rope;
use crate::tensor::DType;

/// Lanes that share a row in `quantize_values`.
pub(super) const VALUE_ROW_LANES: u32 = 16;
/// Invocations of a workgroup of `quantize_values`.
pub(super) const WORKGROUP: u32 = 128;

pub(super) fn quantize_values_variant(value_dim: usize, dtype: DType) -> Variant {
    let constants = [Const::U32("HEAD_DIM", value_dim as u32), Const::U32("LANES", VALUE_ROW_LANES)];
    let modules = [Module::Float, Module::View, Module::Load(dtype), Module::Scale];
    Variant::new(Kernel::QuantizeValues, &modules, &constants)
}

/// Sketches of some dimensions, projections and scalars.
fn sketches() -> Vec<(Sketch, usize)> {
    let mut all = Vec::new();
    for [head_dim, sketch_dim, value_dim] in
        [[1, 1, 1], [64, 64, 64], [80, 320, 80], [128, 8192, 96], [511, 33, 512], [512, 512, 128]]
    {
        for kind in [ProjectionKind::Gaussian, ProjectionKind::Hadamard] {
            for scale in [KeyScale::Norm, KeyScale::Mse, KeyScale::Unbiased] {
                if let Ok(projection) = Projection::new(kind, head_dim, sketch_dim, 0) {
                    all.push((Sketch { projection: Arc::new(projection), scale }, value_dim));
                }
            }
        }
    }
    all
}

/// Every variant some adapter can take, for a selection of dimensions.
pub(crate) fn variants() -> Vec<Variant> {
    let mut variants = Vec::new();
    for (sketch, value_dim) in sketches() {
        let dim = sketch.projection.head_dim();
        for centring in [Centring::None, Centring::PreRope] {
            let rope = Rope::from_theta(dim, dim & !1, 1e4, crate::capture::RopeLayout::HalfSplit).ok();
            let Ok(codec) = Codec::sketched(sketch.clone(), centring, value_dim, rope) else { continue };
            for subgroups in listed_widths(&[4, 8, 32, 64], dim) {
                let make = Make { codec: &codec, subgroups };
                for dtype in DType::ALL {
                    let values = quantize_values_variant(value_dim, dtype).with_subgroups(subgroups);
                    variants.extend([
                        make.quantize(&sketch, dtype),
                        make.sketch_queries(&sketch, dtype),
                        values,
                    ]);
                }
                variants
                    .extend([Arithmetic::Exact, Arithmetic::Fast].map(|precision| make.attend(precision)));
                variants.extend([
                    make.scores(),
                    make.tile(codec.keys(), true),
                    make.tile(codec.values(), false),
                ]);
            }
        }
    }
    variants.sort_unstable();
    variants.dedup();
    variants
}
