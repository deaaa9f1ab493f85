//! Directions in codes: rotated, a few bits a channel, the code's scalar in the layers' magnitudes.

use std::sync::Arc;

use half::f16;

use super::super::config::DirectionPlanes;
use super::super::folded::{Folded, Layout};
use super::row_bytes;
use crate::qjl::planes::Rotation;
use crate::qjl::planes::cpu::{encode_segment, level, pack, unpack};
use crate::tensor::{DType, decode};

/// The rotation of a layout's directions; `None` where they are not coded.
pub(crate) fn rotation(layout: &Layout) -> Option<Arc<Rotation>> {
    layout.planes.map(|planes| Rotation::shared(layout.shape.dim, planes.rounds, planes.seed))
}

/// Fills a store anew, its directions coded: slots of levels `L`, of which `nu L` is as long as `R e`, and each layer's
/// magnitude times `nu` over what a level counts.
pub(crate) fn refill(whole: Folded, planes: DirectionPlanes) -> Folded {
    let layout = whole.layout.coded(Some(planes));
    let rotation = Rotation::shared(layout.shape.dim, planes.rounds, planes.seed);
    let (mut row, mut codes) = (vec![0.0; layout.shape.dim], vec![0; layout.shape.dim]);
    let mut slots = Vec::with_capacity(whole.totals.slots as usize * layout.slot_words());
    let mut magnitudes = whole.magnitudes.clone();
    let per_slot = layout.magnitudes_per_slot();
    for (slot, words) in whole.slots.chunks_exact(whole.layout.slot_words()).enumerate() {
        decode(&row_bytes(words, &whole.layout, DType::F16), DType::F16, &mut row);
        let nu = encode_segment(&rotation, planes.bits, &mut row, &mut codes);
        let nu = f16::from_f32(nu).to_f32() / layout.level_unit();
        pack(&codes, planes.bits, &mut slots);
        for index in slot * per_slot..(slot + 1) * per_slot {
            let shift = index % 2 * 16;
            let Some(word) = magnitudes.get_mut(index / 2) else { continue };
            let magnitude = f16::from_bits((*word >> shift) as u16).to_f32();
            let scaled = u32::from(f16::from_f32(magnitude * nu).to_bits());
            *word = *word & !(0xffff << shift) | scaled << shift;
        }
    }
    Folded { layout, slots, magnitudes, ..whole }
}

/// The direction that a slot's codes stand for, in the magnitudes' scale: `R^T L` times what a level counts.
pub(crate) fn expand(words: &[u32], layout: &Layout, bits: u8, rotation: &Rotation, row: &mut [f32]) {
    unpack(words, bits, row);
    row.iter_mut().for_each(|x| *x = layout.level_unit() * level(bits, *x));
    rotation.apply_transposed(row);
}
