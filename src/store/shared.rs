//! What layers share: codecs, and the rotations or projections in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Store;
use super::tensors::Reader;
use crate::error::{Error, Result};
use crate::qjl::cache::{Coding, codec};
use crate::qjl::planes::{Codec, Rotation};
use crate::qjl::{Projection, ProjectionKind};
use crate::rope::Rope;

/// A codec for each layer.
pub(super) fn codecs(store: &Store, coding: &Coding, given: &Given) -> Result<Vec<Arc<Codec>>> {
    let mut all: Vec<Arc<Codec>> = Vec::with_capacity(store.head.layers.len());
    for (index, layer) in store.head.layers.iter().enumerate() {
        let rope = Rope::from_info(&store.info, index, layer.key_dim)?;
        let dims = [layer.key_dim, layer.value_dim];
        let same =
            |held: &&Arc<Codec>| [held.key_dim(), held.value_dim()] == dims && held.rope() == rope.as_ref();
        let codec = match all.iter().find(same) {
            Some(codec) => Arc::clone(codec),
            None => {
                let projection = given.projections.get(&layer.key_dim);
                Arc::new(codec(coding, dims, rope, &given.rotations, projection)?)
            }
        };
        all.push(codec);
    }
    Ok(all)
}

/// What all layers of so many channels share.
#[derive(Clone, Copy)]
pub(super) enum Shared<'a> {
    Rotation(&'a Rotation),
    Projection(&'a Projection),
}

impl<'a> Shared<'a> {
    /// Rows and channels.
    pub(super) fn sizes(self) -> [usize; 2] {
        match self {
            Self::Rotation(rotation) => [rotation.channels(); 2],
            Self::Projection(projection) => [projection.sketch_dim(), projection.head_dim()],
        }
    }

    /// Of what is stored; a matrix takes a while.
    pub(super) fn digest(self) -> String {
        let digest = match self {
            Self::Rotation(rotation) => rotation.digest(),
            Self::Projection(projection) => projection.digest(),
        };
        format!("{digest:016x}")
    }

    /// `[rows, channels]`, where it is no matter of signs.
    pub(super) fn matrix(self) -> Option<&'a [f32]> {
        match self {
            Self::Rotation(rotation) => rotation.matrix(),
            Self::Projection(projection) => projection.matrix(),
        }
    }

    pub(super) fn name(self) -> String {
        let [_, channels] = self.sizes();
        match self {
            Self::Rotation(_) => matrix_name(ROTATION, channels),
            Self::Projection(_) => matrix_name(PROJECTION, channels),
        }
    }
}

const ROTATION: &str = "rotation";
const PROJECTION: &str = "projection";

fn matrix_name(kind: &str, channels: usize) -> String {
    format!("{kind}.{channels}")
}

/// What a codec shares with others.
pub(super) fn shared(codec: &Codec) -> impl Iterator<Item = Shared<'_>> {
    let rotations = codec.rotations().all().iter().map(Shared::Rotation);
    rotations.chain(codec.projection().map(|projection| Shared::Projection(projection)))
}

/// Matrices that a file holds, by their channels, in place of drawn ones.
#[derive(Default)]
pub(super) struct Given {
    rotations: BTreeMap<usize, Vec<f32>>,
    projections: BTreeMap<usize, Arc<Projection>>,
}

impl Given {
    pub(super) fn read(
        coding: &Coding,
        digests: &BTreeMap<usize, String>,
        reader: &mut Reader<'_>,
    ) -> Result<Self> {
        let mut given = Self::default();
        for &channels in digests.keys() {
            match coding {
                Coding::Planes(_) if !channels.is_power_of_two() => {
                    let matrix = matrix(reader, ROTATION, channels, channels)?;
                    given.rotations.insert(channels, matrix);
                }
                Coding::Sketch(options) if options.projection != ProjectionKind::Hadamard => {
                    let (kind, seed, rows) =
                        (options.projection, Some(options.seed), options.sketch_dim(channels)?);
                    let matrix = matrix(reader, PROJECTION, rows, channels)?;
                    let projection = Projection::drawn(kind, seed, &matrix, channels, rows)?;
                    given.projections.insert(channels, Arc::new(projection));
                }
                _ => (),
            }
        }
        Ok(given)
    }
}

/// A matrix of finite numbers.
fn matrix(reader: &mut Reader<'_>, kind: &str, rows: usize, channels: usize) -> Result<Vec<f32>> {
    let name = matrix_name(kind, channels);
    let matrix = reader.singles(&name, &[rows, channels])?;
    match matrix.iter().enumerate().find(|(_, x)| !x.is_finite()) {
        Some((index, &value)) => Err(Error::NonFinite { what: name, index, value }),
        None => Ok(matrix),
    }
}
