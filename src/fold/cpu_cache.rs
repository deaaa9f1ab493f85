//! The cache of a whole model on the host.

use super::file;
use super::ledger::{Ledger, Model, Part, Spec};
use super::policy::Policy;
use super::shared::{either, folded_methods, sequences};
use crate::attention::AttendOptions;
use crate::cache::Step;
use crate::error::Result;
use crate::minicache::CpuMiniCache;
use crate::qjl::cache::CpuQjlCache;
use crate::tensor::TensorView;

sequences!(CpuQjlCache, CpuMiniCache);
folded_methods!(CpuFoldedCache);

type HostPart = Part<CpuQjlCache, CpuMiniCache>;

/// All layers of a model on the host, each kept as a policy says.
///
/// A step is, for every layer from the lowest on, [`append`](Self::append) and [`attend`](Self::attend), and then, once,
/// [`commit`](Self::commit).
#[derive(Debug)]
pub struct CpuFoldedCache {
    ledger: Ledger<CpuQjlCache, CpuMiniCache>,
}

impl CpuFoldedCache {
    /// A cache of so many empty sequences.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) or [`Error::Shape`](crate::Error::Shape) when the policy does not fit the model, or
    /// either is out of range; [`Error::Limit`](crate::Error::Limit) when a page does not fit 32-bit indices.
    pub fn new(model: Model, policy: Policy, sequences: usize) -> Result<Self> {
        let mut cache = Self { ledger: Ledger::new(model, policy, make)? };
        (0..sequences).for_each(|_| {
            cache.add_sequence();
        });
        Ok(cache)
    }

    /// Appends one layer's new rows of every sequence, and its queries, of which codes with tables learn.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType),
    /// [`Error::HeadRatio`](crate::Error::HeadRatio) or [`Error::Range`](crate::Error::Range) on a step that does not fit;
    /// [`Error::Order`](crate::Error::Order) when a lower layer of a MiniCache group lacks its rows;
    /// [`Error::Capacity`](crate::Error::Capacity) when a fixed MiniCache has no room. Nothing is changed then.
    pub fn append(&mut self, layer: usize, step: &Step<'_, TensorView<'_>>) -> Result<()> {
        let (part, own) = self.ledger.part_mut(layer)?;
        either!(part, held => held.append(own, step))
    }

    /// Attention of one layer over everything appended to it, through the layer's window where it has one: `queries`
    /// `[sequences, query_heads, queries, key_dim]`; gives `[sequences, query_heads, queries, value_dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::HeadRatio`](crate::Error::HeadRatio) or
    /// [`Error::Range`](crate::Error::Range) when queries or options do not fit.
    pub fn attend(
        &self,
        layer: usize,
        queries: &TensorView<'_>,
        options: &AttendOptions<'_>,
    ) -> Result<Vec<f32>> {
        let options = self.ledger.options(layer, options);
        let (part, own) = self.ledger.part(layer)?;
        either!(part, held => held.attend(own, queries, &options))
    }

    /// Ends a step: folds and codes whole pages of what is no longer recent, and lets go of what no window sees.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow), [`Error::Limit`](crate::Error::Limit).
    pub fn commit(&mut self) -> Result<()> {
        self.ledger.end(|part| either!(part, held => held.commit()))
    }

    /// As [`commit`](Self::commit), folding all that can be, and giving back room that no row needs.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn settle(&mut self) -> Result<()> {
        self.ledger.end(|part| either!(part, held => held.settle()))
    }

    /// Ends a sequence's prefill, for MiniCache rules that look at all of its rows; others do not need it.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when there is no such sequence, or its prefill has ended before.
    pub fn end_prefill(&mut self, sequence: usize) -> Result<()> {
        self.ledger.len(sequence)?;
        self.ledger.parts.iter_mut().try_for_each(|part| match part {
            Part::Coded(_) => Ok(()),
            Part::Minicache(held) => held.end_prefill(sequence),
        })
    }

    /// Makes room for `tokens` more raw rows of every sequence and layer.
    ///
    /// # Errors
    /// [`Error::Overflow`](crate::Error::Overflow).
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        let sequences = self.sequences();
        self.ledger.parts.iter_mut().try_for_each(|part| {
            (0..sequences).try_for_each(|sequence| either!(part, held => held.reserve(sequence, tokens)))
        })
    }

    /// The bytes of a file that holds the cache (safetensors, under a digest; `docs/folded-format.md`).
    ///
    /// # Errors
    /// [`Error::Safetensors`](crate::Error::Safetensors) when the metadata exceeds what safetensors allows (100 MB).
    pub fn save(&self) -> Result<Vec<u8>> {
        let save = |part: &HostPart| either!(part, held => held.save());
        file::write(&self.ledger, self.ledger.parts.iter().map(save).collect::<Result<_>>()?)
    }

    /// The cache that a file holds, of the host or of a device: it goes on as if it had never stopped.
    ///
    /// # Errors
    /// [`Error::Safetensors`](crate::Error::Safetensors), [`Error::Metadata`](crate::Error::Metadata),
    /// [`Error::Digest`](crate::Error::Digest) and what [`CpuQjlCache::load`] and [`CpuMiniCache::load`] say of the parts.
    pub fn load(file: &[u8]) -> Result<Self> {
        Ok(Self { ledger: file::read(file, load)? })
    }
}

fn make(spec: Spec) -> Result<HostPart> {
    Ok(match spec {
        Spec::Coded { layers, options } => Part::Coded(CpuQjlCache::new(&layers, 0, options)?),
        Spec::Minicache { layers, plan, options } => {
            Part::Minicache(CpuMiniCache::new(layers, plan, options)?)
        }
    })
}

/// The part that a file holds.
pub(super) fn load(spec: &Spec, bytes: &[u8]) -> Result<HostPart> {
    let (part, had) = match spec {
        Spec::Coded { .. } => {
            let held = CpuQjlCache::load(bytes)?;
            let had = Spec::Coded { layers: held.layers().to_vec(), options: held.options().clone() };
            (Part::Coded(held), had)
        }
        Spec::Minicache { .. } => {
            let held = CpuMiniCache::load(bytes)?;
            let (layers, plan) = (held.ledger.layers.clone(), held.ledger.plan.clone());
            let had = Spec::Minicache { layers, plan, options: held.ledger.options.clone() };
            (Part::Minicache(held), had)
        }
    };
    file::check_part(spec, &had)?;
    Ok(part)
}
