//! The cache of a whole model on a device: recorded into the caller's encoder, one submit for all layers of a step.

use super::cpu_cache;
use super::file;
use super::ledger::{Ledger, Model, Part, Spec};
use super::policy::Policy;
use super::shared::{either, folded_methods, sequences};
use crate::attention::AttendOptions;
use crate::cache::Step;
use crate::error::Result;
use crate::gpu::{Gpu, KvView};
use crate::minicache::MiniCache;
use crate::qjl::cache::QjlCache;

sequences!(QjlCache, MiniCache);
folded_methods!(FoldedCache);

type DevicePart = Part<QjlCache, MiniCache>;

/// All layers of a model on a device, each kept as a policy says.
///
/// A step is, for every layer from the lowest on, [`append`](Self::append) and [`attend`](Self::attend), and then, once,
/// [`commit`](Self::commit), all recorded into the caller's encoders, which must be submitted in the order of their recording.
/// Nothing waits but [`settle`](Self::settle), [`reserve`](Self::reserve) and [`save`](Self::save). An error of `append` or
/// `attend` means that nothing was recorded. After one of `commit` every layer that could has ended its step: what was recorded
/// must be submitted all the same, and committing again ends it for the others.
#[derive(Debug)]
pub struct FoldedCache {
    gpu: Gpu,
    ledger: Ledger<QjlCache, MiniCache>,
}

