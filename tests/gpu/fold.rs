//! The cache of a whole model on the device.

use kvfold::attention::{AttendOptions, Precision};
use kvfold::cache::Step;
use kvfold::fold::{CpuFoldedCache, FoldedCache};
use kvfold::minicache::{DirectionPlanes, MergeOptions};
use kvfold::{DType, Error, Gpu, KvView, Result, Shape, Tensor, wgpu};

use crate::Test;
use crate::folded::{self, Rows, Subject, model, policy};
use crate::numbers::Random;
use crate::rows::{download, upload};

pub(crate) const TESTS: &[Test] = &[
    ("folded_cache_attends_as_every_layer_alone", alone),
    ("folded_cache_has_the_sequences_of_all_layers", sequences),
    ("folded_cache_goes_on_when_loaded", resumes),
    ("folded_cache_goes_to_the_host_and_back", travels),
    ("folded_cache_codes_the_directions_of_a_pair", codes),
    ("folded_cache_ends_a_step_for_all_layers_but_those_that_fail", fails),
];

/// As in `qjl_cache`: codes at the border of a cell may fall to either side on a device.
const TOLERANCE: f64 = 0.02;

struct Device<'a> {
    gpu: &'a Gpu,
    cache: FoldedCache,
}

impl Subject for Device<'_> {
    fn append(&mut self, layer: usize, rows: &Rows) -> Result<()> {
        let [keys, values, queries] = [&rows.keys, &rows.values, &rows.queries].map(|t| upload(self.gpu, t));
        let cache = &mut self.cache;
        let step = Step::new(&keys, &values).queries(&queries);
        self.gpu.submit(|encoder| cache.append(encoder, layer, &step))
    }

    fn attend(&mut self, layer: usize, queries: &Tensor, options: &AttendOptions<'_>) -> Result<Vec<f32>> {
        let shape: Shape = queries.shape();
        let buffer = self.gpu.storage("output", shape.bytes(DType::F32) as u64)?;
        let output = KvView::new(&buffer, DType::F32, shape);
        let queries = upload(self.gpu, queries);
        self.gpu.submit(|encoder| self.cache.attend(encoder, layer, &queries, &output, options))?;
        Ok(download(self.gpu, &output).view().to_f32())
    }

    fn commit(&mut self) -> Result<()> {
        // What the first asks of the device, the second folds.
        let cache = &mut self.cache;
        self.gpu.submit(|encoder| cache.commit(encoder))?;
        self.gpu.wait_blocking()?;
        self.gpu.submit(|encoder| cache.commit(encoder))
    }

    fn len(&self, sequence: usize) -> Result<usize> {
        self.cache.len(sequence)
    }

    fn trim(&mut self, sequence: usize, tokens: usize) -> Result<()> {
        self.cache.trim(sequence, tokens)
    }

    fn fork(&mut self, sequence: usize) -> Result<usize> {
        self.cache.fork(sequence)
    }

    fn gather(&mut self, sources: &[u32]) -> Result<()> {
        self.cache.gather(sources)
    }

    fn bytes(&self) -> [u64; 2] {
        [self.cache.payload_bytes(), self.cache.raw_bytes()]
    }

    fn tokens(&self, layer: usize) -> [usize; 2] {
        let report = self.cache.report();
        [report.layers[layer].tokens, report.layers[layer].folded]
    }

    fn save(&self) -> Result<Vec<u8>> {
        self.cache.save_blocking()
    }

    fn load(&self, file: &[u8]) -> Result<Self> {
        Ok(Self { gpu: self.gpu, cache: FoldedCache::load(self.gpu, file)? })
    }
}

fn device(gpu: &Gpu) -> Result<Device<'_>> {
    Ok(Device { gpu, cache: FoldedCache::new(gpu, model(), policy(), 1)? })
}

fn alone(gpu: &Gpu) -> Result<()> {
    folded::every_layer_attends_as_it_would_alone(device(gpu)?, TOLERANCE);
    Ok(())
}

fn sequences(gpu: &Gpu) -> Result<()> {
    folded::sequences_are_those_of_all_layers(device(gpu)?, TOLERANCE);
    Ok(())
}

