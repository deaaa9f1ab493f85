//! A codec on the device: its rotations in one buffer.

use super::super::Codec;
use crate::error::Result;
use crate::gpu::Gpu;

/// Where the rotation of `channels` channels begins in the buffer, in words; 0 where there is none.
pub(super) fn offset_of(codec: &Codec, channels: usize) -> usize {
    let before = codec.rotations().iter().take_while(|rotation| rotation.channels() != channels);
    if codec.rotations().get(channels).is_none() {
        return 0;
    }
    before.map(|rotation| rotation.bytes() / 4).sum()
}

/// A codec with its rotations on the device, shared by layers and heads.
#[derive(Clone, Debug)]
pub struct CodecBuffer {
    pub(super) codec: Codec,
    pub(super) rotations: wgpu::Buffer,
}

impl CodecBuffer {
    pub(super) fn upload(gpu: &Gpu, codec: &Codec) -> Result<Self> {
        let words: Vec<u32> = codec
            .rotations()
            .iter()
            .flat_map(|rotation| match rotation.signs() {
                Some(signs) => signs.to_vec(),
                None => rotation.matrix().unwrap_or_default().iter().map(|x| x.to_bits()).collect(),
            })
            .collect();
        Ok(Self { codec: codec.clone(), rotations: gpu.upload("rotations", bytemuck::cast_slice(&words))? })
    }

    /// The codec.
    #[must_use]
    pub const fn codec(&self) -> &Codec {
        &self.codec
    }

    /// Bytes of the rotations.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rotations.size()
    }
}