impl FoldedCache {
    /// A cache of so many empty sequences.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) or [`Error::Shape`](crate::Error::Shape) when the policy does not fit the model, or
    /// either is out of range; [`Error::Limit`](crate::Error::Limit), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new(gpu: &Gpu, model: Model, policy: Policy, sequences: usize) -> Result<Self> {
        let make = |spec| -> Result<DevicePart> {
            Ok(match spec {
                Spec::Coded { layers, options } => Part::Coded(QjlCache::new(gpu, &layers, 0, options)?),
                Spec::Minicache { layers, plan, options } => {
                    Part::Minicache(MiniCache::new(gpu, layers, plan, options)?)
                }
            })
        };
        let mut cache = Self { gpu: gpu.clone(), ledger: Ledger::new(model, policy, make)? };
        (0..sequences).for_each(|_| {
            cache.add_sequence();
        });
        Ok(cache)
    }

    /// Records the appending of one layer's new rows of every sequence, and of its queries, of which codes with tables learn.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
    /// [`Error::HeadRatio`](crate::Error::HeadRatio) or [`Error::Range`](crate::Error::Range) on a step that does not fit;
    /// [`Error::Order`](crate::Error::Order) when a lower layer of a MiniCache group lacks its rows;
    /// [`Error::Capacity`](crate::Error::Capacity) when a fixed MiniCache has no room; the errors of a view that cannot be
    /// bound; [`Error::Limit`](crate::Error::Limit), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn append(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        step: &Step<'_, KvView>,
    ) -> Result<()> {
        let (part, own) = self.ledger.part_mut(layer)?;
        either!(part, held => held.append(encoder, own, step))
    }

    /// Records attention of one layer over everything appended to it, through the layer's window where it has one: `queries`
    /// `[sequences, query_heads, queries, key_dim]` into `output` `[sequences, query_heads, queries, value_dim]`, both of any
    /// type.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or
    /// [`Error::Range`](crate::Error::Range) when queries, output or options do not fit, the errors of a view that cannot be
    /// bound or written, [`Error::Limit`](crate::Error::Limit), [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: usize,
        queries: &KvView,
        output: &KvView,
        options: &AttendOptions<'_>,
    ) -> Result<()> {
        let options = self.ledger.options(layer, options);
        let (part, own) = self.ledger.part(layer)?;
        either!(part, held => held.attend(encoder, own, queries, output, &options))
    }

    /// Records the end of a step: folds and codes whole pages of what is no longer recent, and lets go of what no window sees.
    ///
    /// # Errors
    /// As [`MiniCache::commit`] and [`QjlCache::commit`].
    pub fn commit(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        self.ledger.end(|part| either!(part, held => held.commit(encoder)))
    }

    /// Folds all that can be, and gives back room that no row needs: submits to the device's queue and waits for what
    /// MiniCache must know. What was recorded before must have been submitted. Natively somebody must poll the device
    /// meanwhile.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub async fn settle(&mut self) -> Result<()> {
        let gpu = self.gpu.clone();
        for part in &mut self.ledger.parts {
            match part {
                Part::Coded(held) => gpu.submit(|encoder| held.settle(encoder))?,
                Part::Minicache(held) => held.settle().await?,
            }
        }
        Ok(())
    }

    /// [`settle`](Self::settle), waiting for it.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn settle_blocking(&mut self) -> Result<()> {
        let gpu = self.gpu.clone();
        gpu.block_on(self.settle())
    }

    /// Records the end of a sequence's prefill, for MiniCache rules that look at all of its rows; others do not need it.
    ///
    /// # Errors
    /// As [`MiniCache::end_prefill`].
    pub fn end_prefill(&mut self, encoder: &mut wgpu::CommandEncoder, sequence: usize) -> Result<()> {
        self.ledger.len(sequence)?;
        self.ledger.parts.iter_mut().try_for_each(|part| match part {
            Part::Coded(_) => Ok(()),
            Part::Minicache(held) => held.end_prefill(encoder, sequence),
        })
    }

    /// Makes room for `tokens` more raw rows of every sequence and layer, and waits until the device has said that it has it.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow), [`Error::Limit`](crate::Error::Limit),
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub async fn reserve(&mut self, tokens: usize) -> Result<()> {
        let sequences = self.sequences();
        for part in &mut self.ledger.parts {
            for sequence in 0..sequences {
                either!(part, held => held.reserve(sequence, tokens).await?);
            }
        }
        Ok(())
    }

    /// [`reserve`](Self::reserve), waiting for it.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn reserve_blocking(&mut self, tokens: usize) -> Result<()> {
        let gpu = self.gpu.clone();
        gpu.block_on(self.reserve(tokens))
    }

    /// Bytes of buffers that no row is in: those in which calls leave what they need while they run, which all caches of a device
    /// share ([`Gpu::scratch_bytes`]), and MiniCache's verdicts on their way.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        let verdicts = |part: &DevicePart| match part {
            Part::Coded(_) => 0,
            Part::Minicache(held) => held.scratch_bytes(),
        };
        self.gpu.scratch_bytes() + self.ledger.parts.iter().map(verdicts).sum::<u64>()
    }

    /// The bytes of a file that holds the cache, the same as the host's (`docs/folded-format.md`). Submits to the device's queue
    /// and waits.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) or [`Error::DeviceLost`](crate::Error::DeviceLost) when the rows do not come;
    /// [`Error::Safetensors`](crate::Error::Safetensors) when the metadata exceeds what safetensors allows (100 MB).
    pub async fn save(&self) -> Result<Vec<u8>> {
        let mut parts = Vec::with_capacity(self.ledger.parts.len());
        for part in &self.ledger.parts {
            parts.push(either!(part, held => held.save().await?));
        }
        file::write(&self.ledger, parts)
    }

    /// [`save`](Self::save), waiting for it.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn save_blocking(&self) -> Result<Vec<u8>> {
        self.gpu.block_on(self.save())
    }

    /// The cache that a file holds, of a device or of the host: it goes on as if it had never stopped, bit for bit on the same
    /// adapter.
    ///
    /// # Errors
    /// As [`CpuFoldedCache::load`](super::CpuFoldedCache::load), and [`Error::Limit`](crate::Error::Limit) or
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) when the device cannot hold it.
    pub fn load(gpu: &Gpu, file: &[u8]) -> Result<Self> {
        let load = |spec: &Spec, bytes: &[u8]| -> Result<DevicePart> {
            Ok(match cpu_cache::load(spec, bytes)? {
                Part::Coded(held) => Part::Coded(QjlCache::upload(gpu, &held)?),
                // Checked on the host; the device's cache reads the same bytes.
                Part::Minicache(_) => Part::Minicache(MiniCache::load(gpu, bytes)?),
            })
        };
        Ok(Self { gpu: gpu.clone(), ledger: file::read(file, load)? })
    }
}
