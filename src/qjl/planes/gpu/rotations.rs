//! A codec on the device: its rotations in one buffer.

use super::super::{Codec, Rotation};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::qjl::Projection;

/// Where the rotation of `channels` channels begins in the buffer, in words; 0 where there is none.
pub(super) fn offset_of(codec: &Codec, channels: usize) -> usize {
    let before = codec.rotations().iter().take_while(|rotation| rotation.channels() != channels);
    if codec.rotations().get(channels).is_none() {
        return 0;
    }
    before.map(|rotation| rotation.bytes() / 4).sum()
}

/// The words of a projection: its matrix, transposed, or the signs of Hadamard.
pub(in crate::qjl) fn projection_words(projection: &Projection) -> Vec<u32> {
    let columns = projection.head_dim();
    match (projection.matrix(), projection.signs()) {
        (Some(matrix), _) => {
            let column = |c: usize| matrix.iter().skip(c).step_by(columns).map(|x| x.to_bits());
            (0..columns).flat_map(column).collect()
        }
        (None, signs) => signs.unwrap_or_default().to_vec(),
    }
}

/// A codec with its rotations on the device, shared by layers and heads.
#[derive(Clone, Debug)]
pub struct CodecBuffer {
    pub(in crate::qjl) codec: Codec,
    /// Rotations, or the projection.
    pub(in crate::qjl) rotations: wgpu::Buffer,
}

impl CodecBuffer {
    pub(in crate::qjl) fn upload(gpu: &Gpu, codec: &Codec) -> Result<Self> {
        let words: Vec<u32> = match codec.sketch() {
            Some(sketch) => projection_words(&sketch.projection),
            None => codec.rotations().iter().flat_map(rotation_words).collect(),
        };
        Ok(Self { codec: codec.clone(), rotations: gpu.upload("rotations", bytemuck::cast_slice(&words))? })
    }

    /// The codec.
    #[must_use]
    pub const fn codec(&self) -> &Codec {
        &self.codec
    }

    /// The rotations.
    pub(crate) const fn rotations(&self) -> &wgpu::Buffer {
        &self.rotations
    }

    /// Bytes of the rotations.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rotations.size()
    }
}

fn rotation_words(rotation: &Rotation) -> Vec<u32> {
    match rotation.signs() {
        Some(signs) => signs.to_vec(),
        None => rotation.matrix().unwrap_or_default().iter().map(|x| x.to_bits()).collect(),
    }
}
