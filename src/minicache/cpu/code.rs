//! Directions in codes: rotated, a few bits a channel, the code's scalar in the layers' magnitudes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use half::f16;

use super::super::config::DirectionPlanes;
use super::super::folded::{Folded, Layout};
use super::row_bytes;
use crate::error::{Error, Result};
use crate::qjl::planes::Rotation;
use crate::qjl::planes::cpu::{encode_segment, level, pack, unpack};
use crate::tensor::{DType, Shape, decode};

/// The rotation of a store's directions; `None` where none is coded.
pub(crate) fn rotation(folded: &Folded) -> Option<Arc<Rotation>> {
    let layout = &folded.layout;
    layout
        .planes
        .filter(|_| folded.totals.slots > 0)
        .map(|planes| Rotation::shared(layout.shape.dim, planes.rounds, planes.seed))
}

/// Digests of the rotations of these widths, by width, where directions are coded. Files keep them: a matrix is drawn by way of
/// functions that platforms round in their own ways, and another one would restore other rows.
pub(crate) fn rotation_digests(
    dims: impl Iterator<Item = usize>,
    planes: Option<DirectionPlanes>,
) -> Result<BTreeMap<usize, String>> {
    let mut digests = BTreeMap::new();
    let Some(planes) = planes else { return Ok(digests) };
    for dim in dims {
        // Before anything is drawn.
        Shape { batch: 1, heads: 1, tokens: 1, dim }.check_dim("keys or values of a pair")?;
        let digest = || format!("{:016x}", Rotation::shared(dim, planes.rounds, planes.seed).digest());
        digests.entry(dim).or_insert_with(digest);
    }
    Ok(digests)
}

/// Refuses a file whose directions were coded with other rotations.
pub(crate) fn check_digests(want: &BTreeMap<usize, String>, have: &BTreeMap<usize, String>) -> Result<()> {
    let dims: BTreeSet<usize> = want.keys().chain(have.keys()).copied().collect();
    let of = |digests: &BTreeMap<usize, String>, dim| digests.get(dim).cloned().unwrap_or("none".to_owned());
    match dims.iter().find(|dim| want.get(dim) != have.get(dim)) {
        None => Ok(()),
        Some(dim) => Err(Error::Digest {
            what: format!("rotation of {dim} channels"),
            want: of(want, dim),
            have: of(have, dim),
        }),
    }
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
