//! Groups of more than two layers against their formulas in f64.

use kvfold::minicache::{Cause, MergeOptions, Mode, Retention, cpu};
use kvfold::{DType, Error, Shape, Tensor};

use crate::caches::{Random, similar_layers};

/// Norm and direction of a row in f64; zero for a zero row.
fn direction(row: &[f64]) -> (f64, Vec<f64>) {
    let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
    (norm, row.iter().map(|x| if norm > 0.0 { x / norm } else { 0.0 }).collect())
}

fn row_of(tensor: &Tensor, head: usize, token: usize) -> Vec<f64> {
    let mut row = vec![0.0f32; tensor.shape().dim];
    tensor.view().read_row(0, head, token, &mut row);
    row.into_iter().map(f64::from).collect()
}

#[test]
fn a_group_is_restored_from_the_mean_of_its_directions() {
    for (layers, dim, mode) in
        [(3, 64, Mode::Shared), (4, 33, Mode::Shared), (8, 128, Mode::Shared), (3, 64, Mode::Anchor)]
    {
        let shape = Shape::new(1, 2, 40, dim).unwrap();
        let members = similar_layers(layers as u64, layers, shape, 0.93);
        let views: Vec<_> = members.iter().map(Tensor::view).collect();
        let options = MergeOptions::default().mode(mode).retention(Retention::Cosine(0.905)).sinks(1);
        let rows = cpu::group_similarity(&views, &options).unwrap();
        let folded = cpu::group_merge(&views, &options).unwrap();
        let restored: Vec<Tensor> = (0..layers).map(|m| cpu::restore_member(&folded, m).unwrap()).collect();
        let mut merged = 0;
        for ((_, head, token), found) in shape.iter_rows().zip(&rows) {
            let given: Vec<_> = members.iter().map(|m| direction(&row_of(m, head, token))).collect();
            let cosine =
                |a: usize, b: usize| given[a].1.iter().zip(&given[b].1).map(|(x, y)| x * y).sum::<f64>();
            let smallest = (0..layers).flat_map(|a| (0..a).map(move |b| (a, b))).map(|(a, b)| cosine(a, b));
            let smallest = smallest.fold(1.0, f64::min);
            assert!((smallest - f64::from(found.row.cosine)).abs() < 1e-6, "{smallest} {}", found.row.cosine);
            let sum: Vec<f64> = (0..dim).map(|i| given.iter().map(|(_, d)| d[i]).sum()).collect();
            let raw = smallest < 0.905 || token < 1;
            merged += usize::from(!raw);
            for (member, tensor) in restored.iter().enumerate() {
                let want: Vec<f64> = match (raw, mode) {
                    (true, _) => row_of(&members[member], head, token),
                    (_, Mode::Anchor) => {
                        let ratio = given[member].0 / given[0].0;
                        row_of(&members[0], head, token).iter().map(|x| x * ratio).collect()
                    }
                    _ => direction(&sum).1.iter().map(|e| e * given[member].0).collect(),
                };
                // Direction, magnitude and result are each rounded to f16.
                let tolerance = 3.0 * 2f64.powi(-11) * given[member].0;
                for (x, y) in row_of(tensor, head, token).iter().zip(&want) {
                    assert!((x - y).abs() <= tolerance, "{x} {y}, layer {member} of {layers}, token {token}");
                }
            }
        }
        assert!(merged > 20, "{merged} rows merged");
        assert_eq!(folded.totals.counts.merged as usize, merged);
    }
}

#[test]
fn odd_rows_of_a_group_stay_raw() {
    let shape = Shape::new(1, 1, 6, 4).unwrap();
    let row = |token: usize, layer: usize| match token {
        0 if layer == 1 => [f32::NAN; 4],
        // Three directions in a plane that cancel out.
        1 => [[1.0, 0.0, 0.0, 0.0], [-0.5, 0.866_025_4, 0.0, 0.0], [-0.5, -0.866_025_4, 0.0, 0.0]][layer],
        2 => [0.0; 4],
        3 if layer == 2 => [1e-7; 4],
        4 if layer == 0 => [0.0; 4],
        _ => [1.0, 2.0, 3.0, 4.0],
    };
    let layer = |layer: usize| {
        let numbers: Vec<f32> = (0..6).flat_map(|token| row(token, layer)).collect();
        Tensor::from_f32(&numbers, DType::F32, shape).unwrap()
    };
    let members = [layer(0), layer(1), layer(2)];
    let views: Vec<_> = members.iter().map(Tensor::view).collect();
    let options = MergeOptions::default().retention(Retention::Never).sinks(0);
    let faults: Vec<_> =
        cpu::group_similarity(&views, &options).unwrap().iter().map(|row| row.row.fault).collect();
    let cancelled = Some(Cause::Antiparallel);
    assert_eq!(faults, [Some(Cause::NonFinite), cancelled, None, Some(Cause::Range), None, None]);
    let folded = cpu::group_merge(&views, &options).unwrap();
    for (member, tensor) in members.iter().enumerate() {
        let restored = cpu::restore_member(&folded, member).unwrap();
        for token in [0, 1, 2, 3] {
            let (have, want) = (restored.view().row_bytes(0, 0, token), tensor.view().row_bytes(0, 0, token));
            assert_eq!(have, want, "layer {member}, token {token}");
        }
    }
    assert!(matches!(cpu::restore_member(&folded, 3), Err(Error::Range { .. })));
    assert!(matches!(cpu::group_merge(&views[..1], &options), Err(Error::Range { .. })));
}

/// Folded rows joined along their tokens are the rows they were.
#[test]
fn joined_folds_restore_as_their_parts() {
    for (layers, dtype) in [(2, DType::F16), (3, DType::Bf16), (2, DType::F32)] {
        let shape = Shape::new(2, 3, 64, 24).unwrap();
        let mut random = Random(layers as u64);
        let mut part = |tokens: usize| {
            let shape = Shape { tokens, ..shape };
            let members = similar_layers((random.uniform() * 1e6) as u64, layers, shape, 0.9);
            let members: Vec<Tensor> =
                members.iter().map(|m| Tensor::from_f32(&m.view().to_f32(), dtype, shape).unwrap()).collect();
            let views: Vec<_> = members.iter().map(Tensor::view).collect();
            cpu::group_merge(&views, &MergeOptions::default()).unwrap()
        };
        let (first, second) = (part(64), part(41));
        let joined = cpu::join(&first, &second).unwrap();
        joined.check().unwrap();
        for member in 0..layers {
            let restore = |folded| cpu::restore_member(folded, member).unwrap();
            let (all, a, b) = (restore(&joined), restore(&first), restore(&second));
            for (batch, head, token) in all.shape().iter_rows() {
                let want = match token.checked_sub(64) {
                    None => a.view().row_bytes(batch, head, token).to_vec(),
                    Some(token) => b.view().row_bytes(batch, head, token).to_vec(),
                };
                assert_eq!(all.view().row_bytes(batch, head, token), want);
            }
        }
        let ragged = cpu::join(&second, &first).unwrap_err();
        assert!(ragged.to_string().contains("whole pages of 32 tokens"), "{ragged}");
    }
}
