//! Groups of more than two layers, which only a cache folds, against the host's cache.

use std::f64::consts::TAU;

use kvfold::cache::{LayerShape, Step};
use kvfold::minicache::{CacheOptions, CpuMiniCache, MergeOptions, Mode, Retention, pair_layers_depth};
use kvfold::{DType, Gpu, Result, Shape, Tensor};

use crate::Test;
use crate::cache::Device;
use crate::caches::{Cache, Model, compare, similar_layers};

pub(crate) const TESTS: &[Test] = &[("groups_of_layers_fold_as_their_twins", folds)];

/// Layers that are similar in half their rows; the others are of every kind that a fold must survive.
fn members(seed: u64, layers: usize, shape: Shape, dtype: DType) -> Vec<Tensor> {
    let row = |layer: usize, (row, x): (usize, &mut [f32])| {
        let last = layer + 1 == layers;
        match row % 14 {
            1 if layer == 1 => x[shape.dim / 2] = f32::NAN,
            3 => x.fill(0.0),
            5 if layer == 0 || last => x.fill(0.0),
            7 if last => x.iter_mut().for_each(|x| *x = -*x),
            // Directions in a plane that cancel out.
            9 => {
                x.fill(0.0);
                let angle = TAU * layer as f64 / layers as f64;
                (x[0], x[1]) = (angle.cos() as f32, angle.sin() as f32);
            }
            // What f32 does not measure and f16 does not hold.
            11 if layer == 1 => x.iter_mut().for_each(|x| *x *= 1e-33),
            13 if last => x.iter_mut().for_each(|x| *x *= 3e4),
            _ => x.iter_mut().for_each(|x| *x *= 0.5 + layer as f32),
        }
    };
    let layer = |(layer, similar): (usize, Tensor)| {
        let mut numbers = similar.view().to_f32();
        numbers.chunks_mut(shape.dim).enumerate().for_each(|at| row(layer, at));
        Tensor::from_f32(&numbers, dtype, shape).unwrap()
    };
    similar_layers(seed, layers, shape, 0.97).into_iter().enumerate().map(layer).collect()
}

fn folds(gpu: &Gpu) -> Result<()> {
    for (layers, dims, dtype, mode) in [
        (3, [64, 64], DType::F16, Mode::Shared),
        (4, [33, 33], DType::F32, Mode::Anchor),
        (8, [80, 7], DType::Bf16, Mode::Shared),
    ] {
        let shape = LayerShape::new(2, dims[0], dtype).value_dim(dims[1]);
        let [keys, values] = [0, 1].map(|part| {
            let shape = Shape::new(1, 2, 70, dims[part]).unwrap();
            members((2 * layers + part) as u64, layers, shape, dtype)
        });
        for retention in [Retention::Cosine(0.6), Retention::Never] {
            let merge = MergeOptions::default().mode(mode).retention(retention).sinks(2);
            let options = CacheOptions::default().merge(merge).recent(0);
            let plan = pair_layers_depth(layers, 0.0, layers)?;
            let mut host = CpuMiniCache::new(vec![shape; layers], plan.clone(), options.clone())?;
            let mut device = Device::new(gpu, &Model::new(shape, plan, options))?;
            assert_eq!(host.add_sequence(), device.add_sequence());
            for layer in 0..layers {
                host.append(layer, &Step::new(&keys[layer].view(), &values[layer].view()))?;
                device.append(layer, &[keys[layer].clone(), values[layer].clone()], &[70])?;
            }
            device.settle()?;
            host.settle()?;
            let context = format!("{layers} layers, {dims:?}, {dtype}, {mode:?}, {retention:?}");
            let report = host.report().layers;
            assert_eq!(device.report().layers, report, "{context}");
            let counts = report[0].keys;
            let few = if retention == Retention::Never { counts.antiparallel } else { counts.rule };
            assert!(counts.merged > 60 && counts.non_finite > 4 && few > 4, "{counts:?}, {context}");
            // A direction, a magnitude and their product, an ulp each.
            let ulp = if dtype == DType::Bf16 { 2f32.powi(-7) } else { 2f32.powi(-10) };
            for layer in 0..layers {
                for (have, want) in device.restore(layer)?.iter().zip(&host.restore(layer)?) {
                    compare(have, want, 3.0 * ulp, &format!("{context}, layer {layer}"));
                }
            }
        }
    }
    Ok(())
}
