//! A device's cache in a file: its rows come to the host, in the form that files have, and go back.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::cache::{Host, Ledger};
use super::super::cut::Cut;
use super::super::folded::Folded;
use super::super::gpu::FoldedBuffers;
use super::folds::{Device, DeviceFold};
use super::{MiniCache, RUN_TOKENS};
use crate::cache::host::HostBlock;
use crate::error::{Error, Result};
use crate::gpu::block::RawBlock;
use crate::gpu::{Gpu, ReadBack, words};

/// What has come to the host, by where it stands on the device.
#[derive(Default)]
struct Come {
    blocks: HashMap<*const RawBlock, Arc<HostBlock>>,
    folds: HashMap<*const DeviceFold, Arc<Folded>>,
    cuts: HashMap<*const wgpu::Buffer, Arc<Cut>>,
}

impl MiniCache {
    /// The bytes of a file that holds the whole cache (safetensors, version 1, under a digest; `docs/minicache-format.md`), the same
    /// as the CPU's. Submits to the device's queue and waits. What sequences share is written for each; verdicts on their way
    /// are not written, and asked for again.
    ///
    /// # Errors
    /// [`Error::Device`] or [`Error::DeviceLost`] when the rows do not come;
    /// [`Error::Safetensors`] when the metadata exceeds what safetensors allows (100 MB).
    pub async fn save(&self) -> Result<Vec<u8>> {
        let come = self.fetch().await?;
        let missing = || Error::Device { what: "save".to_owned(), cause: "rows did not come".to_owned() };
        let host = Ledger::<Host>::new(
            self.ledger.layers.clone(),
            self.ledger.plan.clone(),
            self.ledger.options.clone(),
            |_, _| Ok(RUN_TOKENS),
        )?;
        let block = |block: &Arc<RawBlock>| come.blocks.get(&Arc::as_ptr(block)).cloned().ok_or_else(missing);
        let fold = |fold: &Arc<DeviceFold>| come.folds.get(&Arc::as_ptr(fold)).cloned().ok_or_else(missing);
        let cut = |cut: &Arc<wgpu::Buffer>| come.cuts.get(&Arc::as_ptr(cut)).cloned().ok_or_else(missing);
        self.ledger.carried_to(host, block, fold, cut)?.to_bytes()
    }

    /// [`save`](Self::save), waiting for it.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    #[cfg(not(target_arch = "wasm32"))]
    pub fn save_blocking(&self) -> Result<Vec<u8>> {
        self.gpu.block_on(self.save())
    }

    /// The cache that a file holds, of a device or of the CPU: it goes on as if it had never stopped, bit for bit on the same
    /// adapter.
    ///
    /// # Errors
    /// As [`CpuMiniCache::load`](crate::minicache::CpuMiniCache::load), and [`Error::Limit`] or
    /// [`Error::OutOfMemory`] when the device cannot hold it.
    pub fn load(gpu: &Gpu, file: &[u8]) -> Result<Self> {
        let host = Ledger::<Host>::from_bytes(file, |_, _| Ok(RUN_TOKENS))?;
        let mut cache = Self::new(gpu, host.layers.clone(), host.plan.clone(), host.options.clone())?;
        let block = |block: &Arc<HostBlock>| {
            let (shape, capacity) = block.sizes();
            let [keys, values] = block.padded_bytes();
            Ok(Arc::new(RawBlock::upload(gpu, shape, capacity, [&keys, &values])?))
        };
        let fold = |fold: &Arc<Folded>| {
            let words = fold.to_words();
            let store = gpu.upload("folded pair", bytemuck::cast_slice(&words))?;
            let store = (!words.is_empty()).then_some(store);
            let buffers = FoldedBuffers { layout: fold.layout, totals: fold.totals, store };
            Ok(Arc::new(DeviceFold { buffers, pages: fold.pages.clone() }))
        };
        let cut = |cut: &Arc<Cut>| Ok(Arc::new(gpu.upload("cuts", bytemuck::bytes_of(cut.as_ref()))?));
        cache.ledger = host.carried_to::<Device>(cache.ledger, block, fold, cut)?;
        Ok(cache)
    }

    /// Brings every block, fold and frozen verdict to the host.
    async fn fetch(&self) -> Result<Come> {
        let (blocks, folds) = self.ledger.unique();
        let cuts = self.ledger.cuts();
        let all: Vec<Vec<&wgpu::Buffer>> = (blocks.iter().map(|block| block.buffers().to_vec()))
            .chain(folds.iter().map(|fold| fold.buffers.store.iter().collect()))
            .chain(cuts.iter().map(|cut| vec![cut.as_ref()]))
            .collect();
        let read_backs = self.gpu.submit(|encoder| {
            let prepared = all.iter().map(|buffers| ReadBack::prepare(&self.gpu, buffers));
            let prepared: Vec<_> = prepared.collect::<Result<_>>()?;
            Ok(prepared.into_iter().map(|prepared| prepared.record(encoder)).collect::<Vec<_>>())
        })?;
        let mut bytes = Vec::with_capacity(read_backs.len());
        for read_back in read_backs {
            bytes.push(read_back.await?);
        }
        let mut bytes = bytes.into_iter();
        let mut come = Come::default();
        for (block, bytes) in blocks.iter().zip(bytes.by_ref()) {
            come.blocks.insert(Arc::as_ptr(block), Arc::new(block.on_host(&bytes)?));
        }
        for (fold, bytes) in folds.iter().zip(bytes.by_ref()) {
            let FoldedBuffers { layout, totals, .. } = fold.buffers;
            let folded = Folded::from_words(layout, totals, &words(&bytes))?;
            come.folds.insert(Arc::as_ptr(fold), Arc::new(folded));
        }
        for (cut, bytes) in cuts.iter().zip(bytes) {
            let words = words(&bytes);
            let word = |index: usize| words.get(index).copied().unwrap_or_default();
            come.cuts.insert(Arc::as_ptr(cut), Arc::new(Cut { key: word(0), index: word(1) }));
        }
        Ok(come)
    }
}