fn resumes(gpu: &Gpu) -> Result<()> {
    folded::a_loaded_cache_goes_on(device(gpu)?);
    Ok(())
}

fn travels(gpu: &Gpu) -> Result<()> {
    let cache = FoldedCache::new(gpu, model(), policy(), 2)?;
    let file = cache.save_blocking()?;
    let host = CpuFoldedCache::load(&file)?;
    assert_eq!((host.sequences(), host.layers()), (2, 6));
    assert_eq!(host.save()?, file);
    assert_eq!(FoldedCache::load(gpu, &host.save()?)?.policy(), cache.policy());
    Ok(())
}

/// A pair whose directions are in sign planes, among layers kept in every other way: the host attends alike to the same file.
fn codes(gpu: &Gpu) -> Result<()> {
    let coded = MergeOptions::default().planes(DirectionPlanes::default().bits(4));
    let mut device = Device { gpu, cache: FoldedCache::new(gpu, model(), policy().merge(coded), 1)? };
    let mut whole = self::device(gpu)?;
    let mut random = Random(13);
    for tokens in [100, 60] {
        for (layer, rows) in folded::step(&mut random, 1, tokens).iter().enumerate() {
            device.append(layer, rows)?;
            whole.append(layer, rows)?;
        }
        device.commit()?;
        whole.commit()?;
    }
    assert!(device.tokens(2)[1] >= 96, "{:?}", device.tokens(2));
    assert!(device.bytes()[0] < whole.bytes()[0], "{:?} {:?}", device.bytes(), whole.bytes());
    let file = device.save()?;
    let host = CpuFoldedCache::load(&file)?;
    assert_eq!((host.save()? == file, device.load(&file)?.save()? == file), (true, true));
    let options = AttendOptions::default().causal(true).precision(Precision::Exact);
    for (layer, rows) in folded::step(&mut random, 1, 3).iter().enumerate() {
        let have = device.attend(layer, &rows.queries, &options)?;
        let want = host.attend(layer, &rows.queries.view(), &options)?;
        let apart = have.iter().zip(&want).map(|(x, y)| (x - y).powi(2)).sum::<f32>().sqrt();
        let length = want.iter().map(|x| x * x).sum::<f32>().sqrt();
        assert!(apart <= 1e-4 * length, "layer {layer}: {apart} of {length}");
    }
    Ok(())
}

/// The encoder that carried MiniCache's questions is dropped, so that its layers, in the middle, fail at the next commit.
fn fails(gpu: &Gpu) -> Result<()> {
    let (mut device, mut host) = (device(gpu)?, CpuFoldedCache::new(model(), policy(), 1)?);
    let mut random = Random(11);
    let mut append = |device: &mut Device<'_>, tokens: usize| -> Result<()> {
        for (layer, rows) in folded::step(&mut random, 1, tokens).iter().enumerate() {
            device.append(layer, rows)?;
            let [keys, values, queries] = [&rows.keys, &rows.values, &rows.queries].map(|t| t.view());
            host.append(layer, &Step::new(&keys, &values).queries(&queries))?;
        }
        host.commit()
    };
    append(&mut device, 40)?;
    // So few tokens that no other layer records anything.
    let mut dropped = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    device.cache.commit(&mut dropped)?;
    drop(dropped);
    append(&mut device, 120)?;
    let mut failed = None;
    gpu.submit(|encoder| {
        failed = device.cache.commit(encoder).err();
        Ok(())
    })?;
    assert!(matches!(failed, Some(Error::Device { .. })), "{failed:?}");
    let tokens = |device: &Device<'_>| (0..6).map(|layer| device.tokens(layer)).collect::<Vec<_>>();
    let after = tokens(&device);
    device.commit()?;
    let want: Vec<_> = host.report().layers.iter().map(|layer| [layer.tokens, layer.folded]).collect();
    let had = tokens(&device);
    assert_eq!(had, want, "as if nothing had failed");
    assert!(want[2][1] > 0 && want[4][1] > 0, "{want:?}");
    let at_once = [after[2][1], after[3][1], after[4][1]];
    assert_eq!(at_once, [0, 0, want[4][1]], "the layer behind those that failed has ended");
    Ok(())
}
