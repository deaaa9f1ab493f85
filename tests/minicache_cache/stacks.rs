//! The original's stacks of layers through a prefill and three steps, in one cache.

use kvfold::cache::{LayerShape, Step};
use kvfold::minicache::{
    CacheOptions, CpuMiniCache, MergeOptions, Mode, OriginalAccounting, Retention, Role, pair_layers_depth,
};
use kvfold::{DType, Shape, Tensor};

use crate::golden::{Golden, STACK_STEPS, stack_rows};

/// Options that decide as the original does: no sinks.
pub(crate) fn original() -> CacheOptions {
    let merge = MergeOptions::default().mode(Mode::Compat).retention(Retention::Cosine(0.9)).sinks(0);
    CacheOptions::default().merge(merge)
}

/// Keys and values of one step of one layer.
pub(crate) fn step_rows(golden: &Golden, layer: usize, step: usize) -> [Tensor; 2] {
    let shape = Shape::new(1, 2, STACK_STEPS[step], 64).unwrap();
    let rows = |part| golden.f32(&format!("in/l{layer}/s{step}/{part}"));
    ["k", "v"].map(|part| Tensor::from_f32(&rows(part), DType::F16, shape).unwrap())
}

/// What the original counts for every layer.
pub(crate) fn accounting(golden: &Golden) -> Vec<OriginalAccounting> {
    let (_, metadata) = safetensors::SafeTensors::read_metadata(golden.raw()).unwrap();
    let json = &metadata.metadata().as_ref().unwrap()["json"];
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    let layer = |layer: &serde_json::Value| {
        let number = |key: &str| layer[key].as_u64().unwrap() as usize;
        let (retained, merged) = (number("retained") as u32, number("merged") as u32);
        OriginalAccounting {
            role: if layer["role"] == "merge" { Role::Merge } else { Role::Primary },
            group: number("group"),
            compressed_key_bytes: number("ck"),
            compressed_value_bytes: number("cv"),
            fp16_key_bytes: number("fk"),
            fp16_value_bytes: number("fv"),
            retained,
            merged,
            retention_rate: if merged > 0 { f64::from(retained) / f64::from(retained + merged) } else { 0.0 },
        }
    };
    json["accounting_by_original"].as_array().unwrap().iter().map(layer).collect()
}

fn check_stack(name: &str, layers: usize, group_size: usize) {
    let golden = Golden::open(name);
    let plan = pair_layers_depth(layers, 0.5, group_size).unwrap();
    let shape = LayerShape::new(2, 64, DType::F16);
    let mut cache = CpuMiniCache::new(vec![shape; layers], plan, original()).unwrap();
    cache.add_sequence();
    for step in 0..STACK_STEPS.len() {
        for layer in 0..layers {
            let [keys, values] = step_rows(&golden, layer, step);
            cache.append(layer, &Step::new(&keys.view(), &values.view())).unwrap();
        }
        cache.commit().unwrap();
    }
    assert_eq!(cache.original_accounting(), accounting(&golden), "{name}");
    assert_eq!(cache.payload_bytes(), cache.report().raw_bytes, "{name}: Compat saves nothing");
    for layer in 0..layers {
        let restored = cache.restore(layer).unwrap();
        for (part, tensor) in ["k", "v"].iter().zip(&restored) {
            let out = format!("out/l{layer}/{part}");
            let want: Vec<Vec<f32>> = (0..STACK_STEPS.len()).map(|s| stack_rows(&golden, &out, s)).collect();
            compare(tensor, &want, &format!("{name} {out}"));
        }
    }
}

/// Every number within one ulp of f16 of the original's, which rounds a norm in another order.
fn compare(tensor: &Tensor, want: &[Vec<f32>], context: &str) {
    let mut first = 0;
    for (step, rows) in want.iter().enumerate() {
        for (i, row) in rows.chunks(64).enumerate() {
            let (head, token) = (i / STACK_STEPS[step], first + i % STACK_STEPS[step]);
            let mut have = [0.0; 64];
            tensor.view().read_row(0, head, token, &mut have);
            for (x, y) in have.iter().zip(row) {
                let ulp = 2f32.powi(-10) * y.abs().max(2f32.powi(-14));
                assert!((x - y).abs() <= ulp, "{x} {y}: {context}, head {head}, token {token}");
            }
        }
        first += STACK_STEPS[step];
    }
}

#[test]
fn a_stack_of_pairs_is_counted_as_the_original_counts() {
    check_stack("minicache_stack_g2", 6, 2);
}

#[test]
fn a_stack_of_threes_is_counted_as_the_original_counts() {
    check_stack("minicache_stack_g3", 7, 3);
}
