//! Whole stacks of layers through a prefill and three steps of decoding.

use kvfold::DType;
use kvfold::minicache::{Mode, Retention, Role, pair_layers_depth};

use crate::golden::{Golden, STACK_STEPS, stack_rows};
use crate::pair::{Pair, Tolerance, original, row_of, widened};

const DIM: usize = 64;

/// One tensor of one layer in one step, folded onto its primary's. Gives the rows retained and merged.
fn check_merge_layer(golden: &Golden, primary: usize, layer: usize, step: usize, kv: &str) -> [u32; 2] {
    let names = [primary, layer].map(|l| format!("in/l{l}/s{step}/{kv}"));
    let pair = Pair::read(golden, names, DType::F16);
    let both = pair.run(&original(Mode::Compat, Retention::Cosine(0.9), 0.5));
    assert_eq!(both.reference.causes, both.causes);
    let want = stack_rows(golden, &format!("out/l{layer}/{kv}"), step);
    for (row, cause) in both.causes.iter().enumerate() {
        let context = format!("layer {layer} step {step} {kv} row {row}");
        let want = row_of(&want, row, DIM);
        let (exact, twin) =
            (row_of(&both.reference.upper, row, DIM), widened(&row_of(&both.restored[1], row, DIM)));
        if cause.is_some() {
            assert_eq!([&exact, &twin], [&widened(&want); 2], "{context}: raw");
        } else {
            let size = both.rows[row].upper;
            Tolerance::exact(5e-7).check(&exact, &want, size, &context);
            Tolerance::twin(5e-7, DType::F16).check(&twin, &want, size, &context);
        }
    }
    [both.folded.totals.counts.retained(), both.folded.totals.counts.merged]
}

fn check_stack(name: &str, layers: usize, group_size: usize, merge_layers: usize) {
    let golden = Golden::open(name);
    let plan = pair_layers_depth(layers, 0.5, group_size).unwrap();
    assert_eq!(plan.iter().filter(|l| l.role == Role::Merge).count(), merge_layers, "{name}");
    for (layer, role) in plan.iter().enumerate() {
        let primary = plan.iter().position(|l| l.group == role.group).unwrap();
        let mut keys = [0, 0];
        for step in 0..STACK_STEPS.len() {
            for kv in ["k", "v"] {
                if role.role == Role::Primary {
                    let (given, put) =
                        (golden.f32(&format!("in/l{layer}/s{step}/{kv}")), format!("out/l{layer}/{kv}"));
                    assert_eq!(given, stack_rows(&golden, &put, step), "{name} layer {layer} passes through");
                    continue;
                }
                let counts = check_merge_layer(&golden, primary, layer, step, kv);
                if kv == "k" {
                    keys = [keys[0] + counts[0], keys[1] + counts[1]];
                }
            }
        }
        if role.role == Role::Merge {
            // The original counts keys alone, and so gives the same figures for a group's every layer.
            assert_eq!(keys, [12, 4], "{name} layer {layer}: the original's retained and merged");
        }
    }
}

#[test]
fn a_stack_of_pairs_agrees_with_the_original() {
    check_stack("minicache_stack_g2", 6, 2, 1);
}

/// Each member of a group of three is paired with the group's lowest layer.
#[test]
fn a_stack_of_threes_agrees_with_the_original() {
    check_stack("minicache_stack_g3", 7, 3, 2);
}
